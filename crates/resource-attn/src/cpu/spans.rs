//! Spans that are gathered until there are enough for a call.

use device::attention::{Rows, Span};

/// What one call takes: beginning one is then little beside its work, and what it reads stays in the
/// cache for a second pass of many queries.
const MOST: usize = 32;

/// Spans not yet handed to a kernel.
#[derive(Debug)]
pub(super) struct Spans<'a> {
    spans: [Span<'a>; MOST],
    count: usize,
}

impl<'a> Spans<'a> {
    pub fn new() -> Self {
        Self { spans: [Span::new(Rows::f32(&[], 0), 0, 0); MOST], count: 0 }
    }

    /// Adds `span`; once there are enough, they go to `call` together.
    pub fn push(&mut self, span: Span<'a>, call: impl FnOnce(&[Span<'a>])) {
        self.spans[self.count] = span;
        self.count += 1;
        if self.count == MOST {
            call(&self.spans);
            self.count = 0;
        }
    }

    /// Hands what is left to `call`.
    pub fn finish(self, call: impl FnOnce(&[Span<'a>])) {
        call(&self.spans[..self.count]);
    }
}
