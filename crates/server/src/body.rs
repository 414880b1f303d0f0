//! A request's body: of a limited size, in a limited time, a JSON object.

use std::sync::Arc;

use axum::body::{Body, to_bytes};
use axum::extract::{FromRequest, Request};
use axum::http::header;
use serde_json::{Map, Value};

use crate::app::App;
use crate::error::{ApiError, Result};

/// The fields of a request.
#[derive(Debug)]
pub struct JsonObject(pub Map<String, Value>);

impl FromRequest<Arc<App>> for JsonObject {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &Arc<App>) -> Result<Self> {
        let kind = request.headers().get(header::CONTENT_TYPE).and_then(|v| v.to_str().ok());
        let kind = kind.unwrap_or_default().split(';').next().unwrap_or_default().trim();
        // A browser sends anything else across origins without asking first.
        if !kind.eq_ignore_ascii_case("application/json") {
            let message = format!("the body must be of type application/json, not {kind:?}");
            return Err(ApiError::new(415, message));
        }
        let length = request.headers().get(header::CONTENT_LENGTH);
        let length = length.and_then(|v| v.to_str().ok()?.parse::<u64>().ok()).unwrap_or(0);
        if length > app.options.max_body_bytes as u64 {
            return Err(too_large(app));
        }
        let bytes = read(request.into_body(), app).await?;
        match serde_json::from_slice(&bytes) {
            Ok(Value::Object(fields)) => Ok(Self(fields)),
            Ok(_) => Err(ApiError::invalid("the body is not a JSON object")),
            Err(e) => Err(ApiError::invalid(format!("the body is not JSON: {e}"))),
        }
    }
}

fn too_large(app: &App) -> ApiError {
    ApiError::new(413, format!("the body is larger than {} bytes", app.options.max_body_bytes))
}

async fn read(body: Body, app: &App) -> Result<axum::body::Bytes> {
    let (most, time) = (app.options.max_body_bytes, app.options.read_timeout);
    let read = to_bytes(body, most);
    let read = match time {
        None => read.await,
        Some(time) => tokio::time::timeout(time, read).await.map_err(|_| {
            ApiError::new(408, format!("the body did not arrive within {} seconds", time.as_secs()))
        })?,
    };
    read.map_err(|e| {
        let source = std::error::Error::source(&e);
        match source.is_some_and(|s| s.to_string().contains("length limit")) {
            true => too_large(app),
            false => ApiError::invalid("the body did not arrive whole"),
        }
    })
}
