//! `bench step`: what the resources cost per step.

use serde_json::{Value, json};

use super::decode::{self, Decode, Ends};
use super::fit::{Fit, Point, fit};
use super::kinds::Kinds;
use super::other::{self, Figures};
use super::phases::{self, Phases};
use super::record::number;
use super::rig::{Geometry, PAGE, Rig};
use super::shapes::{BATCHES, CONTEXTS, Pool, Shape, footprint, free_memory, grid};
use super::{machine, turn};
use crate::error::Result;

/// What is measured.
#[derive(Clone, Debug)]
pub struct Options {
    /// Cells of the grid.
    pub shapes: Vec<Shape>,
    /// Steps that count, of each kind.
    pub steps: usize,
    /// Steps of the search for the longest; 0 leaves it out.
    pub longest: u32,
    /// Whether every method of every resource is timed by itself, too.
    pub methods: bool,
    /// Whether prefill, mixed, refused, churning and staged steps are measured, too.
    pub other: bool,
    /// Fresh processes that all of it is measured in.
    pub processes: usize,
}

impl Options {
    /// The whole protocol.
    pub fn full() -> Self {
        let shapes = grid(&BATCHES, &CONTEXTS, &Pool::ALL);
        Self { shapes, steps: 2000, longest: 10_000, methods: true, other: true, processes: 5 }
    }

    /// A few minutes' worth less: to see that all is well.
    pub fn quick() -> Self {
        let shapes = grid(&[1, 32, 256], &[512, 4096], &[Pool::Enough]);
        Self { shapes, steps: 200, longest: 1000, methods: true, other: true, processes: 1 }
    }

    /// These cells and nothing else.
    pub fn only(shapes: Vec<Shape>, quick: bool) -> Self {
        let steps = if quick { 200 } else { 2000 };
        Self { shapes, steps, longest: 0, methods: true, other: false, processes: 1 }
    }
}

/// Where the longest step is looked for.
const LONGEST: (u32, u32) = (256, 4096);
/// Share of the free memory that resources may touch.
const MEMORY_SHARE: f64 = 0.7;

/// Measures in this process, and hands every result out as soon as it is there: one JSON object each.
///
/// # Errors
/// What a resource says, or a plan that is not what it should be.
pub fn run(kinds: &Kinds, options: &Options, emit: &mut dyn FnMut(Value)) -> Result<()> {
    let machine = machine::describe(kinds.source());
    let mut emit = |mut record: Value| {
        if let Some(object) = record.as_object_mut() {
            object.insert("bench".into(), json!("step"));
            object.insert("machine".into(), machine.clone());
        }
        emit(record);
    };
    let mut left_out = Vec::new();
    for (pool, shapes) in by_pool(&options.shapes) {
        let mut shared = None;
        for shape in shapes {
            let mut longest = (shape.batch, shape.context) == LONGEST && options.longest > 0;
            let geometry = match pool {
                Pool::Enough => shape.geometry(shape.steps()),
                Pool::Pages(pages) => common(&options.shapes, pages, options.longest),
            };
            if let Some(reason) = cannot(&shape, geometry, shared.is_some()) {
                left_out.push(json!({ "shape": shape.to_string(), "why": reason }));
                continue;
            }
            let mut own;
            let rig = match (pool, &mut shared) {
                (Pool::Enough, _) => {
                    own = Rig::build(kinds, geometry)?;
                    &mut own
                }
                (_, Some(rig)) => rig,
                (_, none) => {
                    let mut rig = Rig::build(kinds, geometry)?;
                    rig.fill()?;
                    none.insert(rig)
                }
            };
            for ends in [Ends::None, Ends::Sixteenth] {
                let measured = decode::measure(rig, &shape, ends, options.steps)?;
                let methods = match options.methods {
                    true => Some(phases::measure(rig, &shape, ends, options.steps / 4)?),
                    false => None,
                };
                emit(decoded(&shape, &measured, methods.as_ref()));
            }
            if std::mem::take(&mut longest) {
                emit(longest_of(kinds, rig, &shape, options.longest)?);
            }
        }
    }
    if options.other {
        let steps = options.steps;
        type Measure = fn(&Kinds, usize) -> Result<Figures>;
        let all: [Measure; 7] = [
            other::prefill,
            other::mixed,
            other::refusal,
            other::churn,
            other::staged,
            turn::measure,
            turn::without_resources,
        ];
        for measure in all {
            emit(figures(&measure(kinds, steps)?));
        }
    }
    if !left_out.is_empty() {
        emit(json!({ "what": "left out", "shapes": left_out }));
    }
    Ok(())
}

