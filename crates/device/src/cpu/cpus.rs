//! The processors that this process may use, and keeping threads to them.

use std::collections::BTreeSet;

use crate::cpu::pool::Pool;

/// Processors, first one of every core and then the others of each: hyper-threads share what kernels
/// are made of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cpus {
    order: Vec<usize>,
    cores: usize,
}

impl Cpus {
    /// Those that this thread may run on, by its affinity, which `taskset` and cgroups decide. `None`
    /// where the system does not say.
    pub fn allowed() -> Option<Self> {
        Some(Self::of(allowed()?, |cpu| {
            let file = format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
            // Two processors of a core have the same list; without one each is a core.
            std::fs::read_to_string(file).unwrap_or_else(|_| cpu.to_string())
        }))
    }

    fn of(cpus: Vec<usize>, core_of: impl Fn(usize) -> String) -> Self {
        let mut seen = BTreeSet::new();
        let (mut order, others): (Vec<_>, Vec<_>) =
            cpus.into_iter().partition(|&cpu| seen.insert(core_of(cpu)));
        let cores = order.len();
        order.extend(others);
        Self { order, cores }
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.order.len()
    }

    /// How many cores they are on.
    pub fn cores(&self) -> usize {
        self.cores
    }

    /// The processor for thread `i`; `None` where there are fewer processors than threads.
    pub fn get(&self, i: usize) -> Option<usize> {
        self.order.get(i).copied()
    }
}

/// A [`Pool`] whose threads are kept to processors of their own. The caller, which is one of them, is
/// not: there is room for it on the first. With more threads than processors none is kept.
pub fn pinned_pool(threads: usize) -> Pool {
    let cpus = Cpus::allowed().filter(|cpus| threads <= cpus.count());
    Pool::starting(threads, move |i| {
        if let Some(cpu) = cpus.as_ref().and_then(|cpus| cpus.get(i)) {
            // Where the system refuses it, the thread runs as the others do.
            let _ = pin(cpu);
        }
    })
}

/// How many threads suit this machine: one to a core, and no more than this process is given time for.
pub fn default_threads() -> usize {
    let most = std::thread::available_parallelism().map_or(1, usize::from);
    Cpus::allowed().map_or(most, |cpus| most.min(cpus.cores().max(1)))
}

/// Room for the processors of the largest machines, in bits.
#[cfg(target_os = "linux")]
type Mask = [u64; 128];

#[cfg(target_os = "linux")]
fn allowed() -> Option<Vec<usize>> {
    let mut mask: Mask = [0; 128];
    // SAFETY: the system writes at most as many bytes as it is told there are.
    let done = unsafe { libc::sched_getaffinity(0, size_of::<Mask>(), (&raw mut mask).cast()) };
    let is_set = |&cpu: &usize| mask[cpu / 64] >> (cpu % 64) & 1 == 1;
    (done == 0).then(|| (0..size_of::<Mask>() * 8).filter(is_set).collect())
}

#[cfg(not(target_os = "linux"))]
fn allowed() -> Option<Vec<usize>> {
    None
}

/// Keeps this thread to one processor, and the threads that it starts; false where the system refuses.
#[cfg(target_os = "linux")]
fn pin(cpu: usize) -> bool {
    let mut mask: Mask = [0; 128];
    let Some(word) = mask.get_mut(cpu / 64) else { return false };
    *word = 1 << (cpu % 64);
    // SAFETY: the system reads as many bytes as it is told there are.
    unsafe { libc::sched_setaffinity(0, size_of::<Mask>(), (&raw const mask).cast()) == 0 }
}

#[cfg(not(target_os = "linux"))]
fn pin(_: usize) -> bool {
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_core_comes_before_the_second_half_of_one() {
        let core_of = |cpu: usize| format!("{},{}", cpu % 3, cpu % 3 + 3);
        let cpus = Cpus::of(vec![0, 1, 3, 4, 5], core_of);
        assert_eq!((cpus.count(), cpus.cores()), (5, 3));
        let order: Vec<_> = (0..6).map(|i| cpus.get(i)).collect();
        assert_eq!(order, [Some(0), Some(1), Some(5), Some(3), Some(4), None]);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_thread_that_is_kept_to_a_processor_may_use_that_one() {
        let all = Cpus::allowed().unwrap();
        assert!(all.count() >= 1 && default_threads() <= all.cores());
        let last = all.get(all.count() - 1).unwrap();
        let (pinned, seen) =
            std::thread::spawn(move || (pin(last), Cpus::allowed().unwrap())).join().unwrap();
        assert!(pinned);
        assert_eq!((seen.count(), seen.get(0)), (1, Some(last)));
        assert_eq!(Cpus::allowed().unwrap(), all, "another thread was moved");
        assert!(!pin(1 << 20));
    }
}
