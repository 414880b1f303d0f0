//! What every plan must say, kept apart from the resources.
//!
//! A stream's pages are those that its tokens were written to: the ledger takes each page down when
//! a plan first writes to it. From then on every plan must list the same pages in the same order, so
//! what a kernel reads is what was written, and no work can be skipped unnoticed.

use std::collections::HashMap;

use resource_api::{
    Attention, AttentionHandle, KvPlan, LabelId, PositionsPlan, RequestId, SamplerPlan, StepContext,
};

use super::rig::{Indices, PAGE, Stream, TEMPERATURE, TOP_K, TOP_P};
use crate::error::{Error, ErrorKind, Result};

/// The pages of live streams, by request slot.
pub struct Ledger {
    at: Indices,
    attention: AttentionHandle,
    pages: Vec<Pages>,
    indptr: Vec<u32>,
    /// Plans that were compared.
    pub compared: u64,
    /// Page entries that were compared.
    pub entries: u64,
}

#[derive(Debug, Default)]
struct Pages {
    /// In stream order.
    listed: Vec<u32>,
    /// So many more at the front were adopted: the first plan tells which.
    adopted: usize,
}

impl Ledger {
    /// An empty ledger over plans that are filed there.
    pub fn new(at: Indices, attention: AttentionHandle) -> Self {
        let (pages, indptr) = (Vec::new(), Vec::new());
        Self { at, attention, pages, indptr, compared: 0, entries: 0 }
    }

    /// A request begins with nothing.
    pub fn forget(&mut self, rid: RequestId) {
        let slot = self.slot(rid);
        slot.listed.clear();
        slot.adopted = 0;
    }

    /// A request begins with pages of another.
    pub fn adopt(&mut self, rid: RequestId, tokens: u32) {
        self.slot(rid).adopted = tokens.div_ceil(PAGE) as usize;
    }

    fn slot(&mut self, rid: RequestId) -> &mut Pages {
        let index = rid.index();
        if self.pages.len() <= index {
            self.pages.resize_with(index + 1, Pages::default);
        }
        &mut self.pages[index]
    }

    /// Takes down the pages that the step's tokens begin.
    ///
    /// # Errors
    /// A step without plans.
    pub fn record(&mut self, ctx: &StepContext<'_>) -> Result<()> {
        let kv = ctx.plan_result::<KvPlan>(self.at.kv)?;
        let mut token = 0;
        for row in 0..kv.request.len() {
            let (start, span) = (kv.start[row], kv.span[row]);
            let first = start.next_multiple_of(PAGE);
            if first < start + span || self.slot(kv.request[row]).adopted > 0 {
                let slot = self.slot(kv.request[row]);
                if slot.adopted > 0 {
                    slot.listed = kv.pages(row, PAGE)[..slot.adopted].to_vec();
                    slot.adopted = 0;
                }
                let begun = (first..start + span).step_by(PAGE as usize);
                slot.listed.extend(begun.map(|at| kv.write_page[token + (at - start) as usize]));
            }
            token += span as usize;
        }
        Ok(())
    }

