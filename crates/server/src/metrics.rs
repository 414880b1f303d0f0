//! What `/metrics` tells, in Prometheus' text format: the names that routers scrape from vLLM, with
//! vLLM's meaning, and our own for resources and plugins.
//!
//! What is counted per request is counted where its events are put ([`Counts`]); everything else is read
//! from the engine's [`Snapshot`] when somebody asks.

use std::cell::Cell;
use std::collections::HashMap;
use std::time::{Duration, Instant};

use model::{FinishReason, Usage};
use prometheus::core::Collector;
use prometheus::proto::{LabelPair, MetricFamily};
use prometheus::{
    Counter, Encoder, Gauge, Histogram, HistogramOpts, IntCounterVec, Opts, TextEncoder,
};

use crate::snapshot::{Metric, Snapshot};

/// The format's name in `Content-Type`.
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

// vLLM's borders, so that its dashboards fit.
const FIRST_TOKEN: &[f64] = &[
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
];
const NEXT_TOKEN: &[f64] = &[
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
];
const WHOLE_REQUEST: &[f64] = &[
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
];
const TOKENS: &[f64] = &[
    1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, 10_000.0,
    20_000.0, 50_000.0, 100_000.0,
];

/// Counts of requests, added to by whoever puts their events.
#[derive(Clone, Debug)]
pub struct Counts {
    first_token: Histogram,
    next_token: Histogram,
    whole: Histogram,
    prompt_tokens: Histogram,
    generated_tokens: Histogram,
    succeeded: IntCounterVec,
    failed: IntCounterVec,
}

impl Counts {
    /// Nothing counted yet.
    ///
    /// # Errors
    /// Never with the names written here.
    pub fn new() -> prometheus::Result<Self> {
        let histogram = |name: &str, help: &str, borders: &[f64]| {
            Histogram::with_opts(HistogramOpts::new(name, help).buckets(borders.to_vec()))
        };
        let counter = |name: &str, help: &str, label: &str| {
            IntCounterVec::new(Opts::new(name, help), &[label])
        };
        let counts = Self {
            first_token: histogram(
                "vllm:time_to_first_token_seconds",
                "From a request's arrival to its first token",
                FIRST_TOKEN,
            )?,
            next_token: histogram(
                "vllm:inter_token_latency_seconds",
                "Between two tokens of a request",
                NEXT_TOKEN,
            )?,
            whole: histogram(
                "vllm:e2e_request_latency_seconds",
                "From a request's arrival to its end",
                WHOLE_REQUEST,
            )?,
            prompt_tokens: histogram(
                "vllm:request_prompt_tokens",
                "Tokens of a request's prompt",
                TOKENS,
            )?,
            generated_tokens: histogram(
                "vllm:request_generation_tokens",
                "Tokens generated for a request",
                TOKENS,
            )?,
            succeeded: counter(
                "vllm:request_success_total",
                "Requests that ended well, by reason",
                "finished_reason",
            )?,
            failed: counter(
                "engine_host_request_failures_total",
                "Requests that failed, by HTTP status",
                "status",
            )?,
        };
        // Present from the start, so that a rate over them begins at zero.
        for reason in [FinishReason::Stop, FinishReason::Length] {
            counts.succeeded.with_label_values(&[reason.name()]);
        }
        Ok(counts)
    }

    /// With the labels of the model, whose name is not known yet when counting begins.
    fn families(&self, labels: &HashMap<String, String>) -> Vec<MetricFamily> {
        let histograms = [
            &self.first_token,
            &self.next_token,
            &self.whole,
            &self.prompt_tokens,
            &self.generated_tokens,
        ];
        let counters = [&self.succeeded, &self.failed];
        let histograms = histograms.into_iter().flat_map(Collector::collect);
        let counters = counters.into_iter().flat_map(Collector::collect);
        let mut families: Vec<MetricFamily> = histograms.chain(counters).collect();
        // The encoder refuses a family that has counted nothing yet.
        families.retain(|family| !family.get_metric().is_empty());
        for metric in families.iter_mut().flat_map(|family| family.mut_metric().iter_mut()) {
            let more = labels.iter().map(|(name, value)| {
                let mut pair = LabelPair::default();
                pair.set_name(name.clone());
                pair.set_value(value.clone());
                pair
            });
            let mut all: Vec<LabelPair> = metric.take_label().into_iter().chain(more).collect();
            all.sort_by(|a, b| a.name().cmp(b.name()));
            metric.set_label(all);
        }
        families
    }

