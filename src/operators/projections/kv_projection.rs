//! `kv_projection` (inference 5.1, 8.3, training 14): wkv, its norm and the rotation of K = V. In
//! training they are composed as in a layer, forward and backward. In serving, one pass after the
//! GEMM writes the window cache.
//!
//! ```text
//! training   kv_a = h wkv^T     n = rms_norm(kv_a) kv_norm     kv = rope(n)
//! backward   dn                 dkv_a, dkv_norm                dh, dwkv
//! serving    kv_a = h wkv^T, in bf16 or of codes               kv, cache = kv_norm_rope_write(kv_a)
//! ```

use dsv4_kernels::cache::kv_cache::RowFormat;
use dsv4_kernels::{
    cache::kv_norm_rope_write, projections::linear, projections::rms_norm, projections::rope,
};
use dsv4_reference::cache::kv_cache::SCALE_GROUP;
use dsv4_reference::projections::kv_projection as reference;

use crate::operator::Pooling;
use crate::operator::declaration::{observed, state};
use crate::operator::fields::{extent, tensor};
use crate::operator::prelude::*;
use crate::operators::cache::kv_norm_rope_write::{check_format, holds, set_cache};
use crate::operators::cache::paged::{SlotClass, cut_slots, oracle, page_gap};
use crate::operators::projections::chain::{ChainProduct, parted};
use crate::operators::projections::rms_norm::sizes_of_rows;
use crate::operators::projections::rope::{TableForm, Turning, positions_of};

/// The operators in sequence.
pub struct KvProjection;

const PRODUCT: ChainProduct = ChainProduct {
    x: ["h", "h_codes", "h_scales"],
    w: ["wkv", "wkv_codes", "wkv_scales"],
    y: "kv_a",
    gradients: ["dh", "dwkv", "dkv_a"],
};

/// The use of the rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stored {
    /// Training: rows are not stored in a cache.
    Rows,
    /// They are quantized and written to the cache; wkv is bf16.
    Cache,
    /// The same; wkv and h are e4m3 codes.
    CacheOfFp8,
}

/// A case: sizes, format, rotation, slots, data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct KvProjectionCase {
    /// Tokens; 0 is allowed.
    pub num_tokens: usize,
    /// Features of h.
    pub hidden_size: usize,
    /// Channels of a row that do not rotate; e4m3 ones in a cache: there a multiple of 64, not 0.
    pub nope_dim: usize,
    /// The channels after them, which rotate: even, in a cache a multiple of 8. Both kinds together
    /// are at most 512.
    pub rope_dim: usize,
    /// Added to the mean square.
    pub eps: f32,
    /// How tokens select their table rows.
    pub table: TableForm,
    /// Rows of the table where there are positions.
    pub table_rows: usize,
    /// The use of the rows.
    pub stored: Stored,
    /// Pages of the cache; 0 is allowed.
    pub num_pages: usize,
    /// Rows of a page.
    pub page_size: usize,
    /// h.
    #[serde(flatten)]
    pub data: Data,
}

const SMALL: RowFormat = RowFormat { nope_dim: 64, rope_dim: 64 };
const MIDDLE: RowFormat = RowFormat { nope_dim: 128, rope_dim: 32 };

fn plain(
    num_tokens: usize,
    hidden_size: usize,
    format: RowFormat,
    stored: Stored,
) -> KvProjectionCase {
    let (table, table_rows, eps, data) = (TableForm::RowPerToken, 0, 1e-6, Data::normal(1.0));
    let RowFormat { nope_dim, rope_dim } = format;
    let (num_pages, page_size) = (3, 4);
    KvProjectionCase {
        num_tokens,
        hidden_size,
        nope_dim,
        rope_dim,
        eps,
        table,
        table_rows,
        stored,
        num_pages,
        page_size,
        data,
    }
}

impl KvProjectionCase {
    fn format(&self) -> RowFormat {
        RowFormat { nope_dim: self.nope_dim, rope_dim: self.rope_dim }
    }

