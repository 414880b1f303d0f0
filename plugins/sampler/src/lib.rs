//! The plugin that builds resources of kind `sampler`.

resource_api::export_plugin!(resource_sampler::Sampler);
