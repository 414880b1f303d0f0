//! The plugin that builds resources of the kinds `fake`, `fake_kv` and `panicker`.

resource_api::export_plugin!(
    resource_testkit::Fake,
    resource_testkit::FakeCache,
    resource_testkit::Panicker
);