/// The shapes of each pool, in order of appearance.
fn by_pool(shapes: &[Shape]) -> Vec<(Pool, Vec<Shape>)> {
    let mut pools: Vec<(Pool, Vec<Shape>)> = Vec::new();
    for &shape in shapes {
        match pools.iter_mut().find(|(pool, _)| *pool == shape.pool) {
            Some((_, shapes)) => shapes.push(shape),
            None => pools.push((shape.pool, vec![shape])),
        }
    }
    pools
}

/// A pool that all shapes share is built for the largest batch and the longest stream of any.
fn common(shapes: &[Shape], pages: u32, longest: u32) -> Geometry {
    let len = |s: &Shape| match (s.batch, s.context) == LONGEST {
        true => s.context + s.steps().max(longest + 2 * decode::WARM),
        false => s.context + s.steps(),
    };
    Geometry {
        pages,
        max_batch: shapes.iter().map(|s| s.batch).max().unwrap_or(1),
        max_len: shapes.iter().map(len).max().unwrap_or(PAGE) + 2 * PAGE,
    }
}

/// Why a shape cannot be measured here.
fn cannot(shape: &Shape, geometry: Geometry, built: bool) -> Option<String> {
    let needed = shape.pages(shape.steps());
    if needed > u64::from(geometry.pages) {
        return Some(format!("needs {needed} pages of {}", geometry.pages));
    }
    let bytes = footprint(geometry);
    let free = (free_memory() as f64 * MEMORY_SHARE) as u64;
    (!built && bytes > free)
        .then(|| format!("needs about {} MiB, {} MiB may be taken", bytes >> 20, free >> 20))
}

/// In resources of its own where the pool is just enough for fewer steps.
fn longest_of(kinds: &Kinds, rig: &mut Rig, shape: &Shape, count: u32) -> Result<Value> {
    let longest = match shape.pool {
        Pool::Enough => {
            let geometry = shape.geometry(count + 2 * decode::WARM);
            decode::longest(&mut Rig::build(kinds, geometry)?, shape, count)?
        }
        Pool::Pages(_) => decode::longest(rig, shape, count)?,
    };
    Ok(json!({
        "what": "longest",
        "batch": shape.batch,
        "context": shape.context,
        "pool": shape.pool.to_string(),
        "steps": count,
        "us": { "total": longest.steps.to_json(), "control": longest.control.to_json() },
        "above_three_medians": longest.above,
    }))
}

fn decoded(shape: &Shape, measured: &Decode, methods: Option<&Phases>) -> Value {
    json!({
        "what": "decode",
        "batch": shape.batch,
        "context": shape.context,
        "pool": shape.pool.to_string(),
        "page_ends": measured.page_ends,
        "pages": measured.pages,
        "tokens": [measured.tokens.0, measured.tokens.1],
        "steps": measured.steps,
        "us": {
            "declare": measured.declare.to_json(),
            "start": measured.start.to_json(),
            "commit": measured.commit.to_json(),
            "outputs": measured.outputs.to_json(),
            "total": measured.total.to_json(),
            "publish": measured.publish.to_json(),
        },
        "methods_us": methods.map(Phases::to_json),
        "allocations_per_step": measured.allocations,
        "plan_bytes_per_step": measured.bytes,
        "table_entries_per_step": measured.page_ends * f64::from(super::rig::SLOTS),
        "plans_compared": measured.compared,
    })
}

fn figures((name, summaries, note): &Figures) -> Value {
    let summaries = summaries.iter().map(|(name, s)| ((*name).to_owned(), s.to_json()));
    let us: serde_json::Map<String, Value> = summaries.collect();
    json!({ "what": name, "us": us, "note": note })
}

/// The fit over the decode steps among the results, as one more of them.
pub fn fit_of(records: &[Value]) -> Option<Value> {
    let decode = records.iter().filter(|r| r.get("what").is_some_and(|what| what == "decode"));
    let points: Vec<Point> = decode
        .filter_map(|record| {
            let of = |key: &str| record.get(key).and_then(Value::as_f64);
            let time = number(record, "total", "median")?;
            let (batch, pages) = (of("batch")?, of("pages")?);
            Some(Point { batch, pages, page_ends: of("page_ends")?, time })
        })
        .collect();
    let mut record = fitted(&fit(&points)?);
    record["bench"] = json!("step");
    record["machine"] = records.first().and_then(|r| r.get("machine")).cloned().unwrap_or_default();
    Some(record)
}

fn fitted(fit: &Fit) -> Value {
    let term = |i: usize, scale: f64| json!([fit.value[i] * scale, fit.error[i] * scale]);
    json!({
        "what": "fit",
        "points": fit.points,
        "a_us": term(0, 1.0),
        "b_ns_per_request": term(1, 1e3),
        "c_ns_per_page_held": term(2, 1e3),
        "d_ns_per_page_end": term(3, 1e3),
        "worst": fit.worst,
    })
}
