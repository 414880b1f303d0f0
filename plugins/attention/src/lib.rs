//! The plugin that builds resources of kinds `attention` and `cross_attention`.

resource_api::export_plugin!(resource_attn::PagedAttention, resource_attn::PagedCrossAttention);
