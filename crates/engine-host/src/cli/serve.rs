//! `engine-host serve`: loads a model and answers OpenAI's API over HTTP.

use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use server::engine::{self, Failure, Handle};
use server::{ApiKey, App, Model, ServerOptions};
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

use super::ConfigArg;
use crate::config::Config;
use crate::driver::Driver;
use crate::error::{Error, ErrorKind, Result};
use crate::setup::{self, Loaded};

/// How often the end of the last request is looked for while draining.
const DRAIN_TICK: Duration = Duration::from_millis(20);

#[derive(Args)]
pub struct ServeArgs {
    #[command(flatten)]
    config: ConfigArg,
    /// Address to listen on
    #[arg(long, env = "ENGINE_HOST_HOST", default_value = "127.0.0.1")]
    host: IpAddr,
    /// Port to listen on; 0 takes one that is free
    #[arg(long, env = "ENGINE_HOST_PORT", default_value_t = 8000)]
    port: u16,
    /// Requests must carry this key; may be given more than once
    #[arg(long, env = "ENGINE_HOST_API_KEY", hide_env_values = true, value_delimiter = ',')]
    api_key: Vec<String>,
    /// What requests may call the model; may be given more than once
    #[arg(long, value_name = "NAME")]
    served_model_name: Vec<String>,
}

impl ServeArgs {
    fn options(&self) -> ServerOptions {
        ServerOptions {
            host: self.host,
            port: self.port,
            api_keys: self.api_key.iter().cloned().map(ApiKey).collect(),
            served_model_name: self.served_model_name.clone(),
            ..ServerOptions::default()
        }
    }
}

/// Serves until a signal ends it.
pub fn run(args: &ServeArgs) -> Result<ExitCode> {
    let config = args.config.load()?;
    let app = App::new(args.options());
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
    Driver::new(engine, inbox).run();
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
