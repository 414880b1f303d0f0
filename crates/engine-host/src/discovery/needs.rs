//! What plugins want of each other, by their manifests: solved before any library is opened.

use std::collections::BTreeMap;

use super::{Discovered, State};
use crate::manifest::{Manifest, Requirement};
use crate::suggest;

fn usable(plugin: &Discovered) -> Option<&Manifest> {
    plugin.manifest.as_ref().filter(|_| plugin.state == State::Usable)
}

fn provides(manifest: &Manifest, wanted: &Requirement) -> bool {
    manifest.provides.iter().any(|offered| wanted.accepts(offered))
}

/// A plugin that requires what no usable plugin provides is refused, and so, in turn, is what
/// requires something of it.
pub(super) fn refuse_unmet(plugins: &mut [Discovered]) {
    loop {
        let is_met = |wanted: &Requirement| {
            wanted.optional || plugins.iter().filter_map(usable).any(|m| provides(m, wanted))
        };
        let unmet = plugins.iter().enumerate().find_map(|(i, plugin)| {
            let wanted = usable(plugin)?.requires.iter().find(|r| !is_met(r))?;
            Some((i, format!("requires {wanted}, which {}", why_unmet(plugins, wanted))))
        });
        let Some((i, reason)) = unmet else { return };
        plugins[i].refuse(reason);
    }
}

/// Why nobody provides what is wanted: somebody has another version, somebody would but is not usable,
/// or the name is a slip.
fn why_unmet(plugins: &[Discovered], wanted: &Requirement) -> String {
    let other_version = plugins.iter().filter_map(|p| Some((p, usable(p)?))).find_map(|(p, m)| {
        Some((p, m.provides.iter().find(|offered| offered.name == wanted.name)?))
    });
    if let Some((plugin, offered)) = other_version {
        return format!("no usable plugin provides: {} has {offered}", plugin.name());
    }
    let unusable = plugins.iter().find(|p| {
        p.state != State::Usable && p.manifest.as_ref().is_some_and(|m| provides(m, wanted))
    });
    if let Some(plugin) = unusable {
        let state = if plugin.state == State::Disabled { "disabled" } else { "refused" };
        let path = plugin.path.display();
        return format!(
            "no usable plugin provides: {} would, but is {state} ({path})",
            plugin.name()
        );
    }
    let offered = plugins.iter().filter_map(usable).flat_map(|m| &m.provides);
    let hint = suggest::did_you_mean(&wanted.name, offered.map(|c| c.name.as_str()));
    format!("no usable plugin provides{hint}")
}

/// Plugins that need each other in a circle are all refused: none could be built first. Optional needs
/// and what a plugin needs of itself do not count, and neither does a need that somebody outside of the
/// circle meets, too.
pub(super) fn refuse_cycles(plugins: &mut [Discovered]) {
    // Whoever can be built, again and again: what is left has no beginning.
    let mut built: Vec<usize> = Vec::new();
    loop {
        let can_be_built = |i: usize, manifest: &Manifest| {
            manifest.requires.iter().filter(|r| !r.optional).all(|wanted| {
                provides(manifest, wanted)
                    || built
                        .iter()
                        .any(|&b| usable(&plugins[b]).is_some_and(|m| provides(m, wanted)))
            }) && !built.contains(&i)
        };
        let next: Vec<usize> = (0..plugins.len())
            .filter(|&i| usable(&plugins[i]).is_some_and(|m| can_be_built(i, m)))
            .collect();
        if next.is_empty() {
            break;
        }
        built.extend(next);
    }
    let stuck: Vec<usize> = (0..plugins.len())
        .filter(|i| usable(&plugins[*i]).is_some() && !built.contains(i))
        .collect();
    let mut reasons: BTreeMap<usize, String> = BTreeMap::new();
    for &i in &stuck {
        reasons.insert(i, format!("can never be built: {}", chain(plugins, &stuck, i)));
    }
    for (i, reason) in reasons {
        plugins[i].refuse(reason);
    }
}

/// From a plugin along what it waits for until one comes again.
fn chain(plugins: &[Discovered], stuck: &[usize], start: usize) -> String {
    let mut path = vec![start];
    let mut text = plugins[start].name();
    loop {
        let at = path[path.len() - 1];
        let next = usable(&plugins[at]).and_then(|manifest| {
            manifest.requires.iter().filter(|r| !r.optional && !provides(manifest, r)).find_map(
                |r| {
                    let of = stuck
                        .iter()
                        .find(|&&s| usable(&plugins[s]).is_some_and(|m| provides(m, r)))?;
                    Some((*of, r))
                },
            )
        });
        let Some((next, wanted)) = next else { return text };
        text.push_str(&format!(" requires {wanted} of {}", plugins[next].name()));
        if path.contains(&next) {
            return text;
        }
        text.push_str(", which");
        path.push(next);
    }
}
