//! Measures what the host and the resources cost beside the model: no forward pass runs here.
//!
//! The figures are those of real plugins in the real protocol. Only two things are unlike a server:
//! the cache has one layer of one tiny head, so that a pool of millions of pages is address space
//! that nobody touches, and every sampled token is the same one.
//!
//! | file | holds |
//! |---|---|
//! | `kinds` | where the kinds come from: plugins, or linked in |
//! | `rig` | built resources, requests, and one timed step of them |
//! | `ledger` | what every plan must say, kept apart from the resources |
//! | `shapes` | which batch, context and pool sizes are measured |
//! | `decode` | decode steps with and without page ends |
//! | `phases` | the same, each resource and method by itself |
//! | `other` | prefill, mixed, refused, churning and staged steps |
//! | `turn` | a whole turn of the engine around a model that does nothing |
//! | `fit` | which part of the cost grows with what |
//! | `step` | all of the above: `bench step` |
//! | `prefix`, `load`, `copies`, `abi` | cached prompts; from process start to ready; many plugins; plugins beside linked kinds |
//! | `ratchet`, `child` | steps whose instructions are counted; runs of other programs |
//! | `processes` | the same in several fresh processes, and their spread |
//! | `stats`, `machine` | percentiles; what was measured where |
//! | `record`, `peers`, `plot`, `report` | results as tables and plots, beside other engines' |
//! | `sections` | the parts of `docs/performance.md` that benchmarks write |

pub mod abi;
mod child;
pub mod copies;
mod decode;
mod fit;
pub mod kinds;
mod ledger;
pub mod load;
mod machine;
mod other;
pub mod peers;
mod phases;
mod plot;
pub mod prefix;
pub mod processes;
pub mod ratchet;
pub mod record;
pub mod report;
mod rig;
mod sections;
mod shapes;
mod stats;
pub mod step;
mod turn;

pub use kinds::{Kinds, Linked};
pub use shapes::{Pool, Shape};
