//! Which part of the cost of a step grows with what.

/// One measured shape.
#[derive(Clone, Copy, Debug)]
pub struct Point {
    /// Requests.
    pub batch: f64,
    /// Pages that the batch holds.
    pub pages: f64,
    /// Page ends per step.
    pub page_ends: f64,
    /// Median cost of a step in microseconds.
    pub time: f64,
}

/// `t = a + b * batch + c * pages + d * page_ends`, in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Fit {
    /// a, b, c and d.
    pub value: [f64; 4],
    /// Standard error of each.
    pub error: [f64; 4],
    /// Largest relative distance of a point from the fit.
    pub worst: f64,
    /// How many points there were.
    pub points: usize,
}

/// The least squares of the relative error; `None` when the points do not decide it.
pub fn fit(points: &[Point]) -> Option<Fit> {
    const N: usize = 4;
    let row = |p: &Point| [1.0, p.batch, p.pages, p.page_ends].map(|x| x / p.time);
    if points.len() <= N || points.iter().any(|p| p.time <= 0.0) {
        return None;
    }
    let mut normal = [[0.0; N]; N];
    let mut right = [0.0; N];
    for x in points.iter().map(row) {
        for i in 0..N {
            right[i] += x[i];
            (0..N).for_each(|j| normal[i][j] += x[i] * x[j]);
        }
    }
    let inverse = invert(normal)?;
    let value: [f64; N] = std::array::from_fn(|i| (0..N).map(|j| inverse[i][j] * right[j]).sum());
    let residual = |p: &Point| row(p).iter().zip(value).map(|(x, v)| x * v).sum::<f64>() - 1.0;
    let variance: f64 =
        points.iter().map(|p| residual(p).powi(2)).sum::<f64>() / (points.len() - N) as f64;
    Some(Fit {
        value,
        error: std::array::from_fn(|i| (inverse[i][i] * variance).max(0.0).sqrt()),
        worst: points.iter().map(|p| residual(p).abs()).fold(0.0, f64::max),
        points: points.len(),
    })
}

/// By elimination with the largest pivot, columns scaled to the same size first.
fn invert<const N: usize>(matrix: [[f64; N]; N]) -> Option<[[f64; N]; N]> {
    let scale: [f64; N] = std::array::from_fn(|i| matrix[i][i].sqrt());
    if scale.contains(&0.0) {
        return None;
    }
    let mut left = matrix;
    let mut right = [[0.0; N]; N];
    for i in 0..N {
        right[i][i] = 1.0;
        (0..N).for_each(|j| left[i][j] /= scale[i] * scale[j]);
    }
    for column in 0..N {
        let pivot =
            (column..N).max_by(|&a, &b| left[a][column].abs().total_cmp(&left[b][column].abs()))?;
        if left[pivot][column].abs() < 1e-9 {
            return None;
        }
        left.swap(column, pivot);
        right.swap(column, pivot);
        let by = left[column][column];
        for j in 0..N {
            left[column][j] /= by;
            right[column][j] /= by;
        }
        for i in (0..N).filter(|&i| i != column) {
            let by = left[i][column];
            for j in 0..N {
                left[i][j] -= by * left[column][j];
                right[i][j] -= by * right[column][j];
            }
        }
    }
    for i in 0..N {
        (0..N).for_each(|j| right[i][j] /= scale[i] * scale[j]);
    }
    Some(right)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn points(noise: f64) -> Vec<Point> {
        let mut points = Vec::new();
        for (i, batch) in [1.0, 8.0, 32.0, 128.0, 256.0, 1024.0].into_iter().enumerate() {
            for (j, context) in [32.0, 256.0, 1024.0, 8192.0].into_iter().enumerate() {
                for ends in [0.0, batch / 16.0] {
                    let pages = batch * context;
                    let wobble = 1.0 + noise * if (i + j) % 2 == 0 { 1.0 } else { -1.0 };
                    let time = (0.5 + 0.02 * batch + 1e-6 * pages + 0.1 * ends) * wobble;
                    points.push(Point { batch, pages, page_ends: ends, time });
                }
            }
        }
        points
    }

    #[test]
    fn the_terms_of_a_known_cost_are_found() {
        let exact = fit(&points(0.0)).unwrap();
        for (found, known) in exact.value.iter().zip([0.5, 0.02, 1e-6, 0.1]) {
            assert!((found - known).abs() < 1e-6 * known, "{exact:?}");
        }
        assert!(exact.worst < 1e-9);
        let noisy = fit(&points(0.05)).unwrap();
        for ((found, known), error) in
            noisy.value.iter().zip([0.5, 0.02, 1e-6, 0.1]).zip(noisy.error)
        {
            assert!(error > 0.0 && (found - known).abs() < 4.0 * error, "{noisy:?}");
        }
    }

    #[test]
    fn points_that_decide_nothing_give_no_fit() {
        assert!(fit(&points(0.0)[..3]).is_none());
        let same = Point { batch: 8.0, pages: 64.0, page_ends: 1.0, time: 2.0 };
        assert!(fit(&[same; 9]).is_none());
    }
}
