//! What resources answer, checked where it comes in: values that cannot be right are told with the name
//! of who gave them, before anyone computes with them.
//!
//! Every step is checked, so the checks look at what the step has changed and never at what it has not:
//! columns as long as the step, and the entries of page tables that it has begun.

use resource_api::{
    AdmitOutcome, FailureReason, KvFacts, KvPlan, PositionsPlan, ResourceStep, SamplerPlan, Typed,
    TypedRef,
};

/// More bytes than any machine has for a cache: sizes beyond are slips.
const MOST_BYTES: u128 = 1 << 47;

/// What is wrong with a cache's account of itself.
pub fn facts(facts: &KvFacts) -> Result<(), String> {
    let counts = [
        ("num_layers", facts.num_layers, facts.layer_stride),
        ("num_kv_heads", facts.num_kv_heads, facts.head_stride),
        ("page_size", facts.page_size, facts.slot_stride),
        ("num_pages", facts.num_pages, facts.page_stride),
    ];
    for (name, count, stride) in counts {
        if count == 0 {
            return Err(format!("its facts say {name} = 0"));
        }
        if count > 1 && stride == 0 {
            return Err(format!("its facts put all {count} of {name} in one place"));
        }
    }
    for (name, count) in [
        ("head_dim", facts.head_dim),
        ("num_qo_heads", facts.num_qo_heads),
        ("max_seq_len", facts.max_seq_len),
    ] {
        if count == 0 {
            return Err(format!("its facts say {name} = 0"));
        }
    }
    let spans = counts.map(|(_, count, stride)| u128::from(count - 1) * u128::from(stride));
    let last = spans.iter().sum::<u128>() + u128::from(facts.kv_stride);
    let elements = last + u128::from(facts.head_dim);
    if elements * 2 > MOST_BYTES {
        return Err(format!(
            "its facts describe {elements} elements, which no machine has room for"
        ));
    }
    Ok(())
}

/// What is wrong with an answer of `admit`.
pub fn admission(outcome: &AdmitOutcome) -> Result<(), String> {
    let (need, have) = outcome.amounts();
    match outcome.reason() {
        FailureReason(reason) if reason > FailureReason::GRANT_DEFERRED.0 => {
            Err(format!("refuses for reason {reason}, which the contract does not know"))
        }
        FailureReason::ALLOCATION_FAILED if need > 0 && have >= need => {
            Err(format!("refuses for lack of room, though {need} are needed and {have} are free"))
        }
        _ => Ok(()),
    }
}

/// What is wrong with a plan: only those that others compute with are looked into. `starts` are the
/// lengths that the step's streams have by the engine's account, empty where nobody keeps one.
#[inline]
pub fn plan(
    plan: &TypedRef<'_>,
    facts: Option<&KvFacts>,
    share: &ResourceStep<'_>,
    starts: &[u32],
) -> Result<(), String> {
    match plan.tag() {
        KvPlan::TAG => cache_plan(opened(plan)?, facts, share, starts),
        PositionsPlan::TAG => positions_plan(opened(plan)?, share),
        SamplerPlan::TAG => sampler_plan(opened(plan)?),
        _ => Ok(()),
    }
}

fn opened<'a, T: Typed>(plan: &TypedRef<'a>) -> Result<&'a T, String> {
    plan.open().map_err(|e| e.message().to_owned())
}

