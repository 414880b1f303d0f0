//! The settings themselves.

use std::ops::RangeInclusive;

use super::{Access, Setting};
use crate::engine::Relief;

// Beyond these a value is a slip: each still fits every arithmetic done with it.
const COUNT: RangeInclusive<u64> = 1..=65_536;
const TOKENS: RangeInclusive<u64> = 1..=(1 << 24);
const SECONDS: RangeInclusive<u64> = 0..=86_400;
const BYTES: RangeInclusive<u64> = 1024..=(1 << 40);

/// Tables that settings stand in, each with what it is about.
pub const TABLES: &[(&str, &str)] = &[
    ("engine", "How models are run"),
    ("model", "Which model is run"),
    ("server", "How `engine-host serve` answers"),
    ("log", "What is told on standard error"),
];

/// All settings, in the order of the reference page.
pub const SETTINGS: &[Setting] = &[
    Setting {
        table: "engine",
        key: "device",
        flag: "device",
        help: "Where the model runs: \"cpu\", or \"cuda:N\" for the N-th GPU",
        default: "\"cpu\"",
        access: Access::Text(
            |c| Some(c.engine.device.to_string()),
            |c, text| text.parse().map(|device| c.engine.device = device),
        ),
    },
    Setting {
        table: "engine",
        key: "kv_dtype",
        flag: "kv-dtype",
        help: "Element type of the KV cache",
        default: "\"bf16\"",
        access: Access::Choice(|c| &mut c.engine.kv_dtype),
    },
    Setting {
        table: "engine",
        key: "activations",
        flag: "activations",
        help: "How matrix products with quantized weights treat activations on the CPU: \"int8\" is faster and less exact",
        default: "\"float\"",
        access: Access::Choice(|c| &mut c.engine.activations),
    },
    Setting {
        table: "engine",
        key: "plugin_dirs",
        flag: "plugin-dirs",
        help: "Directories in which plugins are looked for, in order",
        default: "[\"plugins\"]",
        access: Access::Paths(|c| &mut c.engine.plugin_dirs),
    },
    Setting {
        table: "engine",
        key: "strict",
        flag: "strict",
        help: "Strict rules for who may write the plugin directories",
        default: "false",
        access: Access::Boolean(|c| &mut c.engine.strict),
    },
    Setting {
        table: "engine",
        key: "probe",
        flag: "probe",
        help: "Which plugins are loaded in a child process first",
        default: "\"unpinned\"",
        access: Access::Choice(|c| &mut c.engine.probe),
    },
    Setting {
        table: "engine",
        key: "threads",
        flag: "threads",
        help: "Threads of the host's pool",
        default: "as many as there are cores for this process",
        access: Access::Integer(1..=1024, |c| &mut c.engine.threads),
    },
    Setting {
        table: "engine",
        key: "pin_threads",
        flag: "pin-threads",
        help: "Keep each thread of the pool to a processor, where there are as many threads as cores or processors for this process",
        default: "true",
        access: Access::Boolean(|c| &mut c.engine.pin_threads),
    },
    Setting {
        table: "engine",
        key: "cpu_features",
        flag: "cpu-features",
        help: "Keeps all kernels to this level of CPU instructions: portable, avx2, avx512, ...",
        default: "the best that the CPU has",
        access: Access::Text(
            |c| c.engine.cpu_features.clone(),
            |c, text| {
                device::CpuFeatures::parse(text).map_err(|e| e.to_string())?;
                c.engine.cpu_features = Some(text.to_owned());
                Ok(())
            },
        ),
    },
    Setting {
        table: "engine",
        key: "preplan",
        flag: "preplan",
        help: "Plan a step while the one before it runs",
        default: "true",
        access: Access::Boolean(|c| &mut c.engine.preplan),
    },
    Setting {
        table: "engine",
        key: "run_ahead",
        flag: "run-ahead",
        help: "On a GPU, launch a step before what the one before it sampled has been read",
        default: "true",
        access: Access::Boolean(|c| &mut c.engine.run_ahead),
    },
    Setting {
        table: "engine",
        key: "pressure",
        flag: "pressure",
        help: "What makes room when a step does not fit, in order; without \"offload\", requests are computed again",
        default: "[\"evict\", \"offload\", \"recompute\"]",
        access: Access::Order(
            |c| c.engine.pressure.iter().map(ToString::to_string).collect(),
            |c, names| Relief::order(names).map(|order| c.engine.pressure = order),
        ),
    },
    Setting {
        table: "engine",
        key: "victims",
        flag: "victims",
        help: "Which running request gives way then: \"youngest\", \"lru\" (the one that was left out of most steps), or \"priority:KEY\" (the one that the resource KEY wants gone most)",
        default: "\"youngest\"",
        access: Access::Text(
            |c| Some(c.engine.victims.to_string()),
            |c, text| text.parse().map(|victims| c.engine.victims = victims),
        ),
    },
    Setting {
        table: "engine",
        key: "queue",
        flag: "queue",
        help: "Who may start before a request that waits for room: \"strict\" for nobody, or \"skip:N\" for N requests, and then nobody",
        default: "\"strict\"",
        access: Access::Text(
            |c| Some(c.engine.queue.to_string()),
            |c, text| text.parse().map(|queue| c.engine.queue = queue),
        ),
    },
    Setting {
        table: "engine",
        key: "transfer",
        flag: "transfer",
        help: "How requests move between engines: see `prefill`",
        default: "\"off\"",
        access: Access::Choice(|c| &mut c.engine.transfer),
    },
    Setting {
        table: "engine",
        key: "transfer_directory",
        flag: "transfer-directory",
        help: "Where memory that processes share lies",
        default: "\"/dev/shm\"",
        access: Access::Path(|c| &mut c.engine.transfer_directory),
    },
    Setting {
        table: "engine",
        key: "cuda_graphs",
        flag: "cuda-graphs",
        help: "On a GPU, capture decode steps and replay them",
        default: "true",
        access: Access::Boolean(|c| &mut c.engine.cuda_graphs),
    },
    Setting {
        table: "engine",
        key: "batch_invariant",
        flag: "batch-invariant",
        help: "On a GPU, results that do not depend on what runs beside a request; slower",
        default: "false",
        access: Access::Boolean(|c| &mut c.engine.batch_invariant),
    },
    Setting {
        table: "engine",
        key: "watchdog",
        flag: "watchdog",
        help: "Seconds after which a call that has not come back is logged; 0 for never",
        default: "10",
        access: Access::Integer(SECONDS, |c| &mut c.engine.watchdog),
    },
    Setting {
        table: "engine",
        key: "max_batch",
        flag: "max-batch",
        help: "Requests in one step at most",
        default: "64",
        access: Access::Integer(COUNT, |c| &mut c.engine.max_batch),
    },
    Setting {
        table: "engine",
        key: "max_batch_tokens",
        flag: "max-batch-tokens",
        help: "Tokens in one step at most: the budget of chunked prefill",
        default: "512",
        access: Access::Integer(TOKENS, |c| &mut c.engine.max_batch_tokens),
    },
    Setting {
        table: "engine",
        key: "max_model_len",
        flag: "max-model-len",
        help: "Tokens of one request at most, prompt and completion together",
        default: "the model's limit",
        access: Access::Integer(TOKENS, |c| &mut c.engine.max_model_len),
    },
    Setting {
        table: "model",
        key: "path",
        flag: "model-path",
        help: "A GGUF file, or a directory in Hugging Face layout with safetensors",
        default: "$ENGINE_HOST_MODEL, else what `cargo xtask fetch-model` keeps",
        access: Access::Path(|c| &mut c.model.path),
    },
    Setting {
        table: "server",
        key: "host",
        flag: "host",
        help: "Address to listen on; other machines reach the server only if this is not a loopback address",
        default: "\"127.0.0.1\"",
        access: Access::Text(
            |c| Some(c.server.host.to_string()),
            |c, text| {
                let address = if text == "localhost" { "127.0.0.1" } else { text };
                c.server.host = address.parse().map_err(|_| {
                    format!("host = {text:?} in [server] is not an IP address, such as \"127.0.0.1\" or \"::\"")
                })?;
                Ok(())
            },
        ),
    },
    Setting {
        table: "server",
        key: "port",
        flag: "port",
        help: "Port to listen on; 0 for one that is free, which the log tells",
        default: "8000",
        access: Access::Integer(0..=65_535, |c| &mut c.server.port),
    },
    Setting {
        table: "server",
        key: "served_model_name",
        flag: "served-model-name",
        help: "Names that requests may call the model by; answers carry the first",
        default: "the name of the model's file without its ending",
        access: Access::Texts(|c| &mut c.server.served_model_name),
    },
    Setting {
        table: "server",
        key: "api_keys",
        flag: "api-key",
        help: "Keys, one of which every request must carry as a bearer token; never shown. On a command line others can see them: prefer the environment or api_key_file",
        default: "[]",
        access: Access::Secrets(|c| &mut c.server.api_keys),
    },
    Setting {
        table: "server",
        key: "api_key_file",
        flag: "api-key-file",
        help: "A file with further keys, one a line; lines that begin with # do not count",
        default: "none",
        access: Access::Path(|c| &mut c.server.api_key_file),
    },
    Setting {
        table: "server",
        key: "max_waiting",
        flag: "max-waiting",
        help: "Requests that may wait beside those that a step holds; one more is answered with 429",
        default: "256",
        access: Access::Integer(0..=1_000_000, |c| &mut c.server.max_waiting),
    },
    Setting {
        table: "server",
        key: "max_choices",
        flag: "max-choices",
        help: "Answers that one HTTP request may ask for: prompts times n",
        default: "64",
        access: Access::Integer(COUNT, |c| &mut c.server.max_choices),
    },
    Setting {
        table: "server",
        key: "max_connections",
        flag: "max-connections",
        help: "Connections at once; further ones wait to be accepted",
        default: "1024",
        access: Access::Integer(COUNT, |c| &mut c.server.max_connections),
    },
    Setting {
        table: "server",
        key: "max_body_bytes",
        flag: "max-body-bytes",
        help: "Bytes of a request's body at most; more is answered with 413",
        default: "4194304",
        access: Access::Integer(BYTES, |c| &mut c.server.max_body_bytes),
    },
    Setting {
        table: "server",
        key: "max_header_bytes",
        flag: "max-header-bytes",
        help: "Bytes of a request's head at most; more is answered with 431",
        default: "32768",
        // hyper needs 8 KiB for its own reading.
        access: Access::Integer(8192..=(1 << 24), |c| &mut c.server.max_header_bytes),
    },
    Setting {
        table: "server",
        key: "read_timeout",
        flag: "read-timeout",
        help: "Seconds that a request's head, and again its body, may take to arrive; 0 for any time",
        default: "30",
        access: Access::Integer(SECONDS, |c| &mut c.server.read_timeout),
    },
    Setting {
        table: "server",
        key: "write_timeout",
        flag: "write-timeout",
        help: "Seconds that a client may take nothing of an answer before its connection is closed; 0 for any time",
        default: "60",
        access: Access::Integer(SECONDS, |c| &mut c.server.write_timeout),
    },
    Setting {
        table: "server",
        key: "request_timeout",
        flag: "request-timeout",
        help: "Seconds that a request may take, waiting included, unless it asks for less; 0 for any time",
        default: "0",
        access: Access::Integer(SECONDS, |c| &mut c.server.request_timeout),
    },
    Setting {
        table: "server",
        key: "stream_buffer",
        flag: "stream-buffer",
        help: "Tokens kept for a client that reads slowly; one that falls further behind is disconnected",
        default: "4096",
        access: Access::Integer(1..=(1 << 24), |c| &mut c.server.stream_buffer),
    },
    Setting {
        table: "server",
        key: "drain_timeout",
        flag: "drain-timeout",
        help: "Seconds that running requests have to finish after SIGTERM",
        default: "30",
        access: Access::Integer(SECONDS, |c| &mut c.server.drain_timeout),
    },
    Setting {
        table: "server",
        key: "cors_origins",
        flag: "cors-origins",
        help: "Origins whose pages may use the server from a browser; \"*\" for all",
        default: "[]",
        access: Access::Texts(|c| &mut c.server.cors_origins),
    },
    Setting {
        table: "server",
        key: "tool_parser",
        flag: "tool-parser",
        help: "Format of the model's tool calls; \"auto\" takes it from the chat template",
        default: "\"auto\"",
        access: Access::Choice(|c| &mut c.server.tool_parser),
    },
    Setting {
        table: "server",
        key: "reasoning_parser",
        flag: "reasoning-parser",
        help: "Format of what the model thinks before it answers; \"auto\" takes it from the chat template",
        default: "\"auto\"",
        access: Access::Choice(|c| &mut c.server.reasoning_parser),
    },
    Setting {
        table: "server",
        key: "unknown_fields",
        flag: "unknown-fields",
        help: "What happens to a request with a field that the server does not know",
        default: "\"refuse\"",
        access: Access::Choice(|c| &mut c.server.unknown_fields),
    },
    Setting {
        table: "server",
        key: "log_prompts",
        flag: "log-prompts",
        help: "Write prompts and completions into the log",
        default: "false",
        access: Access::Boolean(|c| &mut c.server.log_prompts),
    },
    Setting {
        table: "log",
        key: "filter",
        flag: "log",
        help: "What is logged, such as info or engine_host=debug",
        default: "\"warn\"",
        access: Access::Text(
            |c| Some(c.log.filter.clone()),
            |c, text| {
                tracing_subscriber::EnvFilter::try_new(text)
                    .map_err(|e| format!("{text:?} is no log filter: {e}"))?;
                text.clone_into(&mut c.log.filter);
                Ok(())
            },
        ),
    },
    Setting {
        table: "log",
        key: "format",
        flag: "log-format",
        help: "How a line of the log is written",
        default: "\"text\"",
        access: Access::Choice(|c| &mut c.log.format),
    },
];
