//! Memory, streams, graphs and products on a real device. `cargo xtask device-test` runs these.

use std::sync::Arc;

use device::cuda::{
    Blas, Context, DeviceBuffer, Event, Graph, Into, PinnedBuffer, Stream, fill_random,
};
use half::bf16;

fn device() -> (Arc<Context>, Stream) {
    let context = Context::of(0).unwrap();
    let stream = Stream::new(&context).unwrap();
    (context, stream)
}

/// Numbers that look random, the same in every run.
fn numbers(seed: u64, n: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..n).map(|_| next()).collect()
}

#[test]
#[ignore = "needs a GPU"]
fn facts_are_of_a_device() {
    let (context, _) = device();
    let facts = context.facts();
    eprintln!("{facts:?}, kernels for {}", context.arch());
    assert!(facts.multiprocessors > 0 && facts.compute.0 >= 8 && facts.l2_bytes > 1 << 20);
    assert!(context.free_memory().unwrap() <= facts.memory);
    assert!(Arc::ptr_eq(&context, &Context::of(0).unwrap()));
    assert!(Context::of(99).unwrap_err().to_string().contains("99"));
}

#[test]
#[ignore = "needs a GPU"]
fn copies_arrive_in_order_and_accesses_wait_for_them() {
    let (context, stream) = device();
    const N: usize = 1 << 22;
    let values = numbers(1, N);
    let mut up = PinnedBuffer::<f32>::zeroed(&context, N).unwrap();
    let mut down = PinnedBuffer::<f32>::zeroed(&context, N).unwrap();
    let mut there = DeviceBuffer::<f32>::zeroed(&context, N + 7).unwrap();
    for round in 0..4 {
        // Written right after the last round's copy was given to the stream: this waits for it.
        let staged = up.as_mut_slice().unwrap();
        staged.copy_from_slice(&values);
        staged[0] = round as f32;
        stream.upload(&mut up, 0, &mut there, 7, N).unwrap();
        stream.download(&there, 7, &mut down, 0, N).unwrap();
        let got = down.as_slice().unwrap();
        assert_eq!(got[0], round as f32);
        assert_eq!(got[1..], values[1..]);
    }
    assert_eq!(there.to_vec().unwrap()[..7], [0.0; 7]);
    assert!(stream.upload(&mut up, 1, &mut there, 0, N).is_err());
    assert!(stream.upload(&mut up, 0, &mut there, 8, N).is_err());
    assert!(stream.download(&there, usize::MAX, &mut down, 0, 2).is_err());
    stream.upload_slice(&values[..3], &mut there, 0).unwrap();
    stream.fill_bytes(&mut there, 0).unwrap();
    stream.synchronize().unwrap();
    assert!(there.to_vec().unwrap().iter().all(|&v| v == 0.0));
}

#[test]
#[ignore = "needs a GPU"]
fn parts_of_a_row_that_would_wrap_around_are_refused() {
    let (context, _) = device();
    let mut buffer = DeviceBuffer::<f32>::zeroed(&context, 12).unwrap();
    let [a, b] = buffer.parts_mut(1, 2, [[1, 3], [1, 1]]).unwrap();
    assert_eq!((a.raw().shape(), b.raw().shape()), (&[2, 1, 3][..], &[2, 1, 1][..]));
    assert_eq!(b.raw().byte_offset, 12);
    assert!(buffer.parts_mut(2, 2, [[1, 3], [1, 1]]).is_err());
    assert!(buffer.parts_mut(0, 1, [[1 << 63, 2]]).is_err());
    assert!(buffer.parts_mut(0, 1, [[1, usize::MAX], [1, 1]]).is_err());
}

#[test]
#[ignore = "needs a GPU"]
fn more_than_the_device_has_is_an_error_that_says_so() {
    let (context, _) = device();
    let error = DeviceBuffer::<f32>::new(&context, 1 << 44).unwrap_err();
    assert!(matches!(error, device::Error::OutOfMemory { .. }), "{error}");
}

#[test]
#[ignore = "needs a GPU"]
fn events_order_streams() {
    let (context, first) = device();
    let second = Stream::new(&context).unwrap();
    let mut a = DeviceBuffer::<i32>::zeroed(&context, 1 << 26).unwrap();
    let mut seen = PinnedBuffer::<i32>::zeroed(&context, 1).unwrap();
    let end = Event::new(&context).unwrap();
    for byte in 1..=8 {
        first.fill_bytes(&mut a, byte).unwrap();
    }
    end.record(&first).unwrap();
    second.wait(&end).unwrap();
    second.download(&a, (1 << 26) - 1, &mut seen, 0, 1).unwrap();
    assert_eq!(seen.as_slice().unwrap(), [0x0808_0808]);
    assert!(end.is_passed().unwrap());
}

