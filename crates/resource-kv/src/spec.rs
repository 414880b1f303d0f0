//! Settings, and how many pages they mean.

use resource_api::{DType, EngineResourceInfo, NodeResourceSpec, ResourceError, Result};
use serde::Deserialize;
use std::time::Duration;

use crate::handover::TransferSettings;
use crate::stream::MAX_REQUESTS;

/// Token slots of a page when the settings name none. Smaller than other systems' 128: what a request
/// wastes in its last page is less, and more prefixes can be shared.
const PAGE_SIZE: u32 = 16;

/// Without `pages` and `memory` there is room for `max_batch` streams of up to this many tokens, and
/// for one of full length.
const DEFAULT_TOKENS_PER_STREAM: u32 = 2048;

/// Without `pages` and `memory`, at most this share of the free memory is taken, in percent.
const DEFAULT_SHARE: u64 = 50;

/// Settings of a cache. What describes the model comes from the model's configuration where a config
/// file does not say it.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KvSpec {
    /// Layers of the model that write here.
    pub num_layers: Option<u32>,
    /// Key/value heads.
    pub num_kv_heads: Option<u32>,
    /// Elements per head.
    pub head_dim: Option<u32>,
    /// Query heads of the model; default: as many as key/value heads.
    pub num_qo_heads: Option<u32>,
    /// Longest stream in tokens; default: the engine's `max_model_len`.
    pub max_seq_len: Option<u32>,
    /// Token slots per page; default 16.
    pub page_size: Option<u32>,
    /// Pages of the pool, the sink included. Excludes `memory`.
    #[serde(alias = "max_num_pages")]
    pub pages: Option<u32>,
    /// Memory of the pool: `"512MiB"`, or `"80%"` of what is free when the cache is built. Excludes
    /// `pages`. Without either: room for `max_batch` streams of 2,048 tokens and for one of full
    /// length, in at most half of the free memory.
    pub memory: Option<String>,
    /// Element type: `f32`, `f16`, `bf16`, `fp8` or `i8`; default: the engine's `kv_dtype`.
    pub dtype: Option<String>,
    /// Pages of host memory for what the pool has no room for; default none. Excludes `host_memory`.
    #[serde(alias = "cpu_offload_pages")]
    pub host_pages: Option<u32>,
    /// The same as a size, or a share of the host's free memory, as for `memory`.
    pub host_memory: Option<String>,
    /// A file for pages that host memory has no room for. It outlives the process: cached prefixes are
    /// found again. Each process needs its own.
    pub disk_file: Option<String>,
    /// Most bytes of that file, such as `"20GiB"`.
    pub disk_size: Option<String>,
    /// Pages that can be published for other workers at a time, where the engine has `transfer`; default
    /// as many as the pool has, at most 4,096.
    pub transfer_pages: Option<u32>,
    /// Seconds for which published pages are kept for a reader; default 60.
    pub transfer_lease: Option<f64>,
    /// Seconds in which what another worker published must have arrived; default 30.
    pub transfer_timeout: Option<f64>,
    /// Whether whole pages of finished prompts are kept for requests with the same beginning.
    #[serde(default = "yes")]
    pub prefix_cache: bool,
    /// Keeps prefixes of caches with different salts apart.
    #[serde(default)]
    pub prefix_cache_salt: String,
}

fn yes() -> bool {
    true
}

/// The shape of a cache without its number of pages, every value checked.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(crate) num_layers: u32,
    pub(crate) num_kv_heads: u32,
    pub(crate) num_qo_heads: u32,
    pub(crate) head_dim: u32,
    pub(crate) page_size: u32,
    pub(crate) max_seq_len: u32,
    pub(crate) dtype: DType,
}

/// Puts the resource's key before an error's message.
pub(crate) fn within<T>(spec: &NodeResourceSpec<KvSpec>, result: Result<T>) -> Result<T> {
    result.map_err(|e| e.within(format!("[resources.{}]", spec.resource_key)))
}

impl KvSpec {
    /// Checks the values and fills in what is not set.
    ///
    /// # Errors
    /// `INVALID` naming the first bad setting.
    pub(crate) fn shape(&self, info: &EngineResourceInfo) -> Result<Shape> {
        let num_kv_heads = from_model("num_kv_heads", self.num_kv_heads)?;
        let shape = Shape {
            num_layers: from_model("num_layers", self.num_layers)?,
            num_kv_heads,
            num_qo_heads: at_least_1("num_qo_heads", self.num_qo_heads.unwrap_or(num_kv_heads))?,
            head_dim: from_model("head_dim", self.head_dim)?,
            page_size: at_least_1("page_size", self.page_size.unwrap_or(PAGE_SIZE))?,
            max_seq_len: {
                let default = info.limits.max_model_len;
                at_least_1("max_seq_len", self.max_seq_len.unwrap_or(default))?
            },
            dtype: self.element_type(info)?,
        };
        if !shape.num_qo_heads.is_multiple_of(num_kv_heads) {
            return Err(ResourceError::invalid(format!(
                "`num_qo_heads` is {}, which is not a multiple of the {num_kv_heads} `num_kv_heads`",
                shape.num_qo_heads
            )));
        }
        Ok(shape)
    }

