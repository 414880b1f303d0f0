//! Paged attention on a real device against float64. `cargo xtask device-test` runs these.

use std::sync::Arc;

use device::attention::SCALE_BYTES;
use device::cuda::{
    AttentionRows, AttentionRule, AttentionShape, Context, DeviceBuffer, PagedAttention, Stream,
};
use device::{E4m3, PoolType, SharedPool};
use half::bf16;
use resource_api::{DType, DeviceColumn, RawTensor, TensorView};

/// Numbers that look random, the same in every run, between -1 and 1.
struct Random(u64);

impl Random {
    fn next(&mut self) -> f32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    fn below(&mut self, n: usize) -> usize {
        ((self.next() + 1.0) / 2.0 * n as f32) as usize % n
    }
}

/// One stream: its length, and how many queries stand at its end.
#[derive(Debug, Clone, Copy)]
struct Row {
    len: usize,
    span: usize,
}

/// A type that a cache may have: rows as the bytes that it keeps, and their values as float64.
trait Stored {
    const DTYPE: DType;
    /// Bytes behind a row.
    const BEHIND: usize = 0;
    fn store(row: &[f32]) -> Vec<u8>;
    fn load(bytes: &[u8]) -> Vec<f64>;
}

impl Stored for f32 {
    const DTYPE: DType = DType::F32;
    fn store(row: &[f32]) -> Vec<u8> {
        bytemuck::cast_slice(row).to_vec()
    }
    fn load(bytes: &[u8]) -> Vec<f64> {
        bytes.as_chunks().0.iter().map(|&x| f32::from_ne_bytes(x).into()).collect()
    }
}

impl Stored for bf16 {
    const DTYPE: DType = DType::BF16;
    fn store(row: &[f32]) -> Vec<u8> {
        row.iter().flat_map(|&x| bf16::from_f32(x).to_ne_bytes()).collect()
    }
    fn load(bytes: &[u8]) -> Vec<f64> {
        bytes.as_chunks().0.iter().map(|&x| bf16::from_ne_bytes(x).to_f64()).collect()
    }
}

impl Stored for E4m3 {
    const DTYPE: DType = DType::F8E4M3;
    fn store(row: &[f32]) -> Vec<u8> {
        row.iter().map(|&x| E4m3::from_f32(x).0).collect()
    }
    fn load(bytes: &[u8]) -> Vec<f64> {
        bytes.iter().map(|&x| E4m3(x).to_f32().into()).collect()
    }
}

/// Rows with their scales, as the pool of the CPU has them.
impl Stored for i8 {
    const DTYPE: DType = DType::I8;
    const BEHIND: usize = SCALE_BYTES;
    fn store(row: &[f32]) -> Vec<u8> {
        let pool = SharedPool::new(row.len() + SCALE_BYTES, PoolType::I8).unwrap();
        pool.view().writer().store(0, row).unwrap();
        pool.view().reader().bytes(0..row.len() + SCALE_BYTES).unwrap().to_vec()
    }
    fn load(bytes: &[u8]) -> Vec<f64> {
        let (row, scale) = bytes.split_last_chunk().unwrap();
        let scale = f64::from(f32::from_ne_bytes(*scale));
        row.iter().map(|&x| f64::from(x.cast_signed()) * scale).collect()
    }
}

const PAGE: usize = 16;

struct Case {
    context: Arc<Context>,
    stream: Stream,
    heads: usize,
    kv_heads: usize,
    dim: usize,
    rows: Vec<Row>,
}

impl Case {
    fn new(heads: usize, kv_heads: usize, dim: usize, rows: &[Row]) -> Self {
        let context = Context::of(0).unwrap();
        let stream = Stream::new(&context).unwrap();
        Self { context, stream, heads, kv_heads, dim, rows: rows.to_vec() }
    }

