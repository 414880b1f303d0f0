//! What plugins want of each other, by their manifests: solved before any library is opened.

use std::collections::BTreeMap;

use super::{Discovered, State};
use crate::document;
use crate::manifest::{Capability, Manifest, Requirement};
use crate::suggest;

fn usable(plugin: &Discovered) -> Option<&Manifest> {
    plugin.manifest.as_ref().filter(|_| plugin.state == State::Usable)
}

fn provides(manifest: &Manifest, wanted: &Requirement) -> bool {
    manifest.provides.iter().any(|offered| wanted.accepts(offered))
}

/// What usable plugins provide, by name, each with its plugin's index.
struct Offers<'p>(BTreeMap<&'p str, Vec<(usize, &'p Capability)>>);

impl<'p> Offers<'p> {
    fn of(plugins: &'p [Discovered]) -> Self {
        let mut offers: BTreeMap<_, Vec<_>> = BTreeMap::new();
        for (i, manifest) in plugins.iter().enumerate().filter_map(|(i, p)| Some((i, usable(p)?))) {
            for capability in &manifest.provides {
                offers.entry(capability.name.as_str()).or_default().push((i, capability));
            }
        }
        Self(offers)
    }

    /// The plugins that meet a need.
    fn meeting(&self, wanted: &Requirement) -> impl Iterator<Item = usize> {
        let of_name = self.0.get(wanted.name.as_str()).into_iter().flatten();
        of_name.filter(|(_, offered)| wanted.accepts(offered)).map(|(i, _)| *i)
    }
}

/// A plugin that requires what no usable plugin provides is refused, and so, in turn, is what
/// requires something of it.
pub(super) fn refuse_unmet(plugins: &mut [Discovered]) {
    loop {
        let offers = Offers::of(plugins);
        let is_unmet = |r: &&Requirement| !r.optional && offers.meeting(r).next().is_none();
        let unmet: Vec<(usize, String)> = plugins
            .iter()
            .enumerate()
            .filter_map(|(i, plugin)| Some((i, usable(plugin)?)))
            .flat_map(|(i, manifest)| {
                manifest.requires.iter().filter(is_unmet).map(move |r| (i, r))
            })
            .map(|(i, r)| (i, format!("requires {r}, which {}", why_unmet(plugins, r))))
            .collect();
        if unmet.is_empty() {
            return;
        }
        for (i, reason) in unmet {
            plugins[i].refuse(reason);
        }
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
        let path = document::shown(&plugin.path);
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
    let offers = Offers::of(plugins);
    let mut built = vec![false; plugins.len()];
    loop {
        let can_be_built = |i: usize, manifest: &Manifest| {
            manifest.requires.iter().filter(|r| !r.optional).all(|wanted| {
                offers.meeting(wanted).any(|provider| provider == i || built[provider])
            })
        };
        let next: Vec<usize> = (0..plugins.len())
            .filter(|&i| !built[i] && usable(&plugins[i]).is_some_and(|m| can_be_built(i, m)))
            .collect();
        if next.is_empty() {
            break;
        }
        next.into_iter().for_each(|i| built[i] = true);
    }
    let is_stuck = |i: usize| usable(&plugins[i]).is_some() && !built[i];
    let stuck: Vec<usize> = (0..plugins.len()).filter(|&i| is_stuck(i)).collect();
    let reasons: Vec<String> = stuck
        .iter()
        .map(|&i| format!("can never be built: {}", chain(plugins, &offers, is_stuck, i)))
        .collect();
    for (i, reason) in stuck.into_iter().zip(reasons) {
        plugins[i].refuse(reason);
    }
}

/// Links of a chain that a message tells.
const TOLD_LINKS: usize = 16;

/// From a plugin along what it waits for until one comes again.
fn chain(
    plugins: &[Discovered],
    offers: &Offers<'_>,
    is_stuck: impl Fn(usize) -> bool,
    start: usize,
) -> String {
    let mut path = vec![start];
    let mut text = plugins[start].name();
    while let Some((next, wanted)) = usable(&plugins[path[path.len() - 1]]).and_then(|manifest| {
        let needs = manifest.requires.iter().filter(|r| !r.optional && !provides(manifest, r));
        needs.filter_map(|r| Some((offers.meeting(r).find(|&i| is_stuck(i))?, r))).next()
    }) {
        text.push_str(&format!(" requires {wanted} of {}", plugins[next].name()));
        if path.contains(&next) {
            break;
        }
        if path.len() == TOLD_LINKS {
            text.push_str(", and so on");
            break;
        }
        text.push_str(", which");
        path.push(next);
    }
    text
}
