//! Rows of int8, each with its scale behind it: an element is a number of steps, and the scale says how
//! large a step is.

/// Bytes behind a row for its scale, an `f32` as the machine stores it.
pub const SCALE_BYTES: usize = size_of::<f32>();

/// Steps up to the largest value of a row.
const MOST: f32 = 127.0;

/// The scale behind the row of this width that `x` begins with.
///
/// # Panics
/// Where there is none.
#[inline]
pub(super) fn scale_behind(x: &[i8], width: usize) -> f32 {
    let bytes: [i8; SCALE_BYTES] = *x[width..].first_chunk().expect("a scale behind each row");
    f32::from_ne_bytes(bytemuck::cast(bytes))
}

/// How large a step of a row with these values is, and how many steps 1 is. A row with a value that is not
/// finite has no scale that is a number, so that whoever reads it finds out; one of zeros has 0.
pub(crate) fn steps_of(x: &[f32]) -> (f32, f32) {
    let most = x.iter().fold(0.0, |most: f32, x| most.max(x.abs()));
    match most / MOST {
        _ if !x.iter().all(|x| x.is_finite()) => (f32::NAN, 0.0),
        step if step < f32::MIN_POSITIVE => (0.0, 0.0),
        // All steps together must not be more than there are numbers for.
        step if (step * MOST).is_infinite() => (step.next_down(), MOST / most),
        step => (step, MOST / most),
    }
}

#[cfg(test)]
mod tests {
    use crate::cpu::attention::tests::{add_some, dot_some};
    use crate::cpu::attention::{Rows, load_row};
    use crate::{PoolType, SharedPool};

    fn value(i: usize) -> f32 {
        ((i as f32 * 12.9898).sin() * 43_758.547).fract() * 3.0
    }

    /// Rows as a pool stores them, and what they hold.
    fn stored(rows: &[Vec<f32>], stride: usize) -> (Vec<i8>, Vec<Vec<f32>>) {
        let pool = SharedPool::new(rows.len() * stride, PoolType::I8).unwrap();
        rows.iter()
            .enumerate()
            .for_each(|(i, row)| pool.view().writer().store(i * stride, row).unwrap());
        let bytes = pool.view().reader().bytes(0..rows.len() * stride).unwrap().to_vec();
        let held = rows.iter().enumerate().map(|(i, row)| {
            let mut out = vec![0.0; row.len()];
            pool.view().reader().load(i * stride, &mut out).unwrap();
            out
        });
        (bytemuck::cast_slice(&bytes).to_vec(), held.collect())
    }

    #[test]
    fn a_row_is_held_within_half_a_step() {
        for width in [1, 7, 64, 300] {
            let row: Vec<f32> = (0..width).map(value).collect();
            let (_, held) = stored(std::slice::from_ref(&row), width + 4);
            let most = row.iter().fold(0.0, |m: f32, x| m.max(x.abs()));
            let half = f64::from(most) / 254.0 * (1.0 + 1e-5);
            let close = |(a, b): (&f32, &f32)| (f64::from(*a) - f64::from(*b)).abs() <= half;
            assert!(row.iter().zip(&held[0]).all(close), "{width}");
        }
        for (bad, held) in [(0.0, 0.0), (1e-44, 0.0), (f32::MAX, f32::MAX)] {
            let got = stored(&[vec![bad, 0.0]], 6).1[0][0];
            assert!((got - held).abs() <= held * 1e-6, "{bad}: {got}");
        }
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            assert!(stored(&[vec![1.0, bad]], 6).1[0].iter().all(|x| x.is_nan()), "{bad}");
        }
    }

    #[test]
    fn products_are_those_of_what_rows_hold_and_do_not_depend_on_how_they_are_cut() {
        crate::cpu::ops::tests::at_every_level(|| {
            for (width, heads, count) in [(64, 9, 70), (33, 3, 16), (80, 1, 5), (16, 17, 130)] {
                let stride = width + 4;
                let rows: Vec<Vec<f32>> = (0..count)
                    .map(|i| (0..width).map(|d| value(i * width + d)).collect())
                    .collect();
                let (x, held) = stored(&rows, stride);
                let q: Vec<f32> = (0..heads * width).map(|i| value(i + 7)).collect();
                let p: Vec<f32> = (0..heads * count).map(|i| value(i + 3)).collect();
                let mut scores = vec![0.0; heads * count];
                dot_some(&q, heads, Rows::i8(&x, stride), count, &mut scores, count);
                let mut acc = vec![0.0; heads * width];
                add_some(&p, count, heads, Rows::i8(&x, stride), count, &mut acc);
                let (mut parts, mut row) = (vec![0.0; heads * width], vec![0.0; width]);
                for (i, held) in held.iter().enumerate() {
                    let one = Rows::i8(&x[i * stride..], stride);
                    load_row(one, 0, &mut row);
                    assert_eq!(row, *held);
                    for (h, acc) in parts.chunks_mut(width).enumerate() {
                        let q = &q[h * width..][..width];
                        let want: f64 =
                            q.iter().zip(held).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
                        let got = scores[h * count + i];
                        assert!((f64::from(got) - want).abs() < 1e-4, "{got} {want}");
                        let mut alone = [0.0];
                        dot_some(q, 1, one, 1, &mut alone, 1);
                        assert_eq!(alone[0], got);
                        add_some(&p[h * count + i..][..1], 1, 1, one, 1, acc);
                    }
                }
                assert_eq!(parts, acc);
                for (at, &got) in acc.iter().enumerate() {
                    let terms = held.iter().enumerate().map(|(i, held)| {
                        f64::from(p[at / width * count + i]) * f64::from(held[at % width])
                    });
                    assert!((f64::from(got) - terms.sum::<f64>()).abs() < 2e-4);
                }
            }
        });
    }
}
