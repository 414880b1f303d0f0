//! Host of resource plugins: configuration, discovery and checks of plugins, order of building.
//!
//! The way from files to a running engine: [`config`] reads the engine's TOML, [`discovery`] scans
//! the plugin directories for manifests ([`manifest`]), [`elf`] checks a library before anything
//! maps it, [`order`] puts the resources into the order in which they are built.

#![forbid(unsafe_code)]

pub mod account;
pub mod bench;
mod checkpoint;
pub mod cli;
pub mod compute;
pub mod config;
pub mod discovery;
pub mod document;
pub mod driver;
pub mod elf;
pub mod engine;
pub mod error;
pub mod labels;
pub mod manifest;
pub mod names;
pub mod order;
mod output;
pub mod plugin_check;
pub mod probe;
pub mod registry;
pub mod request;
pub mod resources;
pub mod runner;
mod scheduler;
mod seam;
pub mod services;
pub mod setup;
pub mod slots;
pub mod step;
pub mod suggest;
pub mod watch;

pub use config::Config;
pub use error::{Error, ErrorKind, Result};
