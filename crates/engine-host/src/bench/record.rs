//! Results as tables. A result is one JSON object.

use serde_json::Value;

/// A percentile of a figure, such as `("total", "median")`.
pub fn number(record: &Value, figure: &str, percentile: &str) -> Option<f64> {
    record.get("us")?.get(figure)?.get(percentile)?.as_f64()
}

/// Microseconds with as many digits as mean something.
pub fn us(value: f64) -> String {
    match value {
        v if v >= 100.0 => format!("{v:.0}"),
        v if v >= 10.0 => format!("{v:.1}"),
        v => format!("{v:.2}"),
    }
}

/// Heads the lines of [`line()`] for decode steps.
pub fn heading() -> String {
    format!(
        "{:>5} {:>7} {:>7} {:>5} | {:>7} {:>7} {:>7} {:>7} | {:>7} {:>7} {:>7} {:>7} {:>7} | {:>7} {:>6} {:>8}",
        "B",
        "L",
        "pool",
        "ends",
        "declare",
        "start",
        "commit",
        "outputs",
        "total",
        "p10",
        "p90",
        "p99",
        "max",
        "publish",
        "allocs",
        "bytes"
    )
}

/// The longest of several steps, or of the loop beside them. Of several processes, the one that was
/// disturbed least tells most.
fn longest(record: &Value, figure: &str, above: usize) -> String {
    let at = |percentile: &str| number(record, figure, percentile).map_or_else(|| "-".into(), us);
    let each = record.get("each_max").and_then(|each| each.get(figure)?.as_array());
    let least = each.into_iter().flatten().filter_map(Value::as_f64).fold(f64::MAX, f64::min);
    let least = match least < f64::MAX {
        true => format!(", {} in the quietest process", us(least)),
        false => String::new(),
    };
    let above = record.get("above_three_medians").and_then(|all| all.get(above)?.as_u64());
    format!(
        "{} us{least} (median {}, p99 {}; {} above three medians)",
        at("max"),
        at("median"),
        at("p99"),
        above.unwrap_or(0),
    )
}

/// A result as a line, or several.
pub fn line(record: &Value) -> String {
    let text = |key: &str| match record.get(key) {
        Some(Value::String(text)) => text.clone(),
        Some(Value::Null) | None => "-".into(),
        Some(value) => {
            value.as_f64().map_or(value.to_string(), |x| format!("{}", (x * 100.0).round() / 100.0))
        }
    };
    let at =
        |figure: &str, percentile: &str| number(record, figure, percentile).map_or("-".into(), us);
    match record.get("what").and_then(Value::as_str) {
        Some("decode") => format!(
            "{:>5} {:>7} {:>7} {:>5} | {:>7} {:>7} {:>7} {:>7} | {:>7} {:>7} {:>7} {:>7} {:>7} | {:>7} {:>6} {:>8}",
            text("batch"),
            text("context"),
            text("pool"),
            text("page_ends"),
            at("declare", "median"),
            at("start", "median"),
            at("commit", "median"),
            at("outputs", "median"),
            at("total", "median"),
            at("total", "p10"),
            at("total", "p90"),
            at("total", "p99"),
            at("total", "max"),
            at("publish", "median"),
            text("allocations_per_step"),
            text("plan_bytes_per_step"),
        ),
        Some("longest") => format!(
            "longest of {} steps, B={} L={} pool={}: {}; of a loop as long that touches no memory, in turns \
             with them: {}",
            text("steps"),
            text("batch"),
            text("context"),
            text("pool"),
            longest(record, "total", 0),
            longest(record, "control", 1),
        ),
        Some("peer") => format!(
            "{}, B={} L={}: {} (p10 {}, p90 {})",
            text("peer"),
            text("batch"),
            text("context"),
            at("total", "median"),
            at("total", "p10"),
            at("total", "p90"),
        ),
        Some("fit") => {
            let term = |key: &str, unit: &str| {
                let of = |i: usize| record.get(key).and_then(|t| t.get(i)?.as_f64()).unwrap_or(0.0);
                format!("{:.4} ± {:.4} {unit}", of(0), of(1))
            };
            format!(
                "fit over {} points: {}, {} a request, {} a page held, {} a page end; worst misfit {:.0}%",
                text("points"),
                term("a_us", "us"),
                term("b_ns_per_request", "ns"),
                term("c_ns_per_page_held", "ns"),
                term("d_ns_per_page_end", "ns"),
                record.get("worst").and_then(Value::as_f64).unwrap_or(0.0) * 100.0,
            )
        }
        Some("left out") => {
            let shapes =
                record.get("shapes").and_then(Value::as_array).cloned().unwrap_or_default();
            let each = shapes.iter().map(|s| {
                let of = |key: &str| s.get(key).and_then(Value::as_str).unwrap_or("?");
                format!("left out: {}: {}", of("shape"), of("why"))
            });
            each.collect::<Vec<_>>().join("\n")
        }
        what => {
            let names = record.get("us").and_then(Value::as_object);
            let figures = names.into_iter().flatten().map(|(name, _)| {
                format!("{name} {} (p99 {})", at(name, "median"), at(name, "p99"))
            });
            let figures = figures.collect::<Vec<_>>().join(", ");
            let note = record.get("note").filter(|n| !n.is_null());
            let note = note.map_or(String::new(), |n| format!("  {n}"));
            format!("{}: {figures}{note}", what.unwrap_or("?"))
        }
    }
}