#[test]
#[ignore = "needs a GPU"]
fn random_weights_are_centred_and_repeat() {
    let (context, stream) = device();
    const N: usize = 1 << 20;
    let mut weights = DeviceBuffer::<bf16>::new(&context, N).unwrap();
    let mut made = |seed| {
        fill_random(&stream, &mut weights, 0.02, seed).unwrap();
        weights.to_vec().unwrap()
    };
    let (a, again, other) = (made(1), made(1), made(2));
    assert!(a == again && a != other);
    let values: Vec<f64> = a.iter().map(|v| v.to_f64()).collect();
    let mean = values.iter().sum::<f64>() / N as f64;
    let deviation = (values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / N as f64).sqrt();
    assert!(mean.abs() < 1e-4 && (deviation - 0.02).abs() < 2e-4, "{mean} {deviation}");
}

/// `out = x wᵀ` in float64.
fn product(x: &[bf16], w: &[bf16], inputs: usize) -> Vec<f64> {
    let row = |x: &[bf16]| x.iter().map(|v| v.to_f64()).collect::<Vec<_>>();
    let w: Vec<Vec<f64>> = w.chunks(inputs).map(row).collect();
    let dot = |x: &Vec<f64>, w: &Vec<f64>| x.iter().zip(w).map(|(a, b)| a * b).sum::<f64>();
    x.chunks(inputs).flat_map(|x| w.iter().map(|w| dot(&row(x), w)).collect::<Vec<_>>()).collect()
}

fn relative_error(got: &[f64], want: &[f64]) -> f64 {
    let norm = |v: &mut dyn Iterator<Item = f64>| v.map(|x| x * x).sum::<f64>().sqrt();
    norm(&mut got.iter().zip(want).map(|(a, b)| a - b)) / norm(&mut want.iter().copied())
}

/// Tensor cores cut sums off where f32 arithmetic would round them.
const SUMS_IN_F32: f64 = 1e-5;

#[test]
#[ignore = "needs a GPU"]
fn products_agree_with_float64() {
    let (context, stream) = device();
    let blas = Blas::new(&context).unwrap();
    for (rows, inputs, outputs) in [(1, 64, 32), (3, 576, 1536), (17, 1536, 576), (130, 576, 960)] {
        let half = |seed, n| numbers(seed, n).into_iter().map(bf16::from_f32).collect::<Vec<_>>();
        let (x, w) = (half(2, rows * inputs), half(3, outputs * inputs));
        let want = product(&x, &w, inputs);
        let x = DeviceBuffer::from_slice(&context, &x).unwrap();
        let w = DeviceBuffer::from_slice(&context, &w).unwrap();
        let (x, w) = (x.view(&[rows, inputs]).unwrap(), w.view(&[outputs, inputs]).unwrap());
        let shape = [rows, outputs];

        let poison = vec![f32::NAN; rows * outputs];
        let mut out = DeviceBuffer::from_slice(&context, &poison).unwrap();
        blas.matmul(&stream, &x, &w, &mut out.view_mut(&shape).unwrap(), Into::Set).unwrap();
        let got: Vec<f64> = out.to_vec().unwrap().iter().map(|&v| v.into()).collect();
        let error = relative_error(&got, &want);
        assert!(error < SUMS_IN_F32, "{rows}x{inputs}x{outputs}: {error}");

        blas.matmul(&stream, &x, &w, &mut out.view_mut(&shape).unwrap(), Into::Add).unwrap();
        let got: Vec<f64> = out.to_vec().unwrap().iter().map(|&v| f64::from(v) / 2.0).collect();
        let error = relative_error(&got, &want);
        assert!(error < SUMS_IN_F32, "{rows}x{inputs}x{outputs} added: {error}");

        let poison = vec![bf16::NAN; rows * outputs];
        let mut out = DeviceBuffer::from_slice(&context, &poison).unwrap();
        blas.matmul(&stream, &x, &w, &mut out.view_mut(&shape).unwrap(), Into::Set).unwrap();
        let got: Vec<f64> = out.to_vec().unwrap().iter().map(|v| v.to_f64()).collect();
        let error = relative_error(&got, &want);
        assert!(error < 4e-3, "{rows}x{inputs}x{outputs} to bf16: {error}");
    }
}