    /// A request ended well, so long after it came.
    pub fn finished(&self, time: Duration, reason: FinishReason, usage: Usage) {
        self.whole.observe(time.as_secs_f64());
        self.prompt_tokens.observe(f64::from(usage.prompt_tokens));
        self.generated_tokens.observe(f64::from(usage.completion_tokens));
        self.succeeded.with_label_values(&[reason.name()]).inc();
    }

    /// A request failed.
    pub fn failed(&self, status: u16) {
        self.failed.with_label_values(&[status.to_string().as_str()]).inc();
    }
}

/// Times the tokens of one request.
#[derive(Debug)]
pub struct TokenTimer {
    started: Instant,
    last: Cell<Option<Instant>>,
}

impl TokenTimer {
    /// Starts when the request arrives.
    pub fn start() -> Self {
        Self { started: Instant::now(), last: Cell::new(None) }
    }

    /// A token came.
    pub fn token(&self, counts: &Counts) {
        let now = Instant::now();
        match self.last.replace(Some(now)) {
            None => counts.first_token.observe(seconds(now - self.started)),
            Some(last) => counts.next_token.observe(seconds(now - last)),
        }
    }
}

fn seconds(time: Duration) -> f64 {
    time.as_secs_f64()
}

fn of_model(model: &str) -> HashMap<String, String> {
    HashMap::from([
        ("model_name".to_owned(), model.to_owned()),
        // vLLM's number of the engine within a server; there is one.
        ("engine".to_owned(), "0".to_owned()),
    ])
}

/// The text.
///
/// # Errors
/// Never with the names written here: what comes from plugins stands in labels only.
pub fn render(model: &str, counts: &Counts, snapshot: &Snapshot) -> prometheus::Result<String> {
    let mut page = Page { families: Vec::new() };
    let all = of_model(model);
    let used = snapshot.pages_used as f64 / snapshot.pages_total.max(1) as f64;
    page.gauge("vllm:num_requests_running", "Requests that run", &all, snapshot.running as f64)?;
    page.gauge("vllm:num_requests_waiting", "Requests that wait", &all, snapshot.waiting as f64)?;
    page.gauge(
        "vllm:kv_cache_usage_perc",
        "Share of the cache's pages in use, 0 to 1",
        &all,
        used,
    )?;
    // The name until vLLM 0.10, which routers ask for, too.
    page.gauge("vllm:gpu_cache_usage_perc", "As vllm:kv_cache_usage_perc", &all, used)?;
    let mut cache = all.clone();
    cache.insert("block_size".to_owned(), snapshot.page_size.to_string());
    cache.insert("num_gpu_blocks".to_owned(), snapshot.pages_total.to_string());
    page.gauge(
        "vllm:cache_config_info",
        "Pages of the cache and tokens of one, as labels",
        &cache,
        1.0,
    )?;

    let prompt = snapshot.prompt_tokens + snapshot.cached_tokens;
    for (name, help, value) in [
        ("vllm:prompt_tokens_total", "Tokens of prompts, computed or cached", prompt),
        ("vllm:generation_tokens_total", "Tokens generated", snapshot.generated_tokens),
        ("vllm:prefix_cache_queries_total", "Tokens of prompts looked up in the cache", prompt),
        (
            "vllm:prefix_cache_hits_total",
            "Tokens of prompts found in the cache",
            snapshot.cached_tokens,
        ),
        (
            "vllm:num_preemptions_total",
            "Requests that gave way and were computed again",
            snapshot.preemptions,
        ),
        ("engine_host_steps_total", "Steps of the engine", snapshot.steps),
        ("engine_host_requests_submitted_total", "Requests taken in", snapshot.submitted),
        ("engine_host_requests_finished_total", "Requests that ended well", snapshot.finished),
        (
            "engine_host_requests_cancelled_total",
            "Requests whose client went away",
            snapshot.cancelled,
        ),
        ("engine_host_requests_failed_total", "Requests that failed", snapshot.failed),
    ] {
        page.counter(name, help, &all, value as f64)?;
    }
    let stopped = f64::from(u8::from(snapshot.trouble().is_some()));
    page.gauge("engine_host_stopped", "1 if no request can be answered any more", &all, stopped)?;
    page.resources(snapshot)?;
    page.families.extend(counts.families(&all));
    page.text()
}