    fn shape(&self, cache: DType, batch_invariant: bool) -> AttentionShape {
        AttentionShape {
            heads: self.heads as u32,
            kv_heads: self.kv_heads as u32,
            head_dim: self.dim as u32,
            cache,
            activations: DType::BF16,
            max_rows: self.rows.len() as u32 + 3,
            max_len: 4096,
            batch_invariant,
        }
    }

    /// Runs it and answers the error of the result against float64, relative to its size.
    fn error<T: Stored>(&self, rule: AttentionRule, batch_invariant: bool) -> f64 {
        self.error_with::<T>(rule, batch_invariant, false)
    }

    /// The same; with `apart`, the heads of a slot lie together, and rows of a head apart.
    fn error_with<T: Stored>(
        &self,
        rule: AttentionRule,
        batch_invariant: bool,
        apart: bool,
    ) -> f64 {
        let Self { context, stream, heads, kv_heads, dim, rows } = self;
        let (heads, kv_heads, dim) = (*heads, *kv_heads, *dim);
        let mut random = Random(0x1234_5678_9abc_def1);

        // Pages in no order, page 0 for nobody; what is not written must not be seen.
        let pages_of = |row: &Row| row.len.div_ceil(PAGE);
        let total: usize = 1 + rows.iter().map(pages_of).sum::<usize>();
        let mut free: Vec<u32> = (1..total as u32).collect();
        let stride = rows.iter().map(pages_of).max().unwrap() + 2;
        let mut table = vec![u32::MAX; rows.len() * stride];
        // In bytes, and for a cache of bytes in elements too.
        let bytes = dim * T::DTYPE.size() + T::BEHIND;
        let (slot_bytes, head_bytes) =
            if apart { (kv_heads * bytes, bytes) } else { (bytes, PAGE * bytes) };
        let half_bytes = PAGE * kv_heads * bytes;
        let poison = T::store(&vec![f32::NAN; dim]);
        let mut cache = poison.repeat(total * 2 * PAGE * kv_heads);
        let mut streams: Vec<[Vec<f64>; 2]> = Vec::new();
        // Seats are not rows.
        let seat: Vec<u32> = (0..rows.len() as u32).rev().collect();
        for (row, &seat) in rows.iter().zip(&seat) {
            let mut values = [Vec::new(), Vec::new()];
            for position in 0..row.len {
                let entry = seat as usize * stride + position / PAGE;
                if position % PAGE == 0 {
                    table[entry] = free.swap_remove(random.below(free.len()));
                    let page = table[entry] as usize * 2 * half_bytes;
                    // Whole pages are read, and what lies behind the end is dropped.
                    cache[page..page + 2 * half_bytes].fill(0);
                }
                for (part, values) in values.iter_mut().enumerate() {
                    let slot = (table[entry] as usize * 2 + part) * half_bytes
                        + position % PAGE * slot_bytes;
                    for head in 0..kv_heads {
                        // Rows differ in size: by scales that are not like each other.
                        let by = 0.25 + random.below(8) as f32 / 4.0;
                        let row: Vec<f32> = (0..dim).map(|_| by * random.next()).collect();
                        let stored = T::store(&row);
                        values.extend(T::load(&stored));
                        cache[slot + head * head_bytes..][..bytes].copy_from_slice(&stored);
                    }
                }
            }
            streams.push(values);
        }
        let tokens: usize = rows.iter().map(|r| r.span).sum();
        let width = (heads + 2 * kv_heads) * dim;
        let qkv: Vec<bf16> =
            (0..tokens * width).map(|_| bf16::from_f32(2.0 * random.next())).collect();

        let column = |values: Vec<u32>| DeviceBuffer::from_slice(context, &values).unwrap();
        let mut start = 0;
        let starts = rows.iter().map(|r| {
            start += r.span;
            (start - r.span) as u32
        });
        let columns = [
            column(seat),
            column(rows.iter().map(|r| r.span as u32).collect()),
            column(rows.iter().map(|r| r.len as u32).collect()),
            column(starts.collect()),
            column(table),
        ];
        let [seat, span, len, token_start, table] = columns.each_ref().map(|c| {
            // SAFETY: the buffers live until the result has been read.
            unsafe { DeviceColumn::from_raw(c.address(), c.len()) }
        });
        let layout = AttentionRows {
            seat,
            span,
            len,
            token_start,
            table,
            table_stride: stride as u32,
            has_single: rows.iter().any(|r| r.span == 1),
            has_many: rows.iter().any(|r| r.span > 1),
        };

        let cache = DeviceBuffer::from_slice(context, &cache).unwrap();
        let part = |part: usize| {
            let mut raw = RawTensor::contiguous(
                std::ptr::without_provenance_mut(cache.address() as usize),
                context.device(),
                T::DTYPE,
                &[total, PAGE, kv_heads, dim + T::BEHIND],
            );
            let strides = [2 * half_bytes, slot_bytes, head_bytes];
            for (to, bytes) in raw.strides.iter_mut().zip(strides) {
                *to = (bytes / T::DTYPE.size()) as i64;
            }
            raw.byte_offset = (part * half_bytes) as u64;
            // SAFETY: inside `cache`, which outlives the view.
            unsafe { TensorView::from_raw(raw) }
        };
        let mut there = DeviceBuffer::from_slice(context, &qkv).unwrap();
        let [q, _, _] =
            there.parts_mut(0, tokens, [[heads, dim], [kv_heads, dim], [kv_heads, dim]]).unwrap();
        let poison = vec![bf16::NAN; tokens * heads * dim];
        let mut out = DeviceBuffer::from_slice(context, &poison).unwrap();
        let attention =
            PagedAttention::new(context, self.shape(T::DTYPE, batch_invariant)).unwrap();
        let mut run = || {
            let mut out = out.view_mut(&[tokens, heads, dim]).unwrap();
            attention.run(stream, &q.view(), &mut out, &part(0), &part(1), &layout, rule).unwrap();
        };
        // Twice: the first launch must leave the workspace as it found it.
        run();
        run();
        stream.synchronize().unwrap();

        let got = out.to_vec().unwrap();
        let mut want = Vec::new();
        let mut query = qkv.chunks(width);
        for (row, [k, v]) in rows.iter().zip(&streams) {
            for j in 0..row.span {
                let position = row.len - row.span + j;
                let q: Vec<f64> =
                    query.next().unwrap()[..heads * dim].iter().map(|x| x.to_f64()).collect();
                want.extend(attend(&q, k, v, (heads, kv_heads, dim), position, row.len, rule));
            }
        }
        let square = |x: f64| x * x;
        let error: f64 = got.iter().zip(&want).map(|(g, w)| square(g.to_f64() - w)).sum();
        (error / want.iter().map(|&w| square(w)).sum::<f64>()).sqrt()
    }
}

