//! What a model file holds, and how text becomes token ids and back.
//!
//! - [`gguf`] reads GGUF files; [`weights`] gives the tensors of a GGUF file or of a Hugging Face
//!   directory under one set of names; [`config`] gives the architecture's numbers.
//! - [`tokenizer`] encodes text, [`detok`] turns a stream of ids back into text, [`chat`] renders
//!   a conversation with the template that came with the model, [`stop`] finds stop strings and
//!   [`tool_calls`] calls in what the model answers.
//! - [`package`] opens all of them from one path.
//!
//! Model files come from strangers: every reader here answers a broken file with one line that
//! names the key or tensor, never with a panic or an allocation that the file's size does not
//! justify.
#![forbid(unsafe_code)]

pub mod bytes;
pub mod chat;
pub mod config;
pub mod decoder;
pub mod detok;
pub mod error;
pub mod generation;
pub mod gguf;
pub mod node;
pub mod package;
pub mod reasoning;
pub mod stop;
#[cfg(feature = "testing")]
pub mod testing;
pub mod tokenizer;
pub mod tool_calls;
pub mod weights;

pub use bytes::SharedBytes;
pub use chat::{ChatInput, ChatTemplate};
pub use config::{
    Activation, Architecture, LocalLayers, ModelConfig, RopeConfig, RopeLayout, RopeScaling,
};
pub use decoder::{CudaDecoder, Decoder};
pub use detok::Detokenizer;
pub use error::{Error, ErrorKind, Result};
pub use generation::{FinishReason, GenerateRequest, RequestLabels, Token, Usage};
pub use gguf::Gguf;
pub use node::{
    Fault, NOT_SAMPLED, Node, NodeResource, NodeResources, Score, StepInput, StepOutput,
};
pub use package::ModelPackage;
pub use reasoning::{ReasoningDelta, ReasoningFormat, ReasoningParser};
pub use stop::StopStrings;
pub use tokenizer::Tokenizer;
pub use tool_calls::{ToolCall, ToolCallParser, ToolDelta, ToolFormat};
pub use weights::{Tensor, Weights};
