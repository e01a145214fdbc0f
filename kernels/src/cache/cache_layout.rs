//! The layout of the caches of a model's layers: one packed pool of pages, and one packed state for
//! each sequence (inference 13.1, 13.2).
//!
//! Every layer with entries has a region of each page. Every layer has regions of each sequence's
//! state. Layers share the pages, so the stride between pages is larger than one layer's part of a
//! page:
//!
//! ```text
//! region of page P:   pool + P * page_stride + offset          (bytes)
//! region of slot s:   states + s * state_stride + offset
//! ```

use thiserror::Error;

use crate::cache::kv_cache::RowFormat;

/// Tokens of a page: the least common multiple of the ratios of compression.
pub const TOKENS_PER_PAGE: usize = 128;
/// Tokens that attention sees uncompressed: the query's own and 127 before it.
pub const WINDOW: usize = 128;
/// Every region starts at a multiple of this many bytes.
const ALIGNMENT: usize = 16;

/// What a layer attends to in addition to its window (inference 0).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LayerKind {
    /// Nothing: only a sliding window.
    Window,
    /// Entries of 4 tokens each, chosen by an indexer with separate keys.
    Csa,
    /// Entries of 128 tokens each, all of them.
    Hca,
}

impl LayerKind {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Window, Self::Csa, Self::Hca];

    /// Tokens of an entry; `None` where no entries exist.
    pub fn ratio(self) -> Option<usize> {
        match self {
            Self::Window => None,
            Self::Csa => Some(4),
            Self::Hca => Some(128),
        }
    }

    /// Entries that a page holds of a layer: 0, 32 or 1. Stored rows, not tokens.
    pub fn entries_per_page(self) -> usize {
        self.ratio().map_or(0, |ratio| TOKENS_PER_PAGE / ratio)
    }

    /// Rows of the compressor's state that the next entry may need. Where groups overlap these are
    /// the rows of two groups (inference 6.2).
    pub fn state_tokens(self) -> usize {
        match self {
            Self::Window => 0,
            Self::Csa => 8,
            Self::Hca => 128,
        }
    }
}

/// What a region holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Contents {
    /// Compressed entries, in pages.
    Entries,
    /// Keys of the indexer, in pages: codes of all rows, then their scales (inference 7.1).
    IndexerKeys,
    /// Rows of the newest tokens, uncompressed, in a sequence's state.
    Window,
    /// Rows of the compressor, values and then gates, f32, in a sequence's state.
    Compressor,
    /// Rows of the indexer's compressor, likewise.
    IndexerCompressor,
}

/// A layer's part of each page, or of each sequence's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    /// Number of the layer.
    pub layer: usize,
    /// What it holds.
    pub contents: Contents,
    /// Bytes from the start of the page or of the state, a multiple of 16.
    pub offset: usize,
    /// Rows.
    pub rows: usize,
    /// Bytes of the region.
    pub bytes: usize,
}

/// The configuration that determines the layout of the caches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheConfig {
    /// The layers, in their order.
    pub layers: Vec<LayerKind>,
    /// How rows of K = V are stored, in windows and as entries.
    pub row: RowFormat,
    /// Channels of a compressed entry: 512.
    pub head_dim: usize,
    /// Channels of an indexer's key: 128.
    pub indexer_dim: usize,
    /// Bytes of an indexer's key: 132 as e4m3 with an f32 scale, 68 as e2m1 with four e8m0 scales.
    pub indexer_row_bytes: usize,
    /// The most draft tokens that a step may append; all of them may be rejected afterwards.
    pub max_draft_tokens: usize,
}

/// A configuration for which no cache exists.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("cache layout: `{argument}` is {value}: {rule}")]
pub struct LayoutError {
    argument: &'static str,
    value: usize,
    rule: &'static str,
}

/// Regions of a page and of a sequence's state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheLayout {
    /// Regions of each page.
    pub page: Vec<Region>,
    /// Bytes from one page to the next.
    pub page_stride: usize,
    /// Regions of each sequence's state.
    pub state: Vec<Region>,
    /// Bytes from one sequence's state to the next.
    pub state_stride: usize,
    /// Rows of a window: token p is in row p mod `window_rows` (inference 13.3).
    pub window_rows: usize,
    /// The most draft tokens of a step.
    pub max_draft_tokens: usize,
}

impl CacheLayout {
    /// Packs the layers' regions one after the other.
    ///
    /// # Errors
    /// A configuration without layers, or with an impossible number of rows or channels.
    pub fn new(config: &CacheConfig) -> Result<Self, LayoutError> {
        config.check()?;
        let mut layout = Self {
            page: Vec::new(),
            page_stride: 0,
            state: Vec::new(),
            state_stride: 0,
            window_rows: WINDOW + config.max_draft_tokens,
            max_draft_tokens: config.max_draft_tokens,
        };
        for (layer, &kind) in config.layers.iter().enumerate() {
            layout.pack_page(config, layer, kind);
            layout.pack_state(config, layer, kind);
        }
        Ok(layout)
    }

    /// Rows of a compressor's state: token t is in row t mod this number. Rows of drafts overwrite
    /// no row that is needed after a rejection.
    pub fn state_rows(&self, kind: LayerKind) -> usize {
        match kind.state_tokens() {
            0 => 0,
            tokens => tokens + self.max_draft_tokens,
        }
    }

    /// The region of a page or of a state in which a layer keeps `contents`.
    pub fn region(&self, layer: usize, contents: Contents) -> Option<&Region> {
        self.page
            .iter()
            .chain(&self.state)
            .find(|region| (region.layer, region.contents) == (layer, contents))
    }

