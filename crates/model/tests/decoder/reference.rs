//! The whole model in float64, written straight from its definition: no cache, no batching.

use model::testing::TinyModel;
use model::{Activation, ModelConfig, RopeLayout, RopeScaling};

type Vector = Vec<f64>;

/// The logits after each of `tokens`.
pub fn logits(model: &TinyModel, tokens: &[u32]) -> Vec<Vector> {
    let c = &model.config;
    let embed = matrix(model, "embed.weight", c.hidden);
    let scale = c.embedding_scale.map_or(1.0, f64::from);
    let row = |&t: &u32| embed[t as usize].iter().map(|x| x * scale).collect();
    let mut x: Vec<Vector> = tokens.iter().map(row).collect();
    for n in 0..c.layers {
        let name = |part: &str| format!("layers.{n}.{part}");
        let heads = |part: &str, x: &Vector| {
            let mut y = apply(&matrix(model, &name(&format!("attn.{part}.weight")), c.hidden), x);
            if c.qkv_bias {
                add(&mut y, &vector(model, &name(&format!("attn.{part}.bias"))));
            }
            y.chunks(c.head_dim).map(<[f64]>::to_vec).collect::<Vec<Vector>>()
        };
        let turned = |part: &str, position: usize, x: &Vector| {
            let mut heads = heads(part, x);
            for head in &mut heads {
                if c.qk_norm {
                    *head =
                        norm(c, head, &vector(model, &name(&format!("attn.{part}_norm.weight"))));
                }
                rope(c, n, head, position);
            }
            heads
        };
        let attn_norm = vector(model, &name("attn_norm.weight"));
        let normed: Vec<Vector> = x.iter().map(|x| norm(c, x, &attn_norm)).collect();
        let k: Vec<_> = normed.iter().enumerate().map(|(p, x)| turned("k", p, x)).collect();
        let v: Vec<_> = normed.iter().map(|x| heads("v", x)).collect();
        let o = matrix(model, &name("attn.o.weight"), c.q_width());
        for (p, x) in x.iter_mut().enumerate() {
            let q = turned("q", p, &normed[p]);
            let mut mixed = Vector::new();
            for (h, q) in q.iter().enumerate() {
                let kv = h / (c.heads / c.kv_heads);
                let scale = c.attention_scale.map_or((c.head_dim as f64).powf(-0.5), f64::from);
                let cap = |score: f64| soft_cap(score, c.attention_softcap);
                let first = window(c, n).map_or(0, |window| (p + 1).saturating_sub(window));
                let score = |s: usize| cap(dot(q, &k[s][kv]) * scale);
                let scores: Vector = (first..=p).map(score).collect();
                let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let weights: Vector = scores.iter().map(|s| (s - max).exp()).collect();
                let sum: f64 = weights.iter().sum();
                let value =
                    |i| (first..=p).map(|s| weights[s - first] * v[s][kv][i]).sum::<f64>() / sum;
                mixed.extend((0..c.head_dim).map(value));
            }
            add(x, &post_norm(model, &name("attn_post_norm.weight"), apply(&o, &mixed)));
        }
        let ffn_norm = vector(model, &name("ffn_norm.weight"));
        let gate = matrix(model, &name("ffn.gate.weight"), c.hidden);
        let up = matrix(model, &name("ffn.up.weight"), c.hidden);
        let down = matrix(model, &name("ffn.down.weight"), c.ffn);
        for x in &mut x {
            let normed = norm(c, x, &ffn_norm);
            let gate = apply(&gate, &normed).into_iter().map(|g| activate(c, g));
            let inner: Vector = gate.zip(apply(&up, &normed)).map(|(g, u)| g * u).collect();
            add(x, &post_norm(model, &name("ffn_post_norm.weight"), apply(&down, &inner)));
        }
    }
    let last = vector(model, "norm.weight");
    let head = match c.tied_embeddings {
        true => embed,
        false => matrix(model, "lm_head.weight", c.hidden),
    };
    let logits = |x: &Vector| {
        let row = apply(&head, &norm(c, x, &last)).into_iter();
        row.map(|logit| soft_cap(logit, c.logit_softcap)).collect()
    };
    x.iter().map(logits).collect()
}

fn soft_cap(x: f64, cap: Option<f32>) -> f64 {
    cap.map_or(x, |cap| f64::from(cap) * (x / f64::from(cap)).tanh())
}

fn activate(c: &ModelConfig, x: f64) -> f64 {
    match c.activation {
        Activation::Silu => x / (1.0 + (-x).exp()),
        Activation::GeluTanh => {
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
            0.5 * x * (1.0 + inner.tanh())
        }
    }
}

/// Tokens that a token sees in a layer, itself included.
fn window(c: &ModelConfig, layer: usize) -> Option<usize> {
    c.local.as_ref().filter(|local| local.layers.contains(&layer)).map(|local| local.window)
}

fn post_norm(model: &TinyModel, name: &str, x: Vector) -> Vector {
    match model.config.post_norms {
        true => norm(&model.config, &x, &vector(model, name)),
        false => x,
    }
}

fn vector(model: &TinyModel, name: &str) -> Vector {
    let values = model.values(name).unwrap_or_else(|| panic!("no {name}"));
    values.iter().map(|&x| f64::from(x)).collect()
}

fn matrix(model: &TinyModel, name: &str, inputs: usize) -> Vec<Vector> {
    vector(model, name).chunks(inputs).map(<[f64]>::to_vec).collect()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn apply(matrix: &[Vector], x: &[f64]) -> Vector {
    matrix.iter().map(|row| dot(row, x)).collect()
}

fn add(x: &mut [f64], y: &[f64]) {
    x.iter_mut().zip(y).for_each(|(x, y)| *x += y);
}

fn norm(c: &ModelConfig, x: &[f64], weight: &[f64]) -> Vector {
    let mean = dot(x, x) / x.len() as f64;
    let scale = 1.0 / (mean + f64::from(c.rms_eps)).sqrt();
    x.iter().zip(weight).map(|(x, w)| x * scale * w).collect()
}

fn rope(c: &ModelConfig, layer: usize, head: &mut [f64], position: usize) {
    let half = c.rope.dim / 2;
    let local = c.local.as_ref().filter(|local| local.layers.contains(&layer));
    let theta = local.map_or(c.rope.theta, |local| local.rope_theta);
    for i in 0..half {
        let divisor = match &c.rope.scaling {
            _ if local.is_some() => 1.0,
            RopeScaling::None => 1.0,
            RopeScaling::Linear { factor } => *factor,
            RopeScaling::Divisors(divisors) => f64::from(divisors[i]),
            other => panic!("no reference for {other:?}"),
        };
        let exponent = 2.0 * i as f64 / c.rope.dim as f64;
        let angle = position as f64 / theta.powf(exponent) / divisor;
        // A `TinyModel` states its weights half-split; those of a GGUF file are as the file has them.
        let (first, second) = match c.rope.layout {
            RopeLayout::HalfSplit => (i, half + i),
            RopeLayout::Interleaved => (2 * i, 2 * i + 1),
        };
        let (a, b) = (head[first], head[second]);
        head[first] = a * angle.cos() - b * angle.sin();
        head[second] = a * angle.sin() + b * angle.cos();
    }
}
