//! The shipped kinds, linked in, as a decoder's resources.

use model::Node;
use resource_api::host::PlainHost;
use resource_api::{
    BuiltResource, DType, Device, EngineResourceInfo, NodeResourceSpec, ResourceKind,
    build_resource,
};
use resource_attn::PagedAttention;
use resource_kv::Kv;
use resource_positions::Positions;
use resource_sampler::Sampler;
use serde_json::{Value, json};

/// Where and how the kinds keep things.
#[derive(Clone, Copy)]
pub struct Place {
    pub device: Device,
    pub kv_dtype: DType,
    pub batch_invariant: bool,
}

impl Place {
    /// On the CPU, with a float32 cache.
    pub const CPU: Self =
        Self { device: Device::CPU, kv_dtype: DType::F32, batch_invariant: false };
}

/// Cache, attention, positions and sampler, in build order.
pub fn kinds(node: &dyn Node, place: Place) -> Vec<(&'static str, BuiltResource)> {
    let node = (node, place);
    let (kv_spec, kv) = build::<Kv>(node, "kv", json!({ "page_size": 8, "pages": 128 }), 0, None);
    let of_kv = json!({ "kv_cache": "kv" });
    let cache = Some((&kv_spec, &kv));
    let (_, attention) = build::<PagedAttention>(node, "attention", of_kv.clone(), 1, cache);
    let (_, positions) = build::<Positions>(node, "positions", of_kv, 2, cache);
    let (_, sampler) = build::<Sampler>(node, "sampler", json!({}), 3, None);
    vec![("kv", kv), ("attention", attention), ("positions", positions), ("sampler", sampler)]
}

/// Builds a resource under the name of its kind, on `cache` if it depends on one.
fn build<K: ResourceKind>(
    (node, place): (&dyn Node, Place),
    key: &str,
    settings: Value,
    index: u32,
    cache: Option<(&NodeResourceSpec, &BuiltResource)>,
) -> (NodeResourceSpec, BuiltResource) {
    let mut all = node.resource_defaults(K::KIND);
    all.extend(settings.as_object().cloned().expect("an object"));
    let spec = NodeResourceSpec {
        resource_key: key.into(),
        kind: K::KIND.into(),
        nodes: [node.name().to_string()].into(),
        settings: Value::Object(all).to_string(),
    };
    let mut info = EngineResourceInfo::new(place.device, PlainHost::handle());
    info.kv_dtype = place.kv_dtype;
    info.batch_invariant = place.batch_invariant;
    if !place.device.is_cpu() {
        // Device buffers are made for them.
        info.limits = crate::engine::LIMITS;
    }
    info.index = index;
    if let Some((spec, built)) = cache {
        info.dependencies.insert("kv".into(), built.as_dependency(spec.clone(), 0));
    }
    let built = build_resource::<K>(&spec, &info).expect("the resource is built");
    (spec, built)
}
