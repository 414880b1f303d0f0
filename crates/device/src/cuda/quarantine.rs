//! Memory that nobody wants any more but a step in flight may still use.

use std::any::Any;
use std::collections::VecDeque;

/// Holds values until the device has completed the step that last used them.
///
/// Steps are counted by epochs, which complete in order.
#[derive(Default)]
pub struct Quarantine {
    /// Ascending by epoch.
    held: VecDeque<(u64, Box<dyn Any + Send>)>,
}

impl Quarantine {
    /// Takes a value that steps up to `epoch` may use.
    pub fn hold(&mut self, epoch: u64, value: impl Any + Send) {
        let at = self.held.partition_point(|(e, _)| *e <= epoch);
        self.held.insert(at, (epoch, Box::new(value)));
    }

    /// Drops what no step after `completed` uses; answers how many values that were. Not under
    /// capture: dropping device memory waits for the device.
    pub fn release(&mut self, completed: u64) -> usize {
        let done = self.held.partition_point(|(epoch, _)| *epoch <= completed);
        self.held.drain(..done).count()
    }

    /// How many values are held.
    pub fn len(&self) -> usize {
        self.held.len()
    }

    /// Whether nothing is held.
    pub fn is_empty(&self) -> bool {
        self.held.is_empty()
    }
}

impl std::fmt::Debug for Quarantine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.held.iter().map(|(epoch, _)| epoch)).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn a_value_goes_when_its_epoch_has_completed_and_not_before() {
        let values: Vec<Arc<()>> = (0..4).map(|_| Arc::new(())).collect();
        let mut quarantine = Quarantine::default();
        for (value, epoch) in values.iter().zip([3, 5, 4, 3]) {
            quarantine.hold(epoch, value.clone());
        }
        let alive = || values.iter().map(|v| Arc::strong_count(v) - 1).collect::<Vec<_>>();
        assert_eq!((quarantine.release(2), alive()), (0, vec![1, 1, 1, 1]));
        assert_eq!((quarantine.release(3), alive()), (2, vec![0, 1, 1, 0]));
        assert_eq!((quarantine.release(4), alive()), (1, vec![0, 1, 0, 0]));
        assert_eq!((quarantine.release(u64::MAX), quarantine.is_empty()), (1, true));
    }
}
