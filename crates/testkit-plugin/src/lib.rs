//! The plugin that builds resources of the kinds `fake` and `panicker`.

resource_api::export_plugin!(resource_testkit::Fake, resource_testkit::Panicker);
