//! A whole model from one path: a GGUF file or a Hugging Face directory.

use std::path::Path;
use std::sync::Arc;

use serde_json::Value;

use crate::chat::ChatTemplate;
use crate::config::ModelConfig;
use crate::error::{Error, ErrorKind, Result};
use crate::gguf::Gguf;
use crate::tokenizer::Tokenizer;
use crate::weights::Weights;

/// Everything that the files of a model hold.
#[derive(Debug)]
pub struct ModelPackage {
    pub config: ModelConfig,
    pub weights: Weights,
    pub tokenizer: Arc<Tokenizer>,
    /// A model without a template, or with a broken one, still completes text.
    chat_template: Result<ChatTemplate>,
}

impl ModelPackage {
    /// Opens a GGUF file, or a directory with `config.json`, safetensors and `tokenizer.json`.
    ///
    /// # Errors
    /// One line naming the path and what is wrong there.
    pub fn open(path: &Path) -> Result<Self> {
        let opened = if path.is_dir() { Self::open_dir(path) } else { Self::open_gguf(path) };
        let package = opened?;
        let (tokens, rows) = (package.tokenizer.vocab_size(), package.config.vocab);
        if tokens > rows {
            return Err(Error::tokenizer(format!(
                "{}: the tokenizer has {tokens} tokens, the model's embedding only {rows} rows",
                path.display()
            )));
        }
        Ok(package)
    }

    /// The chat template, or why there is none.
    pub fn chat_template(&self) -> Result<&ChatTemplate> {
        self.chat_template.as_ref().map_err(Clone::clone)
    }

    fn open_gguf(path: &Path) -> Result<Self> {
        let gguf = Gguf::open(path)?;
        Self::from_gguf(&gguf).map_err(|e| e.within(path.display()))
    }

    /// Everything in a GGUF file that has been opened already.
    pub fn from_gguf(gguf: &Gguf) -> Result<Self> {
        let config = ModelConfig::from_gguf(gguf)?;
        let mut tokenizer = Tokenizer::from_gguf(gguf)?;
        tokenizer.add_eos_ids(&config.eos);
        Ok(Self {
            weights: Weights::from_gguf(gguf, &config)?,
            tokenizer: Arc::new(tokenizer),
            chat_template: ChatTemplate::from_gguf(gguf).and_then(present),
            config,
        })
    }

    fn open_dir(dir: &Path) -> Result<Self> {
        let within = |e: Error| e.within(dir.display());
        let config_json = read_json(&dir.join("config.json"))?;
        let generation = read_json_if_present(&dir.join("generation_config.json"))?;
        let config = ModelConfig::from_hf(&config_json, generation.as_ref()).map_err(within)?;
        let tokenizer_config = read_json_if_present(&dir.join("tokenizer_config.json"))?;
        let tokenizer_json = read(&dir.join("tokenizer.json"))?;
        let mut tokenizer =
            Tokenizer::from_json(&tokenizer_json, tokenizer_config.as_ref()).map_err(within)?;
        tokenizer.add_eos_ids(&config.eos);
        Ok(Self {
            weights: Weights::from_safetensors(dir, &config)?,
            tokenizer: Arc::new(tokenizer),
            chat_template: ChatTemplate::from_hf_dir(dir).and_then(present).map_err(within),
            config,
        })
    }
}

fn present(template: Option<ChatTemplate>) -> Result<ChatTemplate> {
    template.ok_or_else(|| {
        Error::template("the model has no chat template; send a text to complete instead")
    })
}

pub(crate) fn read_json(path: &Path) -> Result<Value> {
    serde_json::from_slice(&read(path)?)
        .map_err(|e| Error::format(format!("{}: {e}", path.display())))
}

pub(crate) fn read_json_if_present(path: &Path) -> Result<Option<Value>> {
    if path.exists() { read_json(path).map(Some) } else { Ok(None) }
}

pub(crate) fn read_text_if_present(path: &Path) -> Result<Option<String>> {
    if !path.exists() {
        return Ok(None);
    }
    String::from_utf8(read(path)?)
        .map(Some)
        .map_err(|_| Error::format(format!("{} is not UTF-8", path.display())))
}

fn read(path: &Path) -> Result<Vec<u8>> {
    std::fs::read(path)
        .map_err(|e| Error::new(ErrorKind::Io, format!("cannot read {}: {e}", path.display())))
}
