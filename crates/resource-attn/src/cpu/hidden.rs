//! Picks the rows that the head of a model needs.

use resource_api::{ResourceError, Result, TensorView, TensorViewMut};

/// Copies the last token's hidden state of each row; rows without tokens are left alone.
///
/// # Errors
/// `INVALID` when `hidden` is not `[tokens, hidden]` or `out` not `[rows, hidden]`, both f32.
pub(crate) fn select_last(
    indptr: &[u32],
    hidden: &TensorView<'_>,
    out: &mut TensorViewMut<'_>,
) -> Result<()> {
    let tokens = indptr.last().map_or(0, |&n| i64::from(n));
    let rows = indptr.len() as i64 - 1;
    let width = match (hidden.shape(), out.shape()) {
        (&[n, width], &[r, out_width]) if n >= tokens && r >= rows && width == out_width => width,
        (hidden, out) => {
            return Err(ResourceError::invalid(format!(
                "hidden is {hidden:?} and out {out:?}; this step needs [{tokens}, n] and [{rows}, n]"
            )));
        }
    };
    let width = width as usize;
    let (Some(hidden), Some(out)) = (hidden.as_slice::<f32>(), out.as_mut_slice::<f32>()) else {
        return Err(ResourceError::invalid("hidden and out must be contiguous f32 on the CPU"));
    };
    for (r, ends) in indptr.windows(2).enumerate() {
        if ends[1] > ends[0] {
            let last = (ends[1] - 1) as usize * width;
            out[r * width..][..width].copy_from_slice(&hidden[last..][..width]);
        }
    }
    Ok(())
}
