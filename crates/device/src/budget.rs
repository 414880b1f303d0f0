//! A share of the engine's memory budget.

use resource_api::{Device, HostServices, HostServicesHandle};

/// Memory that is spoken for in the engine's budget until this is dropped. What is allocated under it
/// should be dropped before.
#[derive(Debug)]
pub struct Budget {
    host: HostServicesHandle,
    device: Device,
    bytes: u64,
}

impl Budget {
    /// Reserves `bytes` of the memory of a device or of the host.
    ///
    /// # Errors
    /// That of the host, where the budget has no such room.
    pub fn take(
        host: &HostServicesHandle,
        device: Device,
        bytes: u64,
    ) -> resource_api::Result<Self> {
        host.reserve_memory(device, bytes)?;
        Ok(Self { host: host.clone(), device, bytes })
    }
}

impl Drop for Budget {
    fn drop(&mut self) {
        self.host.release_memory(self.device, self.bytes);
    }
}
