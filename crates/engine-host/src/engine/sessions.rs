//! Sessions: what a request has computed is the beginning of a later one, without its tokens being computed
//! again.

use std::collections::VecDeque;

use resource_api::{RequestId, Resource};

use super::Engine;
use super::offload::start_anew;
use crate::labels::StreamLabels;
use crate::request::Tracked;
use crate::resources::{Entry, ResourceSet};

/// The sessions that resources keep, the one that was kept before all others in front.
#[derive(Debug)]
pub(super) struct Sessions {
    kept: VecDeque<Session>,
    most: usize,
}

#[derive(Debug)]
struct Session {
    name: String,
    /// The tokens whose state there is.
    tokens: Vec<u32>,
    /// The streams that they went to.
    labels: Option<Box<StreamLabels>>,
}

impl Session {
    /// How many tokens a request can take over from it. Caches cut `main` alone, so where there are other
    /// streams it is all or nothing; and where a prompt has other streams than what follows it, none of
    /// them has all tokens.
    fn begins(&self, request: &Tracked) -> usize {
        let most = request.tokens.len() - 1;
        let pairs = self.tokens.iter().zip(&request.tokens[..most]);
        let same = pairs.take_while(|(a, b)| a == b).count();
        let fits = match &self.labels {
            None => true,
            Some(labels) => labels.prefill == labels.decode && same == self.tokens.len(),
        };
        if fits && self.labels == request.labels { same } else { 0 }
    }
}

impl Sessions {
    pub(super) fn new(most: usize) -> Self {
        Self { kept: VecDeque::new(), most }
    }

    fn take(&mut self, name: &str) -> Option<Session> {
        let at = self.kept.iter().position(|kept| kept.name == name)?;
        self.kept.remove(at)
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

/// Has a request go on where its session was left, as far as its tokens and streams are the same; at least
/// one token is left to compute.
pub(super) fn resume(resources: &ResourceSet, sessions: &mut Sessions, request: &mut Tracked) {
    if request.prefix_resolved || request.computed > 0 {
        return;
    }
    let Some(name) = request.session.clone() else { return };
    let Some(session) = sessions.take(&name) else { return };
    let same = session.begins(request);
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
    request.take_cached(same);
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
        self.sessions.kept.iter().map(|kept| kept.name.as_str())
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
        let (tokens, labels) =
            (request.tokens[..request.computed].to_vec(), request.labels.clone());
        self.drop_stage_of(rid);
        self.sessions.take(&name);
        for_all(self.resources(), "retain_session", |entry| {
            entry.resource().retain_session(rid, &name)
        });
        self.sessions.kept.push_back(Session { name, tokens, labels });
        self.trim_sessions();
    }

    fn trim_sessions(&mut self) {
        while self.sessions.kept.len() > self.sessions.most {
            if let Some(session) = self.sessions.kept.pop_front() {
                forget(self.resources(), &session.name);
            }
        }
    }
}
