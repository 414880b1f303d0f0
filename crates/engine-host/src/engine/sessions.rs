//! Sessions: what a request has computed is the beginning of a later one, without its tokens being computed
//! again.

use std::collections::VecDeque;

use resource_api::{RequestId, Resource};

use super::Engine;
use super::offload::start_anew;
use crate::request::Tracked;
use crate::resources::{Entry, ResourceSet};

/// The sessions that resources keep, the one that was kept before all others in front.
#[derive(Debug)]
pub(super) struct Sessions {
    /// Name, and the tokens whose state there is.
    kept: VecDeque<(String, Vec<u32>)>,
    most: usize,
}

impl Sessions {
    pub(super) fn new(most: usize) -> Self {
        Self { kept: VecDeque::new(), most }
    }

    fn take(&mut self, name: &str) -> Option<Vec<u32>> {
        let at = self.kept.iter().position(|(kept, _)| kept == name)?;
        self.kept.remove(at).map(|(_, tokens)| tokens)
    }
}

fn for_all(resources: &ResourceSet, what: &str, call: impl Fn(&Entry) -> resource_api::Result<()>) {
    for entry in resources.entries().iter().rev() {
        if let Err(e) = call(entry) {
            tracing::warn!(resource = entry.key, "{what} failed: {e}");
        }
    }
}

fn forget(resources: &ResourceSet, name: &str) {
    for_all(resources, "remove_session", |entry| entry.resource().remove_session(name));
}

/// Has a request go on where its session was left, as far as its tokens are the same; at least one is left to
/// compute.
pub(super) fn resume(resources: &ResourceSet, sessions: &mut Sessions, request: &mut Tracked) {
    if request.prefix_resolved || request.computed > 0 {
        return;
    }
    let Some(name) = request.session.clone() else { return };
    let Some(tokens) = sessions.take(&name) else { return };
    let most = request.tokens.len() - 1;
    let same = tokens.iter().zip(&request.tokens[..most]).take_while(|(a, b)| a == b).count();
    let mut agreed = same > 0;
    for entry in resources.entries().iter().filter(|_| same > 0) {
        let adopted = entry.resource().adopt_session(request.rid, &name, same as u32);
        let adopted = adopted.inspect_err(|e| {
            tracing::warn!(resource = entry.key, "adopt_session failed: {e}");
        });
        agreed &= adopted.is_ok_and(|len| len.is_none_or(|len| len as usize == same));
    }
    if !agreed {
        // One has forgotten it, or took up less than the others.
        forget(resources, &name);
        start_anew(resources, request);
        return;
    }
    request.computed = same;
    request.cached = request.cached.max(same.min(request.prompt_len));
    request.prefix_resolved = true;
}

impl Engine {
    /// Sets how many sessions are kept at most; 64 from the start. Those that were kept first go first.
    pub fn set_max_sessions(&mut self, most: usize) {
        self.sessions.most = most;
        self.trim_sessions();
    }

    /// Names of the sessions that can be resumed, the one that would go first in front.
    pub fn sessions(&self) -> impl Iterator<Item = &str> {
        self.sessions.kept.iter().map(|(name, _)| name.as_str())
    }

    /// Forgets a session and frees what it has. Unknown ones are accepted.
    pub fn remove_session(&mut self, name: &str) {
        if self.sessions.take(name).is_some() {
            forget(self.resources(), name);
        }
    }

    /// Keeps what a request that has ended well has computed, where it names a session.
    pub(super) fn retain_session(&mut self, rid: RequestId) {
        let Some(request) = self.requests.get(rid) else { return };
        let Some(name) = request.session.clone().filter(|_| self.sessions.most > 0) else { return };
        let tokens = request.tokens[..request.computed].to_vec();
        self.drop_stage_of(rid);
        self.sessions.take(&name);
        for_all(self.resources(), "retain_session", |entry| {
            entry.resource().retain_session(rid, &name)
        });
        self.sessions.kept.push_back((name, tokens));
        self.trim_sessions();
    }

    fn trim_sessions(&mut self) {
        while self.sessions.kept.len() > self.sessions.most {
            if let Some((name, _)) = self.sessions.kept.pop_front() {
                forget(self.resources(), &name);
            }
        }
    }
}
