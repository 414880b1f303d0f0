//! What the server tells of itself, and the routes for its operator.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use serde_json::{Value, json};

use crate::app::{App, Model};
use crate::error::Result;

/// An entry of `/v1/models`.
pub fn model_entry(app: &App, model: &Model, name: &str) -> Value {
    json!({
        "id": name,
        "object": "model",
        "created": app.started(),
        "owned_by": "engine-host",
        "root": model.names[0],
        "parent": null,
        "max_model_len": model.max_model_len,
    })
}

/// `/server_info`: what a router or a person wants to know of the configuration.
pub fn server_info(app: &App, model: &Model) -> Value {
    let snapshot = model.engine.snapshot();
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "model": model.names[0],
        "served_model_names": model.names,
        "model_path": model.names[0],
        "max_model_len": model.max_model_len,
        "max_num_seqs": model.max_num_seqs,
        "max_num_batched_tokens": model.max_batch_tokens,
        "max_waiting": app.options.max_waiting,
        "vocab_size": model.package.config.vocab,
        "block_size": snapshot.page_size,
        "num_blocks": snapshot.pages_total,
        "preemptions": snapshot.preemptions,
        "started": app.started(),
        "draining": app.is_draining(),
    })
}

/// `/v1/loads`: how busy the engine is.
pub async fn loads(model: &Model) -> Value {
    let snapshot = model.engine.ask().await;
    let size = snapshot.page_size;
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "timestamp": crate::app::now(),
        "dp_rank_count": 1,
        "loads": [{
            "dp_rank": 0,
            "num_running_reqs": snapshot.running,
            "num_waiting_reqs": snapshot.waiting,
            "num_total_reqs": snapshot.running + snapshot.waiting,
            "num_used_tokens": snapshot.pages_used * size,
            "num_tokens": snapshot.pages_used * size,
            "max_total_num_tokens": snapshot.pages_total * size,
            "max_running_requests": model.max_num_seqs,
            "token_usage": snapshot.pages_used as f64 / snapshot.pages_total.max(1) as f64,
        }],
    })
}

/// Resources, with what they say of themselves.
pub async fn plugins(State(app): State<Arc<App>>) -> Result<Json<Value>> {
    let snapshot = app.model()?.engine.ask().await;
    let resource = |r: &crate::snapshot::ResourceSnapshot| {
        json!({
            "key": r.key,
            "kind": r.kind,
            "calls": r.calls,
            "seconds": r.time.as_secs_f64(),
            "panics": r.panics,
            "is_faulted": r.is_faulted,
            "restarts": r.restarts,
            "bytes": r.bytes,
            "state": r.state,
        })
    };
    let list: Vec<Value> = snapshot.resources.iter().map(resource).collect();
    Ok(Json(json!({ "resources": list })))
}

/// Nothing that caches hold of earlier requests is read any more.
pub async fn reset_prefix_cache(State(app): State<Arc<App>>) -> Json<Value> {
    tracing::info!("the prefix cache begins anew");
    app.reset_prefix_cache();
    Json(json!({ "status": "ok" }))
}

/// No new generations from now on; those that run go on.
pub async fn drain(State(app): State<Arc<App>>) -> Json<Value> {
    tracing::warn!("draining, as a request to /admin/drain asks");
    app.drain();
    let left = app.loaded_model().map_or(0, |model| model.engine.in_flight());
    Json(json!({ "status": "draining", "requests": left }))
}