struct Page {
    families: Vec<MetricFamily>,
}

impl Page {
    fn gauge(
        &mut self,
        name: &str,
        help: &str,
        labels: &HashMap<String, String>,
        value: f64,
    ) -> prometheus::Result<()> {
        let gauge = Gauge::with_opts(Opts::new(name, help).const_labels(labels.clone()))?;
        gauge.set(value);
        self.add(gauge.collect());
        Ok(())
    }

    fn counter(
        &mut self,
        name: &str,
        help: &str,
        labels: &HashMap<String, String>,
        value: f64,
    ) -> prometheus::Result<()> {
        let counter = Counter::with_opts(Opts::new(name, help).const_labels(labels.clone()))?;
        counter.inc_by(value);
        self.add(counter.collect());
        Ok(())
    }

    /// A name has one family, whatever number of label sets.
    fn add(&mut self, families: Vec<MetricFamily>) {
        for mut family in families {
            match self.families.iter_mut().find(|known| known.name() == family.name()) {
                Some(known) => known.mut_metric().extend(family.take_metric()),
                None => self.families.push(family),
            }
        }
    }

    fn resources(&mut self, snapshot: &Snapshot) -> prometheus::Result<()> {
        for resource in &*snapshot.resources {
            let labels = HashMap::from([
                ("resource".to_owned(), resource.key.clone()),
                ("kind".to_owned(), resource.kind.clone()),
                ("plugin".to_owned(), resource.plugin.clone()),
            ]);
            for (name, help, value) in [
                ("engine_host_resource_calls_total", "Calls of a resource", resource.calls as f64),
                (
                    "engine_host_resource_seconds_total",
                    "Time that calls of a resource took",
                    seconds(resource.time),
                ),
                (
                    "engine_host_resource_panics_total",
                    "Panics in a resource",
                    resource.panics as f64,
                ),
                (
                    "engine_host_resource_bad_values_total",
                    "Answers of a resource that could not be right",
                    resource.bad_values as f64,
                ),
                (
                    "engine_host_resource_restarts_total",
                    "How often a resource was built anew",
                    resource.restarts as f64,
                ),
            ] {
                self.counter(name, help, &labels, value)?;
            }
            let faulted = f64::from(u8::from(resource.is_faulted));
            self.gauge(
                "engine_host_resource_faulted",
                "1 if a resource is out of use",
                &labels,
                faulted,
            )?;
            self.gauge(
                "engine_host_resource_bytes",
                "What a resource holds of the engine's memory",
                &labels,
                resource.bytes as f64,
            )?;
        }
        for (name, metric) in &*snapshot.metrics {
            let (resource, name) = name.split_once('.').unwrap_or(("", name));
            let labels = HashMap::from([
                ("resource".to_owned(), resource.to_owned()),
                ("name".to_owned(), name.to_owned()),
            ]);
            match *metric {
                Metric::Counter(count) => self.counter(
                    "engine_host_plugin_count_total",
                    "What a resource's plugin counts",
                    &labels,
                    count as f64,
                )?,
                Metric::Gauge(value) => self.gauge(
                    "engine_host_plugin_gauge",
                    "What a resource's plugin measures",
                    &labels,
                    value,
                )?,
            }
        }
        Ok(())
    }

