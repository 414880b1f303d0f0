//! What all routes share: settings, the stage that the server is in, and once it is loaded the model.

use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{SystemTime, UNIX_EPOCH};

use model::ModelPackage;

use crate::engine::Handle;
use crate::error::{ApiError, Result};
use crate::options::ServerOptions;

/// A loaded model, and the way to its engine.
#[derive(Debug)]
pub struct Model {
    /// Tokenizer and chat template.
    pub package: Arc<ModelPackage>,
    /// Takes requests.
    pub engine: Handle,
    /// Names that requests may call it by, the first in answers; at least one.
    pub names: Vec<String>,
    /// Tokens of one request at most, prompt and answer together.
    pub max_model_len: u32,
    /// Requests in one step at most.
    pub max_num_seqs: u32,
    /// Tokens in one step at most.
    pub max_batch_tokens: u32,
}

/// State of the server.
#[derive(Debug)]
pub struct App {
    pub options: ServerOptions,
    /// Bytes of the model that are loaded, and all of them.
    loaded: AtomicUsize,
    total: AtomicUsize,
    model: OnceLock<Model>,
    is_draining: AtomicBool,
    /// How often the prefix cache was reset.
    resets: AtomicU64,
    started: SystemTime,
    answers: AtomicU64,
    random: RandomState,
}

impl App {
    pub fn new(options: ServerOptions) -> Arc<Self> {
        Arc::new(Self {
            options,
            loaded: AtomicUsize::new(0),
            total: AtomicUsize::new(0),
            model: OnceLock::new(),
            is_draining: AtomicBool::new(false),
            resets: AtomicU64::new(0),
            started: SystemTime::now(),
            answers: AtomicU64::new(0),
            random: RandomState::new(),
        })
    }

    /// Tells how far the model is loaded.
    pub fn set_progress(&self, done: usize, total: usize) {
        self.loaded.store(done, Ordering::Relaxed);
        self.total.store(total, Ordering::Relaxed);
    }

    /// Bytes loaded, and all of them as far as that is known.
    pub fn progress(&self) -> (usize, usize) {
        (self.loaded.load(Ordering::Relaxed), self.total.load(Ordering::Relaxed))
    }

    /// Says that the model is there. Only the first one counts.
    pub fn set_model(&self, model: Model) {
        let _ = self.model.set(model);
    }

    /// The model, once it is loaded.
    pub fn loaded_model(&self) -> Option<&Model> {
        self.model.get()
    }

    /// The model.
    ///
    /// # Errors
    /// 503 while it is being loaded.
    pub fn model(&self) -> Result<&Model> {
        self.model.get().ok_or_else(|| {
            let (done, total) = self.progress();
            let percent = (100 * done).checked_div(total).unwrap_or(0);
            let message = format!("the model is being loaded ({percent} %): try again soon");
            ApiError::new(503, message).with_retry_after(1)
        })
    }

    /// The model, for a new generation.
    ///
    /// # Errors
    /// 503 while it is being loaded, and once the server drains.
    pub fn model_to_run(&self) -> Result<&Model> {
        if self.is_draining() {
            let message = "the server is shutting down and takes no new requests";
            return Err(ApiError::new(503, message).with_retry_after(1));
        }
        self.model()
    }

    /// From now on no new generation begins.
    pub fn drain(&self) {
        self.is_draining.store(true, Ordering::Release);
    }

    pub fn is_draining(&self) -> bool {
        self.is_draining.load(Ordering::Acquire)
    }

    /// From now on no request reads what caches hold of earlier ones; that is dropped as room is needed.
    pub fn reset_prefix_cache(&self) {
        self.resets.fetch_add(1, Ordering::AcqRel);
    }

    /// The salt of a request that brings `own`, perhaps empty.
    pub fn cache_salt(&self, own: &str) -> String {
        match (self.resets.load(Ordering::Acquire), own) {
            (0, "") => String::new(),
            (resets, own) => format!("{resets}:{own}"),
        }
    }

    /// When the server was started, in seconds since 1970.
    pub fn started(&self) -> u64 {
        seconds(self.started)
    }

    /// An id for an answer, which no other answer of any server has.
    pub fn answer_id(&self, prefix: &str) -> String {
        format!("{prefix}-{:016x}{:016x}", self.random.hash_one(0), self.random_number())
    }

    /// A number that nobody can foretell.
    pub fn random_number(&self) -> u64 {
        let count = self.answers.fetch_add(1, Ordering::Relaxed);
        self.random.hash_one((1, count))
    }
}

/// Seconds since 1970.
pub fn now() -> u64 {
    seconds(SystemTime::now())
}

fn seconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).map_or(0, |t| t.as_secs())
}
