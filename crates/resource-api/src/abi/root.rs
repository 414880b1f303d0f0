//! What a plugin file exports: one root module with the kinds it builds.

use super::guard::{guard, install_panic_hook};
use crate::kind::KindHandle;
use crate::{
    AttentionHandle, AttentionStepOptions, CrossAttentionHandle, HostServicesHandle, Interface,
    KvCacheHandle, KvFacts, KvPlan, KvStepOptions, LogitsProcessorHandle, MethodDesc,
    PositionStepOptions, PositionsHandle, PositionsPlan, ResourceHandle, SamplerHandle,
    SamplerPlan, SamplerStepOptions, Typed,
};
use abi_stable::StableAbi;
use abi_stable::library::{LibHeader, RootModule, RootModuleError, RootModuleResult};
use abi_stable::prefix_type::{PrefixRef, PrefixTypeTrait};
use abi_stable::sabi_types::VersionStrings;
use abi_stable::std_types::{RResult, RSlice, RStr};
use abi_stable::type_layout::TypeLayout;

/// Version of the contract, as manifests name it.
pub const API_VERSION: &str = "1.0";

/// The root module.
#[repr(C)]
#[derive(StableAbi)]
#[sabi(kind(Prefix(prefix_ref = PluginRootRef, prefix_fields = PluginRootPrefix)))]
#[sabi(missing_field(panic))]
pub struct PluginRoot {
    /// Contract version it was built against.
    pub api: RStr<'static>,
    /// Whether panics unwind in it. One built with `panic=abort` could not contain its own.
    pub unwinds: bool,
    /// The contract's interfaces as it knows them.
    pub interfaces: RSlice<'static, InterfaceDesc>,
    /// The contract's plans, facts and step options as it knows them.
    pub types: RSlice<'static, TypeDesc>,
    /// Name of the crate.
    pub name: RStr<'static>,
    /// Version of the crate.
    pub version: RStr<'static>,
    /// The kinds.
    #[sabi(last_prefix_field)]
    pub kinds: RSlice<'static, KindObject>,
}

/// An interface of the contract.
#[repr(C)]
#[derive(Clone, Copy, StableAbi)]
pub struct InterfaceDesc {
    /// Its id.
    pub id: RStr<'static>,
    /// Its methods.
    pub methods: RSlice<'static, MethodDesc>,
}

/// A type of the contract that crosses behind a typed reference.
#[repr(C)]
#[derive(Clone, Copy, StableAbi)]
pub struct TypeDesc {
    /// Its tag.
    pub tag: RStr<'static>,
    /// Its layout.
    #[sabi(unsafe_opaque_field)]
    pub layout: &'static TypeLayout,
}

const fn interface<I: Interface>() -> InterfaceDesc {
    InterfaceDesc { id: RStr::from_str(I::ID), methods: RSlice::from_slice(I::METHODS) }
}

const fn typed<T: Typed>() -> TypeDesc {
    TypeDesc { tag: RStr::from_str(T::TAG), layout: T::LAYOUT }
}

/// All interfaces of the contract.
pub const INTERFACES: &[InterfaceDesc] = &[
    interface::<ResourceHandle>(),
    interface::<KindHandle>(),
    interface::<HostServicesHandle>(),
    interface::<KvCacheHandle>(),
    interface::<AttentionHandle>(),
    interface::<CrossAttentionHandle>(),
    interface::<PositionsHandle>(),
    interface::<SamplerHandle>(),
    interface::<LogitsProcessorHandle>(),
];

/// All types of the contract that cross behind typed references.
pub const TYPES: &[TypeDesc] = &[
    typed::<KvFacts>(),
    typed::<KvPlan>(),
    typed::<KvStepOptions>(),
    typed::<AttentionStepOptions>(),
    typed::<PositionStepOptions>(),
    typed::<PositionsPlan>(),
    typed::<SamplerStepOptions>(),
    typed::<SamplerPlan>(),
];

/// A kind inside the root module.
#[repr(transparent)]
#[derive(Clone, StableAbi)]
pub struct KindObject(super::object::Object);

impl KindObject {
    /// Its object, to be opened as a [`KindHandle`].
    pub fn object(&self) -> super::object::Object {
        self.0.clone()
    }
}

impl RootModule for PluginRootRef {
    abi_stable::declare_root_module_statics! {PluginRootRef}
    const BASE_NAME: &'static str = "resource";
    const NAME: &'static str = "resource";
    const VERSION_STRINGS: VersionStrings = VersionStrings::new("1.0.0");
}

/// The symbol that `export_plugin!` exports.
pub const fn header(open: extern "C" fn() -> RootModuleResult) -> LibHeader {
    // SAFETY: `open` calls `open_plugin`, which gives back a PluginRootRef.
    unsafe {
        LibHeader::from_constructor::<PluginRootRef>(
            open,
            abi_stable::library::CheckTypeLayout::Yes,
        )
    }
}

/// Constructor of the root module. Panics of `kinds` become an error.
pub fn open_plugin(
    name: &'static str,
    version: &'static str,
    unwinds: bool,
    kinds: impl FnOnce() -> Vec<KindHandle>,
) -> RootModuleResult {
    install_panic_hook();
    let kinds = match guard("export_plugin!", || Ok(kinds())) {
        Ok(kinds) => kinds,
        Err(e) => {
            return RResult::RErr(RootModuleError::Returned(
                abi_stable::std_types::RBoxError::from_fmt(&e),
            ));
        }
    };
    let kinds: Vec<_> = kinds.into_iter().map(|k| KindObject(k.into_object())).collect();
    let root = PluginRoot {
        api: RStr::from_str(API_VERSION),
        unwinds: unwinds && cfg!(panic = "unwind"),
        interfaces: RSlice::from_slice(INTERFACES),
        types: RSlice::from_slice(TYPES),
        name: RStr::from_str(name),
        version: RStr::from_str(version),
        // Lives as long as the library, which is never unloaded.
        kinds: RSlice::from_slice(Vec::leak(kinds)),
    };
    let root: PluginRootRef = root.leak_into_prefix();
    // SAFETY: erased here, cast back to the same type by `unchecked_layout`.
    let erased = unsafe { abi_stable::prefix_type::PrefixRefTrait::to_prefix_ref(root).cast() };
    let _: PrefixRef<abi_stable::marker_type::ErasedPrefix> = erased;
    RResult::ROk(erased)
}
