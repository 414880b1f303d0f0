//! The plugin that builds resources of kind `kv`.

resource_api::export_plugin!(resource_kv::Kv);
