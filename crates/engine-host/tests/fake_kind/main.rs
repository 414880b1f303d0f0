//! The contract through the real runner, with fake kinds that are really loaded from a plugin.
//!
//! `resource_testkit` is linked here too, for the types of its interface; its resources live in the
//! plugin, with another copy of everything.

#![forbid(unsafe_code)]

mod capabilities;
mod fixture;
mod images;
mod moving;
mod panics;
mod panics_of_capabilities;
mod seam;
mod slots;
mod staging;
mod steps;
