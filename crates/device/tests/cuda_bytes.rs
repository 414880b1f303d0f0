//! Caches of 8 bits on a real device hold the very bytes that they hold on the CPU: pages go from one to the other.

use std::sync::Arc;

use device::attention::SCALE_BYTES;
use device::cuda::{Columns, Context, DeviceBuffer, KvPool, PinnedBuffer, Places, Stream};
use device::{PoolType, SharedPool};
use resource_api::{DType, DeviceColumn, HeadTurn, KvFacts, Turning};

const HEADS: usize = 2;
const SLOTS: usize = 4;
const PAGES: usize = 5;

/// One layer, with pages in the order of a cache's.
fn facts(dtype: DType, dim: usize) -> KvFacts {
    let row = dim + if dtype == DType::I8 { SCALE_BYTES } else { 0 };
    let [slot_stride, head_stride, kv_stride] =
        [row, row * SLOTS, row * SLOTS * HEADS].map(|n| n as u64);
    KvFacts {
        num_layers: 1,
        num_kv_heads: HEADS as u32,
        num_qo_heads: HEADS as u32,
        head_dim: dim as u32,
        page_size: SLOTS as u32,
        num_pages: PAGES as u32,
        max_seq_len: 100,
        dtype,
        page_stride: 2 * kv_stride,
        layer_stride: 2 * kv_stride,
        kv_stride,
        head_stride,
        slot_stride,
    }
}

/// Floats of all sizes, what is halfway between two codes of either type, and what is no number.
fn values(seed: u32, rows: usize, dim: usize) -> Vec<f32> {
    let mut state = u64::from(seed).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 32) as u32
    };
    let mut all = Vec::new();
    for row in 0..rows {
        let size = [1.0, 1e-3, 300.0, 2f32.powi(-7), 1e-38, 3e38, 1e-44][row % 7];
        all.extend((0..dim).map(|_| match next() % 4 {
            // Whole and half steps of a row whose largest value is 127, and of 3 bits of mantissa.
            0 => size * (next() % 255) as f32 / 2.0 / 127.0,
            1 => -size * (17.0 + 2.0 * (next() % 8) as f32) / 16.0 / 2.0,
            _ => size * (next() as f32 / (1u32 << 31) as f32 - 1.0),
        }));
        let first = row * dim;
        match row % 11 {
            3 => all[first + 1] = f32::NAN,
            5 => all[first + dim - 1] = f32::INFINITY,
            7 => all[first..].fill(0.0),
            9 => all[first] = f32::from_bits(0xffc0_0001),
            _ => {}
        }
    }
    all
}

struct Device {
    context: Arc<Context>,
    stream: Stream,
}

impl Device {
    /// The bytes of all pages.
    fn bytes(&self, pool: &KvPool) -> Vec<u8> {
        let mut page = PinnedBuffer::<u8>::zeroed(&self.context, pool.page_bytes()).unwrap();
        let mut all = Vec::new();
        for i in 0..PAGES as u32 {
            pool.download_page(&self.stream, i, &mut page).unwrap();
            all.extend(page.as_slice().unwrap());
        }
        all
    }
}

