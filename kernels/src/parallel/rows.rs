//! Launchers of `kernels/cuda/parallel` (training 10): rows of all ranks and lists of them, on the
//! device alone. A step of ranks reads nothing on the host, so it can be recorded.

use dsv4_runtime::params::{DeviceAddress, Params};
use dsv4_runtime::source::{Module, module};
use dsv4_runtime::{DType, Kernel, Result, RuntimeError, TensorView};

use super::collectives::Rank;

const ROWS_FILE: &str = "cp_sparse_attention_rows.cu";
const RANGES_FILE: &str = "cp_indexer_ranges.cu";
const WINDOW_FILE: &str = "cp_window_lists.cu";
/// `THREADS` of the kernels: items of a block.
const THREADS: usize = 256;
/// `WARPS` of the kernels: rows of a block.
const WARPS: usize = THREADS / 32;
/// `NUMBERS` of the kernels: the most of a launch.
const NUMBERS: usize = 256;
/// Bytes of a word that is copied.
const WORD: usize = 16;

/// Every module that the launchers of rows compile.
pub fn modules() -> Vec<Module> {
    vec![module(ROWS_FILE, &[])]
}

/// Those of `cp_indexer`.
pub fn modules_of_indexer() -> Vec<Module> {
    vec![module(ROWS_FILE, &[]), module(RANGES_FILE, &[])]
}

/// Those of halos: `cp_window` and `cp_compressor`.
pub fn modules_of_halos() -> Vec<Module> {
    vec![module(WINDOW_FILE, &[])]
}

/// Bytes from one row to the next.
fn row_bytes(view: &TensorView) -> usize {
    view.strides[0] as usize * view.dtype.size()
}

