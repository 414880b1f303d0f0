//! Who may call what.

use std::net::SocketAddr;
use std::sync::Arc;

use axum::extract::{ConnectInfo, Request, State};
use axum::http::{HeaderMap, header};
use axum::middleware::Next;
use axum::response::Response;
use subtle::ConstantTimeEq;

use crate::app::App;
use crate::error::{ApiError, Result};

/// Lets requests with a key pass, or all where no key is configured.
pub async fn needs_key(
    State(app): State<Arc<App>>,
    request: Request,
    next: Next,
) -> Result<Response> {
    if !app.options.api_keys.is_empty() && !has_key(&app, request.headers()) {
        let message = "a valid API key is needed: send it as \"Authorization: Bearer KEY\"";
        return Err(ApiError::new(401, message).with_code("invalid_api_key"));
    }
    Ok(next.run(request).await)
}

/// Lets requests with a key pass and, where no key is configured, those from this machine that no
/// browser and no proxy sent.
pub async fn is_admin(
    State(app): State<Arc<App>>,
    ConnectInfo(peer): ConnectInfo<SocketAddr>,
    request: Request,
    next: Next,
) -> Result<Response> {
    let headers = request.headers();
    let is_direct = ["origin", "x-forwarded-for", "forwarded", "x-real-ip"]
        .iter()
        .all(|name| !headers.contains_key(*name));
    let is_local = app.options.api_keys.is_empty() && peer.ip().to_canonical().is_loopback();
    if has_key(&app, headers) || is_local && is_direct {
        return Ok(next.run(request).await);
    }
    let message = "this route is for this machine, or for requests with an API key";
    Err(ApiError::new(if app.options.api_keys.is_empty() { 403 } else { 401 }, message))
}

fn has_key(app: &App, headers: &HeaderMap) -> bool {
    let given = headers.get(header::AUTHORIZATION).map(|v| v.as_bytes());
    let given = given.and_then(|value| {
        let (scheme, key) = value.split_at_checked(7)?;
        scheme.eq_ignore_ascii_case(b"bearer ").then(|| key.trim_ascii())
    });
    let Some(given) = given else { return false };
    // All are compared, and each without telling where they differ.
    let same = |key: &crate::options::ApiKey| bool::from(key.0.as_bytes().ct_eq(given));
    app.options.api_keys.iter().fold(false, |found, key| found | same(key))
}
