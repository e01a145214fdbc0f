//! Loops over many elements, compiled for the vector instructions that the processor has.

/// Runs a loop with these instructions. Its results have the same bits as without them: no
/// operation is fused with another, and no sum has another order.
#[inline(always)]
pub(crate) fn wide<R>(work: impl FnOnce() -> R) -> R {
    pulp::Arch::new().dispatch(work)
}
