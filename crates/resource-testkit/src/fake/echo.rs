//! What a fake offers to others.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use resource_api::host::Job;
use resource_api::{HostServices, ResourceError, Result};

use super::Fake;
use crate::interface::Echo;

impl Echo for Fake {
    fn echo(&self, values: &[u32], label: Option<&str>) -> Result<u64> {
        self.log.enter("echo");
        match label {
            Some("bad") => Err(ResourceError::invalid("label `bad` is never echoed")),
            _ => Ok(values.iter().map(|&v| u64::from(v)).sum::<u64>() + self.key.len() as u64),
        }
    }

    fn key(&self) -> String {
        self.key.clone()
    }

    fn peers(&self) -> Vec<String> {
        self.peers.lock().iter().map(|(key, _)| key.clone()).collect()
    }

    fn spread(&self, tasks: u32, panic_at: Option<u32>) -> Result<u64> {
        let sum = AtomicU64::new(0);
        self.host.run(tasks, |task| {
            assert!(Some(task) != panic_at, "task {task} was asked to panic");
            sum.fetch_add(u64::from(task), Ordering::Relaxed);
        });
        Ok(sum.into_inner())
    }

    fn start_job(&self, panic: bool) -> Result<()> {
        let done = self.jobs_done.clone();
        let job = move || {
            assert!(!panic, "the job was asked to panic");
            done.fetch_add(1, Ordering::Release);
        };
        self.host.spawn("fake", Job::new(job))
    }

    fn jobs_done(&self) -> u32 {
        self.jobs_done.load(Ordering::Acquire)
    }

    fn graph_buffer(&self, slot: u32, at: u32) -> Result<&[AtomicU32]> {
        self.buffers.get(slot, at)
    }
}