    fn pack_page(&mut self, config: &CacheConfig, layer: usize, kind: LayerKind) {
        let rows = kind.entries_per_page();
        let mut push = |contents, bytes: usize, padded: usize| {
            let offset = self.page_stride;
            self.page.push(Region { layer, contents, offset, rows, bytes });
            self.page_stride = (offset + padded).next_multiple_of(ALIGNMENT);
        };
        if rows > 0 {
            push(Contents::Entries, rows * config.row.row_bytes(), config.row.page_stride(rows));
        }
        if kind == LayerKind::Csa {
            let bytes = rows * config.indexer_row_bytes;
            push(Contents::IndexerKeys, bytes, bytes);
        }
    }

    fn pack_state(&mut self, config: &CacheConfig, layer: usize, kind: LayerKind) {
        let (window_rows, state_rows) = (self.window_rows, self.state_rows(kind));
        let mut push = |contents, rows: usize, bytes: usize| {
            let offset = self.state_stride;
            self.state.push(Region { layer, contents, offset, rows, bytes });
            self.state_stride = (offset + bytes).next_multiple_of(ALIGNMENT);
        };
        push(Contents::Window, window_rows, window_rows * config.row.row_bytes());
        // Values and gates, of two halves where groups overlap.
        let row_bytes = |head_dim: usize| {
            2 * size_of::<f32>() * head_dim * if kind == LayerKind::Csa { 2 } else { 1 }
        };
        if state_rows > 0 {
            push(Contents::Compressor, state_rows, state_rows * row_bytes(config.head_dim));
        }
        if kind == LayerKind::Csa {
            push(
                Contents::IndexerCompressor,
                state_rows,
                state_rows * row_bytes(config.indexer_dim),
            );
        }
    }
}

impl CacheConfig {
    fn check(&self) -> Result<(), LayoutError> {
        let refuse = |argument, value, rule| Err(LayoutError { argument, value, rule });
        if self.layers.is_empty() {
            return refuse("layers", 0, "a model has layers");
        }
        let sizes = [
            ("row", self.row.row_bytes()),
            ("head_dim", self.head_dim),
            ("indexer_dim", self.indexer_dim),
            ("indexer_row_bytes", self.indexer_row_bytes),
        ];
        for (argument, value) in sizes {
            if value == 0 || value > 1 << 16 {
                return refuse(argument, value, "it must be 1 to 65536");
            }
        }
        if self.max_draft_tokens >= TOKENS_PER_PAGE {
            return refuse(
                "max_draft_tokens",
                self.max_draft_tokens,
                "it must be less than a page's 128 tokens",
            );
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flash(indexer_row_bytes: usize) -> CacheConfig {
        let compressed =
            (0..41).map(|layer| if layer % 2 == 0 { LayerKind::Csa } else { LayerKind::Hca });
        let layers = [LayerKind::Window; 2].into_iter().chain(compressed).collect();
        let row = RowFormat::MODEL;
        CacheConfig {
            layers,
            row,
            head_dim: 512,
            indexer_dim: 128,
            indexer_row_bytes,
            max_draft_tokens: 0,
        }
    }

    #[test]
    fn a_page_of_the_small_model_has_the_bytes_that_the_specification_counts() {
        let layout = CacheLayout::new(&flash(132)).expect("a layout");
        // 21 layers of 32 entries and 32 keys, 20 layers of one entry.
        assert_eq!(layout.page_stride, 21 * (19008 + 4224) + 20 * 1152);
        let fp4 = CacheLayout::new(&flash(68)).expect("a layout");
        assert_eq!(fp4.page_stride, 21 * (19008 + 2176) + 20 * 1152);
        let csa = layout.region(2, Contents::Compressor).expect("a state");
        let indexer = layout.region(2, Contents::IndexerCompressor).expect("a state");
        let hca = layout.region(3, Contents::Compressor).expect("a state");
        assert_eq!([csa.bytes, indexer.bytes, hca.bytes], [64 << 10, 16 << 10, 512 << 10]);
    }

    #[test]
    fn regions_are_aligned_and_do_not_overlap() {
        let layout =
            CacheLayout::new(&CacheConfig { max_draft_tokens: 5, ..flash(68) }).expect("a layout");
        for (regions, stride) in
            [(&layout.page, layout.page_stride), (&layout.state, layout.state_stride)]
        {
            let mut end = 0;
            for region in regions {
                assert!(region.offset >= end && region.offset % ALIGNMENT == 0, "{region:?}");
                end = region.offset + region.bytes;
            }
            assert!(end <= stride && stride % ALIGNMENT == 0);
        }
        assert_eq!((layout.window_rows, layout.state_rows(LayerKind::Csa)), (133, 13));
        assert_eq!(
            (layout.state_rows(LayerKind::Hca), layout.state_rows(LayerKind::Window)),
            (133, 0)
        );
    }

    #[test]
    fn a_configuration_that_no_cache_has_is_refused_by_name() {
        let refusal =
            |config: CacheConfig| CacheLayout::new(&config).expect_err("a refusal").to_string();
        assert!(
            refusal(CacheConfig { layers: Vec::new(), ..flash(132) }).contains("`layers` is 0")
        );
        assert!(
            refusal(CacheConfig { indexer_row_bytes: 0, ..flash(132) })
                .contains("`indexer_row_bytes` is 0")
        );
        assert!(
            refusal(CacheConfig { head_dim: 1 << 40, ..flash(132) })
                .contains("`head_dim` is 1099511627776")
        );
        assert!(
            refusal(CacheConfig { max_draft_tokens: 128, ..flash(132) })
                .contains("`max_draft_tokens` is 128")
        );
    }
}
