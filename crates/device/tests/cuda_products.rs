//! Products of few rows, and those that do not depend on the batch, against float64. `cargo xtask
//! device-test` runs these.

use std::sync::Arc;

use device::cuda::{
    Blas, Context, DeviceBuffer, Gemv, GemvInput, GemvInto, Into, Stream, fill_random,
};
use half::bf16;
use resource_api::{DType, TensorViewMut};

const EPS: f32 = 1e-5;

/// Numbers that look random, the same in every run, between -1 and 1.
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

fn rounded(values: &[f32]) -> Vec<bf16> {
    values.iter().map(|&v| bf16::from_f32(v)).collect()
}

fn relative_error(got: &[f32], want: &[f64]) -> f64 {
    assert_eq!(got.len(), want.len());
    let square = |x: f64| x * x;
    let error: f64 = got.iter().zip(want).map(|(&g, w)| square(f64::from(g) - w)).sum();
    (error / want.iter().map(|&w| square(w)).sum::<f64>()).sqrt()
}

struct Case {
    context: Arc<Context>,
    stream: Stream,
    gemv: Gemv,
    inputs: usize,
    outputs: usize,
}

impl Case {
    fn new(inputs: usize, outputs: usize) -> Self {
        let context = Context::of(0).unwrap();
        let stream = Stream::new(&context).unwrap();
        let gemv = Gemv::load(&context).unwrap();
        Self { context, stream, gemv, inputs, outputs }
    }

    fn to_device<T: bytemuck::Pod>(&self, values: &[T]) -> DeviceBuffer<T> {
        DeviceBuffer::from_slice(&self.context, values).unwrap()
    }

    /// The error against float64 of a product of `rows` rows.
    fn error(&self, rows: usize, is_normed: bool, into: GemvInto) -> f64 {
        let Self { inputs, outputs, stream, .. } = self;
        let (inputs, outputs) = (*inputs, *outputs);
        let is_gated = matches!(into, GemvInto::Silu | GemvInto::GeluTanh);
        let height = if is_gated { 2 * outputs } else { outputs };
        let x = numbers(1, rows * inputs);
        let norm: Vec<f32> = numbers(2, inputs).iter().map(|v| 1.0 + v / 2.0).collect();
        let weight: Vec<f32> =
            numbers(3, height * inputs).iter().map(|v| v / (inputs as f32).sqrt()).collect();
        let bias = numbers(4, outputs);
        let (x_bf16, weight) = (rounded(&x), rounded(&weight));
        let before = numbers(5, rows * outputs);

        let there = (self.to_device(&x), self.to_device(&x_bf16), self.to_device(&norm));
        let (weight_there, bias_there) = (self.to_device(&weight), self.to_device(&bias));
        let mut out_f32 = match into {
            GemvInto::AddF32 => self.to_device(&before),
            _ => self.to_device(&vec![f32::NAN; rows * outputs]),
        };
        let mut out_bf16 = self.to_device(&vec![bf16::NAN; rows * outputs]);
        let (wide, narrow, norm_view) = (
            there.0.view(&[rows, inputs]).unwrap(),
            there.1.view(&[rows, inputs]).unwrap(),
            there.2.view(&[inputs]).unwrap(),
        );
        let input = match is_normed {
            true => GemvInput::Normed { rows: &wide, weight: &norm_view, eps: EPS },
            false => GemvInput::Rows(&narrow),
        };
        let is_f32 = matches!(into, GemvInto::F32 | GemvInto::AddF32);
        let mut out: TensorViewMut<'_> = match is_f32 {
            true => out_f32.view_mut(&[rows, outputs]).unwrap(),
            false => out_bf16.view_mut(&[rows, outputs]).unwrap(),
        };
        let bias_view = bias_there.view(&[outputs]).unwrap();
        let bias_view = (into == GemvInto::Bf16).then_some(&bias_view);
        let weight_view = weight_there.view(&[height, inputs]).unwrap();
        self.gemv.run(stream, input, &weight_view, bias_view, &mut out, into).unwrap();
        stream.synchronize().unwrap();
        let got: Vec<f32> = match is_f32 {
            true => out_f32.to_vec().unwrap(),
            false => out_bf16.to_vec().unwrap().into_iter().map(bf16::to_f32).collect(),
        };

        let mut want = Vec::new();
        for r in 0..rows {
            let row: Vec<f64> = match is_normed {
                false => x_bf16[r * inputs..][..inputs].iter().map(|v| v.to_f64()).collect(),
                true => {
                    let row = x[r * inputs..][..inputs].iter().map(|&v| f64::from(v));
                    let mean = row.clone().map(|v| v * v).sum::<f64>() / inputs as f64;
                    let factor = 1.0 / (mean + f64::from(EPS)).sqrt();
                    row.zip(&norm).map(|(v, &w)| v * factor * f64::from(w)).collect()
                }
            };
            let dot = |o: usize| -> f64 {
                let weights = &weight[o * inputs..][..inputs];
                weights.iter().zip(&row).map(|(w, x)| w.to_f64() * x).sum()
            };
            for o in 0..outputs {
                let product = dot(o);
                want.push(match into {
                    GemvInto::F32 => product,
                    GemvInto::Bf16 => product + f64::from(bias[o]),
                    GemvInto::AddF32 => product + f64::from(before[r * outputs + o]),
                    GemvInto::Silu => product / (1.0 + (-product).exp()) * dot(outputs + o),
                    GemvInto::GeluTanh => {
                        let inner = (2.0 / std::f64::consts::PI).sqrt()
                            * (product + 0.044715 * product.powi(3));
                        0.5 * product * (1.0 + inner.tanh()) * dot(outputs + o)
                    }
                });
            }
        }
        relative_error(&got, &want)
    }
}