impl Rank<'_> {
    fn kernel(&self, file: &str, name: &'static str) -> Result<Kernel> {
        self.rows.borrow_mut().insert(name);
        self.device.kernel(file, &[], name)
    }

    /// Those of these kernels that ran so far.
    pub fn kernels_of_rows(&self) -> impl Iterator<Item = String> {
        self.rows.borrow().clone().into_iter().map(str::to_owned)
    }

    fn params(&self) -> Params {
        Params::new(self.operator)
    }

    /// For each position the gathered row that has it, `[num_keys]`, from the positions of all
    /// gathered rows. A key that no row has gets -1; of several rows the lowest counts.
    pub fn slots_of(&self, positions: &TensorView, slots: &TensorView) -> Result<()> {
        let (num_rows, num_keys) = (positions.elements(), slots.elements());
        self.device.backend().fill(slots.address, 0xFF, 4 * num_keys)?;
        let params = self.params().ptr("positions", positions).ptr("slots", slots);
        let params = params.i64("num_rows", num_rows)?.i32("num_keys", num_keys)?;
        let kernel = self.kernel(ROWS_FILE, "gathered_slots")?;
        kernel.launch_blocks("positions", num_rows.div_ceil(THREADS), &params)
    }

    /// Lists of positions as lists of gathered rows, both dense. What is no position becomes -1.
    pub fn map_lists(
        &self,
        indices: &TensorView,
        slots: &TensorView,
        mapped: &TensorView,
    ) -> Result<()> {
        let count = indices.elements();
        let params = self.params().ptr("indices", indices).ptr("slots", slots);
        let params = params.ptr("mapped", mapped).i64("num_slots", count)?;
        let params = params.i32("num_keys", slots.elements())?;
        let kernel = self.kernel(ROWS_FILE, "gathered_lists")?;
        kernel.launch_blocks("indices", count.div_ceil(THREADS), &params)
    }

    /// Copies rows: row `i` of `target` is row `map[i]` of `source`, or 0 where that is no row.
    /// Both are contiguous along their rows, in words of 16 bytes.
    ///
    /// # Errors
    /// Rows that are not such words.
    pub fn copy_rows(
        &self,
        source: &TensorView,
        target: &TensorView,
        map: Option<&TensorView>,
    ) -> Result<()> {
        let (rows, width) = (target.shape[0], source.shape[1..].iter().product::<usize>());
        let width = width * source.dtype.size();
        let is_words = |view: &TensorView| {
            view.address.is_multiple_of(WORD as u64) && row_bytes(view).is_multiple_of(WORD)
        };
        if !(width.is_multiple_of(WORD) && is_words(source) && is_words(target)) {
            let reason = format!("rows of {width} bytes, copied in words of {WORD}");
            return Err(RuntimeError::argument(self.operator, "rows", reason));
        }
        let stride = |view: &TensorView| (row_bytes(view) / WORD) as i64;
        let params = self.params().ptr("source", source);
        let params = params.stride("source_row_stride", stride(source)).ptr("target", target);
        let params = params.stride("target_row_stride", stride(target)).ptr("map", map);
        let params = params.i64("num_rows", rows)?.i64("num_source_rows", source.shape[0])?;
        let params = params.i32("width", width / WORD)?;
        self.kernel(ROWS_FILE, "gathered_copy")?.launch_blocks(
            "rows",
            rows.div_ceil(WARPS),
            &params,
        )
    }

    /// Copies all rows of a tensor to another one.
    pub fn copy_all_rows(&self, source: &TensorView, target: &TensorView) -> Result<()> {
        if !(source.is_dense() && target.is_dense()) {
            return self.copy_rows(source, target, None);
        }
        match source.elements() * source.dtype.size() {
            0 => Ok(()),
            bytes => self.device.backend().copy(target.address, source.address, bytes),
        }
    }

    /// The first of the keys `ks` up to `ke` of each token, and how many they are; all
    /// `[num_tokens]`. Both ends are held to the keys, as the logits' kernel holds them.
    pub fn ranges(
        &self,
        [ks, ke]: [&TensorView; 2],
        [offsets, lengths]: [&TensorView; 2],
        num_keys: usize,
    ) -> Result<()> {
        let tokens = ks.elements();
        let params = self.params().ptr("ks", ks).ptr("ke", ke).ptr("offsets", offsets);
        let params = params.ptr("lengths", lengths).i64("num_tokens", tokens)?;
        let params = params.i32("num_keys", num_keys)?;
        let kernel = self.kernel(RANGES_FILE, "gathered_ranges")?;
        kernel.launch_blocks("ks", tokens.div_ceil(THREADS), &params)
    }

    /// The rows of each own token's window, `[num_tokens, window]`, behind `halo` other rows.
    /// `starts` are the rows of the first keys of sequences, ascending; there is at least one,
    /// unless there are no tokens.
    pub fn window(&self, starts: &TensorView, indices: &TensorView, halo: usize) -> Result<()> {
        let (tokens, window) = (indices.shape[0], indices.shape[1]);
        let params = self.params().ptr("starts", starts).ptr("indices", indices);
        let params = params.i64("num_tokens", tokens)?;
        let params = params.i32("num_sequences", starts.elements())?;
        let params = params.i32("halo", halo)?.i32("window", window)?;
        let kernel = self.kernel(WINDOW_FILE, "gathered_window")?;
        kernel.launch_blocks("window", tokens.div_ceil(WARPS), &params)
    }

    /// Writes numbers that are known when the step is planned to a dense i32 tensor. They are in
    /// the launches' parameters.
    pub fn write(&self, view: &TensorView, numbers: &[i32]) -> Result<()> {
        debug_assert_eq!((view.dtype, view.elements()), (DType::I32, numbers.len()));
        let kernel = self.kernel(WINDOW_FILE, "gathered_numbers")?;
        for (launch, numbers) in numbers.chunks(NUMBERS).enumerate() {
            let target = DeviceAddress(view.address + (4 * NUMBERS * launch) as u64);
            let params = self.params().ptr("target", target).i32("count", numbers.len())?;
            kernel.launch_blocks("numbers", 1, &params.i32s::<NUMBERS>("numbers", numbers)?)?;
        }
        Ok(())
    }
}
