//! The weights of both formats under one set of names, and what is refused.

use std::fs;
use std::path::Path;

use model::testing::TinyModel;
use model::{Architecture, Gguf, ModelConfig, ModelPackage, Weights};
use serde_json::{Value, json};

const ALL: [Architecture; 3] = [Architecture::Llama, Architecture::Qwen2, Architecture::Qwen3];

fn untied(architecture: Architecture) -> TinyModel {
    let TinyModel { mut config, vocabulary, .. } = TinyModel::new(architecture, 5);
    config.tied_embeddings = false;
    TinyModel::with_config(config, vocabulary, 5)
}

fn gguf_package(tiny: &TinyModel) -> model::Result<ModelPackage> {
    ModelPackage::from_gguf(&Gguf::parse(tiny.gguf().build().into())?)
}

fn hf_dir(tiny: &TinyModel) -> tempfile::TempDir {
    let dir = tempfile::tempdir().expect("a directory");
    tiny.write_hf_dir(dir.path()).expect("a model in it");
    dir
}

#[track_caller]
fn refused<T: std::fmt::Debug>(result: model::Result<T>, parts: &[&str]) {
    let error = result.expect_err("a wrong model").to_string();
    assert!(!error.contains('\n'), "{error}");
    for part in parts {
        assert!(error.contains(part), "{part:?} is not in: {error}");
    }
}

#[test]
fn both_formats_give_the_model_that_was_written() {
    for tiny in ALL.into_iter().flat_map(|a| [TinyModel::new(a, 5), untied(a)]) {
        let dir = hf_dir(&tiny);
        let hf = ModelPackage::open(dir.path()).expect("the directory opens");
        let gguf = gguf_package(&tiny).expect("the file opens");
        for package in [&hf, &gguf] {
            assert_eq!(package.weights.iter().count(), tiny.tensors.len());
            let path_is_gguf = std::ptr::eq(package, &gguf);
            for tensor in &tiny.tensors {
                let loaded = package.weights.get(&tensor.name).expect("the tensor");
                assert_eq!(loaded.shape, tensor.shape);
                let mut expected = tensor.values.clone();
                if path_is_gguf && tiny.config.architecture == Architecture::Llama {
                    expected = interleave_heads(&tensor.name, expected, &tiny.config);
                }
                assert_eq!(loaded.to_f32().expect("values"), expected, "{}", tensor.name);
            }
            let head = package.weights.lm_head().expect("an output matrix").to_f32();
            let name = if tiny.config.tied_embeddings { "embed.weight" } else { "lm_head.weight" };
            assert_eq!(head.as_deref().ok(), tiny.values(name));
        }
        assert_eq!(hf.weights.total_bytes(), gguf.weights.total_bytes());
    }
}

/// What converters do to q and k of `llama` models: halves of each head become neighbours.
fn interleave_heads(name: &str, values: Vec<f32>, config: &ModelConfig) -> Vec<f32> {
    if !(name.ends_with("attn.q.weight") || name.ends_with("attn.k.weight")) {
        return values;
    }
    let (width, half) = (config.hidden, config.head_dim / 2);
    let mut out = Vec::new();
    for head in values.chunks(config.head_dim * width) {
        let (first, second) = head.split_at(half * width);
        for (a, b) in first.chunks(width).zip(second.chunks(width)) {
            out.extend_from_slice(a);
            out.extend_from_slice(b);
        }
    }
    out
}

#[test]
fn tied_embeddings_in_all_their_forms() {
    let set_tied = |dir: &Path, tied: bool| {
        let path = dir.join("config.json");
        let mut config: Value =
            serde_json::from_slice(&fs::read(&path).expect("config")).expect("JSON");
        config["tie_word_embeddings"] = json!(tied);
        fs::write(path, config.to_string()).expect("config");
    };
    // Tied, nothing stored.
    let tied = TinyModel::new(Architecture::Llama, 5);
    let dir = hf_dir(&tied);
    let package = ModelPackage::open(dir.path()).expect("a tied model");
    let head = package.weights.lm_head().and_then(|h| h.to_f32()).expect("the embedding");
    assert_eq!(Some(head.as_slice()), tied.values("embed.weight"));
    // The flag gone: nothing to compute logits with.
    set_tied(dir.path(), false);
    refused(ModelPackage::open(dir.path()), &["lm_head.weight", "tie_word_embeddings"]);
    // Tied, and stored all the same: the stored one counts.
    let stored = untied(Architecture::Llama);
    let dir = hf_dir(&stored);
    set_tied(dir.path(), true);
    let package = ModelPackage::open(dir.path()).expect("a stored output matrix");
    let head = package.weights.lm_head().and_then(|h| h.to_f32()).expect("the stored one");
    assert_eq!(Some(head.as_slice()), stored.values("lm_head.weight"));
}

