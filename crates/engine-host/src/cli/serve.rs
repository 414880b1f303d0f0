//! `engine-host serve`: loads a model and answers OpenAI's API over HTTP.

use std::net::SocketAddr;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use model::{ReasoningFormat, ToolFormat};
use server::engine::{self, Failure, Handle};
use server::{ApiKey, App, Format, Model, ServerOptions};
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

use super::ConfigArg;
use super::settings::ServerFlags;
use crate::config::{Config, ReasoningParser, ServerConfig, ToolParser};
use crate::driver::Driver;
use crate::error::{Error, ErrorKind, Result};
use crate::setup::{self, Loaded};

/// How often the end of the last request is looked for while draining.
const DRAIN_TICK: Duration = Duration::from_millis(20);

#[derive(Args)]
pub struct ServeArgs {
    #[command(flatten)]
    config: ConfigArg,
    #[command(flatten)]
    server: ServerFlags,
}

impl ServeArgs {
    pub fn config_path(&self) -> Option<&Path> {
        self.config.path()
    }
}

fn options(config: &ServerConfig) -> Result<ServerOptions> {
    let seconds = Duration::from_secs;
    let unless_zero = |time: u64| (time > 0).then(|| seconds(time));
    let keys = config.all_keys()?;
    Ok(ServerOptions {
        host: config.host,
        port: config.port,
        api_keys: keys.iter().map(|key| ApiKey(key.to_owned())).collect(),
        served_model_name: config.served_model_name.clone(),
        max_waiting: config.max_waiting,
        max_choices: config.max_choices,
        max_body_bytes: config.max_body_bytes,
        max_header_bytes: config.max_header_bytes,
        max_connections: config.max_connections,
        read_timeout: unless_zero(config.read_timeout),
        write_timeout: unless_zero(config.write_timeout),
        request_timeout: unless_zero(config.request_timeout),
        stream_buffer: config.stream_buffer,
        drain_timeout: seconds(config.drain_timeout),
        cors_origins: config.cors_origins.clone(),
        log_prompts: config.log_prompts,
        unknown_fields: config.unknown_fields,
        tool_calls: match config.tool_parser {
            ToolParser::Auto => Format::OfTemplate,
            ToolParser::None => Format::AsText,
            ToolParser::Hermes => Format::Is(ToolFormat::Hermes),
            ToolParser::Llama3 => Format::Is(ToolFormat::Llama3),
            ToolParser::Qwen3Coder => Format::Is(ToolFormat::Qwen3Coder),
        },
        reasoning: match config.reasoning_parser {
            ReasoningParser::Auto => Format::OfTemplate,
            ReasoningParser::None => Format::AsText,
            ReasoningParser::Think => Format::Is(ReasoningFormat::Think),
        },
    })
}

/// Serves until a signal ends it.
pub fn run(args: &ServeArgs) -> Result<ExitCode> {
    let config = args.config.load_with(&args.server.0)?;
    let app = App::new(options(&config.server)?);
    let runtime = runtime()?;
    let (host, port) = (app.options.host, app.options.port);
    let listener = runtime.block_on(TcpListener::bind((host, port))).map_err(|e| {
        Error::new(ErrorKind::Unavailable, format!("cannot listen on {host}:{port}: {e}"))
    })?;
    let address = listener.local_addr().map_err(internal)?;
    let (stop, stopped) = watch::channel(false);
    let router = server::routes::router(&app);
    let serving = runtime.spawn(server::listen::serve(app.clone(), listener, router, stopped));
    note!("listening on http://{address}");
    runtime.spawn(watch_signals(app.clone()));

    let done = serve(&config, &app, address);
    app.drain();
    let _ = stop.send(true);
    let _ = runtime.block_on(serving);
    runtime.shutdown_timeout(Duration::from_secs(1));
    done.map(|()| ExitCode::SUCCESS)
}

/// Two threads answer as many readers as a model on this machine can serve, and leave the rest to it.
fn runtime() -> Result<Runtime> {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    builder.worker_threads(2).thread_name("http").enable_all().build().map_err(internal)
}

fn internal(e: std::io::Error) -> Error {
    Error::new(ErrorKind::Internal, e.to_string())
}

/// Loads the model and runs the engine on this thread until it is told to stop.
fn serve(config: &Config, app: &Arc<App>, address: SocketAddr) -> Result<()> {
    let mut tell = |done: usize, total: usize| app.set_progress(done, total);
    let Loaded { engine, model } = setup::load(config, &mut tell)?;
    let limits = engine.limits();
    let (handle, inbox) = engine::channel(engine::Limits {
        requests: limits.max_batch as usize + app.options.max_waiting,
        buffered_events: app.options.stream_buffer,
    });
    let driver = Driver::new(engine, inbox);
    app.set_model(Model {
        package: Arc::new(model),
        engine: handle,
        names: names(&app.options, &config.model.path),
        max_model_len: limits.max_model_len,
        max_num_seqs: limits.max_batch,
        max_batch_tokens: limits.max_batch_tokens,
    });
    if app.is_draining() {
        return Ok(());
    }
    note!("ready: http://{address}/v1");
    driver.run();
    Ok(())
}

fn names(options: &ServerOptions, path: &Path) -> Vec<String> {
    if !options.served_model_name.is_empty() {
        return options.served_model_name.clone();
    }
    let name = if path.is_dir() { path.file_name() } else { path.file_stem() };
    vec![name.map_or_else(|| "model".into(), |name| name.to_string_lossy().into_owned())]
}

/// The first signal drains, a second one ends at once.
async fn watch_signals(app: Arc<App>) {
    let (Ok(mut term), Ok(mut int)) =
        (signal(SignalKind::terminate()), signal(SignalKind::interrupt()))
    else {
        return;
    };
    let mut next = async || tokio::select! { _ = term.recv() => (), _ = int.recv() => () };
    next().await;
    app.drain();
    let Some(model) = app.loaded_model() else {
        note!("stopped while the model was being loaded");
        std::process::exit(0);
    };
    let time = app.options.drain_timeout;
    note!("shutting down: {} requests may finish within {time:?}", model.engine.in_flight());
    tokio::select! {
        () = until_idle(&model.engine) => {}
        () = tokio::time::sleep(time) => {}
        () = next() => {}
    }
    model.engine.stop(Failure::new(503, "the server is shutting down"));
    next().await;
    std::process::exit(1);
}

async fn until_idle(engine: &Handle) {
    while engine.in_flight() > 0 {
        tokio::time::sleep(DRAIN_TICK).await;
    }
}
