//! The decoder on tiny random models of every architecture, against float64, and on the real one
//! against its reference outputs.

mod cuda;
mod engine;
mod gemma;
mod inputs;
mod kinds;
mod plain;
mod real;
mod reference;
mod tiny;
mod trimmed;