fn attend(
    q: &[f64],
    k: &[f64],
    v: &[f64],
    (heads, kv_heads, dim): (usize, usize, usize),
    position: usize,
    len: usize,
    rule: AttentionRule,
) -> Vec<f64> {
    let end = if rule.causal { position + 1 } else { len };
    let first = match rule.window {
        0 => 0,
        window => (position + 1).saturating_sub(window as usize),
    };
    let mut out = Vec::new();
    for h in 0..heads {
        let kv = h / (heads / kv_heads);
        let part = |x: &[f64], t: usize| x[(t * kv_heads + kv) * dim..][..dim].to_vec();
        let score = |t: usize| {
            let terms = part(k, t).into_iter().zip(&q[h * dim..][..dim]).map(|(k, q)| k * q);
            let score = terms.sum::<f64>() * f64::from(rule.scale);
            let cap = f64::from(rule.softcap);
            if cap > 0.0 { cap * (score / cap).tanh() } else { score }
        };
        let scores: Vec<f64> = (first..end).map(score).collect();
        let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
        let sum: f64 = weights.iter().sum();
        let mut mixed = vec![0.0; dim];
        for (t, weight) in (first..end).zip(&weights) {
            part(v, t).iter().zip(&mut mixed).for_each(|(v, m)| *m += weight / sum * v);
        }
        out.extend(mixed);
    }
    out
}