    /// Compares the step's plans with what `streams` are and what was taken down.
    ///
    /// # Errors
    /// The first difference.
    pub fn compare(
        &mut self,
        ctx: &StepContext<'_>,
        streams: &[Stream],
        spans: Option<&[u32]>,
    ) -> Result<()> {
        let kv = ctx.plan_result::<KvPlan>(self.at.kv)?;
        let positions = ctx.plan_result::<PositionsPlan>(self.at.positions)?.ids(LabelId::MAIN);
        let positions = positions.unwrap_or_default();
        let sampler = ctx.plan_result::<SamplerPlan>(self.at.sampler)?;
        self.indptr.resize(streams.len() + 1, 0);
        let rows = self.attention.qo_indptr(ctx, LabelId::MAIN, &mut self.indptr)? as usize - 1;
        let in_step = streams.iter().zip(0..).filter_map(|(stream, i): (&Stream, usize)| {
            let span = spans.map_or(1, |spans| spans[i]);
            (span > 0).then_some((stream, span))
        });
        let (mut row, mut token) = (0, 0);
        for (stream, span) in in_step {
            let (start, len) = (stream.len, stream.len + span);
            let equal = |what: &str, is: u64, should: u64| match is == should {
                true => Ok(()),
                false => Err(differs(stream.rid, what, is, should)),
            };
            let column = |what: &str, column: &[u32], should: u32| match column.get(row) {
                Some(&is) => equal(what, is.into(), should.into()),
                None => Err(differs(stream.rid, what, row as u64, column.len() as u64)),
            };
            if kv.request.get(row) != Some(&stream.rid) {
                return Err(differs(stream.rid, "row", row as u64, kv.request.len() as u64));
            }
            column("first token in attention", &self.indptr, token as u32)?;
            column("start", &kv.start, start)?;
            column("span", &kv.span, span)?;
            column("length", &kv.len, len)?;
            column("length of the last page", &kv.last_page_len, (len - 1) % PAGE + 1)?;
            column("first token", &kv.token_start, token as u32)?;
            let listed = &self.pages[stream.rid.index()].listed;
            let pages = kv.pages(row, PAGE);
            self.entries += pages.len() as u64;
            if pages != &listed[..] {
                let at = pages.iter().zip(listed).position(|(a, b)| a != b);
                let at = at.unwrap_or(pages.len().min(listed.len()));
                return Err(differs(stream.rid, "page list at", at as u64, listed.len() as u64));
            }
            for position in start..len {
                let (page, slot) = (kv.write_page[token], kv.write_slot[token]);
                let should = listed[(position / PAGE) as usize];
                equal("page written", page.into(), should.into())?;
                equal("slot written", slot.into(), (position % PAGE).into())?;
                let is = positions.get(token).copied().unwrap_or(u32::MAX);
                equal("position", is.into(), position.into())?;
                token += 1;
            }
            self.compare_sampling(sampler, row, stream)?;
            row += 1;
        }
        if (rows, kv.request.len(), positions.len()) != (row, row, token) {
            let rid = RequestId::padding(0);
            return Err(differs(rid, "number of rows", kv.request.len() as u64, row as u64));
        }
        self.compared += 1;
        Ok(())
    }

    fn compare_sampling(&self, plan: &SamplerPlan, row: usize, stream: &Stream) -> Result<()> {
        let seat = plan.seat.get(row).map_or(usize::MAX, |&seat| seat as usize);
        let values = |of: &SamplerPlan| {
            Some((
                (*of.request.get(row)? == stream.rid, *of.row.get(seat)? as usize),
                (of.temperature.get(seat)?.to_bits(), *of.top_k.get(seat)?),
                (of.top_p.get(seat)?.to_bits(), *of.seed.get(seat)?),
                (of.repetition_penalty.get(seat)?.to_bits(), *of.position.get(seat)?),
            ))
        };
        let expected = (
            (true, row),
            (TEMPERATURE.to_bits(), TOP_K),
            (TOP_P.to_bits(), stream.seed),
            (1.0f32.to_bits(), stream.sampled),
        );
        match values(plan) {
            Some(values) if values == expected => Ok(()),
            _ => Err(differs(stream.rid, "sampling parameters of row", row as u64, seat as u64)),
        }
    }

    /// Checks that no page is in two streams.
    ///
    /// # Errors
    /// The first one that is.
    pub fn disjoint(&self, streams: &[Stream]) -> Result<()> {
        let mut owners = HashMap::new();
        for stream in streams {
            for &page in &self.pages[stream.rid.index()].listed {
                if let Some(other) = owners.insert(page, stream.rid) {
                    let other = u64::from(other.slot);
                    return Err(differs(stream.rid, "page shared", page.into(), other));
                }
            }
        }
        Ok(())
    }

    /// Bytes of the plans' columns that a step writes anew, and entries of page tables it holds.
    ///
    /// # Errors
    /// A step without plans.
    pub fn written(&self, ctx: &StepContext<'_>) -> Result<u64> {
        let kv = ctx.plan_result::<KvPlan>(self.at.kv)?;
        let positions = ctx.plan_result::<PositionsPlan>(self.at.positions)?;
        let sampler = ctx.plan_result::<SamplerPlan>(self.at.sampler)?;
        let rows = kv.request.len();
        // request 8; seat, start, span, len, token_start, last_page_len 4 each.
        let of_kv = rows * (8 + 6 * 4) + kv.write_page.len() * 8;
        let of_positions = positions.pos_ids.len() * 4;
        // request 8, seat 4, and the seat's row, position and fresh_len.
        let of_sampler = sampler.request.len() * (8 + 4 + 12);
        // Rows of attention: where each begins.
        Ok((of_kv + of_positions + of_sampler + (rows + 1) * 4) as u64)
    }
}

impl std::fmt::Debug for Ledger {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Ledger({} plans compared)", self.compared)
    }
}

fn differs(rid: RequestId, what: &str, is: u64, should: u64) -> Error {
    let message = format!("request {rid}: the plan's {what} is {is}, and should be {should}");
    Error::new(ErrorKind::Internal, message)
}