    fn element_type(&self, info: &EngineResourceInfo) -> Result<DType> {
        let (setting, dtype, name) = match &self.dtype {
            Some(name) => ("dtype", DType::parse(name), name.as_str()),
            None => ("kv_dtype", Some(info.kv_dtype), info.kv_dtype.name()),
        };
        match dtype {
            Some(dtype @ (DType::F32 | DType::F16 | DType::BF16 | DType::F8E4M3 | DType::I8)) => {
                Ok(dtype)
            }
            _ => Err(ResourceError::invalid(format!(
                "`{setting}` is \"{name}\"; a cache holds f32, f16, bf16, fp8 or i8"
            ))),
        }
    }

    /// Number of pages, the sink included, of `page_bytes` each, when `free` bytes of memory are.
    ///
    /// # Errors
    /// `INVALID` naming the setting.
    pub(crate) fn num_pages(
        &self,
        shape: &Shape,
        max_batch: u32,
        page_bytes: u64,
        free: u64,
    ) -> Result<u32> {
        let (wanted, from) = match (self.pages, &self.memory) {
            (Some(_), Some(_)) => {
                let what = "`pages` and `memory` both size the pool; set one of them";
                return Err(ResourceError::invalid(what));
            }
            (Some(pages), None) => (u64::from(pages), format!("`pages` is {pages}")),
            (None, Some(text)) => {
                let pages = memory_bytes("memory", text, free)? / page_bytes;
                (pages, format!("`memory` is \"{text}\" ({free} bytes are free)"))
            }
            (None, None) => {
                let per_stream = shape.max_seq_len.min(DEFAULT_TOKENS_PER_STREAM);
                let streams =
                    u64::from(per_stream.div_ceil(shape.page_size)) * u64::from(max_batch);
                let longest = u64::from(shape.max_seq_len.div_ceil(shape.page_size));
                let share = share_of(free, DEFAULT_SHARE) / page_bytes;
                ((streams.max(longest) + 1).min(share), format!("half of the {free} free bytes"))
            }
        };
        if wanted < 2 {
            let pages = if wanted == 1 { "page" } else { "pages" };
            return Err(ResourceError::invalid(format!(
                "{from}: that is {wanted} {pages} of {page_bytes} bytes; at least 2 are needed, the sink \
                 and one for tokens"
            )));
        }
        // More than all requests can fill would only cost page metadata.
        let most = u64::from(shape.max_seq_len.div_ceil(shape.page_size)) * u64::from(MAX_REQUESTS);
        Ok(u32::try_from(wanted.min(most.saturating_add(1))).unwrap_or(u32::MAX - 1))
    }
}

impl KvSpec {
    /// What is said of transfers, with defaults.
    ///
    /// # Errors
    /// `INVALID` naming the setting.
    pub(crate) fn transfer(&self, num_pages: u32) -> Result<TransferSettings> {
        let seconds = |name: &str, value: Option<f64>, default: f64| {
            let value = value.unwrap_or(default);
            let within = Duration::try_from_secs_f64(value).ok().filter(|_| value <= 86_400.0);
            within.filter(|d| !d.is_zero()).ok_or_else(|| {
                let what =
                    format!("`{name}` is {value}; it must be seconds above 0, at most 86400");
                ResourceError::invalid(what)
            })
        };
        let pages = self.transfer_pages.unwrap_or(num_pages.min(4096));
        Ok(TransferSettings {
            pages: at_least_1("transfer_pages", pages)?,
            lease: seconds("transfer_lease", self.transfer_lease, 60.0)?,
            timeout: seconds("transfer_timeout", self.transfer_timeout, 30.0)?,
        })
    }
}

fn from_model(name: &str, value: Option<u32>) -> Result<u32> {
    match value {
        Some(value) => at_least_1(name, value),
        None => Err(ResourceError::invalid(format!(
            "`{name}` is not set and no model says it; set it or list the model's node in `nodes`"
        ))),
    }
}

fn at_least_1(name: &str, value: u32) -> Result<u32> {
    match value {
        0 => Err(ResourceError::invalid(format!("`{name}` is 0; it must be at least 1"))),
        value => Ok(value),
    }
}

fn share_of(bytes: u64, percent: u64) -> u64 {
    (u128::from(bytes) * u128::from(percent) / 100) as u64
}

