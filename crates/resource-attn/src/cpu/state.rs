//! Softmax in progress: what some keys of a row amount to, and how two such parts become one.

use device::ops;

/// Of several (token, query head) rows: the greatest score, the sum of exponentials relative to it,
/// and the values weighted with them. Empty at `(-inf, 0, 0)`.
#[derive(Debug)]
pub(super) struct State<'a> {
    pub max: &'a mut [f32],
    pub sum: &'a mut [f32],
    pub acc: &'a mut [f32],
}

impl<'a> State<'a> {
    /// Elements that a state of `rows` rows takes.
    pub fn len(rows: usize, head_dim: usize) -> usize {
        rows * (head_dim + 2)
    }

    /// The element at which `acc` of the first of `rows` rows begins.
    pub fn acc_start(rows: usize) -> usize {
        2 * rows
    }

    /// The state kept in `memory`.
    pub fn in_memory(memory: &'a mut [f32], rows: usize) -> Self {
        let (max, rest) = memory.split_at_mut(rows);
        let (sum, acc) = rest.split_at_mut(rows);
        Self { max, sum, acc }
    }

    /// Makes it that of no keys.
    pub fn clear(&mut self) {
        self.max.fill(f32::NEG_INFINITY);
        self.sum.fill(0.0);
        self.acc.fill(0.0);
    }

    /// Takes in the state of later keys, kept in `memory`. Nothing merged with nothing stays
    /// nothing, where the plain formula has `-inf - -inf`.
    pub fn merge(&mut self, memory: &[f32]) {
        let rows = self.max.len();
        let (maxima, rest) = memory.split_at(rows);
        let (sums, accs) = rest.split_at(rows);
        let head_dim = self.acc.len() / rows.max(1);
        for r in 0..rows {
            let (max, sum) = (maxima[r], sums[r]);
            let acc = &accs[r * head_dim..][..head_dim];
            let own = &mut self.acc[r * head_dim..][..head_dim];
            if is_empty(max, sum) {
                continue;
            }
            if is_empty(self.max[r], self.sum[r]) {
                (self.max[r], self.sum[r]) = (max, sum);
                own.copy_from_slice(acc);
                continue;
            }
            let both = self.max[r].max(max);
            let (a, b) = ((self.max[r] - both).exp(), (max - both).exp());
            self.max[r] = both;
            self.sum[r] = self.sum[r] * a + sum * b;
            for (own, &x) in own.iter_mut().zip(acc) {
                *own = *own * a + x * b;
            }
        }
    }

    /// The attention of row `r`: 0 when it saw no keys.
    pub fn finish(&self, r: usize, out: &mut [f32]) {
        let sum = self.sum[r];
        out.copy_from_slice(&self.acc[r * out.len()..][..out.len()]);
        if sum != 0.0 {
            ops::scale(out, 1.0 / sum);
        }
    }
}

fn is_empty(max: f32, sum: f32) -> bool {
    sum == 0.0 && max == f32::NEG_INFINITY
}

#[cfg(test)]
mod tests {
    use super::*;

    const EMPTY: [f32; 4] = [f32::NEG_INFINITY, 0.0, 0.0, 0.0];

    fn merged(parts: &[[f32; 4]]) -> ([f32; 4], [f32; 2]) {
        let mut memory = [f32::NAN; 4];
        let mut state = State::in_memory(&mut memory, 1);
        state.clear();
        parts.iter().for_each(|part| state.merge(part));
        let mut out = [f32::NAN; 2];
        state.finish(0, &mut out);
        (memory, out)
    }

    #[test]
    fn two_empty_states_make_an_empty_one() {
        assert_eq!(merged(&[EMPTY, EMPTY]), (EMPTY, [0.0; 2]));
        assert_eq!(merged(&[]), (EMPTY, [0.0; 2]));
    }

    #[test]
    fn an_empty_state_changes_nothing_on_either_side() {
        let part = [3.0, 2.0, 4.0, -1.0];
        let want = (part, [2.0, -0.5]);
        assert_eq!(merged(&[part]), want);
        assert_eq!(merged(&[EMPTY, part, EMPTY]), want);
    }

    #[test]
    fn parts_far_apart_merge_without_overflow() {
        // Keys with scores 1000 and 0, values (1, 0) and (0, 1).
        let (_, out) = merged(&[[0.0, 1.0, 0.0, 1.0], [1000.0, 1.0, 1.0, 0.0]]);
        assert_eq!(out, [1.0, 0.0]);
        // Equal scores weigh the same.
        let (_, out) = merged(&[[5.0, 1.0, 0.0, 1.0], [5.0, 1.0, 1.0, 0.0]]);
        assert_eq!(out, [0.5, 0.5]);
    }

    #[test]
    fn a_broken_part_stays_visible() {
        let (_, out) = merged(&[[1.0, 1.0, 1.0, 1.0], [1.0, f32::NAN, f32::NAN, 1.0]]);
        assert!(out.iter().all(|x| x.is_nan()));
    }
}
