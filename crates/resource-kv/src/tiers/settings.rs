//! The tiers that the settings want.

use std::path::Path;
use std::sync::{Arc, Mutex};

use device::Budget;
use device::cuda::Context;
use resource_api::{Device, EngineResourceInfo, HostServices, ResourceError, Result};

use super::{DiskStore, MemoryStore, Origins, PageStore, PinnedStore, Tier, Tiers, disk};
use crate::spec::{KvSpec, memory_bytes};
use crate::state::no_memory;

impl KvSpec {
    /// Tiers for pages of `page_size` tokens and `page_bytes`, and the host memory that is spoken for.
    ///
    /// # Errors
    /// `INVALID` naming the setting, `EXHAUSTED` without that memory.
    pub(crate) fn tiers(
        &self,
        page_bytes: u64,
        page_size: u32,
        info: &EngineResourceInfo,
    ) -> Result<(Tiers, Option<Budget>)> {
        let (mut tiers, mut budget, mut kept) = (Vec::new(), None, None);
        let free = info.host.free_memory(Device::CPU);
        let slots = match (self.host_pages, &self.host_memory) {
            (Some(_), Some(_)) => {
                let what =
                    "`host_pages` and `host_memory` both size the host pool; set one of them";
                return Err(ResourceError::invalid(what));
            }
            (Some(pages), None) => u64::from(pages),
            (None, Some(text)) => memory_bytes("host_memory", text, free)? / page_bytes,
            (None, None) => 0,
        };
        let slots = u32::try_from(slots).unwrap_or(u32::MAX);
        if self.host_memory.is_some() && slots == 0 {
            return Err(ResourceError::invalid(format!(
                "`host_memory` has no room for a page of {page_bytes} bytes"
            )));
        }
        if slots > 0 {
            budget = Some(Budget::take(&info.host, Device::CPU, page_bytes * u64::from(slots))?);
            let store: Arc<dyn PageStore> = match info.device.is_cpu() {
                true => Arc::new(MemoryStore::new(slots)),
                false => {
                    let context = Context::of_device(info.device)?;
                    Arc::new(PinnedStore::new(&context, slots, page_bytes as usize)?)
                }
            };
            tiers.push(Tier::new("host", store, slots));
        }
        match (&self.disk_file, &self.disk_size) {
            (None, None) => {}
            (None, Some(_)) => {
                return Err(ResourceError::invalid("`disk_size` is set and `disk_file` is not"));
            }
            (Some(_), None) => {
                let what = "`disk_file` is set and `disk_size` is not: say how large it may become";
                return Err(ResourceError::invalid(what));
            }
            (Some(file), Some(size)) => {
                let bytes = match size.trim().ends_with('%') {
                    true => {
                        let what = "`disk_size` is a size, such as \"20GiB\", not a share";
                        return Err(ResourceError::invalid(what));
                    }
                    false => memory_bytes("disk_size", size, 0)?,
                };
                let slots = disk::slots_in(bytes, page_bytes);
                if slots == 0 {
                    return Err(ResourceError::invalid(format!(
                        "`disk_size` is \"{size}\", which has no room for a page of {page_bytes} bytes"
                    )));
                }
                let origins = Origins::new(slots, page_size).map_err(no_memory)?;
                let origins = Arc::new(Mutex::new(origins));
                let opened = DiskStore::open(Path::new(file), slots, page_bytes, origins.clone())?;
                let disk = Tier::new("disk", Arc::new(opened.store), slots);
                tiers.push(disk.with_contents(opened.contents));
                kept = Some((origins, opened.found));
            }
        }
        let tiers = Tiers::new(tiers);
        match kept {
            Some((origins, found)) => Ok((tiers.with_origins(origins, found), budget)),
            None => Ok((tiers, budget)),
        }
    }
}
