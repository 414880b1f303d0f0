//! `on_fault = "restart"`: a resource that broke is built anew while the engine goes on.
//!
//! The requests of the step in which it broke have failed by then. What the others had in the new
//! resources is gone, so that they are computed again from their tokens, as after giving way.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use model::Node;
use resource_api::{EngineLimits, RequestId, Resource};

use super::Engine;
use super::intake::{config_of, ingest_into, to_text};
use crate::error::{Error, ErrorKind, Result};
use crate::request::{Failure, GenerateRequest};
use crate::resources::ResourceSet;

use super::wards::OnFault;

/// A resource that breaks more often than this within [`WITHIN`] stays out of use.
const MOST: usize = 3;
const WITHIN: Duration = Duration::from_secs(600);

/// What restarts need to know.
#[derive(Debug, Default)]
pub(super) struct Restarts {
    /// When each resource was built anew.
    times: BTreeMap<String, Vec<Instant>>,
    /// What each live request said to each resource that it said something to.
    said: BTreeMap<RequestId, Said>,
    /// Resources that stay out of use.
    given_up: Vec<String>,
}

#[derive(Debug)]
struct Said {
    max_tokens: u32,
    config: BTreeMap<String, String>,
}

impl Restarts {
    pub(super) fn forget(&mut self, rid: RequestId) {
        self.said.remove(&rid);
    }

    /// Whether it broke too often.
    pub(super) fn has_given_up(&self, key: &str) -> bool {
        self.given_up.iter().any(|k| k == key)
    }

    /// Notes a restart, unless there were too many.
    fn may(&mut self, key: &str) -> bool {
        let times = self.times.entry(key.to_owned()).or_default();
        times.retain(|at| at.elapsed() < WITHIN);
        if times.len() >= MOST {
            self.given_up.push(key.to_owned());
            return false;
        }
        times.push(Instant::now());
        true
    }
}

/// Gives the node its resources.
pub(super) fn attach(node: &dyn Node, set: &ResourceSet, limits: &EngineLimits) -> Result<()> {
    let name = node.name();
    let own = set.of_node(name);
    let offered = own.iter().map(|&i| {
        let entry = &set.entries()[i];
        model::NodeResource {
            key: &entry.key,
            kind: &entry.kind,
            capabilities: entry.capabilities(),
        }
    });
    Ok(node.attach(&model::NodeResources::new(name, offered.collect()), limits)?)
}

impl Engine {
    /// Keeps what a request says to resources, if one of them may have to be told again.
    pub(super) fn remember(&mut self, rid: RequestId, request: &GenerateRequest, max_tokens: u32) {
        if !self.policies.values().any(|&p| p == OnFault::Restart) {
            return;
        }
        let entries = self.runner.resources().entries().iter();
        let config = entries.map(|e| (e.key.clone(), to_text(config_of(request, &e.key, &e.kind))));
        let config = config.filter(|(_, text)| !text.is_empty()).collect();
        self.restarts.said.insert(rid, Said { max_tokens, config });
    }

    /// Builds a resource anew; stops the engine if that fails.
    pub(super) fn restart(&mut self, key: &str) {
        if !self.restarts.may(key) {
            tracing::error!(
                resource = key,
                "broke again after {MOST} restarts in {} minutes: it stays out of use",
                WITHIN.as_secs() / 60
            );
            return;
        }
        let started = Instant::now();
        match self.try_restart(key) {
            Ok(anew) => tracing::warn!(
                resource = key,
                "broke, and was built anew in {:.1?}, with {}",
                started.elapsed(),
                crate::suggest::listed(anew.iter().map(String::as_str).filter(|k| *k != key))
            ),
            Err(e) => self.stop(format!(
                "resource `{key}` broke and cannot be built anew: {e}: start the engine again"
            )),
        }
    }

    fn try_restart(&mut self, key: &str) -> Result<Vec<String>> {
        self.drop_stage();
        self.buckets.clear();
        self.runner.remove_buckets();
        self.node.detach();
        let set = self.runner.resources_mut().ok_or_else(|| {
            let message = "somebody else holds the engine's resources";
            Error::new(ErrorKind::Internal, message)
        })?;
        let anew = set.rebuild(key)?;
        attach(&*self.node, self.runner.resources(), &self.limits)?;
        self.warm_up(|key| anew.iter().any(|k| k == key))?;
        self.take_along(&anew);
        Ok(anew)
    }

    /// Has every request start again, in resources that know it and in those that do not.
    fn take_along(&mut self, anew: &[String]) {
        let mut failed = Vec::new();
        let said = &self.restarts.said;
        let (node, walk) = (self.node_id, self.decode);
        for request in self.requests.iter_mut() {
            let rid = request.rid;
            let (prompt, generated) = request.tokens.split_at(request.prompt_len);
            for entry in self.runner.resources().entries() {
                let told = match anew.contains(&entry.key) {
                    false => entry.resource().reset_request(rid, true).map_err(Error::from),
                    true => {
                        let said = said.get(&rid);
                        let config = said.and_then(|s| s.config.get(&entry.key));
                        let config = config.map_or("", String::as_str);
                        let most = said.map_or(request.max_tokens, |s| s.max_tokens);
                        // What was generated is known to those alone that were there.
                        ingest_into(entry, rid, config, prompt, most).and_then(|()| {
                            let told =
                                entry.resource().extend_prefix_chain(rid, node, walk, generated);
                            Ok(told?)
                        })
                    }
                };
                if let Err(e) = told {
                    failed.push((rid, Failure::from(&e)));
                    break;
                }
            }
            if request.computed > 0 {
                self.stats.preemptions += 1;
            }
            request.give_up_computed();
            request.in_step = 0;
        }
        for (rid, why) in failed {
            self.fail(rid, &why);
        }
    }
}
