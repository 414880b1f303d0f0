//! The OpenAPI document of all routes, kept by hand in `openapi.json`; a test holds it to the routes and to
//! the fields that they read.

use axum::http::header;
use axum::response::{IntoResponse, Response};

/// The document, without the server's version.
pub const DOCUMENT: &str = include_str!("openapi.json");

/// Serves it.
pub async fn document() -> Response {
    let version = format!("\"version\": \"{}\"", env!("CARGO_PKG_VERSION"));
    let text = DOCUMENT.replacen("\"version\": \"0\"", &version, 1);
    ([(header::CONTENT_TYPE, "application/json")], text).into_response()
}
