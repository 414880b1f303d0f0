//! Connections: accepting, limiting, and closing them when the server ends.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::{ConnectInfo, Request};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, watch};
use tower::ServiceExt;

use crate::app::App;
use crate::stall::Impatient;

/// How long idle connections may take to close once the server ends.
const CLOSING: Duration = Duration::from_secs(2);

/// Serves `router` on `listener` until `stop` becomes true, and closes all connections then.
pub async fn serve(
    app: Arc<App>,
    listener: TcpListener,
    router: Router,
    mut stop: watch::Receiver<bool>,
) {
    let places = Arc::new(Semaphore::new(app.options.max_connections));
    let open = GracefulShutdown::new();
    let mut builder = http1::Builder::new();
    builder
        .timer(TokioTimer::new())
        .header_read_timeout(app.options.read_timeout)
        // Less than that the library refuses.
        .max_buf_size(app.options.max_header_bytes.max(8192));
    loop {
        // Those that find no place wait in the system's queue.
        let place = tokio::select! {
            place = places.clone().acquire_owned() => place,
            _ = stop.wait_for(|&stop| stop) => break,
        };
        let Ok(place) = place else { break };
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            _ = stop.wait_for(|&stop| stop) => break,
        };
        let (stream, peer) = match accepted {
            Ok(accepted) => accepted,
            Err(e) => {
                // No descriptors left, most likely: others will be closed.
                tracing::warn!("a connection cannot be accepted: {e}");
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            }
        };
        // A token is a small packet that should not wait for the next.
        let _ = stream.set_nodelay(true);
        let router = router.clone();
        let service = hyper::service::service_fn(move |request: Request<Incoming>| {
            let mut request = request.map(Body::new);
            request.extensions_mut().insert(ConnectInfo(peer));
            router.clone().oneshot(request)
        });
        let stream = Impatient::new(stream, app.options.write_timeout);
        let connection = builder.serve_connection(TokioIo::new(stream), service);
        let connection = open.watch(connection);
        tokio::spawn(async move {
            if let Err(e) = connection.await {
                tracing::debug!(%peer, "connection ended: {e}");
            }
            drop(place);
        });
    }
    drop(listener);
    if tokio::time::timeout(CLOSING, open.shutdown()).await.is_err() {
        tracing::warn!("some connections were cut");
    }
}
