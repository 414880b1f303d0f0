//! What the resource layers of other engines cost, for plots and tables beside ours.
//!
//! The figures here were measured in November 2026 on two cores of a Sapphire Rapids server (page size
//! 16, medians in microseconds), each engine through its own allocation, planning and scheduling calls
//! without a model: beside ours of another run they are leads and no more. Those that are Rust programs
//! can run beside ours, on the same core: `scripts/peers` has their sources.

use std::path::Path;

use serde_json::{Value, json};

use super::child;
use crate::error::{Error, ErrorKind, Result};

/// Shapes that all were measured at: (batch, context).
pub const SHAPES: [(u32, u32); 7] =
    [(1, 4096), (8, 4096), (32, 4096), (128, 4096), (256, 512), (256, 4096), (256, 16_384)];

/// One engine.
#[derive(Clone, Copy, Debug)]
pub struct Peer {
    /// Name and version.
    pub name: &'static str,
    /// A short name for plots.
    pub short: &'static str,
    /// What of a step its figures contain.
    pub covers: &'static str,
    /// A decode step at each of [`SHAPES`].
    pub us: [f64; 7],
    /// Whether it stands in plots.
    pub plotted: bool,
    /// What its program in `scripts/peers` calls it; empty where there is none.
    pub key: &'static str,
}

/// Programs that a directory of peers may have.
const PROGRAMS: [&str; 2] = ["floor", "kvbm"];

/// Runs the peers that `directory` has, one after the other, and gives one result per shape and peer.
///
/// # Errors
/// When there is none, or one fails.
pub fn run(directory: &Path) -> Result<Vec<Value>> {
    let mut results = Vec::new();
    for name in PROGRAMS {
        let program = directory.join(name);
        if program.exists() {
            eprintln!("peer {name}");
            results.append(&mut child::results(&program, &[], &[])?);
        }
    }
    if results.is_empty() {
        let message = format!(
            "{} has none of the peers {PROGRAMS:?}: `scripts/peers/build {}` builds them",
            directory.display(),
            directory.display()
        );
        return Err(Error::new(ErrorKind::NotFound, message));
    }
    for result in &mut results {
        result["what"] = json!("peer");
        result["bench"] = json!("step");
    }
    Ok(results)
}

/// What a peer took at a shape in the same run, if it was there.
pub fn measured(records: &[Value], peer: &Peer, shape: (u32, u32)) -> Option<f64> {
    let int = |r: &Value, key: &str| r.get(key).and_then(Value::as_u64).map(|x| x as u32);
    let is_it = |r: &&Value| {
        r.get("peer").and_then(Value::as_str) == Some(peer.key)
            && (int(r, "batch"), int(r, "context")) == (Some(shape.0), Some(shape.1))
    };
    super::record::number(records.iter().find(is_it)?, "total", "median")
}

/// The engines.
pub const PEERS: [Peer; 7] = [
    Peer {
        name: "M* rp2, admit + plan + commit",
        short: "M* (all four)",
        covers: "kv, attention, positions, sampler; no prefix index; FlashInfer's Python wrapper",
        us: [188.0, 368.0, 864.0, 2843.0, 1984.0, 5254.0, 16_873.0],
        plotted: true,
        key: "",
    },
    Peer {
        name: "vLLM 0.33, schedule + update_from_output",
        short: "vLLM (kv, scheduling)",
        covers: "kv blocks, prefix cache, scheduling; no plan",
        us: [36.5, 121.0, 380.0, 1487.0, 2922.0, 3049.0, 2991.0],
        plotted: true,
        key: "",
    },
    Peer {
        name: "vLLM 0.33 block table, append + upload",
        short: "vLLM block table",
        covers: "the table half of a plan",
        us: [3.3, 5.1, 8.6, 23.6, 38.3, 43.5, 103.0],
        plotted: false,
        key: "",
    },
    Peer {
        name: "SGLang 0.5.23, alloc_for_decode",
        short: "SGLang (kv slots)",
        covers: "kv slots",
        us: [35.4, 52.1, 58.1, 75.3, 96.8, 99.1, 98.8],
        plotted: true,
        key: "",
    },
    Peer {
        name: "Dynamo kvbm-logical 1.6.1, schedule + apply + list of blocks",
        short: "kvbm (kv, listed)",
        covers: "kv blocks, prefix registry, page list",
        us: [0.31, 2.8, 12.4, 64.1, 34.5, 206.0, 564.0],
        plotted: true,
        key: "kvbm listed",
    },
    Peer {
        name: "flat Rust, page list rebuilt, blake3 keys",
        short: "flat Rust, rebuilt",
        covers: "kv, attention, positions, sampler; no boundary",
        us: [0.10, 0.34, 1.8, 7.2, 8.1, 14.8, 52.8],
        plotted: false,
        key: "floor rebuild",
    },
    Peer {
        name: "flat Rust, resident table, blake3 keys",
        short: "flat Rust, resident",
        covers: "kv, attention, positions, sampler; no boundary",
        us: [0.09, 0.26, 0.78, 3.4, 6.4, 7.2, 9.6],
        plotted: true,
        key: "floor table",
    },
];
