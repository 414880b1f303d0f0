//! The routes.

use std::sync::Arc;

use axum::Json;
use axum::Router;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, Request, State};
use axum::http::{HeaderName, HeaderValue, Method, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use serde_json::{Value, json};
use tower_http::cors::{Any, CorsLayer};

use crate::app::App;
use crate::body::JsonObject;
use crate::error::{ApiError, Result};
use crate::{admin, chat, completions, guard, metrics, openapi, tokens};

/// All routes over `app`.
pub fn router(app: &Arc<App>) -> Router {
    let open = Router::new()
        .route("/health", get(health))
        .route("/ready", get(ready))
        .route("/version", get(version))
        .route("/metrics", get(metrics))
        .route("/openapi.json", get(openapi::document));
    let api = Router::new()
        .route("/v1/models", get(models))
        .route("/v1/models/{id}", get(one_model))
        .route("/v1/completions", post(complete))
        .route("/v1/chat/completions", post(chat))
        .route("/v1/chat/completions/render", post(render))
        .route("/tokenize", post(tokenize))
        .route("/detokenize", post(detokenize))
        .route("/server_info", get(server_info))
        .route("/get_server_info", get(server_info))
        .route("/v1/loads", get(loads))
        .route_layer(middleware::from_fn_with_state(app.clone(), guard::needs_key));
    let admin = Router::new()
        .route("/admin/plugins", get(admin::plugins))
        .route("/admin/drain", post(admin::drain))
        .route("/admin/reset_prefix_cache", post(admin::reset_prefix_cache))
        .route_layer(middleware::from_fn_with_state(app.clone(), guard::is_admin));
    let all = open.merge(api).merge(admin);
    let all = all.fallback(unknown_route).method_not_allowed_fallback(wrong_method);
    let all = all.layer(middleware::from_fn(observe));
    let all = match cors(&app.options.cors_origins) {
        Some(cors) => all.layer(cors),
        None => all,
    };
    all.with_state(app.clone())
}

/// `None`: browsers get no leave from any origin.
fn cors(origins: &[String]) -> Option<CorsLayer> {
    let methods = [Method::GET, Method::POST];
    let headers = [header::AUTHORIZATION, header::CONTENT_TYPE];
    let layer = CorsLayer::new().allow_methods(methods).allow_headers(headers);
    match origins {
        [] => None,
        all if all.iter().any(|o| o == "*") => Some(layer.allow_origin(Any)),
        some => {
            let some: Vec<HeaderValue> = some.iter().filter_map(|o| o.parse().ok()).collect();
            Some(layer.allow_origin(some))
        }
    }
}

/// Gives every answer an id and writes a line about it; neither bodies nor query strings are in it.
async fn observe(request: Request, next: Next) -> Response {
    let name = HeaderName::from_static("x-request-id");
    let own = request.headers().get(&name).filter(|id| id.len() <= 128).cloned();
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let started = std::time::Instant::now();
    let mut response = next.run(request).await;
    let status = response.status().as_u16();
    let id = own.as_ref().and_then(|id| id.to_str().ok()).unwrap_or("-");
    let time = started.elapsed().as_secs_f64();
    tracing::info!(target: "server::access", %method, path, status, id, time, "answered");
    if let Some(id) = own {
        response.headers_mut().insert(name, id);
    }
    response
}

async fn unknown_route(request: Request) -> ApiError {
    let path: String = request.uri().path().chars().take(120).collect();
    ApiError::new(404, format!("there is no route {} {path}", request.method()))
}

async fn wrong_method(request: Request) -> ApiError {
    let path = request.uri().path();
    ApiError::new(405, format!("the route {path} does not take {}", request.method()))
}

/// 200 once requests can be answered, also while draining; 503 with the progress before.
async fn health(State(app): State<Arc<App>>) -> Response {
    let (done, total) = app.progress();
    let loading = json!({ "status": "loading", "loaded_bytes": done, "total_bytes": total });
    let trouble = app.loaded_model().map(|model| model.engine.snapshot().trouble());
    let (status, body) = match trouble {
        None => (503, loading),
        Some(Some(why)) => (503, json!({ "status": "out of use", "message": why })),
        Some(None) if app.is_draining() => (200, json!({ "status": "draining" })),
        Some(None) => (200, json!({ "status": "ok" })),
    };
    let status = axum::http::StatusCode::from_u16(status).unwrap_or_default();
    (status, Json(body)).into_response()
}

/// 200 while new requests are taken.
async fn ready(State(app): State<Arc<App>>) -> Result<Response> {
    let model = app.model_to_run()?;
    match model.engine.snapshot().trouble() {
        Some(why) => Err(ApiError::new(503, why)),
        None => Ok(Json(json!({ "status": "ready" })).into_response()),
    }
}

/// Without a key, as scrapers expect it: there are numbers in it, and names of resources.
async fn metrics(State(app): State<Arc<App>>) -> Result<Response> {
    let model = app.model()?;
    let (counts, snapshot) = (model.engine.counts(), model.engine.ask().await);
    let text = metrics::render(&model.names[0], counts, &snapshot)
        .map_err(|e| ApiError::new(500, format!("the metrics cannot be written: {e}")))?;
    Ok(([(header::CONTENT_TYPE, metrics::CONTENT_TYPE)], text).into_response())
}

async fn version() -> Json<Value> {
    Json(json!({ "version": env!("CARGO_PKG_VERSION") }))
}

async fn models(State(app): State<Arc<App>>) -> Result<Json<Value>> {
    let model = app.model()?;
    let list: Vec<Value> =
        model.names.iter().map(|name| admin::model_entry(&app, model, name)).collect();
    Ok(Json(json!({ "object": "list", "data": list })))
}

async fn one_model(
    State(app): State<Arc<App>>,
    id: Result<Path<String>, PathRejection>,
) -> Result<Json<Value>> {
    let model = app.model()?;
    let Path(id) =
        id.map_err(|e| ApiError::invalid(format!("the path cannot be read: {}", e.body_text())))?;
    match model.names.contains(&id) {
        true => Ok(Json(admin::model_entry(&app, model, &id))),
        false => {
            let id: String = id.chars().take(80).collect();
            let error = ApiError::new(404, format!("the model {id:?} does not exist"));
            Err(error.with_code("model_not_found"))
        }
    }
}

async fn complete(State(app): State<Arc<App>>, JsonObject(fields): JsonObject) -> Result<Response> {
    completions::run(app, fields).await
}

async fn chat(State(app): State<Arc<App>>, JsonObject(fields): JsonObject) -> Result<Response> {
    chat::run(app, fields).await
}

async fn render(State(app): State<Arc<App>>, JsonObject(fields): JsonObject) -> Result<Response> {
    chat::render(app, fields).await
}

async fn tokenize(
    State(app): State<Arc<App>>,
    JsonObject(fields): JsonObject,
) -> Result<Json<Value>> {
    tokio::task::block_in_place(|| tokens::tokenize(&app, fields)).map(Json)
}

async fn detokenize(
    State(app): State<Arc<App>>,
    JsonObject(fields): JsonObject,
) -> Result<Json<Value>> {
    tokio::task::block_in_place(|| tokens::detokenize(&app, fields)).map(Json)
}

async fn server_info(State(app): State<Arc<App>>) -> Result<Json<Value>> {
    Ok(Json(admin::server_info(&app, app.model()?)))
}

async fn loads(State(app): State<Arc<App>>) -> Result<Json<Value>> {
    Ok(Json(admin::loads(app.model()?).await))
}
