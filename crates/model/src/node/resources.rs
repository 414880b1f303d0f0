//! The built resources of a node, and how the node finds the capabilities it calls.

use resource_api::{Capability, ErrorKind, Interface, ResourceError, Result};

/// A built resource that names the node in its `nodes`.
#[derive(Debug, Clone, Copy)]
pub struct NodeResource<'a> {
    /// Key of its config section.
    pub key: &'a str,
    /// Kind that built it.
    pub kind: &'a str,
    /// What it offers.
    pub capabilities: &'a [Capability],
}

/// All resources of one node.
#[derive(Debug, Clone)]
pub struct NodeResources<'a> {
    node: &'a str,
    resources: Vec<NodeResource<'a>>,
}

impl<'a> NodeResources<'a> {
    /// The resources of the node of that name.
    pub fn new(node: &'a str, resources: Vec<NodeResource<'a>>) -> Self {
        Self { node, resources }
    }

    /// The one capability with handle type `H`. `usual_kind` is what the error suggests to a config
    /// that has none.
    ///
    /// # Errors
    /// `NOT_FOUND` when no resource offers it, `INVALID` when several do, both naming config
    /// sections; `INCOMPATIBLE` when the one that does was built against another version of it.
    pub fn only<H: Interface>(&self, usual_kind: &str) -> Result<H> {
        let mut offers = self.resources.iter().flat_map(|resource| {
            let of_interface = |c: &&Capability| c.id() == H::ID && c.major() == H::MAJOR;
            resource.capabilities.iter().filter(of_interface).map(move |c| (resource, c))
        });
        match (offers.next(), offers.next()) {
            (Some((resource, capability)), None) => {
                capability.open().map_err(|e| e.within(format!("[resources.{}]", resource.key)))
            }
            (Some((first, _)), Some((second, _))) => Err(ResourceError::invalid(format!(
                "[resources.{}] and [resources.{}] both offer {}/{} to node `{node}`, which uses \
                 one; take \"{node}\" out of the `nodes` of the other",
                first.key,
                second.key,
                H::ID,
                H::MAJOR,
                node = self.node
            ))),
            (None, _) => Err(self.missing::<H>(usual_kind)),
        }
    }

    fn missing<H: Interface>(&self, usual_kind: &str) -> ResourceError {
        let offered: Vec<String> = self
            .resources
            .iter()
            .map(|r| {
                let names = r.capabilities.iter().map(|c| format!("{}/{}", c.id(), c.major()));
                let names: Vec<String> = names.collect();
                let names = if names.is_empty() { "nothing".into() } else { names.join(", ") };
                format!("[resources.{}] (kind {}) offers {names}", r.key, r.kind)
            })
            .collect();
        let offered =
            if offered.is_empty() { "it has no resources".into() } else { offered.join("; ") };
        ResourceError::new(
            ErrorKind::NOT_FOUND,
            format!(
                "node `{node}` needs a resource that offers {}/{}, such as one of kind \
                 `{usual_kind}`, and none of its resources does ({offered}); add a \
                 [resources.<key>] section with kind = \"{usual_kind}\" and nodes = [\"{node}\"]",
                H::ID,
                H::MAJOR,
                node = self.node
            ),
        )
    }
}