    fn turning(&self) -> Turning {
        let Self { num_tokens, table: form, table_rows, rope_dim, .. } = *self;
        Turning { form, table_rows, num_tokens, rope_dim, seed: self.data.seed }
    }

    fn of_oracle(&self, t: &Bound<'_>) -> OracleResult<reference::Turn> {
        let eps = t.scalar("eps", self.eps.into());
        Ok(reference::Turn {
            cos: t.f64("cos")?,
            sin: t.f64("sin")?,
            positions: positions_of(t),
            eps,
        })
    }

    fn trains(&self) -> bool {
        self.stored == Stored::Rows
    }

    /// Slots, and the number of groups in each of their rows.
    fn observed(&self) -> [usize; 2] {
        [self.num_pages.saturating_mul(self.page_size), self.nope_dim / SCALE_GROUP]
    }
}

impl Operator for KvProjection {
    type Case = KvProjectionCase;
    const SUM_LANES: usize = 32;

    const ABOUT: About = About {
        name: "kv_projection",
        family: Family::Projections,
        summary: "wkv, its norm and the rope of K = V: in bf16 with gradients, or into the cache, also of FP8 weights",
        specification: &["inference 3", "inference 5.1", "inference 8.3", "training 14"],
        paths: &[
            "linear_forward_large",
            "linear_forward_one",
            "linear_forward_small",
            "linear_forward_scalar",
            "linear_sum",
            "rms_norm_forward_warp",
            "rms_norm_forward_scalar",
            "rope_forward",
            "rope_forward_scalar",
            "quantize_fp8_vector",
            "quantize_fp8_scalar",
            "linear_quantized_large<fp8>",
            "linear_quantized_small<fp8>",
            "linear_quantized_scalar<fp8>",
            "linear_quantized_sum<fp8>",
            "kv_norm_rope_write",
            "backward rope_forward",
            "backward rope_forward_scalar",
            "backward rms_norm_backward_warp",
            "backward rms_norm_backward_scalar",
            "backward rms_norm_dweight",
            "backward linear_dx_large",
            "backward linear_dx_small",
            "backward linear_dx_scalar",
            "backward linear_dw_large",
            "backward linear_dw_scalar",
        ],
        modules: Vec::new,
        cases: [8, 20, 40],
    };

