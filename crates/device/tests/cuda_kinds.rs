//! Rotation, the paged cache, tables and columns on a real device, against the CPU's.

use std::sync::Arc;

use device::cuda::{
    Columns, Context, DeviceBuffer, KvPool, LastRows, PageTable, Places, RopePhases, Stream,
    part_of, read_column,
};
use device::ops::RopeLayout;
use half::bf16;
use resource_api::{DType, KvFacts};

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

fn halves(x: &[f32]) -> Vec<bf16> {
    x.iter().map(|&x| bf16::from_f32(x)).collect()
}

fn assert_near(what: &str, got: &[f32], want: &[f32], relative: f32, absolute: f32) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        let near = (got - want).abs() <= want.abs() * relative + absolute;
        assert!(near, "{what}, element {i}: {got} for {want}");
    }
}

const BF16: f32 = 1.0 / 250.0;

#[test]
#[ignore = "needs a GPU"]
fn the_last_token_of_each_row_is_picked() {
    let (context, stream) = device();
    let (tokens, width) = (14, 72);
    let x = halves(&numbers(1, tokens * width));
    let there = DeviceBuffer::from_slice(&context, &x).unwrap();
    let mut columns = Columns::new(&context, &[4, 4]).unwrap();
    columns.upload(&stream, &[&[0, 6, 2, 99], &[7, 0, 1, 3]]).unwrap();
    let (start, span) = (columns.column(0, 4).unwrap(), columns.column(1, 4).unwrap());
    let untouched = vec![bf16::ONE; width];
    let mut out = DeviceBuffer::from_slice(&context, &vec![bf16::ONE; 4 * width]).unwrap();
    let out_view = &mut out.view_mut(&[4, width]).unwrap();
    let last = LastRows::new(&context).unwrap();
    last.pick(&stream, &there.view(&[tokens, width]).unwrap(), start, span, out_view).unwrap();
    let row = |i: usize| x[i * width..][..width].to_vec();
    assert_eq!(out.to_vec().unwrap(), [row(6), untouched.clone(), row(2), untouched].concat());
}

#[test]
#[ignore = "needs a GPU"]
fn rotation_is_the_cpus() {
    let (context, stream) = device();
    let positions = [0u32, 1, 77, 131_072, 1 << 20];
    let mut columns = Columns::new(&context, &[8]).unwrap();
    columns.upload(&stream, &[&positions]).unwrap();
    for (dim, pairs) in [(64, 32), (80, 16), (6, 3)] {
        for layout in [RopeLayout::HalfSplit, RopeLayout::Interleaved] {
            let frequencies: Vec<f64> =
                (0..pairs).map(|i| 500_000f64.powf(-(i as f64) / pairs as f64)).collect();
            let phases = RopePhases::new(&context, &frequencies, dim, layout).unwrap();
            let (mut q, mut k) = (numbers(1, 5 * 4 * dim), numbers(2, 5 * 2 * dim));
            let mut q_there = DeviceBuffer::from_slice(&context, &q).unwrap();
            let mut k_there = DeviceBuffer::from_slice(&context, &k).unwrap();
            let q_view = &mut q_there.view_mut(&[5, 4, dim]).unwrap();
            let k_view = &mut k_there.view_mut(&[5, 2, dim]).unwrap();
            let column = columns.column(0, 5).unwrap();
            phases.turn(&stream, column, q_view, k_view).unwrap();
            for (token, &position) in positions.iter().enumerate() {
                let angles = frequencies.iter().map(|f| f * f64::from(position));
                let cos: Vec<f32> = angles.clone().map(|a| a.cos() as f32).collect();
                let sin: Vec<f32> = angles.map(|a| a.sin() as f32).collect();
                for (x, heads) in [(&mut q, 4), (&mut k, 2)] {
                    let x = &mut x[token * heads * dim..][..heads * dim];
                    device::ops::rope(x, dim, &cos, &sin, layout);
                }
            }
            assert_near("q", &q_there.to_vec().unwrap(), &q, 0.0, 3e-7);
            assert_near("k", &k_there.to_vec().unwrap(), &k, 0.0, 3e-7);
        }
    }
}

fn facts(dtype: DType, dim: u32) -> KvFacts {
    let (heads, slots, layers) = (2u32, 4u32, 3u32);
    let slot_stride = u64::from(dim);
    let head_stride = slot_stride * u64::from(slots);
    let kv_stride = head_stride * u64::from(heads);
    KvFacts {
        num_layers: layers,
        num_kv_heads: heads,
        num_qo_heads: heads,
        head_dim: dim,
        page_size: slots,
        num_pages: 6,
        max_seq_len: 100,
        dtype,
        page_stride: kv_stride * 2 * u64::from(layers),
        layer_stride: kv_stride * 2,
        kv_stride,
        head_stride,
        slot_stride,
    }
}

