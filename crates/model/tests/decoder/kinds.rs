//! The shipped kinds, linked in, as a decoder's resources.

use model::{Decoder, Node};
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

/// Cache, attention, positions and sampler, in build order, with a float32 cache.
pub fn kinds(node: &Decoder) -> Vec<(&'static str, BuiltResource)> {
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
    node: &Decoder,
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
    let mut info = EngineResourceInfo::new(Device::CPU, PlainHost::handle());
    info.kv_dtype = DType::F32;
    info.index = index;
    if let Some((spec, built)) = cache {
        info.dependencies.insert("kv".into(), built.as_dependency(spec.clone(), 0));
    }
    let built = build_resource::<K>(&spec, &info).expect("the resource is built");
    (spec, built)
}