#[test]
fn wrong_shapes_missing_and_surplus_tensors_are_named() {
    let original = TinyModel::new(Architecture::Qwen2, 5);

    let mut tiny = original.clone();
    let k = tiny.tensors.iter_mut().find(|t| t.name == "layers.1.attn.k.weight").expect("k");
    k.shape = vec![32, 16];
    let parts = ["[32, 16]", "[16, 32]"];
    refused(gguf_package(&tiny), &[&parts[..], &["blk.1.attn_k.weight"]].concat());
    let dir = hf_dir(&tiny);
    let name = ["model.layers.1.self_attn.k_proj.weight"];
    refused(ModelPackage::open(dir.path()), &[&parts[..], &name].concat());

    let mut tiny = original.clone();
    tiny.tensors.retain(|t| t.name != "layers.0.ffn.up.weight");
    refused(gguf_package(&tiny), &["blk.0.ffn_up.weight", "missing"]);

    let mut file = original.gguf();
    file.tensor("blk.0.attn_q.lora", &[1], 0, vec![0; 4]);
    let gguf = Gguf::parse(file.build().into()).expect("a readable file");
    refused(ModelPackage::from_gguf(&gguf), &["blk.0.attn_q.lora", "qwen2"]);
}

#[test]
fn sharded_directories() {
    let tiny = TinyModel::new(Architecture::Qwen3, 5);
    let dir = hf_dir(&tiny);
    let whole = ModelPackage::open(dir.path()).expect("one file").weights;
    let at = |name: &str| dir.path().join(name);
    let bytes = fs::read(at("model.safetensors")).expect("the file");
    let tensors = safetensors::SafeTensors::deserialize(&bytes).expect("safetensors");
    let mut map = serde_json::Map::new();
    for (shard, odd) in [("a.safetensors", false), ("b.safetensors", true)] {
        let part = tensors.iter().enumerate().filter(|(i, _)| (i % 2 == 1) == odd);
        let part: Vec<_> = part.map(|(_, (name, view))| (name.to_owned(), view)).collect();
        map.extend(part.iter().map(|(name, _)| (name.clone(), json!(shard))));
        fs::write(at(shard), safetensors::serialize(part, None).expect("a shard")).expect("write");
    }
    fs::remove_file(at("model.safetensors")).expect("remove");
    let index = at("model.safetensors.index.json");
    fs::write(&index, json!({ "weight_map": map }).to_string()).expect("write");
    let sharded = ModelPackage::open(dir.path()).expect("two files").weights;
    for ((name, a), (other, b)) in whole.iter().zip(sharded.iter()) {
        assert_eq!((name, &*a.bytes), (other, &*b.bytes));
    }

    let name = "model.norm.weight";
    for (file, parts) in [
        ("../a.safetensors", vec![name, "no file name"]),
        ("/etc/hostname", vec![name, "no file name"]),
        ("c.safetensors", vec!["c.safetensors"]),
    ] {
        let mut broken = map.clone();
        broken.insert(name.to_owned(), json!(file));
        fs::write(&index, json!({ "weight_map": broken }).to_string()).expect("write");
        refused(ModelPackage::open(dir.path()), &parts);
    }
    let mut broken = map.clone();
    broken.insert("model.norm2.weight".to_owned(), json!("a.safetensors"));
    fs::write(&index, json!({ "weight_map": broken }).to_string()).expect("write");
    refused(ModelPackage::open(dir.path()), &["model.norm2.weight", "a.safetensors"]);
    fs::remove_file(&index).expect("remove");
    refused(ModelPackage::open(dir.path()), &["neither model.safetensors nor"]);
}

#[test]
fn half_precision_and_damaged_safetensors() {
    let tiny = TinyModel::new(Architecture::Llama, 5);
    let dir = hf_dir(&tiny);
    let path = dir.path().join("model.safetensors");
    let whole = fs::read(&path).expect("the file");

    let bf16: Vec<(String, Vec<usize>, Vec<u8>)> = tiny
        .tensors
        .iter()
        .map(|t| {
            let bytes =
                t.values.iter().flat_map(|x| (x.to_bits() >> 16).to_le_bytes()[..2].to_vec());
            (t.hf.clone(), t.shape.clone(), bytes.collect())
        })
        .collect();
    let views = bf16.iter().map(|(name, shape, bytes)| {
        let dtype = safetensors::Dtype::BF16;
        let view = safetensors::tensor::TensorView::new(dtype, shape.clone(), bytes);
        (name.clone(), view.expect("a view"))
    });
    fs::write(&path, safetensors::serialize(views, None).expect("a file")).expect("write");
    let weights = Weights::from_safetensors(dir.path(), &tiny.config).expect("bf16 weights");
    for tensor in &tiny.tensors {
        let loaded = weights.get(&tensor.name).and_then(|t| t.to_f32()).expect("values");
        for (got, full) in loaded.iter().zip(&tensor.values) {
            assert_eq!(got.to_bits(), full.to_bits() >> 16 << 16);
        }
    }

    for len in [0, 1, 7, 8, 9, 100, whole.len() / 2, whole.len() - 1] {
        fs::write(&path, &whole[..len]).expect("write");
        refused(Weights::from_safetensors(dir.path(), &tiny.config), &["model.safetensors"]);
    }
    let mut broken = whole;
    broken[..8].copy_from_slice(&u64::MAX.to_le_bytes());
    fs::write(&path, &broken).expect("write");
    refused(Weights::from_safetensors(dir.path(), &tiny.config), &["model.safetensors"]);
}