#[test]
#[ignore = "needs a GPU"]
fn a_cache_gives_back_what_was_put_in() {
    let (context, stream) = device();
    let (page, slot) = ([3u32, 3, 1, 99], [0u32, 3, 2, 0]);
    let mut columns = Columns::new(&context, &[4, 4]).unwrap();
    columns.upload(&stream, &[&page, &slot]).unwrap();
    let all = |which| columns.column(which, 4).unwrap();
    let places = Places { page: all(0), slot: all(1) };
    for dim in [64, 6] {
        for (dtype, error) in
            [(DType::F32, 0.0), (DType::BF16, BF16), (DType::F16, 1e-3), (DType::F8E4M3, 0.0626)]
        {
            let pool = KvPool::new(&context, facts(dtype, dim)).unwrap();
            let n = 4 * 2 * dim as usize;
            let shape = [4, 2, dim as usize];
            let (k, v) = (numbers(1, n), numbers(2, n));
            let on = |x: &[f32]| DeviceBuffer::from_slice(&context, x).unwrap();
            let (k_there, v_there) = (on(&k), on(&v));
            let (k_view, v_view) = (k_there.view(&shape).unwrap(), v_there.view(&shape).unwrap());
            pool.write(&stream, 1, places, &k_view, &v_view).unwrap();
            pool.copy_page(&stream, 3, 5).unwrap();
            let read = |layer: u32, places: Places| {
                let (mut k, mut v) = (on(&vec![f32::NAN; n]), on(&vec![f32::NAN; n]));
                let k_view = &mut k.view_mut(&shape).unwrap();
                let v_view = &mut v.view_mut(&shape).unwrap();
                pool.read(&stream, layer, places, k_view, v_view).unwrap();
                (k.to_vec().unwrap(), v.to_vec().unwrap())
            };
            let row = 2 * dim as usize;
            let zeros = |x: &[f32], from: usize| [&x[..from], &vec![0.0; n - from]].concat();
            let (got_k, got_v) = read(1, places);
            assert_near("k", &got_k, &zeros(&k, 3 * row), error, error * 0.02);
            assert_near("v", &got_v, &zeros(&v, 3 * row), error, error * 0.02);
            assert_eq!(read(0, places).0, vec![0.0; n], "another layer");
            // The copy of page 3, where the first two tokens are.
            let mut copied = Columns::new(&context, &[4, 4]).unwrap();
            copied.upload(&stream, &[&[5, 5, 2, 99], &slot]).unwrap();
            let copy = Places { page: copied.column(0, 4).unwrap(), slot: all(1) };
            assert_eq!(read(1, copy).0, zeros(&got_k, 2 * row));
            assert!(pool.copy_page(&stream, 0, 6).is_err());
            assert!(pool.write(&stream, 3, places, &k_view, &v_view).is_err());
            let (keys, values) = pool.layer(2).unwrap();
            assert_eq!(
                (keys.shape(), values.shape()),
                ([6, 4, 2, i64::from(dim)].as_slice(), keys.shape())
            );
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn tables_take_changes_and_columns_keep_their_places() {
    let (context, stream) = device();
    let mut table = PageTable::new(&context, 100).unwrap();
    let mut columns = Columns::new(&context, &[3, 8]).unwrap();
    let before = columns.column(1, 8).unwrap();
    columns.upload(&stream, &[&[], &[7, 70, 99, 1, 100, 5]]).unwrap();
    assert_eq!(columns.column(1, 6).unwrap().address(), before.address());
    let changes = columns.column(1, 6).unwrap();
    table.apply(&stream, changes).unwrap();
    table.apply(&stream, part_of(changes, 2, 2).unwrap()).unwrap();
    let mut want = vec![0u32; 100];
    (want[7], want[99]) = (70, 1);
    assert_eq!(read_column(&context, table.column()).unwrap(), want);

    // What outgrows its room moves, and the old place stays readable.
    columns.upload(&stream, &[&[1, 2, 3, 4], &[]]).unwrap();
    assert_eq!(read_column(&context, columns.column(0, 4).unwrap()).unwrap(), [1, 2, 3, 4]);
    assert_eq!(read_column(&context, changes).unwrap()[..2], [7, 70]);
    assert!(columns.column(0, 5).is_err() && columns.column(2, 0).is_err());
    assert!(columns.upload(&stream, &[&[1]]).is_err());
}