fn cache_plan(
    plan: &KvPlan,
    facts: Option<&KvFacts>,
    share: &ResourceStep<'_>,
    starts: &[u32],
) -> Result<(), String> {
    let Some(facts) = facts else {
        return Err("lays out a kv.plan and describes no kv.facts".into());
    };
    let rows = plan.request.len();
    let columns = [
        ("seat", plan.seat.len()),
        ("start", plan.start.len()),
        ("span", plan.span.len()),
        ("len", plan.len.len()),
        ("token_start", plan.token_start.len()),
        ("last_page_len", plan.last_page_len.len()),
    ];
    if let Some((name, len)) = columns.iter().find(|(_, len)| *len != rows) {
        return Err(format!("column {name} has {len} entries for {rows} rows"));
    }
    let tokens = plan.write_page.len();
    if plan.write_slot.len() != tokens {
        return Err(format!(
            "column write_slot has {} entries for {tokens} tokens",
            plan.write_slot.len()
        ));
    }
    let in_rows = |first: u32, count: u32, all: usize| {
        first as usize <= all && count as usize <= all - first as usize
    };
    for group in plan.groups.iter() {
        if !in_rows(group.first_row, group.num_rows, rows)
            || !in_rows(group.first_token, group.num_tokens, tokens)
        {
            return Err(format!(
                "a group of {group:?} in a plan of {rows} rows and {tokens} tokens"
            ));
        }
    }
    below("write_page", &plan.write_page, facts.num_pages, "the pool's pages")?;
    below("write_slot", &plan.write_slot, facts.page_size, "the slots of a page")?;
    let seats = plan.table.len().checked_div(plan.table_stride as usize).unwrap_or(0);
    below("seat", &plan.seat, seats.min(u32::MAX as usize) as u32, "the rows of the page table")?;
    let longest = u64::from(plan.table_stride) * u64::from(facts.page_size);
    let longest = longest.min(facts.max_seq_len.into()) as u32;
    below("len", &plan.len, longest.saturating_add(1), "lengths of a stream")?;
    let begun = plan.last_page_len.iter().zip(plan.span.iter()).enumerate();
    for (row, _) in begun.filter(|(_, (in_last, span))| in_last <= span) {
        begun_pages(plan, facts, row)?;
    }
    if !share.has_options() {
        let added = share.segments().num_tokens();
        if tokens != added {
            return Err(format!("{tokens} tokens are planned, the step adds {added}"));
        }
        if starts.len() == rows && *plan.start != *starts {
            let row = (0..rows).find(|&row| plan.start[row] != starts[row]).unwrap_or(0);
            return Err(format!(
                "request {} has {} tokens in it, and {} were computed",
                plan.request[row], plan.start[row], starts[row]
            ));
        }
    }
    Ok(())
}

/// The entries of a row's page table that this step has begun.
fn begun_pages(plan: &KvPlan, facts: &KvFacts, row: usize) -> Result<(), String> {
    let (len, span, size) = (plan.len[row], plan.span[row], facts.page_size);
    if len == 0 || span == 0 {
        return Ok(());
    }
    let first = plan.seat[row] as usize * plan.table_stride as usize;
    let (from, to) = (len.saturating_sub(span) / size, (len - 1) / size);
    let pages = &plan.table[first + from as usize..=first + to as usize];
    match pages.iter().find(|&&page| page >= facts.num_pages) {
        None => Ok(()),
        Some(page) => Err(format!(
            "the page table of request {} names page {page}, outside of the pool of {}",
            plan.request[row], facts.num_pages
        )),
    }
}

/// Every entry of a column is under `end`.
fn below(name: &str, column: &[u32], end: u32, what: &str) -> Result<(), String> {
    // One pass without branches, which the compiler makes wide.
    match column.iter().fold(0, |most, &value| most.max(value)) {
        most if most < end || column.is_empty() => Ok(()),
        most => Err(format!("column {name} has {most}, outside of {what}, which are {end}")),
    }
}

fn positions_plan(plan: &PositionsPlan, share: &ResourceStep<'_>) -> Result<(), String> {
    let ids = plan.pos_ids.len();
    for group in plan.groups.iter() {
        let (first, count) = (group.first_token as usize, group.num_tokens as usize);
        if first > ids || count > ids - first {
            return Err(format!("a group of {group:?} in a plan of {ids} position ids"));
        }
    }
    let added = share.segments().num_tokens();
    match share.has_options() || ids == added {
        true => Ok(()),
        false => Err(format!("{ids} position ids are planned, the step adds {added} tokens")),
    }
}

fn sampler_plan(plan: &SamplerPlan) -> Result<(), String> {
    let (rows, seats) = (plan.request.len(), plan.row.len());
    if plan.seat.len() != rows {
        return Err(format!("column seat has {} entries for {rows} rows", plan.seat.len()));
    }
    let columns = [
        ("version", plan.version.len()),
        ("position", plan.position.len()),
        ("seed", plan.seed.len()),
        ("temperature", plan.temperature.len()),
        ("top_k", plan.top_k.len()),
        ("top_p", plan.top_p.len()),
        ("min_p", plan.min_p.len()),
    ];
    if let Some((name, len)) = columns.iter().find(|(_, len)| *len != seats) {
        return Err(format!("column {name} has {len} entries for {seats} seats"));
    }
    below("seat", &plan.seat, seats as u32, "the seats")
}

