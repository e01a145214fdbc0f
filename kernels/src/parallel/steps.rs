//! What the launchers of this room have in common: rows of all ranks by position, the attention of
//! a rank's own queries, and its results.

use dsv4_runtime::{DType, Result, TensorView, Views};

use super::collectives::Rank;
use crate::attention::sparse_attention::{self, Options};

/// A part of a call's workspace, `offset` bytes after its start.
pub(super) fn in_workspace(
    views: &Views,
    name: &str,
    offset: usize,
    dtype: DType,
    shape: &[usize],
) -> TensorView {
    TensorView::dense(name, views["workspace"].address + offset as u64, dtype, shape)
}

/// Gathered positions, and the gathered row of each position.
pub(super) struct Slots {
    /// `[rows of all ranks]` i32: the position of each gathered row.
    pub positions: TensorView,
    /// `[num_keys]` i32: the gathered row of each position.
    pub slots: TensorView,
}

impl Rank<'_> {
    /// Gathers the positions of all ranks' keys, and inverts them, in parts of the workspace: that
    /// of `rows` positions, then that of the slots of `num_keys` keys.
    #[track_caller]
    pub fn gather_slots(
        &mut self,
        views: &Views,
        parts: [usize; 2],
        [rows, num_keys]: [usize; 2],
    ) -> Result<Slots> {
        let positions = in_workspace(views, "positions", parts[0], DType::I32, &[rows]);
        let slots = in_workspace(views, "slots", parts[1], DType::I32, &[num_keys]);
        self.all_gather("positions", &views["positions"], &positions)?;
        self.slots_of(&positions, &slots)?;
        Ok(Slots { positions, slots })
    }

    /// Brings rows in the order of positions to `slotted`, that of gathered rows. Rows of padding,
    /// which are no sum, become 0.
    pub fn by_slot(&self, rows: &TensorView, slotted: &TensorView, slots: &Slots) -> Result<()> {
        self.copy_rows(rows, slotted, Some(&slots.positions))
    }

    /// The attention over the keys and lists of `attended`. It writes the outputs of `views`.
    /// Returns the kernel that ran.
    pub fn attention(
        &mut self,
        views: &Views,
        attended: Views,
        options: Options,
    ) -> Result<Option<String>> {
        let attended = ["out", "lse", "max_logits"]
            .into_iter()
            .fold(attended, |all, name| all.with(name, &views[name]));
        self.launch("sparse_attention", "forward", &attended, |device| {
            sparse_attention::forward(device, &attended, options)
        })
    }

    /// The backward of [`Self::attention`]. `attended` has the gradients of its keys, and scratch
    /// memory. Returns the kernels that ran.
    pub fn attention_backward(
        &mut self,
        views: &Views,
        mut attended: Views,
        options: Options,
    ) -> Result<Vec<String>> {
        for name in ["out", "lse", "dout", "dlse", "dq", "dsink"] {
            if let Some(view) = views.get(name) {
                attended.put(name, view.clone());
            }
        }
        let ran = self.launch("sparse_attention", "backward", &attended, |device| {
            sparse_attention::backward(device, &attended, options)
        })?;
        Ok(ran.unwrap_or_default())
    }

    /// Writes fp32 rows to a result, rounded if it is bf16. `v_dim` says of whose module the kernel
    /// is. Returns it, if it ran.
    pub fn write_rows(
        &self,
        source: &TensorView,
        target: &TensorView,
        v_dim: usize,
    ) -> Result<Option<String>> {
        if target.dtype == DType::F32 {
            self.copy_all_rows(source, target)?;
            return Ok(None);
        }
        sparse_attention::round_rows(self.device, v_dim, source, target)?;
        Ok(Some("sparse_attention_cast".into()))
    }

    /// Sums the gradient of the sinks over ranks, where the call has any.
    #[track_caller]
    pub fn sum_sink(&mut self, views: &Views) -> Result<Option<String>> {
        let Some(dsink) = views.get("dsink") else { return Ok(None) };
        self.all_reduce("dsink", dsink)?;
        Ok(Some("all_reduce".into()))
    }
}