#[test]
#[ignore = "needs a GPU"]
fn caches_of_eight_bits_hold_the_bytes_of_the_cpu() {
    let context = Context::of(0).unwrap();
    let device = Device { stream: Stream::new(&context).unwrap(), context };
    let Device { context, stream } = &device;
    let tokens = (PAGES - 1) * SLOTS;
    let page: Vec<u32> = (0..tokens).map(|t| 1 + (t / SLOTS) as u32).collect();
    let slot: Vec<u32> = (0..tokens).map(|t| (t % SLOTS) as u32).collect();
    let mut columns = Columns::new(context, &[tokens, tokens]).unwrap();
    columns.upload(stream, &[&page, &slot]).unwrap();
    let column = |which| columns.column(which, tokens).unwrap();
    let places = Places { page: column(0), slot: column(1) };
    for (dtype, element) in [(DType::I8, PoolType::I8), (DType::F8E4M3, PoolType::E4M3)] {
        for dim in [64, 128, 256, 80, 20] {
            let f = facts(dtype, dim);
            let shape = [tokens, HEADS, dim];
            let (k, v) = (values(1, tokens * HEADS, dim), values(2, tokens * HEADS, dim));
            let host = SharedPool::new(f.page_stride as usize * PAGES, element).unwrap();
            for token in 0..tokens {
                for head in 0..HEADS {
                    for (which, x) in [&k, &v].into_iter().enumerate() {
                        let at = u64::from(page[token]) * f.page_stride
                            + which as u64 * f.kv_stride
                            + head as u64 * f.head_stride
                            + u64::from(slot[token]) * f.slot_stride;
                        let row = &x[(token * HEADS + head) * dim..][..dim];
                        host.view().writer().store(at as usize, row).unwrap();
                    }
                }
            }
            let want =
                host.view().reader().bytes(0..f.page_stride as usize * PAGES).unwrap().to_vec();
            let there = |x: &[f32]| DeviceBuffer::from_slice(context, x).unwrap();
            let (on_k, on_v) = (there(&k), there(&v));
            let (k_view, v_view) = (on_k.view(&shape).unwrap(), on_v.view(&shape).unwrap());
            let plain = KvPool::new(context, f).unwrap();
            plain.write(stream, 0, places, &k_view, &v_view).unwrap();
            assert!(device.bytes(&plain) == want, "{} of {dim}", dtype.name());

            // What comes with rotation of no pair stores the same.
            let turned = KvPool::new(context, f).unwrap();
            let mut q = there(&vec![0.0; tokens * HEADS * dim]);
            let turning = Turning {
                positions: column(0),
                phases: DeviceColumn::default(),
                is_interleaved: false,
            };
            let (q_norm, k_norm) = (DeviceColumn::default(), DeviceColumn::default());
            let how = HeadTurn { turning, q_norm, k_norm, eps: 0.0 };
            let q_view = &mut q.view_mut(&shape).unwrap();
            let done = turned.write_turned(stream, 0, places, q_view, &k_view, &v_view, &how);
            assert_eq!(done, Ok(dim % 16 == 0), "{} of {dim}", dtype.name());
            if dim % 16 == 0 {
                assert!(device.bytes(&turned) == want, "turned: {} of {dim}", dtype.name());
            }

            // And a page that came from the CPU is read as it is there.
            let moved = KvPool::new(context, f).unwrap();
            let mut staged = PinnedBuffer::<u8>::zeroed(context, moved.page_bytes()).unwrap();
            for (i, bytes) in want.chunks(moved.page_bytes()).enumerate() {
                staged.as_mut_slice().unwrap().copy_from_slice(bytes);
                moved.upload_page(stream, &mut staged, i as u32).unwrap();
            }
            let (mut got_k, mut got_v) = (vec![0.0; k.len()], vec![0.0; v.len()]);
            let read_k = &mut resource_api::TensorViewMut::from_slice(&mut got_k, &shape);
            let read_v = &mut resource_api::TensorViewMut::from_slice(&mut got_v, &shape);
            moved.read_to_host(stream, 0, places, read_k, read_v).unwrap();
            let mut row = vec![0.0; dim];
            for token in 0..tokens {
                let start =
                    u64::from(page[token]) * f.page_stride + u64::from(slot[token]) * f.slot_stride;
                host.view().reader().load(start as usize, &mut row).unwrap();
                let got = &got_k[token * HEADS * dim..][..dim];
                let same = |(a, b): (&f32, &f32)| a == b || a.is_nan() && b.is_nan();
                assert!(row.iter().zip(got).all(same), "token {token} of {} {dim}", dtype.name());
            }
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn rows_of_int8_that_are_not_whole_words_are_refused_by_name() {
    let context = Context::of(0).unwrap();
    let refused = KvPool::new(&context, facts(DType::I8, 6)).unwrap_err().to_string();
    assert!(refused.contains("heads of 6 i8") && refused.contains("kv_dtype"), "{refused}");
}
