//! Makes a sequence of operations that shows a fault as short as it will get.

/// Most attempts before the kit is content with what it has.
const ATTEMPTS: usize = 400;

/// Leaves out operations, in ever smaller runs, for as long as `fails` says that the rest still
/// shows a fault (Zeller and Hildebrandt's ddmin, without its complements). `fails` gives the fault.
pub fn shrink<T: Clone, E>(
    operations: Vec<T>,
    error: E,
    mut fails: impl FnMut(&[T]) -> Option<E>,
) -> (Vec<T>, E) {
    let (mut shortest, mut error) = (operations, error);
    let mut run = shortest.len().div_ceil(2);
    let mut attempts = 0;
    while run > 0 && attempts < ATTEMPTS {
        let (mut at, mut shrunk) = (0, false);
        while at < shortest.len() && attempts < ATTEMPTS {
            attempts += 1;
            let mut rest = shortest.clone();
            rest.drain(at..(at + run).min(rest.len()));
            match fails(&rest) {
                Some(e) => (shortest, error, shrunk) = (rest, e, true),
                None => at += run,
            }
        }
        if run == 1 && !shrunk {
            break;
        }
        run = if run == 1 { 1 } else { run.div_ceil(2) };
    }
    (shortest, error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_matters_is_left() {
        let fails = |ops: &[u32]| (ops.contains(&7) && ops.contains(&90)).then_some("both");
        let all: Vec<u32> = (0..100).collect();
        assert_eq!(shrink(all, "both", fails), (vec![7, 90], "both"));
    }
}