#[test]
#[ignore = "needs a GPU"]
fn products_of_wrong_shapes_are_refused() {
    let (context, stream) = device();
    let blas = Blas::new(&context).unwrap();
    let x = DeviceBuffer::<bf16>::zeroed(&context, 64).unwrap();
    let mut out = DeviceBuffer::<f32>::zeroed(&context, 64).unwrap();
    let mut refused = |x_shape: &[usize], w_shape: &[usize], out_shape: &[usize]| {
        let (x, w) = (x.view(x_shape).unwrap(), x.view(w_shape).unwrap());
        let mut out = out.view_mut(out_shape).unwrap();
        blas.matmul(&stream, &x, &w, &mut out, Into::Set).unwrap_err().to_string()
    };
    assert!(refused(&[8, 8], &[4, 16], &[8, 4]).contains("rows of 8 by a weight of [4, 16]"));
    assert!(refused(&[8, 8], &[4, 8], &[4, 8]).contains("product: shape [4, 8], need [8, 4]"));
    assert!(refused(&[8], &[4, 8], &[4, 8]).contains("not two matrices"));
    assert!(out.view(&[65]).is_err());
    let (shifted, w) = (x.view_at(8, &[1, 8]).unwrap(), x.view(&[1, 8]).unwrap());
    let mut one = out.view_mut(&[1, 1]).unwrap();
    let e = blas.matmul(&stream, &shifted, &w, &mut one, Into::Set).unwrap_err().to_string();
    assert!(e.contains("multiples of 256"), "{e}");
    let host = [bf16::ZERO; 8];
    let host = resource_api::TensorView::from_slice(&host, &[1, 8]);
    let w = x.view(&[1, 8]).unwrap();
    let e = blas.matmul(&stream, &host, &w, &mut out.view_mut(&[1, 1]).unwrap(), Into::Set);
    assert!(e.unwrap_err().to_string().contains("lies on cpu, need cuda:0"));
}

#[test]
#[ignore = "needs a GPU"]
fn a_captured_product_is_done_at_each_replay_and_not_before() {
    let (context, stream) = device();
    let blas = Blas::new(&context).unwrap();
    let one = [bf16::ONE; 64];
    let x = DeviceBuffer::from_slice(&context, &one).unwrap();
    let w = DeviceBuffer::from_slice(&context, &one).unwrap();
    let mut out = DeviceBuffer::<f32>::zeroed(&context, 1).unwrap();
    let mut add = |stream: &Stream| {
        let (x, w) = (x.view(&[1, 64])?, w.view(&[1, 64])?);
        blas.matmul(stream, &x, &w, &mut out.view_mut(&[1, 1])?, Into::Add)
    };
    add(&stream).unwrap(); // the library loads its kernel, which a capture would refuse
    let mut graph = Graph::capture(&stream, || add(&stream)).unwrap();
    let value = |out: &DeviceBuffer<f32>| out.to_vec().unwrap()[0];
    assert_eq!(value(&out), 64.0);
    for _ in 0..3 {
        graph.replay(&stream).unwrap();
    }
    assert_eq!(value(&out), 256.0);
}

#[test]
#[ignore = "needs a GPU"]
fn a_capture_that_fails_leaves_the_stream_usable() {
    let (context, stream) = device();
    let mut pinned = PinnedBuffer::<f32>::zeroed(&context, 4).unwrap();
    let mut there = DeviceBuffer::<f32>::zeroed(&context, 4).unwrap();
    let failed = Graph::capture(&stream, || stream.upload(&mut pinned, 0, &mut there, 0, 4));
    assert!(failed.unwrap_err().to_string().contains("under capture"));
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let _ =
            Graph::capture(&stream, || -> device::Result<()> { panic!("in the recorded work") });
    }));
    assert!(panicked.is_err());
    assert!(!stream.is_capturing().unwrap());
    stream.upload_slice(&[1.0, 2.0, 3.0, 4.0], &mut there, 0).unwrap();
    stream.synchronize().unwrap();
    assert_eq!(there.to_vec().unwrap(), [1.0, 2.0, 3.0, 4.0]);
}
