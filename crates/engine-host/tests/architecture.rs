//! The rule that makes kinds replaceable: the host is not linked to any.

use std::collections::{BTreeMap, BTreeSet};

use cargo_metadata::{DependencyKind, MetadataCommand, PackageId};

#[test]
fn the_host_links_no_resource_crate_and_the_contract_knows_nobody() {
    let metadata = MetadataCommand::new()
        .manifest_path(xtask::workspace_root().join("Cargo.toml"))
        .exec()
        .unwrap();
    let members: BTreeMap<&PackageId, &str> =
        metadata.workspace_packages().iter().map(|p| (&p.id, p.name.as_str())).collect();
    let resolve = metadata.resolve.as_ref().unwrap();
    let linked = |name: &str| -> BTreeSet<&str> {
        let start = members.iter().find(|(_, n)| **n == name).map(|(id, _)| *id).unwrap();
        let (mut todo, mut seen) = (vec![start], BTreeSet::new());
        while let Some(id) = todo.pop() {
            let node = resolve.nodes.iter().find(|n| n.id == *id).unwrap();
            for dep in &node.deps {
                let normal = dep.dep_kinds.iter().any(|k| k.kind == DependencyKind::Normal);
                if normal && members.contains_key(&dep.pkg) && seen.insert(members[&dep.pkg]) {
                    todo.push(&dep.pkg);
                }
            }
        }
        seen
    };
    let host = linked("engine-host");
    assert!(host.contains("resource-api") && host.contains("model"), "{host:?}");
    // The conformance check is linked for `plugin check`: it knows the contract and no kind, and the
    // fakes beside it hold nobody's state.
    let of_testkit = linked("resource-testkit");
    assert_eq!(of_testkit, BTreeSet::from(["device", "resource-api", "resource-api-macros"]));
    let kinds = members.values().filter(|n| **n != "resource-testkit").filter(|n| {
        (n.starts_with("resource-") || n.starts_with("plugin-") || n.starts_with("testkit"))
            && !n.starts_with("resource-api")
    });
    for kind in kinds {
        assert!(!host.contains(kind), "engine-host is linked to {kind}");
        let of_kind = linked(kind);
        assert!(
            !of_kind.contains("engine-host") && !of_kind.contains("model"),
            "{kind}: {of_kind:?}"
        );
    }
    assert_eq!(linked("resource-api"), BTreeSet::from(["resource-api-macros"]));
}
