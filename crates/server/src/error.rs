//! Errors as OpenAI's API writes them.

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use crate::engine::Failure;
use crate::generation::SAMPLING;

/// An error of an HTTP request.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct ApiError {
    pub status: u16,
    /// One line: what, where, and what to do.
    pub message: String,
    /// The field that it is about.
    pub param: Option<String>,
    /// OpenAI's short name of the error, where it has one.
    pub code: Option<&'static str>,
    /// Seconds after which to try again.
    pub retry_after: Option<u64>,
}

pub type Result<T, E = ApiError> = std::result::Result<T, E>;

impl ApiError {
    pub fn new(status: u16, message: impl Into<String>) -> Self {
        Self { status, message: message.into(), param: None, code: None, retry_after: None }
    }

    /// A request that is wrong.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(400, message)
    }

    /// A field that is wrong; the message should begin with its name.
    pub fn field(param: &str, message: impl Into<String>) -> Self {
        Self { param: Some(param.to_owned()), ..Self::invalid(message) }
    }

    #[must_use]
    pub fn with_code(mut self, code: &'static str) -> Self {
        self.code = Some(code);
        self
    }

    #[must_use]
    pub fn with_retry_after(mut self, seconds: u64) -> Self {
        self.retry_after = Some(seconds);
        self
    }

    /// OpenAI's name for this class of errors.
    fn type_name(&self) -> &'static str {
        match self.status {
            401 => "authentication_error",
            403 => "permission_error",
            404 => "not_found_error",
            429 => "rate_limit_error",
            503 => "service_unavailable",
            408 | 504 => "timeout_error",
            400..500 => "invalid_request_error",
            _ => "server_error",
        }
    }

    /// The body, which is also what an event stream ends with.
    pub fn to_json(&self) -> Value {
        json!({ "error": {
            "message": self.message,
            "type": self.type_name(),
            "param": self.param,
            "code": self.code,
        }})
    }
}

/// Further fields that a resource's message may begin with.
const NAMED: [&str; 3] = ["max_tokens", "min_tokens", "logprobs"];

impl From<Failure> for ApiError {
    fn from(failure: Failure) -> Self {
        let mut error = Self::new(failure.status, failure.message);
        if error.status == 400 {
            // Of several the one that the message begins with.
            let place = |name| error.message.find(&format!("{name} = ")).map(|at| (at, name));
            let first = SAMPLING.into_iter().chain(NAMED).filter_map(place).min();
            error.param = first.map(|(_, name)| name.to_owned());
            if error.message.contains("max_model_len") {
                error.code = Some("context_length_exceeded");
            }
        }
        if matches!(error.status, 429 | 503) {
            error.retry_after = Some(1);
        }
        error
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let mut response = (status, Json(self.to_json())).into_response();
        if let Some(seconds) = self.retry_after {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.status == 401 {
            let scheme = HeaderValue::from_static("Bearer");
            response.headers_mut().insert(header::WWW_AUTHENTICATE, scheme);
        }
        response
    }
}