#[cfg(test)]
mod tests {
    use super::*;
    use resource_api::{DType, KvGroup, LabelId, PlanVec, RequestId, Segments, StepId};

    const FACTS: KvFacts = KvFacts {
        num_layers: 2,
        num_kv_heads: 2,
        num_qo_heads: 4,
        head_dim: 4,
        page_size: 4,
        num_pages: 9,
        max_seq_len: 20,
        dtype: DType::F32,
        page_stride: 128,
        layer_stride: 64,
        kv_stride: 32,
        head_stride: 4,
        slot_stride: 8,
    };

    fn column<T: Clone>(values: &[T]) -> PlanVec<T> {
        let mut column = PlanVec::default();
        values.iter().cloned().for_each(|value| column.push(value));
        column
    }

    /// Two streams: one of 7 tokens that adds one, in pages 3 and 4; an empty one that adds 6 in 5 and 6.
    fn good() -> KvPlan {
        let group = KvGroup {
            label: LabelId::MAIN,
            first_row: 0,
            num_rows: 2,
            first_token: 0,
            num_tokens: 7,
        };
        KvPlan {
            groups: column(&[group]),
            request: column(&[RequestId::new(0, 1), RequestId::new(1, 1)]),
            seat: column(&[1, 0]),
            start: column(&[7, 0]),
            span: column(&[1, 6]),
            len: column(&[8, 6]),
            token_start: column(&[0, 1]),
            last_page_len: column(&[4, 2]),
            write_page: column(&[4, 5, 5, 5, 5, 6, 6]),
            write_slot: column(&[3, 0, 1, 2, 3, 0, 1]),
            table: column(&[5, 6, 0, 0, 0, 3, 4, 0, 0, 0]),
            table_stride: 5,
            ..KvPlan::default()
        }
    }