    const GOLDEN: &'static [&'static str] = &["attention_csa", "attention_hca", "attention_swa"];
    const CHAIN: &'static [&'static str] =
        &["linear", "rms_norm", "rope", "quantize_fp8", "kv_norm_rope_write"];

    const CONVENTIONS: &'static [Convention] = &[Convention::ScaleFloor];

    fn tensors(c: &KvProjectionCase) -> Specs {
        let (bf16, f32, u8, normal) = (DType::Bf16, DType::F32, DType::U8, Distribution::Normal);
        let (trains, coded) = (c.trains(), c.stored == Stored::CacheOfFp8);
        let (tokens, hidden) =
            (axis("num_tokens", c.num_tokens), axis("hidden_size", c.hidden_size).not_empty());
        let channels = axis("head_dim", c.format().head_dim());
        let blocks = |name, extent: usize| axis(name, extent.div_ceil(linear::BLOCK));
        let of_hidden = blocks("hidden_blocks", c.hidden_size);
        let page_bytes = c.page_size.saturating_mul(c.format().row_bytes());
        let pages = [axis("num_pages", c.num_pages), axis("page_bytes", page_bytes)];
        let [num_slots, num_groups] = c.observed();
        let of_slots = [axis("num_slots", num_slots), axis("num_groups", num_groups)];
        let deviation = (c.hidden_size.max(1) as f64).sqrt().recip();
        let [cos, sin, positions] = c.turning().tensors();
        // The pass into the cache requires multiples of 16 bytes.
        let row = |name| {
            if trains {
                output(name, bf16, &[tokens, channels]).rows()
            } else {
                output(name, bf16, &[tokens, channels]).aligned_rows()
            }
        };
        let kv = if trains { row("kv") } else { row("kv").pooled(Pooling::Group(SCALE_GROUP)) };
        let tensors = [
            input("h", bf16, &[tokens, hidden]).rows().drawn_as(c.data),
            input("wkv", bf16, &[channels, hidden]).rows().drawn(normal, deviation).when(!coded),
            input("wkv_codes", u8, &[channels, hidden]).rows().when(coded),
            input("wkv_scales", u8, &[blocks("channel_blocks", c.format().head_dim()), of_hidden])
                .when(coded),
            input("kv_norm", f32, &[channels]).drawn(normal, 1.0).aligned_rows(),
            cos,
            sin,
            positions,
            input("slots", DType::I32, &[tokens]).when(!trains),
            output("h_codes", u8, &[tokens, hidden]).rows().exact().when(coded),
            output("h_scales", u8, &[tokens, of_hidden]).exact().when(coded),
            row("kv_a"),
            row("n").when(trains),
            output("rstd", f32, &[tokens]).when(trains),
            kv,
            state("cache", u8, &pages)
                .aligned_rows()
                .with_gap("page_padding", page_gap(c.format(), c.page_size.max(1)))
                .when(!trains),
            observed("slot_holds", u8, &of_slots[..1]).exact().when(!trains),
            observed("scale_is_least", u8, &of_slots).exact().when(!trains),
            upstream("dkv", "kv").when(trains),
            gradient("dn", "n", bf16),
            gradient("dkv_norm", "kv_norm", f32).when(trains),
            gradient("dkv_a", "kv_a", bf16).when(trains),
            gradient("dwkv", "wkv", f32).when(trains),
            gradient("dh", "h", bf16).when(trains),
        ];
        Specs::new(c.data.seed, tensors).positive("eps", c.eps)
    }

    fn check(c: &KvProjectionCase) -> Result<(), Refused> {
        if c.trains() {
            check_rows(c.format())?
        } else {
            check_format(c.format(), c.page_size)?
        }
        c.turning().check()?;
        c.data.check()
    }

    /// The decoded weights are in no tensor.
    fn oracle_elements(c: &KvProjectionCase) -> u128 {
        4 * c.hidden_size as u128 * c.format().head_dim() as u128
    }

    fn strategy(profile: Profile) -> BoxedStrategy<KvProjectionCase> {
        let [tokens, features] = profile.of([[10, 50], [40, 150], [150, 600]]);
        let table = select(vec![TableForm::RowPerToken, TableForm::Positions]);
        let eps = prop_oneof![3 => Just(1e-6f32), 1 => Just(1e-2f32)];
        let stored = select(vec![Stored::Rows, Stored::Cache, Stored::CacheOfFp8]);
        let format = select(vec![SMALL, MIDDLE, RowFormat::MODEL]);
        let cache = (1..=6usize, select(vec![1usize, 2, 3, 7]));
        (
            0..=tokens,
            extent(features, 8),
            format,
            (table, 1..100usize),
            (eps, stored),
            cache,
            Data::strategy(-8..=8),
        )
            .prop_map(
                |(
                    num_tokens,
                    hidden_size,
                    format,
                    (table, rows),
                    (eps, stored),
                    (num_pages, page_size),
                    data,
                )| {
                    let table_rows = if table == TableForm::RowPerToken { 0 } else { rows };
                    let plain = plain(num_tokens, hidden_size, format, stored);
                    KvProjectionCase { eps, table, table_rows, num_pages, page_size, data, ..plain }
                },
            )
            .boxed()
    }

    fn typical() -> Vec<KvProjectionCase> {
        let positions =
            |case| KvProjectionCase { table: TableForm::Positions, table_rows: 9, ..case };
        vec![
            plain(5, 24, SMALL, Stored::Rows).then(positions),
            plain(5, 144, SMALL, Stored::CacheOfFp8).then(positions),
        ]
    }

    fn edge_cases(profile: Profile) -> Vec<KvProjectionCase> {
        use Stored::{Cache, CacheOfFp8, Rows};
        let mut cases = vec![
            plain(0, 24, SMALL, Rows),
            plain(0, 24, SMALL, CacheOfFp8),
            plain(1, 8, SMALL, Rows),
            // More tokens than small tiles have; rows of h that are not multiples of 16 bytes;
            // split-k.
            plain(18, 40, MIDDLE, Rows),
            plain(3, 13, SMALL, Rows),
            // Rows that no cache accepts.
            plain(4, 24, RowFormat { nope_dim: 6, rope_dim: 10 }, Rows),
            plain(3, 16, RowFormat { nope_dim: 0, rope_dim: 8 }, Rows),
            plain(2, 584, SMALL, Rows),
            plain(1, 584, SMALL, Rows),
            plain(5, 24, SMALL, Cache),
            plain(18, 32, SMALL, CacheOfFp8),
            plain(3, 131, MIDDLE, CacheOfFp8),
            plain(2, 584, SMALL, CacheOfFp8),
            plain(11, 16, SMALL, Cache).with(|case| {
                case.table = TableForm::HostilePositions;
                case.table_rows = 5;
            }),
        ];
        if profile == Profile::Full {
            let model = |num_tokens, stored| plain(num_tokens, 1024, RowFormat::MODEL, stored);
            cases.extend([model(50, Rows), model(1, Cache), model(50, CacheOfFp8)]);
        }
        cases
    }

    fn amend(c: &KvProjectionCase, tensors: &mut Tensors) -> OracleResult<()> {
        c.turning().amend(tensors)?;
        if !c.trains() {
            set_cache(
                c.format(),
                [c.num_pages, c.page_size],
                SlotClass::Hostile,
                c.data.seed,
                tensors,
            );
        }
        if c.stored == Stored::CacheOfFp8 {
            let extents = [c.format().head_dim(), c.hidden_size];
            PRODUCT.set_weight(c.data.seed, tensors, extents)?;
        }
        Ok(())
    }

    fn forward(
        c: &KvProjectionCase,
        t: &Bound<'_>,
        rounding: &mut Rounding,
    ) -> OracleResult<Named> {
        if c.trains() {
            return reference::forward(&c.of_oracle(t)?, &named(t)?, rounding);
        }
        let named =
            reference::forward_cached(&c.of_oracle(t)?, &named(t)?, oracle(c.format()), rounding)?;
        let [num_slots, num_groups] = c.observed();
        let named = named.with("slot_holds", tensor(vec![1.0; num_slots], &[num_slots])?);
        Ok(named.with(
            "scale_is_least",
            tensor(vec![1.0; num_slots * num_groups], &[num_slots, num_groups])?,
        ))
    }

    fn backward(
        c: &KvProjectionCase,
        t: &Bound<'_>,
        rounding: &mut Rounding,
    ) -> OracleResult<Named> {
        if c.trains() {
            reference::backward(&c.of_oracle(t)?, &named(t)?, rounding)
        } else {
            Ok(Named::new())
        }
    }

    /// Sequential tensors may share memory: launches have one order.
    fn workspaces(
        c: &KvProjectionCase,
        _: &Views,
        device: &Device,
    ) -> Result<Vec<(&'static str, usize)>, RuntimeError> {
        let (tokens, outs, ins) = (c.num_tokens, c.format().head_dim(), c.hidden_size);
        let bytes = [
            linear::forward_workspace_bytes(device, 1, tokens, outs, ins),
            linear::backward_workspace_bytes(device, 1, tokens, outs, ins),
            linear::quantized_workspace_bytes(device, tokens, outs, ins),
            rms_norm::workspace_bytes(device, DType::Bf16, tokens, outs),
        ];
        Ok(vec![("workspace", bytes.into_iter().max().unwrap_or(0))])
    }

    fn launch(c: &KvProjectionCase, v: &Views, run: &mut Launches<'_>) -> Result<(), RuntimeError> {
        PRODUCT.launch(v, run, c.stored == Stored::CacheOfFp8)?;
        run.freeze(&v["kv_a"])?;
        if !c.trains() {
            let views =
                v.only(&["kv_a", "kv_norm", "cos", "sin", "positions", "slots", "cache", "kv"]);
            let views = views.renamed(&[("kv_a", "x"), ("kv_norm", "weight"), ("kv", "y")]);
            return run.launch(|device| {
                kv_norm_rope_write::forward(device, &views, c.format(), c.page_size, c.eps)
            });
        }
        let norm = v.only(&["kv_a", "kv_norm", "n", "rstd"]);
        let norm = norm.renamed(&[("kv_a", "x"), ("kv_norm", "weight"), ("n", "y")]);
        run.launch(|device| rms_norm::forward(device, &norm, c.eps))?;
        run.freeze(&v["n"])?;
        let turned = v
            .only(&["cos", "sin", "positions"])
            .with("x", &head(v, "n")?)
            .with("y", &head(v, "kv")?);
        run.launch(|device| rope::forward(device, &turned, false))
    }

    fn launch_backward(
        c: &KvProjectionCase,
        v: &Views,
        run: &mut Launches<'_>,
    ) -> Result<(), RuntimeError> {
        if !c.trains() {
            return Ok(());
        }
        let device = run.device();
        let turned = v
            .only(&["cos", "sin", "positions"])
            .with("x", &head(v, "dkv")?)
            .with("y", &head(v, "dn")?);
        let mut ran = vec![rope::backward(device, &turned, false)?];
        run.freeze(&v["dn"])?;
        let norm = v.only(&["kv_a", "kv_norm", "rstd", "dn", "dkv_a", "dkv_norm", "workspace"]);
        let names = [
            ("kv_a", "x"),
            ("kv_norm", "weight"),
            ("dn", "dy"),
            ("dkv_a", "dx"),
            ("dkv_norm", "dweight"),
        ];
        ran.extend(rms_norm::backward(device, &norm.renamed(&names))?);
        run.freeze(&v["dkv_a"])?;
        ran.extend(PRODUCT.backward(v, device)?);
        run.ran_backward(ran);
        Ok(())
    }

    fn observe(
        c: &KvProjectionCase,
        given: &Tensors,
        written: &Tensors,
        conventions: Conventions,
    ) -> Vec<(&'static str, HostTensor)> {
        let (Some(kv), Some(cache)) = (written.get("kv"), written.get("cache")) else {
            return Vec::new();
        };
        holds(c.format(), c.page_size, given, [kv, cache], conventions)
    }

    fn invariant(_: &KvProjectionCase, path: bool) -> &'static [BatchAxis] {
        if path { BatchAxis::OF_ROWS } else { &[] }
    }

    fn batches(c: &KvProjectionCase, batches: &mut Batches<'_, Self>) {
        batches.rows_with("num_tokens", |tensors, cut| {
            let [num_slots, _] = c.observed();
            cut_slots(tensors, num_slots, &["slot_holds", "scale_is_least"], cut)
        });
    }

    fn laws(c: &KvProjectionCase, laws: &mut Laws<'_, Self>) {
        if c.trains() {
            laws.scale_upstreams();
        }
        laws.separate("num_tokens", "tokens may be permuted");
    }

    /// Tokens with a hostile position have NaN outputs, so finite differences do not exist.
    fn is_smooth(c: &KvProjectionCase) -> bool {
        let elements = (c.num_tokens + c.format().head_dim()) * c.hidden_size;
        c.trains() && c.table != TableForm::HostilePositions && elements <= 4096
    }

    /// A token bends over its own magnitude. Weights before a norm bend over their own magnitude,
    /// which the norm removes.
    fn bends_over(c: &KvProjectionCase, tensors: &Tensors, input: &str) -> Option<Vec<f64>> {
        let width = if input == "kv_norm" { c.format().head_dim() } else { c.hidden_size };
        Some(
            sizes_of_rows(&tensors.values(input), width, 0.0)
                .into_iter()
                .map(|size| size / 8.0)
                .collect(),
        )
    }

    /// The window's rows of attention layers, stored before the compressed ones of a batch row.
    fn golden(file: &mut Reading<'_>) -> Result<Vec<Golden<KvProjectionCase>>, String> {
        let table = if file.kind() == "attention_swa" { "main" } else { "compress" };
        let (of_tokens, of_rows) =
            (["batch", "tokens", "hidden"], ["batch", "1", "rows", "channels"]);
        let h = file.floats("in.hidden", &of_tokens)?.to_vec();
        file.floats("mid.kv_all", &of_rows)?;
        let [cos, sin] = ["cos", "sin"].map(|name| format!("mid.rope.{table}.{name}"));
        let of_table = ["1", "tokens", "half"];
        let (cos, sin) =
            (file.floats(&cos, &of_table)?.to_vec(), file.floats(&sin, &of_table)?.to_vec());
        let [batches, tokens, hidden] =
            [file.extent("batch")?, file.extent("tokens")?, file.extent("hidden")?];
        let [rows, channels, half] =
            [file.extent("rows")?, file.extent("channels")?, file.extent("half")?];
        let (rope_dim, eps) = (2 * half, file.number("rms_norm_eps")?);
        let beyond =
            |what: &str, least: usize, most: usize| format!("{what}: {least} are more than {most}");
        let nope_dim = channels
            .checked_sub(rope_dim)
            .ok_or_else(|| beyond("channels that turn", rope_dim, channels))?;
        if tokens > rows {
            return Err(beyond("tokens and rows of `mid.kv_all`", tokens, rows));
        }
        let plain = plain(batches * tokens, hidden, RowFormat { nope_dim, rope_dim }, Stored::Rows);
        let case = KvProjectionCase {
            table: TableForm::Positions,
            table_rows: tokens,
            eps: eps as f32,
            ..plain
        };
        let golden = Golden::new(case)
            .scalar("eps", eps)
            .values("h", h)
            .values("cos", cos)
            .values("sin", sin);
        // Batch rows share positions.
        let golden =
            golden.integers("positions", (0..batches).flat_map(|_| 0..tokens as i32).collect());
        let named = |name: &str| format!("param.self_attn.{name}.weight");
        let golden = golden.stored(file, "wkv", &named("kv_proj"), &["channels", "hidden"])?;
        let golden = golden.stored(file, "kv_norm", &named("kv_norm"), &["channels"])?;
        let of_window = |all: &[f64]| {
            all.chunks(rows * channels)
                .flat_map(|all| &all[..tokens * channels])
                .copied()
                .collect::<Vec<_>>()
        };
        Ok(vec![golden.expect_reordered(file, "kv", "mid.kv_all", &of_rows, &of_window)?])
    }
}

/// Rows without a cache.
fn check_rows(RowFormat { nope_dim, rope_dim }: RowFormat) -> Result<(), Refused> {
    if rope_dim == 0 || !rope_dim.is_multiple_of(2) {
        return refuse("rope_dim", format!("{rope_dim} must be even, at least 2"));
    }
    if nope_dim.saturating_add(rope_dim) > kv_norm_rope_write::MAX_HEAD_DIM {
        return refuse("nope_dim", format!("{nope_dim} must be at most 512 with rope_dim"));
    }
    Ok(())
}

/// The oracle's inputs in addition to the rotation.
fn named(t: &Bound<'_>) -> OracleResult<Named> {
    let names = ["h", "wkv", "wkv_codes", "wkv_scales", "kv_norm", "dkv"];
    names.into_iter().try_fold(Named::new(), |all, name| Ok(all.maybe(name, t.maybe(name)?)))
}

/// A tensor of rows as a tensor of heads, one head for each token.
fn head(v: &Views, name: &'static str) -> Result<dsv4_runtime::TensorView, RuntimeError> {
    parted("kv_projection", name, &v[name], 1)
}
