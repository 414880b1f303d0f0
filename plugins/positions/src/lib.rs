//! The plugin that builds resources of kind `positions`.

resource_api::export_plugin!(resource_positions::Positions);
