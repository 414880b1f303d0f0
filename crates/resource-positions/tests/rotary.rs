//! Rotary embedding against float64 computed straight from its definition.

#[allow(dead_code)] // each test file uses its part
mod common;

use common::*;
use resource_api::host::PlainHost;
use resource_api::{Positions as _, RequestId, Resource as _, TensorViewMut};
use resource_positions::{PositionsSpec, frequencies};
use serde_json::json;

const A: RequestId = RequestId::new(0, 1);

/// Values that repeat nowhere.
fn noise(n: usize) -> Vec<f32> {
    let mut state = 0x9E37_79B9_u64;
    let mut next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..n).map(|_| next()).collect()
}

/// One head turned by the definition.
fn reference(head: &[f32], position: u32, frequencies: &[f64], interleave: bool) -> Vec<f64> {
    let mut out: Vec<f64> = head.iter().map(|&x| f64::from(x)).collect();
    for (i, frequency) in frequencies.iter().enumerate() {
        let (a, b) = if interleave { (2 * i, 2 * i + 1) } else { (i, i + frequencies.len()) };
        let (sin, cos) = (f64::from(position) * frequency).sin_cos();
        (out[a], out[b]) = (out[a] * cos - out[b] * sin, out[a] * sin + out[b] * cos);
    }
    out
}

/// Turns two heads of q and one of k for ids `ids`.
fn turn(e: &Engine, ids: &[u32]) -> (Vec<f32>, Vec<f32>) {
    let mut step = Step::new(1, 0, &[(A, MAIN, ids.len() as u32)]);
    ids.iter().for_each(|&id| step.options.pos_ids.push(id));
    let (mut q, mut k) = (noise(ids.len() * 2 * HEAD_DIM), noise(ids.len() * HEAD_DIM));
    e.planned(&step, |e, ctx| {
        let mut q = TensorViewMut::from_slice(&mut q, &[ids.len(), 2, HEAD_DIM]);
        let mut k = TensorViewMut::from_slice(&mut k, &[ids.len(), 1, HEAD_DIM]);
        e.api.apply_qk(ctx, MAIN, &mut q, &mut k).unwrap();
    });
    (q, k)
}

fn spec(mut settings: serde_json::Value) -> PositionsSpec {
    settings["kv_cache"] = "kv".into();
    serde_json::from_value(settings).unwrap()
}

fn assert_turned(settings: serde_json::Value, frequencies: &[f64], ids: &[u32]) {
    let e = Engine::new(settings.clone());
    e.ingest(&[A]);
    let interleave = settings["interleave"] == true;
    let (q, k) = turn(&e, ids);
    for (got, heads) in [(q, 2), (k, 1)] {
        let input = noise(got.len());
        for (i, (got, input)) in got.chunks(HEAD_DIM).zip(input.chunks(HEAD_DIM)).enumerate() {
            let want = reference(input, ids[i / heads], frequencies, interleave);
            for (got, want) in got.iter().zip(want) {
                assert!((f64::from(*got) - want).abs() < 3e-7, "{settings}: {got} for {want}");
            }
        }
    }
}

const IDS: [u32; 6] = [0, 1, 255, 256, 10_000, 16_383];

#[test]
fn both_styles_and_partial_rotation() {
    for interleave in [false, true] {
        for dim in [2, 4, 8] {
            let plain: Vec<f64> =
                (0..dim / 2).map(|i| 1e4f64.powf(-2.0 * f64::from(i) / f64::from(dim))).collect();
            let settings = json!({ "interleave": interleave, "rotary_dim": dim });
            assert_turned(settings, &plain, &IDS);
        }
    }
}

#[test]
fn linear_scaling_divides_positions() {
    let scaled: Vec<f64> = (0..4).map(|i| 5e5f64.powf(-f64::from(i) / 4.0) / 2.5).collect();
    assert_turned(json!({ "rope_theta": 5e5, "rope_scale": 2.5 }), &scaled, &IDS);
}

#[test]
fn explicit_divisors_divide_frequencies() {
    let divisors = [1.0, 2.0, 8.0, 32.0];
    let divided: Vec<f64> =
        divisors.iter().enumerate().map(|(i, d)| 1e4f64.powf(-(i as f64) / 4.0) / d).collect();
    assert_turned(json!({ "rope_freqs": divisors }), &divided, &IDS);
}

/// The formula as Meta's `apply_scaling` has it, by wavelengths.
#[test]
fn llama_3_scaling_at_position_10_000() {
    let (factor, low, high, original) = (8.0, 1.0, 4.0, 8192.0);
    let settings = json!({
        "rope_theta": 5e5, "llama3_factor": factor, "llama3_low_freq_factor": low,
        "llama3_high_freq_factor": high, "llama3_original_max_position": original,
    });
    let got = frequencies(&spec(settings), 128).unwrap();
    let (mut kept, mut between, mut divided) = (0, 0, 0);
    for (i, got) in got.iter().enumerate() {
        let plain = 1.0 / 5e5f64.powf(2.0 * i as f64 / 128.0);
        let wavelength = 2.0 * std::f64::consts::PI / plain;
        let want = if wavelength < original / high {
            kept += 1;
            plain
        } else if wavelength > original / low {
            divided += 1;
            plain / factor
        } else {
            between += 1;
            let smooth = (original / wavelength - low) / (high - low);
            (1.0 - smooth) * plain / factor + smooth * plain
        };
        assert!((got - want).abs() <= 1e-12 * want, "pair {i}: {got} for {want}");
        let (got, want) = (10_000.0 * got, 10_000.0 * want);
        assert!((got.cos() - want.cos()).abs() < 1e-6 && (got.sin() - want.sin()).abs() < 1e-6);
    }
    assert!(kept > 0 && between > 0 && divided > 0, "{kept} {between} {divided}");
}