const MIXED: [Row; 7] = [
    Row { len: 1, span: 1 },
    Row { len: 500, span: 1 },
    Row { len: 37, span: 37 },
    Row { len: 300, span: 5 },
    Row { len: 64, span: 0 },
    Row { len: 2049, span: 1 },
    Row { len: 130, span: 100 },
];

fn plain(dim: usize) -> AttentionRule {
    AttentionRule { scale: (dim as f32).powf(-0.5), causal: true, window: 0, softcap: 0.0 }
}

/// Results are rounded to bf16, and so are the weights that multiply values.
const MARGIN: f64 = 8e-3;

#[test]
#[ignore = "needs a GPU"]
fn streams_of_all_kinds_in_one_step_agree_with_float64() {
    for (heads, kv_heads, dim) in [(9, 3, 64), (8, 2, 128), (32, 2, 128), (4, 1, 256)] {
        let error = Case::new(heads, kv_heads, dim, &MIXED).error::<bf16>(plain(dim), false);
        eprintln!("{heads} heads of {kv_heads}, {dim}: {error:.2e}");
        assert!(error < MARGIN, "{heads} heads of {kv_heads}, {dim}: {error}");
    }
}

#[test]
#[ignore = "needs a GPU"]
fn windows_bounds_and_whole_streams_agree_with_float64() {
    let rules = [
        AttentionRule { window: 33, ..plain(64) },
        AttentionRule { softcap: 2.0, scale: 0.3, ..plain(64) },
        AttentionRule { causal: false, ..plain(64) },
    ];
    for rule in rules {
        let error = Case::new(8, 2, 64, &MIXED).error::<bf16>(rule, false);
        assert!(error < MARGIN, "{rule:?}: {error}");
    }
}

#[test]
#[ignore = "needs a GPU"]
fn caches_of_eight_bits_agree_with_float64_of_what_they_hold() {
    for (heads, kv_heads, dim) in [(9, 3, 64), (8, 2, 128), (32, 2, 128), (4, 1, 256), (6, 3, 80)] {
        for (batch_invariant, apart) in [(false, false), (true, false), (false, true)] {
            let case = Case::new(heads, kv_heads, dim, &MIXED);
            let of = [
                case.error_with::<E4m3>(plain(dim), batch_invariant, apart),
                case.error_with::<i8>(plain(dim), batch_invariant, apart),
            ];
            eprintln!("{heads} heads of {kv_heads}, {dim}: fp8 {:.2e}, i8 {:.2e}", of[0], of[1]);
            let what = format!("{heads} heads of {kv_heads}, {dim}, {batch_invariant}, {apart}");
            assert!(of.iter().all(|&error| error < MARGIN), "{what}: {of:?}");
        }
    }
    for rule in [
        AttentionRule { window: 33, ..plain(128) },
        AttentionRule { softcap: 2.0, scale: 0.3, ..plain(128) },
        AttentionRule { causal: false, ..plain(128) },
    ] {
        let case = Case::new(8, 2, 128, &MIXED);
        let error = case.error::<i8>(rule, false);
        assert!(error < MARGIN, "{rule:?}: {error}");
    }
}

