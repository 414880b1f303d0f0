//! A resource with two requests, and steps that it can run: what the rules are tried on.

use resource_api::{
    KvCache, KvCacheHandle, LabelId, NodeId, Positions, PositionsHandle, RequestId, Resource,
    WalkId,
};

use super::rig::{Plans, Rig, Subject, Watch, shown, told};
use super::step::{Row, Step};

/// Puts what was called before an error's text.
pub fn failed(what: impl std::fmt::Display) -> impl FnOnce(resource_api::ResourceError) -> String {
    move |e| format!("{what} fails: {}", told(&e))
}

/// A built resource with requests, and steps that it can run.
pub struct Bench {
    /// The resource.
    pub rig: Rig,
    /// Labels that every request reads beside its main stream, without adding to them.
    pub also: Vec<LabelId>,
    next: u64,
}

/// The requests of the rules.
pub const A: RequestId = RequestId::new(0, 1);
/// As above.
pub const B: RequestId = RequestId::new(1, 1);
/// Never told of.
pub const STRANGER: RequestId = RequestId::new(6, 3);
/// The node.
pub const NODE: NodeId = NodeId(0);
/// The walk.
pub const WALK: WalkId = WalkId(0);

impl Bench {
    /// With requests [`A`] and [`B`].
    pub fn new(subject: &Subject, watch: Watch) -> Result<Self, String> {
        let rig = subject.build(watch).map_err(failed("build"))?;
        let mut bench = Self { rig, also: Vec::new(), next: 1 };
        bench.ingest(A)?;
        bench.ingest(B)?;
        bench.find_shape()?;
        Ok(bench)
    }

    /// Some resources want a stream to read beside the one that they extend.
    fn find_shape(&mut self) -> Result<(), String> {
        let context = self.rig.host().as_ref();
        let context = resource_api::HostServices::label_id(context, "context");
        let mut first = None;
        for also in [vec![], vec![context]] {
            self.also = also;
            let step = self.step(&[(A, 1)]);
            let ran = self.rig.admit(&step).map_err(|e| told(&e)).and_then(|outcome| match outcome
                .is_ready()
            {
                true => self.rig.plan(&step).map_err(|e| told(&e)),
                false => Err(outcome.message()),
            });
            match ran {
                Ok(_) => return self.rig.rollback(&step).map_err(failed("rollback_admit")),
                Err(e) => drop(first.get_or_insert(e)),
            }
        }
        Err(format!("a step of one token cannot be run: {}", first.unwrap_or_default()))
    }

    /// Tells of a request.
    pub fn ingest(&self, rid: RequestId) -> Result<(), String> {
        self.rig.ingest(rid, &[rid.slot + 1, 5, 6]).map_err(failed("ingest_request"))
    }

    /// A step that adds so many tokens to the main stream of each.
    pub fn step(&mut self, rows: &[(RequestId, u32)]) -> Step {
        let id = self.next;
        self.next += 1;
        let mut step = Step { id, slot: (id % 3) as u32, ..Step::default() };
        for &(rid, span) in rows {
            step.tokens.extend((0..span).map(|i| 10 * (rid.slot % 100) + i % 7));
            step.rows.push(Row { rid, label: LabelId::MAIN, span });
        }
        for &label in &self.also {
            let rows = step.rows.clone();
            let main = rows.iter().filter(|r| r.label == LabelId::MAIN);
            step.rows.extend(main.map(|r| Row { label, span: 0, ..*r }));
        }
        step
    }

    /// Admits a step that must be.
    pub fn admit(&self, step: &Step) -> Result<(), String> {
        match self.rig.admit(step).map_err(failed("admit"))? {
            outcome if outcome.is_ready() => Ok(()),
            outcome => Err(format!("{step} is refused: {}", outcome.message())),
        }
    }

    /// Runs a step from `admit` to what was sampled.
    pub fn run(&mut self, rows: &[(RequestId, u32)]) -> Result<Plans, String> {
        let step = self.step(rows);
        self.admit(&step)?;
        let plans = self.rig.plan(&step).map_err(failed("plan"))?;
        self.commit(&step, &plans)?;
        Ok(plans)
    }

    /// Commits a step and tells what was sampled.
    pub fn commit(&self, step: &Step, plans: &Plans) -> Result<(), String> {
        self.rig.commit(step, plans).map_err(failed("commit"))?;
        let rids = step.requests();
        let ids: Vec<u32> = rids.iter().map(|r| 3 + r.slot).collect();
        for i in 0..=self.rig.index() {
            self.rig.say(&format!("on_outputs {step}"));
            let told =
                self.rig.call(step, i, plans, |_, c| self.rig.part(i).on_outputs(c, &rids, &ids));
            told.map_err(failed("on_outputs"))?;
        }
        Ok(())
    }

    /// All that can be asked about these requests without changing anything.
    pub fn seen(&self, rids: &[RequestId]) -> Result<Vec<String>, String> {
        let r = self.rig.resource();
        let mut all = Vec::new();
        for &rid in rids {
            self.rig.say(&format!("questions about {rid}"));
            let info = r.publish(rid).map_err(failed("publish"))?;
            all.push(format!("publish {rid}: {}", shown(info.as_ref())));
            let step = r.publish_for_step(rid, Some(NODE), Some(WALK));
            let step = step.map_err(failed("publish_for_step"))?;
            all.push(format!("publish_for_step {rid}: {}", shown(step.as_ref())));
            let stop = r.publish_after_stop(rid, Some(NODE), Some(WALK));
            let stop = stop.map_err(failed("publish_after_stop"))?;
            all.push(format!("publish_after_stop {rid}: {}", shown(stop.as_ref())));
            let n = r.reclaimable(rid).map_err(failed("reclaimable"))?;
            let away = r.is_offloaded(rid).map_err(failed("is_offloaded"))?;
            let back = r.can_reload(rid).map_err(failed("can_reload"))?;
            let wish = r.get_offload_priority(rid).map_err(failed("get_offload_priority"))?;
            all.push(format!("{rid}: reclaimable {n}, away {away}, can reload {back}, {wish}"));
            for label in 0..3 {
                if let Some(kv) = self.rig.own::<KvCacheHandle>() {
                    let len = kv.stream_len(rid, LabelId(label)).map_err(failed("stream_len"))?;
                    all.push(format!("{rid} label {label}: {len} tokens"));
                }
                if let Some(positions) = self.rig.own::<PositionsHandle>() {
                    let at = positions.position(rid, LabelId(label)).map_err(failed("position"))?;
                    all.push(format!("{rid} label {label}: position {at}"));
                }
            }
        }
        if let Some(kv) = self.rig.own::<KvCacheHandle>() {
            all.push(format!("{} pages free", kv.free_pages()));
        }
        self.rig.check_fault()?;
        Ok(all)
    }

    /// Likewise, about [`A`] and [`B`].
    pub fn both(&self) -> Result<Vec<String>, String> {
        self.seen(&[A, B])
    }

    /// Compares what can be asked with what it was.
    ///
    /// # Errors
    /// The first difference.
    pub fn same(&self, before: &[String], after: &str) -> Result<(), String> {
        let now = self.both()?;
        match before.iter().zip(&now).find(|(a, b)| a != b) {
            None => Ok(()),
            Some((was, is)) => Err(format!("{after} changes something: {was} became {is}")),
        }
    }
}