    fn in_step<R>(f: impl FnOnce(&ResourceStep<'_>) -> R) -> R {
        let (request, label) = ([RequestId::new(0, 1), RequestId::new(1, 1)], [LabelId::MAIN; 2]);
        let span = [1, 6];
        f(&ResourceStep::new(Segments { request: &request, label: &label, span: &span }))
    }

    fn refusal(plan: &KvPlan) -> Option<String> {
        in_step(|share| super::plan(&TypedRef::new(plan), Some(&FACTS), share, &[7, 0]).err())
    }

    #[test]
    fn a_cache_plan_is_taken_only_if_it_can_be_right() {
        assert_eq!(refusal(&good()), None);
        type Change = fn(&mut KvPlan);
        let cases: [(Change, &str); 17] = [
            (|p| p.write_page = column(&[4, 5, 5, 5, 5, 6, 9]), "column write_page has 9, outside"),
            (|p| p.write_page = column(&[u32::MAX; 7]), "column write_page has 4294967295"),
            (|p| p.write_slot = column(&[4; 7]), "column write_slot has 4, outside of the slots"),
            (|p| p.write_slot = column(&[3]), "column write_slot has 1 entries for 7 tokens"),
            (
                |p| p.table = column(&[5, 9, 0, 0, 0, 3, 4, 0, 0, 0]),
                "page 9, outside of the pool of 9",
            ),
            (|p| p.table = column(&[99, 6, 0, 0, 0, 3, 4, 0, 0, 0]), "page 99, outside"),
            (|p| p.table = column(&[5, 6]), "column seat has 1, outside of the rows of the page"),
            (|p| p.table_stride = 0, "column seat has 1, outside of the rows of the page table"),
            (|p| p.table_stride = u32::MAX, "column seat has 1, outside of the rows of the page"),
            (|p| p.seat = column(&[2, 0]), "column seat has 2, outside"),
            (|p| p.seat = column(&[1]), "column seat has 1 entries for 2 rows"),
            (|p| p.len = column(&[21, 6]), "column len has 21, outside of lengths"),
            (|p| p.len = column(&[8, u32::MAX]), "column len has 4294967295"),
            (|p| p.start = column(&[6, 0]), "request r0.1 has 6 tokens in it, and 7 were computed"),
            (|p| p.groups.as_mut_slice()[0].num_rows = 3, "a group of KvGroup"),
            (|p| p.groups.as_mut_slice()[0].first_token = u32::MAX, "a group of KvGroup"),
            (
                |p| {
                    p.write_page = column(&[4, 5, 5]);
                    p.write_slot = column(&[3, 0, 1]);
                    p.groups.as_mut_slice()[0].num_tokens = 3;
                },
                "3 tokens are planned, the step adds 7",
            ),
        ];
        for (change, says) in cases {
            let mut plan = good();
            change(&mut plan);
            let what = refusal(&plan).unwrap_or_else(|| panic!("taken, and should say {says}"));
            assert!(what.contains(says), "{what}, and should say {says}");
        }
        let without = in_step(|share| super::plan(&TypedRef::new(&good()), None, share, &[]));
        assert!(without.unwrap_err().contains("describes no kv.facts"));
    }

    #[test]
    fn facts_that_cannot_be_right_are_refused() {
        assert_eq!(facts(&FACTS), Ok(()));
        for (wrong, says) in [
            (KvFacts { page_size: 0, ..FACTS }, "page_size = 0"),
            (KvFacts { num_pages: 0, ..FACTS }, "num_pages = 0"),
            (KvFacts { head_dim: 0, ..FACTS }, "head_dim = 0"),
            (KvFacts { max_seq_len: 0, ..FACTS }, "max_seq_len = 0"),
            (KvFacts { page_stride: 0, ..FACTS }, "put all 9 of num_pages in one place"),
            (KvFacts { page_stride: u64::MAX, ..FACTS }, "no machine has room for"),
            (KvFacts { num_pages: u32::MAX, page_stride: 1 << 40, ..FACTS }, "no machine"),
        ] {
            assert!(facts(&wrong).unwrap_err().contains(says), "{wrong:?}");
        }
    }

    #[test]
    fn refusals_that_make_no_sense_are_told() {
        let (rid, label) = (RequestId::new(0, 1), LabelId::MAIN);
        let refused = |reason| AdmitOutcome::refused(FailureReason(reason), rid, label);
        for reason in 0..=5 {
            assert_eq!(admission(&refused(reason)), Ok(()), "{reason}");
        }
        for reason in [6, u32::MAX] {
            let what = admission(&refused(reason)).unwrap_err();
            assert!(what.contains("which the contract does not know"), "{what}");
        }
        assert!(admission(&AdmitOutcome::allocation_failed(rid, label, 3, 2)).is_ok());
        let what = admission(&AdmitOutcome::allocation_failed(rid, label, 3, 3)).unwrap_err();
        assert_eq!(what, "refuses for lack of room, though 3 are needed and 3 are free");
    }

    #[test]
    fn positions_and_sampler_plans_have_columns_that_fit() {
        let check = |plan: TypedRef<'_>| in_step(|share| super::plan(&plan, None, share, &[]));
        let mut positions = PositionsPlan { step: StepId(1), ..PositionsPlan::default() };
        positions.pos_ids = column(&[7, 0, 1, 2, 3, 4, 5]);
        assert_eq!(check(TypedRef::new(&positions)), Ok(()));
        positions.pos_ids = column(&[7, 0]);
        let what = check(TypedRef::new(&positions)).unwrap_err();
        assert_eq!(what, "2 position ids are planned, the step adds 7 tokens");

        let mut sampler = SamplerPlan::default();
        assert_eq!(check(TypedRef::new(&sampler)), Ok(()));
        sampler.request = column(&[RequestId::new(0, 1)]);
        let what = check(TypedRef::new(&sampler)).unwrap_err();
        assert_eq!(what, "column seat has 0 entries for 1 rows");
        sampler.seat = column(&[5]);
        let what = check(TypedRef::new(&sampler)).unwrap_err();
        assert_eq!(what, "column seat has 5, outside of the seats, which are 0");
    }
}
