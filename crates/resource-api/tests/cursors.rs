//! The label and layer cursors of a capability bound to a step.

use std::sync::{Arc, Mutex};

use resource_api::{
    Attention, AttentionHandle, AttentionResource, LabelId, NodeId, RequestId, Result, SlotLease,
    StepContext, StepHead, StepId, TensorView, TensorViewMut, WalkId,
};

/// Notes where it is called.
#[derive(Default)]
struct Notes(Mutex<Vec<(u64, u32, u32)>>);

impl Attention for Notes {
    fn run(
        &self,
        ctx: &StepContext<'_>,
        layer: u32,
        label: LabelId,
        _q: &TensorView<'_>,
        _out: &mut TensorViewMut<'_>,
    ) -> Result<()> {
        self.0.lock().unwrap().push((ctx.step().0, label.0, layer));
        Ok(())
    }
    fn qo_indptr(&self, _: &StepContext<'_>, _: LabelId, _: &mut [u32]) -> Result<u32> {
        Ok(0)
    }
    fn select_last_hidden(
        &self,
        _: &StepContext<'_>,
        _: LabelId,
        _: &TensorView<'_>,
        _: &mut TensorViewMut<'_>,
    ) -> Result<()> {
        Ok(())
    }
}

fn step(id: u64) -> StepContext<'static> {
    let head = StepHead {
        step: StepId(id),
        epoch: id,
        node: NodeId(0),
        graph_walk: WalkId(0),
        lease: SlotLease::eager(0, 1),
        capture: false,
        is_preplan: false,
        stream: 0,
    };
    const NOBODY: &[RequestId] = &[];
    StepContext::new(head, NOBODY, NOBODY, &[])
}

#[test]
fn an_argument_wins_for_its_call_and_the_cursor_stays() {
    let notes = Arc::new(Notes::default());
    let handle = AttentionHandle::new(notes.clone());
    let ctx = step(1);
    let mut bound = handle.bind(&ctx);
    let (q, mut out) = ([0.0f32; 1], [0.0f32; 1]);
    let q = TensorView::from_slice(&q, &[1, 1, 1]);
    let mut out = TensorViewMut::from_slice(&mut out, &[1, 1, 1]);
    bound.set_default_label(LabelId(3));
    bound.set_default_layer_idx(5);
    bound.attend(&q, &mut out, None, None).unwrap();
    bound.attend(&q, &mut out, Some(LabelId(8)), Some(9)).unwrap();
    bound.attend(&q, &mut out, None, None).unwrap();
    bound.reset_default_cursors();
    bound.attend(&q, &mut out, None, None).unwrap();
    assert_eq!(*notes.0.lock().unwrap(), [(1, 3, 5), (1, 8, 9), (1, 3, 5), (1, 0, 0)]);
}

#[test]
fn a_step_that_sets_no_cursor_starts_from_the_defaults_whatever_another_did() {
    let notes = Arc::new(Notes::default());
    let handle = AttentionHandle::new(notes.clone());
    let (first, second) = (step(1), step(2));
    let mut running = handle.bind(&first);
    running.set_default_label(LabelId(3));
    running.set_default_layer_idx(5);
    // The next step is bound while the first still runs.
    let next = handle.bind(&second);
    let (q, mut out) = ([0.0f32; 1], [0.0f32; 1]);
    let q = TensorView::from_slice(&q, &[1, 1, 1]);
    let mut out = TensorViewMut::from_slice(&mut out, &[1, 1, 1]);
    next.attend(&q, &mut out, None, None).unwrap();
    running.attend(&q, &mut out, None, None).unwrap();
    assert_eq!(next.default_label(), LabelId::MAIN);
    assert_eq!(*notes.0.lock().unwrap(), [(2, 0, 0), (1, 3, 5)]);
}