    fn text(&self) -> prometheus::Result<String> {
        let mut text = Vec::new();
        TextEncoder::new().encode(&self.families, &mut text)?;
        Ok(String::from_utf8_lossy(&text).into_owned())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::Arc;

    use super::*;
    use crate::snapshot::ResourceSnapshot;

    fn snapshot() -> Snapshot {
        Snapshot {
            waiting: 3,
            running: 2,
            pages_used: 1,
            pages_total: 4,
            page_size: 16,
            prompt_tokens: 10,
            cached_tokens: 6,
            resources: Arc::new([ResourceSnapshot {
                key: "main.kv".into(),
                kind: "kv".into(),
                plugin: "resource-kv".into(),
                bytes: 4096,
                restarts: 2,
                calls: 7,
                time: Duration::from_millis(1500),
                ..ResourceSnapshot::default()
            }]),
            metrics: Arc::new(BTreeMap::from([
                ("kv.a\"b\\c\nd".to_owned(), Metric::Gauge(f64::NAN)),
                ("kv.evicted".to_owned(), Metric::Counter(5)),
                ("attn.évicted".to_owned(), Metric::Counter(6)),
            ])),
            ..Snapshot::default()
        }
    }

    #[test]
    fn routers_find_vllms_names_with_their_labels() {
        let counts = Counts::new().unwrap();
        let text = render("my \"model\"", &counts, &snapshot()).unwrap();
        let of = "{engine=\"0\",model_name=\"my \\\"model\\\"\"}";
        for line in [
            format!("vllm:num_requests_running{of} 2"),
            format!("vllm:num_requests_waiting{of} 3"),
            format!("vllm:kv_cache_usage_perc{of} 0.25"),
            format!("vllm:prompt_tokens_total{of} 16"),
            format!("vllm:prefix_cache_hits_total{of} 6"),
        ] {
            assert!(text.lines().any(|l| l == line), "{line}\n{text}");
        }
        let config = text.lines().find(|l| l.starts_with("vllm:cache_config_info{")).unwrap();
        assert!(config.contains("block_size=\"16\"") && config.contains("num_gpu_blocks=\"4\""));
    }

    #[test]
    fn plugins_choose_label_values_and_nothing_else() {
        let text = render("m", &Counts::new().unwrap(), &snapshot()).unwrap();
        for line in [
            "engine_host_resource_seconds_total{kind=\"kv\",plugin=\"resource-kv\",resource=\"main.kv\"} \
             1.5",
            "engine_host_resource_bytes{kind=\"kv\",plugin=\"resource-kv\",resource=\"main.kv\"} 4096",
            "engine_host_resource_restarts_total{kind=\"kv\",plugin=\"resource-kv\",resource=\"main.kv\"} \
             2",
            "engine_host_plugin_count_total{name=\"evicted\",resource=\"kv\"} 5",
            "engine_host_plugin_count_total{name=\"évicted\",resource=\"attn\"} 6",
            "engine_host_plugin_gauge{name=\"a\\\"b\\\\c\\nd\",resource=\"kv\"} NaN",
        ] {
            assert!(text.lines().any(|l| l == line), "{line}\n{text}");
        }
        let types: Vec<&str> = text.lines().filter(|l| l.starts_with("# TYPE")).collect();
        let mut once = types.clone();
        once.sort_unstable();
        once.dedup();
        assert_eq!(once.len(), types.len(), "a name has one family\n{text}");
    }

    #[test]
    fn requests_are_timed() {
        let counts = Counts::new().unwrap();
        let timer = TokenTimer::start();
        (0..3).for_each(|_| timer.token(&counts));
        let usage = Usage { prompt_tokens: 5, completion_tokens: 3, cached_tokens: 0 };
        counts.finished(Duration::from_secs(1), FinishReason::Length, usage);
        counts.failed(429);
        let text = render("m", &counts, &Snapshot::default()).unwrap();
        let value = |start: &str| {
            let line = text
                .lines()
                .find(|l| l.starts_with(start))
                .unwrap_or_else(|| panic!("{start}\n{text}"));
            line.rsplit(' ').next().unwrap().to_owned()
        };
        assert_eq!(value("vllm:time_to_first_token_seconds_count"), "1");
        assert_eq!(value("vllm:inter_token_latency_seconds_count"), "2");
        assert_eq!(value("vllm:e2e_request_latency_seconds_count"), "1");
        assert_eq!(value("vllm:request_prompt_tokens_sum"), "5");
        assert_eq!(
            value("vllm:request_generation_tokens_bucket{engine=\"0\",model_name=\"m\",le=\"5\"}"),
            "1"
        );
        assert_eq!(
            value(
                "vllm:request_success_total{engine=\"0\",finished_reason=\"length\",model_name=\"m\"}"
            ),
            "1"
        );
        assert_eq!(
            value(
                "engine_host_request_failures_total{engine=\"0\",model_name=\"m\",status=\"429\"}"
            ),
            "1"
        );
    }
}
