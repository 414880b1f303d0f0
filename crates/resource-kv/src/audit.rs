//! The state for people: as JSON, and checked.

use std::collections::HashMap;

use resource_api::{ResourceError, Result};
use serde_json::{Value, json};

use crate::pool::SINK;
use crate::state::{Shared, State};
use crate::stream::StreamId;

impl State {
    /// The state for tools. Labels are ids; `label_name` gives their names.
    pub(crate) fn inspect(
        &self,
        shared: &Shared,
        label_name: impl Fn(resource_api::LabelId) -> String,
    ) -> Value {
        let facts = &shared.facts;
        let streams: Vec<Value> = self
            .requests
            .iter()
            .map(|(id, s)| {
                json!({
                    "request": id.request.to_string(),
                    "label": label_name(id.label),
                    "tokens": s.len,
                    "pending": s.pending,
                    "pages": s.held(),
                    "released": s.released,
                    "protected": s.protected,
                    "generation": s.generation,
                })
            })
            .collect();
        json!({
            "pages": {
                "total": facts.num_pages,
                "free": self.pool.ready(),
                "waiting": self.pool.waiting(),
                "sealed": self.pool.sealed(),
            },
            "page_size": facts.page_size,
            "max_seq_len": facts.max_seq_len,
            "dtype": facts.dtype.name(),
            "bytes": crate::geometry::total_bytes(facts),
            "steps_in_flight": self.steps.len(),
            "streams": streams,
        })
    }

    /// Checks that every page is free or owned, never both, by as many as it counts.
    pub(crate) fn check_conservation(&self) -> Result<()> {
        let mut owners: HashMap<u32, u32> = HashMap::from([(SINK, 1)]);
        let held = self.requests.iter().flat_map(|(_, s)| &s.pages);
        let copies = self.steps.iter().flat_map(|r| &r.copies).flat_map(|c| &c.pages);
        for &page in held.chain(copies) {
            *owners.entry(page).or_default() += 1;
        }
        let fault = |what: String| Err(ResourceError::internal(what));
        let mut free = vec![false; self.pool.usable() as usize + 1];
        for page in self.pool.ready_list().chain(self.pool.waiting_list()) {
            if std::mem::replace(&mut free[page as usize], true) {
                return fault(format!("page {page} is free twice"));
            }
        }
        for (page, &is_free) in free.iter().enumerate() {
            let page = page as u32;
            let (counted, found) =
                (self.pool.owners(page), owners.get(&page).copied().unwrap_or(0));
            if counted != found {
                return fault(format!("page {page} counts {counted} owners and has {found}"));
            }
            if is_free == (found > 0) {
                let is = if is_free { "free and owned" } else { "lost: neither free nor owned" };
                return fault(format!("page {page} is {is}"));
            }
            if found > 1 && page != SINK && !self.pool.is_sealed(page) {
                return fault(format!("page {page} is shared by {found} and not sealed"));
            }
        }
        let listed = free.iter().filter(|&&f| f).count() as u32;
        let counted = self.pool.ready() + self.pool.waiting();
        if listed != counted {
            return fault(format!("{listed} pages are free, {counted} are counted"));
        }
        self.requests.iter().try_for_each(|(id, s)| self.check_stream(id, s))
    }

    fn check_stream(&self, id: StreamId, s: &crate::stream::Stream) -> Result<()> {
        let size = self.page_size();
        let what = match () {
            _ if u64::from(s.held()) * u64::from(size) < u64::from(s.len) => "pages for its tokens",
            _ if s.in_flight == 0 && (s.pending > 0 || s.rewriters > 0) => {
                "step for what is pending"
            }
            _ => return Ok(()),
        };
        let (request, label) = (id.request, id.label.0);
        Err(ResourceError::internal(format!("label {label} of request {request} lacks a {what}")))
    }
}