/// Reads `"80%"` (of `free`) or a size such as `"512MiB"`.
pub(crate) fn memory_bytes(name: &str, text: &str, free: u64) -> Result<u64> {
    let bad = || {
        ResourceError::invalid(format!(
            "`{name}` is \"{text}\"; write a share of the free memory as in \"80%\" (1 to 100), or a \
             size as in \"512MiB\" (KiB, MiB, GiB, kB, MB, GB, B)"
        ))
    };
    if let Some(percent) = text.trim().strip_suffix('%') {
        let percent: u64 = percent.trim().parse().map_err(|_| bad())?;
        return if (1..=100).contains(&percent) { Ok(share_of(free, percent)) } else { Err(bad()) };
    }
    const UNITS: [(&str, f64); 7] = [
        ("KiB", 1024.0),
        ("MiB", 1_048_576.0),
        ("GiB", 1_073_741_824.0),
        ("kB", 1e3),
        ("MB", 1e6),
        ("GB", 1e9),
        ("B", 1.0),
    ];
    let text = text.trim();
    let unit = UNITS.iter().find_map(|&(unit, bytes)| Some((text.strip_suffix(unit)?, bytes)));
    let (number, bytes) = unit.ok_or_else(bad)?;
    let number: f64 = number.trim().parse().map_err(|_| bad())?;
    let total = number * bytes;
    if total.is_finite() && (1.0..=(1u64 << 60) as f64).contains(&total) {
        Ok(total as u64)
    } else {
        Err(bad())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use resource_api::Device;
    use resource_api::host::PlainHost;

    fn read(json: &str) -> Result<(Shape, u32)> {
        let spec: KvSpec = resource_api::spec::parse_settings(json)?;
        let shape = spec.shape(&EngineResourceInfo::new(Device::CPU, PlainHost::handle()))?;
        let pages = spec.num_pages(&shape, 64, 1 << 20, 1 << 30)?;
        Ok((shape, pages))
    }

    fn with(more: &str) -> String {
        format!(r#"{{"num_layers": 2, "num_kv_heads": 3, "head_dim": 8{more}}}"#)
    }

    #[test]
    fn defaults_come_from_the_engine() {
        let (shape, pages) = read(&with("")).unwrap();
        assert_eq!((shape.num_qo_heads, shape.max_seq_len, shape.page_size), (3, 8192, 16));
        assert_eq!(shape.dtype, DType::BF16);
        // 64 streams of 128 pages would be 8,193; half of 1 GiB in pages of 1 MiB is less.
        assert_eq!(pages, 512);
        assert_eq!(read(&with(r#", "max_seq_len": 33, "page_size": 8"#)).unwrap().1, 64 * 5 + 1);
    }

    #[test]
    fn the_pool_is_sized_by_pages_or_by_memory() {
        assert_eq!(read(&with(r#", "pages": 77"#)).unwrap().1, 77);
        assert_eq!(read(&with(r#", "max_num_pages": 78"#)).unwrap().1, 78);
        for (memory, pages) in [("80%", 819), ("64MiB", 64), ("0.5 GiB", 512), ("100MB", 95)] {
            assert_eq!(read(&with(&format!(r#", "memory": "{memory}""#))).unwrap().1, pages);
        }
    }

    #[test]
    fn every_bad_value_is_named() {
        for (settings, said) in [
            (r#"{"num_layers": 2, "head_dim": 8}"#.to_string(), "`num_kv_heads` is not set"),
            (with(r#", "page_size": 0"#), "`page_size` is 0"),
            (with(r#", "max_seq_len": 0"#), "`max_seq_len` is 0"),
            (with(r#", "num_qo_heads": 4"#), "`num_qo_heads` is 4"),
            (with(r#", "pages": 1"#), "`pages` is 1"),
            (with(r#", "pages": 9, "memory": "80%""#), "set one of them"),
            (with(r#", "memory": "0%""#), "`memory` is \"0%\""),
            (with(r#", "memory": "101%""#), "`memory` is \"101%\""),
            (with(r#", "memory": "many""#), "`memory` is \"many\""),
            (with(r#", "memory": "-1GiB""#), "`memory` is \"-1GiB\""),
            (with(r#", "memory": "NaN GiB""#), "`memory` is \"NaN GiB\""),
            (with(r#", "memory": "1MiB""#), "that is 1 page of"),
            (with(r#", "dtype": "f64""#), "`dtype` is \"f64\""),
            (with(r#", "page_sise": 8"#), "did you mean `page_size`?"),
        ] {
            let error = read(&settings).err().unwrap_or_else(|| panic!("accepted {settings}"));
            assert!(error.message().contains(said), "{settings}: {error}");
            assert!(!error.message().contains('\n'));
        }
    }
}
