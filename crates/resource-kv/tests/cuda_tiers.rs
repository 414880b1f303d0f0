//! How fast requests leave a CUDA device for host memory and come back, beside one copy of as many bytes.
//! `cargo xtask device-test` runs it and tells the rates; that they come back right is tested in `cuda.rs`.

use std::time::{Duration, Instant};

use device::cuda::{Context, DeviceBuffer, PinnedBuffer, Stream};
use resource_api::host::PlainHost;
use resource_api::{
    Device, EngineResourceInfo, LabelId, NodeId, NodeResourceSpec, RequestId, RequestOverrides,
    Resource, ResourceStep, Segments, SlotLease, StepContext, StepHead, StepId, WalkId,
    build_resource,
};
use resource_kv::Kv;

const PAGE: u32 = 16;
/// Llama-3.1-8B: 2 MiB a page.
const MODEL: &str = r#""num_layers": 32, "num_kv_heads": 8, "num_qo_heads": 32, "head_dim": 128"#;
const PAGE_BYTES: usize = 32 * 2 * PAGE as usize * 8 * 128 * 2;
const RUNS: usize = 7;

fn median(mut of: Vec<Duration>) -> f64 {
    of.sort();
    of[of.len() / 2].as_secs_f64()
}

#[test]
#[ignore = "needs a GPU"]
fn requests_leave_and_come_back_near_the_rate_of_one_copy() {
    let context = Context::of(0).unwrap();
    let stream = Stream::new(&context).unwrap();
    for pages in [16, 256, 1024] {
        let settings = format!(
            r#"{{{MODEL}, "page_size": {PAGE}, "pages": {}, "host_pages": {pages},
                "max_seq_len": {}, "dtype": "bf16"}}"#,
            pages + 1,
            pages * PAGE
        );
        let spec = NodeResourceSpec {
            resource_key: "main_kv".into(),
            kind: "kv".into(),
            nodes: Default::default(),
            settings,
        };
        let mut info = EngineResourceInfo::new(Device::cuda(0), PlainHost::handle());
        info.limits.max_batch_tokens = pages * PAGE;
        let clock = Instant::now();
        let kv = build_resource::<Kv>(&spec, &info).unwrap().resource;
        let built = clock.elapsed();
        let rids = [RequestId::new(0, 1)];
        kv.ingest_request(rids[0], &RequestOverrides::new("", &[1], 1)).unwrap();
        let (label, span) = ([LabelId::MAIN], [pages * PAGE]);
        let step = ResourceStep::new(Segments { request: &rids, label: &label, span: &span });
        let head = StepHead {
            step: StepId(1),
            epoch: 1,
            node: NodeId(0),
            graph_walk: WalkId(0),
            lease: SlotLease::eager(0, 1),
            capture: false,
            is_preplan: false,
            stream: stream.handle(),
        };
        let ctx = StepContext::new(head, &rids, &rids, &[]);
        assert!(kv.admit(&step, &ctx).unwrap().is_ready());
        let results = [kv.plan(&step, &ctx).unwrap().into_result()];
        kv.commit(&step, &StepContext::new(head, &rids, &rids, &results)).unwrap();
        stream.synchronize().unwrap();

        let bytes = pages as usize * PAGE_BYTES;
        let mut there = DeviceBuffer::<u8>::zeroed(&context, bytes).unwrap();
        let mut here = PinnedBuffer::<u8>::zeroed(&context, bytes).unwrap();
        let (mut out, mut back, mut down, mut up) = (vec![], vec![], vec![], vec![]);
        let timed = |into: &mut Vec<Duration>, what: &mut dyn FnMut()| {
            let clock = Instant::now();
            what();
            into.push(clock.elapsed());
        };
        for _ in 0..RUNS {
            timed(&mut out, &mut || {
                assert_eq!(kv.offload(rids[0]).unwrap(), u64::from(pages));
            });
            timed(&mut down, &mut || {
                stream.download(&there, 0, &mut here, 0, bytes).unwrap();
                stream.synchronize().unwrap();
            });
            timed(&mut back, &mut || assert!(kv.reload(rids[0]).unwrap()));
            timed(&mut up, &mut || {
                stream.upload(&mut here, 0, &mut there, 0, bytes).unwrap();
                stream.synchronize().unwrap();
            });
        }
        let rate = |seconds: f64| bytes as f64 / seconds / 1e9;
        let [out, down, back, up] = [out, down, back, up].map(|of| rate(median(of)));
        eprintln!(
            "{pages} pages of {} KiB: out {out:.1} GB/s, {:.0}% of one copy ({down:.1}); back {back:.1} GB/s, \
             {:.0}% of one copy ({up:.1}); built in {:.2} s",
            PAGE_BYTES >> 10,
            100.0 * out / down,
            100.0 * back / up,
            built.as_secs_f64()
        );
    }
}