/// A token's bits do not depend on where its prompt was divided, which decides what it shares a block with.
#[test]
#[ignore = "needs a GPU"]
fn a_prompt_that_is_divided_anywhere_gets_the_same_bits() {
    const LEN: usize = 200;
    let context = Context::of(0).unwrap();
    let stream = Stream::new(&context).unwrap();
    for (heads, kv_heads, dim) in [(9usize, 3usize, 64usize), (8, 2, 128), (4, 1, 256)] {
        let mut random = Random(77);
        let pages = LEN.div_ceil(PAGE);
        let mut values = |n: usize, by: f32| -> Vec<bf16> {
            (0..n).map(|_| bf16::from_f32(by * random.next())).collect()
        };
        let cache = values(2 * pages * PAGE * kv_heads * dim, 1.0);
        let [keys, of_values] = [0, 1].map(|part| {
            let half = cache.len() / 2;
            DeviceBuffer::from_slice(&context, &cache[part * half..][..half]).unwrap()
        });
        let queries = values(LEN * heads * dim, 3.0);
        let shape = Case::new(heads, kv_heads, dim, &[]).shape(DType::BF16, true);
        let attention = PagedAttention::new(&context, shape).unwrap();
        let column = |values: &[u32]| DeviceBuffer::from_slice(&context, values).unwrap();
        let table = column(&(0..pages as u32).collect::<Vec<_>>());
        // SAFETY: the buffers live until the result has been read.
        let borrowed =
            |c: &DeviceBuffer<u32>| unsafe { DeviceColumn::from_raw(c.address(), c.len()) };
        let cache_shape = [pages, PAGE, kv_heads, dim];
        let run = |from: usize, to: usize| -> Vec<bf16> {
            let of = [0, to - from, to, 0].map(|n| column(&[n as u32]));
            let rows = AttentionRows {
                seat: borrowed(&of[0]),
                span: borrowed(&of[1]),
                len: borrowed(&of[2]),
                token_start: borrowed(&of[3]),
                table: borrowed(&table),
                table_stride: pages as u32,
                has_single: to - from == 1,
                has_many: to - from > 1,
            };
            let width = heads * dim;
            let q = DeviceBuffer::from_slice(&context, &queries[from * width..to * width]).unwrap();
            let mut out =
                DeviceBuffer::from_slice(&context, &vec![bf16::NAN; (to - from) * width]).unwrap();
            let shape = [to - from, heads, dim];
            let (k, v) = (keys.view(&cache_shape).unwrap(), of_values.view(&cache_shape).unwrap());
            let out_view = &mut out.view_mut(&shape).unwrap();
            let q = q.view(&shape).unwrap();
            attention.run(&stream, &q, out_view, &k, &v, &rows, plain(dim)).unwrap();
            stream.synchronize().unwrap();
            out.to_vec().unwrap()
        };
        let want = run(0, LEN);
        for from in 1..LEN {
            let to = (from + 1 + from * 37 % 90).min(LEN);
            let got = run(from, to);
            let want = &want[from * heads * dim..to * heads * dim];
            assert!(got == want, "{heads} heads of {kv_heads}, {dim}: {from} to {to}");
        }
    }
}

