//! The same measurements in several fresh processes, and what they have in common.

use std::path::Path;

use serde_json::{Map, Value, json};

use super::child;
use super::stats::median;
use crate::error::Result;

/// Tells one result of a process from the others.
const IDENTITY: [&str; 5] = ["what", "batch", "context", "pool", "page_ends"];

/// Runs this program with `args` so many times, one after the other, and merges the results. Peers run
/// between the first process and the second: on the same core, while the machine is as it is.
///
/// # Errors
/// When a process fails.
pub fn run(
    program: &Path,
    args: &[&str],
    processes: usize,
    between: impl FnOnce() -> Result<Vec<Value>>,
) -> Result<Vec<Value>> {
    let (mut runs, mut between, mut others) = (Vec::new(), Some(between), Vec::new());
    for n in 1..=processes {
        eprintln!("process {n} of {processes}");
        runs.push(child::results(program, args, &[])?);
        if let Some(between) = between.take() {
            others = between()?;
        }
    }
    let mut merged = merge(&runs);
    merged.append(&mut others);
    Ok(merged)
}

/// One result for those that the runs have in common, in the order of the first: percentiles are the
/// medians of the runs', the largest is the largest of all, and `processes_us` has every run's median.
fn merge(runs: &[Vec<Value>]) -> Vec<Value> {
    let Some((first, rest)) = runs.split_first() else { return Vec::new() };
    let identity = |r: &Value| IDENTITY.map(|key| r.get(key).cloned());
    let merged = first.iter().map(|record| {
        let same = |run: &Vec<Value>| run.iter().find(|r| identity(r) == identity(record)).cloned();
        let mut all = vec![record.clone()];
        all.extend(rest.iter().filter_map(same));
        merge_one(&all)
    });
    merged.collect()
}

fn merge_one(all: &[Value]) -> Value {
    let mut merged = all[0].clone();
    let mut spread = Map::new();
    let figures: Vec<String> = match merged.get("us").and_then(Value::as_object) {
        Some(us) => us.keys().cloned().collect(),
        None => return merged,
    };
    for figure in figures {
        let of = |r: &Value, percentile: &str| r.get("us")?.get(&figure)?.get(percentile)?.as_f64();
        let values =
            |percentile: &str| all.iter().filter_map(|r| of(r, percentile)).collect::<Vec<_>>();
        for percentile in ["median", "p10", "p90", "p99"] {
            merged["us"][&figure][percentile] = json!(median(&values(percentile)));
        }
        let most = values("max").into_iter().fold(0.0, f64::max);
        merged["us"][&figure]["max"] = json!(most);
        let medians = json!(values("median"));
        spread.insert(figure, medians);
    }
    if merged.get("what").is_some_and(|what| what == "longest") {
        let each = |figure: &str| -> Vec<f64> {
            let max = |r: &Value| r.get("us")?.get(figure)?.get("max")?.as_f64();
            all.iter().filter_map(max).collect()
        };
        merged["each_max"] = json!({ "total": each("total"), "control": each("control") });
        let above = |i: usize| {
            let of = |r: &Value| r.get("above_three_medians")?.get(i)?.as_u64();
            all.iter().filter_map(of).sum::<u64>()
        };
        merged["above_three_medians"] = json!([above(0), above(1)]);
    }
    merged["processes"] = json!(all.len());
    merged["processes_us"] = Value::Object(spread);
    merged
}

/// How far the medians of the processes are apart, as a share of the middle one; `None` for one process.
pub fn spread(record: &Value) -> Option<f64> {
    let all: Vec<f64> = record
        .get("processes_us")?
        .get("total")?
        .as_array()?
        .iter()
        .filter_map(Value::as_f64)
        .collect();
    let (low, high) =
        all.iter().fold((f64::MAX, 0.0f64), |(low, high), &x| (low.min(x), high.max(x)));
    (all.len() > 1).then(|| (high - low) / median(&all))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn result(batch: u32, median: f64, max: f64) -> Value {
        let us = json!({ "total": {
            "median": median, "p10": median - 1.0, "p90": median, "p99": median, "max": max,
        } });
        json!({ "what": "decode", "batch": batch, "us": us })
    }

    #[test]
    fn runs_are_merged_result_by_result() {
        let runs = [
            vec![result(1, 2.0, 9.0), result(8, 5.0, 6.0)],
            vec![result(1, 4.0, 30.0), result(8, 7.0, 8.0)],
            vec![result(8, 6.0, 7.0), result(1, 3.0, 8.0)],
        ];
        let merged = merge(&runs);
        let total = |i: usize| &merged[i]["us"]["total"];
        assert_eq!(
            (total(0)["median"].as_f64(), total(0)["max"].as_f64()),
            (Some(3.0), Some(30.0))
        );
        assert_eq!((total(1)["median"].as_f64(), total(1)["p10"].as_f64()), (Some(6.0), Some(5.0)));
        assert_eq!(merged[0]["processes_us"]["total"], json!([2.0, 4.0, 3.0]));
        assert!((spread(&merged[0]).unwrap() - 2.0 / 3.0).abs() < 1e-12);
        assert_eq!(spread(&result(1, 2.0, 3.0)), None);
    }
}