#[test]
fn a_token_is_turned_by_the_same_bits_in_any_batch_and_on_any_threads() {
    let ids: Vec<u32> = (0..3000).map(|i| i * 37 % 16_384).collect();
    let (alone, threads) = (Engine::new(json!({})), Engine::on(json!({}), Threads::handle()));
    alone.ingest(&[A]);
    threads.ingest(&[A]);
    let (q, k) = turn(&alone, &ids);
    assert_eq!(turn(&threads, &ids), (q.clone(), k.clone()));
    let (few_q, few_k) = turn(&alone, &ids[..5]);
    assert_eq!((&few_q[..], &few_k[..]), (&q[..few_q.len()], &k[..few_k.len()]));
}

#[test]
fn local_layers_are_turned_by_their_own_unscaled_base() {
    let e = Engine::new(json!({
        "rope_theta": 1e6, "rope_scale": 8.0, "local_rope_theta": 100.0, "local_layers": [0, 2],
    }));
    e.ingest(&[A]);
    let bases = |theta: f64, scale: f64| -> Vec<f64> {
        (0..4).map(|i| theta.powf(-f64::from(i) / 4.0) / scale).collect()
    };
    let mut step = Step::new(1, 0, &[(A, MAIN, 1)]);
    step.options.pos_ids.push(77);
    for (layer, frequencies) in
        [bases(100.0, 1.0), bases(1e6, 8.0), bases(100.0, 1.0)].iter().enumerate()
    {
        let (mut q, mut k) = (noise(HEAD_DIM), noise(HEAD_DIM));
        e.planned(&step, |e, ctx| {
            let mut q = TensorViewMut::from_slice(&mut q, &[1, 1, HEAD_DIM]);
            let mut k = TensorViewMut::from_slice(&mut k, &[1, 1, HEAD_DIM]);
            e.api.apply_qk_layer(ctx, layer as u32, MAIN, &mut q, &mut k).unwrap();
        });
        for (got, want) in q.iter().zip(reference(&noise(HEAD_DIM), 77, frequencies, false)) {
            assert!((f64::from(*got) - want).abs() < 3e-7, "layer {layer}: {got} for {want}");
        }
        assert_eq!(q, k);
    }
}

#[test]
fn wrong_shapes_are_errors() {
    let e = Engine::new(json!({}));
    e.ingest(&[A]);
    e.planned(&Step::new(1, 0, &[(A, MAIN, 2)]), |e, ctx| {
        let (mut q, mut k) = (vec![0.0f32; 3 * HEAD_DIM], vec![0.0f32; 2 * HEAD_DIM]);
        let mut k = TensorViewMut::from_slice(&mut k, &[2, 1, HEAD_DIM]);
        let mut short = TensorViewMut::from_slice(&mut q[..HEAD_DIM], &[1, 1, HEAD_DIM]);
        let error = e.api.apply_qk(ctx, MAIN, &mut short, &mut k).unwrap_err();
        assert_eq!(
            error.to_string(),
            "q is f32 [1, 1, 8]: expected contiguous f32 [2 tokens, heads, 8] in host memory"
        );
        let mut longer = TensorViewMut::from_slice(&mut q, &[3, 1, HEAD_DIM]);
        e.api.apply_qk(ctx, MAIN, &mut longer, &mut k).unwrap();
        let error = e.api.apply_qk(ctx, OTHER, &mut longer, &mut k).unwrap_err();
        assert_eq!(error.to_string(), "plan label 1 has no rows in this step");
    });
}

#[test]
fn settings_that_cannot_be_are_named() {
    let message = |settings| build(settings, PlainHost::handle()).unwrap_err().to_string();
    let cases = [
        (
            json!({ "rotary_dim": 5 }),
            "rotary_dim = 5 must be even, and at most the head dimension 8",
        ),
        (json!({ "rotary_dim": 10 }), "rotary_dim = 10 must be even"),
        (json!({ "rope_theta": -1.0 }), "rope_theta = -1 must be above 0"),
        (json!({ "rope_scale": 0.0 }), "rope_scale = 0 must be above 0"),
        (json!({ "rope_freqs": [1.0] }), "rope_freqs has 1 values, but rotary_dim = 8 needs 4"),
        (json!({ "llama3_factor": 8.0 }), "llama3_low_freq_factor is missing"),
        (json!({ "local_layers": [0] }), "local_rope_theta is missing"),
        (json!({ "local_rope_theta": 1e4 }), "local_layers is missing"),
        (json!({ "local_rope_theta": 0.0, "local_layers": [] }), "local_rope_theta = 0 must be"),
        (json!({ "rotary_dims": 8 }), "unknown key `rotary_dims`; did you mean `rotary_dim`?"),
    ];
    for (settings, want) in cases {
        let got = message(settings);
        assert!(got.starts_with("[resources.pos]: ") && got.contains(want), "{got}");
    }
}

#[test]
fn the_fingerprint_changes_with_what_keys_depend_on() {
    let print = |settings| Engine::new(settings).pos.fingerprint().unwrap();
    let base = print(json!({}));
    assert_eq!(base, print(json!({ "rotary_dim": 8 })));
    for other in [
        json!({ "rope_theta": 2e4 }),
        json!({ "interleave": true }),
        json!({ "rotary_dim": 4 }),
        json!({ "rope_scale": 2.0 }),
        json!({ "scheme": "block" }),
        json!({ "local_rope_theta": 1e3, "local_layers": [0] }),
    ] {
        assert_ne!(base, print(other));
    }
}