#[test]
#[ignore = "needs a GPU"]
fn products_of_few_rows_agree_with_float64() {
    let kinds = [
        (false, GemvInto::Bf16),
        (false, GemvInto::AddF32),
        (true, GemvInto::Bf16),
        (true, GemvInto::F32),
        (true, GemvInto::Silu),
        (true, GemvInto::GeluTanh),
    ];
    let mut worst = 0f64;
    for (inputs, outputs) in [(8, 3), (576, 960), (1024, 1000), (2056, 72), (9216, 40)] {
        let case = Case::new(inputs, outputs);
        for (is_normed, into) in kinds {
            for rows in [1, 2, 3].into_iter().filter(|&rows| case.gemv.takes(rows, inputs)) {
                let error = case.error(rows, is_normed, into);
                assert!(error < 8e-3, "{rows} rows of {inputs} to {outputs}, {into:?}: {error}");
                worst = worst.max(error);
            }
        }
    }
    eprintln!("worst relative error {worst:.2e}");
}

#[test]
#[ignore = "needs a GPU"]
fn what_has_no_kernel_is_refused() {
    let case = Case::new(64, 8);
    assert!(case.gemv.takes(1, 64) && !case.gemv.takes(0, 64));
    assert!(!case.gemv.takes(9, 64) && !case.gemv.takes(1, 60) && !case.gemv.takes(1, 1 << 20));
    let x = DeviceBuffer::<bf16>::zeroed(&case.context, 16 * 64).unwrap();
    let weight = DeviceBuffer::<bf16>::zeroed(&case.context, 8 * 64).unwrap();
    let mut out = DeviceBuffer::<f32>::zeroed(&case.context, 16 * 8).unwrap();
    let mut run = |rows: usize, inputs: usize, into| {
        let x = x.view(&[rows, inputs]).unwrap();
        let weight = weight.view(&[8, 64]).unwrap();
        let out = &mut out.view_mut(&[rows, 8]).unwrap();
        case.gemv.run(&case.stream, GemvInput::Rows(&x), &weight, None, out, into)
    };
    assert!(run(1, 64, GemvInto::AddF32).is_ok());
    assert!(run(16, 64, GemvInto::AddF32).unwrap_err().to_string().contains("16 rows"));
    assert!(run(1, 64, GemvInto::F32).is_err(), "rows as they are go to bf16 or are added");
    assert!(run(1, 64, GemvInto::Bf16).is_err(), "the output is f32");
    assert!(run(1, 32, GemvInto::AddF32).is_err(), "the weight has other inputs");
}

/// A row's product is the same to the bit alone and among any others, at any place.
#[test]
#[ignore = "needs a GPU"]
fn batch_invariant_products_of_a_row_have_the_same_bits_in_every_batch() {
    let context = Context::of(0).unwrap();
    let stream = Stream::new(&context).unwrap();
    let mut blas = Blas::new(&context).unwrap();
    blas.set_batch_invariant(true);
    const ROWS: usize = 700;
    for (inputs, outputs) in [(64, 128), (576, 960), (1536, 576), (4096, 6144), (1024, 49_152)] {
        let mut x = DeviceBuffer::<bf16>::new(&context, ROWS * inputs).unwrap();
        let mut weight = DeviceBuffer::<bf16>::new(&context, outputs * inputs).unwrap();
        fill_random(&stream, &mut x, 1.0, 1).unwrap();
        fill_random(&stream, &mut weight, 1.0 / (inputs as f32).sqrt(), 2).unwrap();
        for dtype in [DType::BF16, DType::F32] {
            let mut whole: Vec<f32> = Vec::new();
            for rows in [ROWS, 1, 2, 3, 8, 17, 64, 65, 256, 511] {
                // From the end, so that a row has another place in each batch.
                let first = ROWS - rows;
                let all = x.to_vec().unwrap()[first * inputs..].to_vec();
                let part = DeviceBuffer::from_slice(&context, &all).unwrap();
                let x = part.view(&[rows, inputs]).unwrap();
                let weight = weight.view(&[outputs, inputs]).unwrap();
                let mut narrow = DeviceBuffer::<bf16>::zeroed(&context, rows * outputs).unwrap();
                let mut wide = DeviceBuffer::<f32>::zeroed(&context, rows * outputs).unwrap();
                let shape = [rows, outputs];
                let mut out = match dtype {
                    DType::F32 => wide.view_mut(&shape).unwrap(),
                    _ => narrow.view_mut(&shape).unwrap(),
                };
                blas.matmul(&stream, &x, &weight, &mut out, Into::Set).unwrap();
                stream.synchronize().unwrap();
                let got: Vec<f32> = match dtype {
                    DType::F32 => wide.to_vec().unwrap(),
                    _ => narrow.to_vec().unwrap().into_iter().map(bf16::to_f32).collect(),
                };
                if rows == ROWS {
                    whole = got;
                } else {
                    let same = got == whole[first * outputs..];
                    assert!(same, "{rows} rows of {inputs} to {outputs}, {dtype:?}");
                }
            }
        }
    }
}
