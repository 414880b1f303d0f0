//! Building, describing itself, sizing buffers, and going.

use resource_api::{
    BucketKey, CGSlotSpec, Capability, ErrorKind, GraphConfig, Kind, RequestId, Resource,
};

use super::super::bench::{A, B, Bench, WALK, failed};
use super::super::rig::{Plans, Subject, Watch, told, unmarked};
use super::{HOLDS, Outcome};

pub(super) fn builds(subject: &Subject, watch: Watch) -> Outcome {
    let rig = subject.build(watch).map_err(failed("build"))?;
    let kind = unmarked(&subject.kind).map_err(|e| told(&e))?;
    let (about, own) = (rig.resource().inspect(), rig.resource().depends_on());
    rig.check_fault()?;
    let mut said = kind.provides();
    said.sort();
    let has = names(rig.capabilities());
    if said != has {
        return Err(format!("its kind provides {said:?}, the resource offers {has:?}"));
    }
    let declared = kind.depends_on(subject.spec.clone()).map_err(failed("depends_on"))?;
    let undeclared = own.into_iter().find(|d| !declared.contains(d));
    if let Some(key) = undeclared {
        return Err(format!("it depends on `{key}`, which its kind did not declare"));
    }
    if serde_json::from_str::<serde_json::Value>(&about).is_err() {
        return Err("`inspect` is not JSON".into());
    }
    rig.resource().post_warmup_validate().map_err(failed("post_warmup_validate"))?;
    rig.check_fault()?;
    HOLDS
}

pub(super) fn unknown_setting(subject: &Subject, watch: Watch) -> Outcome {
    let mut other = subject.clone();
    let text = if subject.spec.settings.trim().is_empty() { "{}" } else { &subject.spec.settings };
    let parsed: serde_json::Value = serde_json::from_str(text).map_err(|e| e.to_string())?;
    let mut settings = parsed.as_object().cloned().unwrap_or_default();
    settings.insert("no_such_setting".into(), 1.into());
    other.spec.settings = serde_json::Value::Object(settings).to_string();
    match other.build(watch) {
        Ok(_) => Err("`no_such_setting = 1` is accepted: a typing error would be, too".into()),
        Err(e) if !e.message().contains("no_such_setting") || e.message().contains('\n') => {
            Err(format!("the error does not name the key, or is more than a line: {e}"))
        }
        Err(e) if e.kind() != ErrorKind::INVALID => {
            Err(format!("the error is `{}`, not `invalid`", e.kind().name()))
        }
        Err(_) => HOLDS,
    }
}

pub(super) fn describes_alike(subject: &Subject, watch: Watch) -> Outcome {
    let about = || -> Result<String, String> {
        let rig = subject.build(watch).map_err(failed("build"))?;
        let r = rig.resource();
        let facts: Vec<&str> = r.describe().iter().map(|f| f.tag()).collect();
        let flags = [r.prefix_skip_safe(), r.supports_preplan(), r.supports_eviction()];
        let about = format!(
            "{facts:?} {flags:?} {:?} {:?} {:?}",
            r.fingerprint(),
            r.accepts(),
            r.depends_on()
        );
        rig.check_fault()?;
        Ok(about)
    };
    let (one, two) = (about()?, about()?);
    if one != two {
        return Err(format!("{one} and {two}"));
    }
    HOLDS
}

pub(super) fn captured_buffers(subject: &Subject, watch: Watch) -> Outcome {
    let mut bench = Bench::new(subject, watch)?;
    let bucket = |bs| BucketKey { graph_walk: WALK, bs, num_tokens: bs, cg_key_info: 0 };
    let slots = |bs| -> Vec<CGSlotSpec> {
        (0..2)
            .map(|slot| CGSlotSpec {
                bucket: bucket(bs),
                slot,
                config: GraphConfig::FULL,
                config_idx: CGSlotSpec::NO_CONFIG_IDX,
            })
            .collect()
    };
    for i in 0..=bench.rig.index() {
        bench.rig.say("build_cuda_graph_buffers");
        let built = bench.rig.part(i).build_cuda_graph_buffers(&slots(2), 2, 32);
        built.map_err(failed("build_cuda_graph_buffers"))?;
    }
    let pad = RequestId::padding(0);
    let mut seen: Vec<Vec<usize>> = Vec::new();
    for round in 0..4 {
        if round == 2 {
            for i in 0..=bench.rig.index() {
                bench.rig.say("build_cuda_graph_buffers, larger");
                let built = bench.rig.part(i).build_cuda_graph_buffers(&slots(8), 8, 64);
                built.map_err(failed("a second build_cuda_graph_buffers"))?;
            }
        }
        let second = if round % 2 == 0 { B } else { pad };
        let mut step = bench.step(&[(A, 1), (second, 1)]);
        (step.slot, step.bucket) = (0, Some((2, 2)));
        bench.admit(&step)?;
        let plans = bench.rig.plan(&step).map_err(failed("plan"))?;
        seen.push(addresses(&plans, bench.rig.index())?);
        bench.commit(&step, &plans)?;
    }
    // A second capture may make room; what was sized for the first stays where it was from then on.
    for (a, b) in [(0, 1), (2, 3)] {
        if seen[a] != seen[b] {
            return Err("a plan's columns moved between two replays of one captured shape".into());
        }
    }
    HOLDS
}

/// Where the columns of plans that the contract knows lie.
fn addresses(plans: &Plans, at: usize) -> Result<Vec<usize>, String> {
    use resource_api::{KvPlan, PositionsPlan, SamplerPlan};
    let place = |column: &[u32]| column.as_ptr() as usize;
    if let Ok(p) = plans[at].open::<KvPlan>() {
        let columns = [&p.seat, &p.start, &p.span, &p.len, &p.write_page, &p.write_slot, &p.table];
        return Ok(columns.iter().map(|c| place(c)).collect());
    }
    if let Ok(p) = plans[at].open::<PositionsPlan>() {
        return Ok(vec![place(&p.pos_ids)]);
    }
    if let Ok(p) = plans[at].open::<SamplerPlan>() {
        return Ok([&p.seat, &p.row, &p.position].iter().map(|c| place(c)).collect());
    }
    Ok(Vec::new())
}

pub(super) fn memory(subject: &Subject, watch: Watch) -> Outcome {
    let mut bench = Bench::new(subject, watch)?;
    bench.run(&[(A, 3), (B, 2)])?;
    let step = bench.step(&[(A, 1)]);
    bench.admit(&step)?;
    // In the middle of a step, with requests: an engine may stop at any time.
    match bench.rig.shut_down() {
        0 => HOLDS,
        left => Err(format!("{left} bytes of the engine's memory are not given back")),
    }
}

fn names(capabilities: &[Capability]) -> Vec<String> {
    let mut names: Vec<String> =
        capabilities.iter().map(|c| format!("{}/{}", c.id(), c.major())).collect();
    names.sort();
    names
}
