//! Libraries that are given up while threads still have something of them.

use std::path::Path;
use std::sync::mpsc::channel;

use engine_host::discovery::{Options, discover};
use engine_host::manifest::ApiVersion;
use engine_host::probe::Probe;
use engine_host::registry::Registry;
use resource_api::{Capability, Interface};
use resource_testkit::{Echo, EchoHandle};
use serde_json::json;

use super::fixture::{info, spec};

/// A fake out of the plugin in `directory`, with nothing else kept of it.
fn echo_of(directory: &Path) -> EchoHandle {
    let api = ApiVersion::parse(resource_api::API_VERSION).unwrap();
    let options = Options { strict: false, api, probe: Probe::Never, use_lock: true };
    let registry = Registry::load(&discover(&[directory.to_owned()], &options).unwrap(), None);
    let built = registry.build_resource(&spec("fake", "fake", json!({})), info()).unwrap();
    let offered = built.capabilities.iter().find(|c| c.id() == EchoHandle::ID);
    offered.map(Capability::open).unwrap().unwrap()
}

/// Images of the plugin that are mapped.
fn images() -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let name = "libresource_testkit_plugin.so";
    // Its code: whoever reads its symbols for a backtrace maps the file, too.
    let code_of = |line: &&str| line.contains(name) && line.contains(" r-xp ");
    maps.lines().filter(code_of).count()
}

#[test]
fn a_library_outlives_those_who_called_it_and_a_new_build_loads_beside_it() {
    let first = resource_testkit::support::plugin_directory().unwrap();
    let echo = echo_of(first.path());
    let (called, is_called) = channel();
    let (end, may_end) = channel::<()>();
    let worker = std::thread::spawn(move || {
        // The place of a panic is kept in a value of the thread, whose destructor is the library's.
        let e = echo.spread(1, Some(0)).unwrap_err();
        assert!(e.message().contains("was asked to panic"), "{e}");
        drop(echo);
        called.send(()).unwrap();
        may_end.recv().unwrap();
    });
    is_called.recv().unwrap();
    // Nobody has anything of the library left but the thread, and its file is gone.
    let file = first.path().join("libresource_testkit_plugin.so");
    let mut bytes = std::fs::read(&file).unwrap();
    let manifest = std::fs::read(first.path().join("testkit.toml")).unwrap();
    drop(first);
    assert_eq!(images(), 1);
    end.send(()).unwrap();
    worker.join().unwrap();

    // The same again in other bytes, as a rebuild would be: in what the compiler says of itself.
    let said = b"rustc version";
    let at = bytes.windows(said.len()).position(|w| w == said).expect("a compiler's mark");
    bytes[at] = b'R';
    let second = tempfile::tempdir().unwrap();
    std::fs::write(second.path().join("libresource_testkit_plugin.so"), &bytes).unwrap();
    std::fs::write(second.path().join("testkit.toml"), &manifest).unwrap();
    let echo = echo_of(second.path());
    assert_eq!(echo.echo(&[1, 2], None).unwrap(), 3 + 4);
    assert_eq!(images(), 2, "it is another image");
}