/// Columns of a plan that another library made, with numbers that mean nothing: nothing beyond the tensors
/// is touched, rows that are right are computed, and the device goes on.
#[test]
#[ignore = "needs a GPU"]
fn columns_that_name_what_is_not_there_do_no_harm() {
    let context = Context::of(0).unwrap();
    let stream = Stream::new(&context).unwrap();
    let (heads, kv_heads, dim, pages, seats, stride) =
        (8usize, 2usize, 64usize, 9usize, 4u32, 3u32);
    const TOKENS: usize = 24;
    const BAD: u32 = u32::MAX - 7;
    let column = |values: &[u32]| DeviceBuffer::from_slice(&context, values).unwrap();
    // Of: seat, span, len, first token. The first and the last row are right.
    let rows: [[u32; 4]; 9] = [
        [0, 1, 40, 0],
        [BAD, 1, 40, 1],
        [1, 1, BAD, 2],
        [1, 1, 40, BAD],
        [4, 3, 40, 3],
        [1, BAD, 40, 4],
        [1, 4, BAD, 5],
        [1, 4, 2, BAD],
        [2, 9, 30, 15],
    ];
    let of = |i: usize| column(&rows.map(|row| row[i]));
    let columns = [of(0), of(1), of(2), of(3)];
    // Seats 0 and 2 have pages; the others name pages that there are not.
    let table = column(&[1, 2, 3, BAD, BAD, 9, 4, 5, 6, BAD, BAD, BAD]);
    // SAFETY: the buffers live until the device is done.
    let borrowed = |c: &DeviceBuffer<u32>| unsafe { DeviceColumn::from_raw(c.address(), c.len()) };
    let layout = AttentionRows {
        seat: borrowed(&columns[0]),
        span: borrowed(&columns[1]),
        len: borrowed(&columns[2]),
        token_start: borrowed(&columns[3]),
        table: borrowed(&table),
        table_stride: stride,
        has_single: true,
        has_many: true,
    };
    assert_eq!(table.len() as u32, seats * stride);
    let values: Vec<bf16> = {
        let mut random = Random(5);
        (0..pages * PAGE * kv_heads * dim).map(|_| bf16::from_f32(random.next())).collect()
    };
    let queries = vec![bf16::from_f32(0.5); TOKENS * heads * dim];
    for (cache_type, batch_invariant) in
        [(DType::BF16, false), (DType::BF16, true), (DType::F32, false)]
    {
        let shape = AttentionShape {
            heads: heads as u32,
            kv_heads: kv_heads as u32,
            head_dim: dim as u32,
            cache: cache_type,
            activations: DType::BF16,
            max_rows: 16,
            max_len: 4096,
            batch_invariant,
        };
        let of_f32: Vec<f32> = values.iter().map(|x| x.to_f32()).collect();
        let (narrow, wide) = (
            DeviceBuffer::from_slice(&context, &values).unwrap(),
            DeviceBuffer::from_slice(&context, &of_f32).unwrap(),
        );
        let sizes = [pages, PAGE, kv_heads, dim];
        let cache = match cache_type {
            DType::F32 => wide.view(&sizes).unwrap(),
            _ => narrow.view(&sizes).unwrap(),
        };
        let q = DeviceBuffer::from_slice(&context, &queries).unwrap();
        let nan = vec![bf16::NAN; (TOKENS + 1) * heads * dim];
        let mut out = DeviceBuffer::from_slice(&context, &nan).unwrap();
        let attention = PagedAttention::new(&context, shape).unwrap();
        let q = q.view(&[TOKENS, heads, dim]).unwrap();
        let mut to = out.view_mut(&[TOKENS, heads, dim]).unwrap();
        attention.run(&stream, &q, &mut to, &cache, &cache, &layout, plain(dim)).unwrap();
        stream.synchronize().expect("the device goes on");
        let got = out.to_vec().unwrap();
        let token = |t: usize| &got[t * heads * dim..][..heads * dim];
        for t in [0, 15, 23] {
            assert!(token(t).iter().all(|x| x.is_finite()), "{cache_type:?}: token {t}");
        }
        assert!(token(TOKENS).iter().all(|x| x.is_nan()), "written behind the end");
        assert!(token(1).iter().all(|x| x.is_nan()), "a row without a seat");
    }
}

/// A token's result is the same alone, beside others, as the last of a prompt and as a step of its own.
#[test]
#[ignore = "needs a GPU"]
fn batch_invariant_results_agree_with_float64() {
    let error = Case::new(8, 2, 128, &MIXED).error::<bf16>(plain(128), true);
    assert!(error < MARGIN, "{error}");
}

#[test]
#[ignore = "needs a GPU"]
fn other_heads_and_caches_take_the_exact_kernel() {
    for (heads, kv_heads, dim) in [(4, 2, 8), (6, 2, 96), (20, 1, 64)] {
        let error = Case::new(heads, kv_heads, dim, &MIXED).error::<bf16>(plain(dim), false);
        assert!(error < 3e-3, "{heads} heads of {kv_heads}, {dim}: {error}");
    }
    let error = Case::new(8, 2, 128, &MIXED).error::<f32>(plain(128), false);
    assert!(error < 3e-3, "float32: {error}");
}
