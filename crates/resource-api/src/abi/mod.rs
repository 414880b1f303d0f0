//! The carrier: everything that is `repr(C)`, checked by layout, or `unsafe` about two libraries
//! talking to each other. Nothing outside this crate names what is in here, except code that the
//! macros of this crate generate, so that the carrier could be replaced.

pub mod cross;
pub mod fault;
pub mod guard;
pub mod layout;
pub mod library;
pub mod note;
pub mod object;
pub mod root;

/// What generated code needs, under paths that do not depend on the caller's dependencies.
pub mod generated {
    pub use super::cross::{Cross, CrossReturn, erase};
    pub use super::guard::guard;
    pub use super::layout::{MethodDesc, layout_of};
    pub use super::note::{About, Note, content_len};
    pub use super::object::{Instance, Interface, Object, VTableHead, instance};
    pub use super::root::{PluginRoot, header};
    pub use crate::ResourceError;
    pub use abi_stable::library::{LibHeader, RootModuleResult};
    pub use abi_stable::std_types::{RResult, RSlice, RStr, RVec};
    pub use abi_stable::type_layout::TypeLayout;
}
