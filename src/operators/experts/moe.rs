//! `moe` (inference 10, 11): a layer of experts, composed as in a serving step. Its operators run
//! in sequence on one arena, and are compared with one oracle.
//!
//! ```text
//! logits                      = linear(hidden, gate_weight)
//! topk_indices, topk_weights  = router(logits)
//! maps                        = moe_map(topk_indices)
//! rows, row_weights           = moe_expand(hidden), moe_expand(topk_weights)
//! gate_up                     = grouped_linear(quantize_fp8(rows), w13)
//! y                           = grouped_linear(swiglu_quantize(gate_up, row_weights), w2)
//! shared                      = linear(swiglu_quantize(linear(quantize_fp8(hidden), shared_w13)), shared_w2)
//! out                         = moe_reduce(y, shared)
//! ```
//!
//! Each operator may be correct by itself, and still a layer may be wrong. Examples: a routing
//! weight that is applied twice, to the shared expert, or after the second GEMM; a map of slots
//! used as one of tokens; rows of no expert that are reduced; gate and up exchanged.
//!
//! The values of hidden, gate_weight and bias let fp32 hold every logit exactly, so that no
//! rounding decides which experts are chosen.

use std::rc::Rc;

use dsv4_kernels::experts::grouped_linear::{self, Grouped, Grouping};
use dsv4_kernels::experts::moe_map::{self, MAX_EXPERTS, positions};
use dsv4_kernels::experts::swiglu_quantize::{self, Group};
use dsv4_kernels::formats::quantize_fp8::{self, ScaleType};
use dsv4_kernels::projections::linear::{self, ScaleLayout, Weights};
use dsv4_kernels::{experts::moe_expand, experts::moe_reduce, experts::router};
use dsv4_reference::experts::moe as reference;
use dsv4_runtime::TensorView;
use rand::Rng;

use crate::operator::declaration::{Axis, TensorSpec};
use crate::operator::fields::{Implementation, extent};
use crate::operator::prelude::*;
use crate::operators::experts::moe_map::MoeMapCase;
use crate::operators::projections::linear::{LinearCase, quantized, set_codes, set_scales};

/// The operators in sequence.
pub struct Moe;

/// A case: sizes, routing, formats, data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MoeCase {
    /// Tokens; 0 is allowed.
    pub num_tokens: usize,
    /// Slots of a token.
    pub topk: usize,
    /// Experts, up to 512.
    pub num_experts: usize,
    /// Channels of a token: a multiple of 16, up to 4096.
    pub hidden_size: usize,
    /// Channels of gate, and of up: a multiple of 16, up to 4096.
    pub intermediate_size: usize,
    /// The alignment of an expert's rows.
    pub alignment: usize,
    /// Positions beyond the necessary rows.
    pub spare_positions: usize,
    /// Whether experts come from a table, with some tokens as padding, instead of the best scores.
    pub hashed: bool,
    /// Formats of the experts' weights: FP8 or MXFP4. The shared expert's are FP8.
    pub weights: Weights,
    /// Which kernels run the quantized GEMMs.
    pub implementation: Implementation,
    /// The sum of the routing weights.
    pub route_scale: f32,
    /// The limit of SwiGLU's clamps.
    pub limit: f32,
    /// Seed of all data.
    pub seed: u64,
}

/// Rows of the table of a hashed router.
const VOCAB_SIZE: usize = 23;
/// Values of a row that share a scale.
const GROUP: usize = 128;

fn plain(
    [num_tokens, topk, num_experts]: [usize; 3],
    hidden_size: usize,
    intermediate_size: usize,
) -> MoeCase {
    MoeCase {
        num_tokens,
        topk,
        num_experts,
        hidden_size,
        intermediate_size,
        alignment: 8,
        spare_positions: 3,
        hashed: false,
        weights: Weights::Mxfp4,
        implementation: Implementation::Portable,
        route_scale: 1.5,
        limit: 10.0,
        seed: 1,
    }
}

fn mxfp4(implementation: Implementation, case: MoeCase) -> MoeCase {
    MoeCase { weights: Weights::Mxfp4, implementation, ..case }
}

fn fp8(implementation: Implementation, case: MoeCase) -> MoeCase {
    MoeCase { weights: Weights::Fp8, implementation, ..case }
}

impl MoeCase {
    fn num_slots(&self) -> usize {
        self.num_tokens.saturating_mul(self.topk)
    }

    fn num_positions(&self) -> usize {
        positions(self.num_slots(), self.num_experts, self.alignment)
            .saturating_add(self.spare_positions)
    }

    /// The alignment of channels: the kernels for Hopper need rows of codes that are whole
    /// accesses.
    fn multiple(&self) -> usize {
        let packed =
            self.weights == Weights::Mxfp4 && self.implementation == Implementation::Hopper;
        if packed { 32 } else { 16 }
    }

    /// A linear layer of that many rows with these weights, and scales in bytes.
    fn layer(
        &self,
        weights: Weights,
        [num_rows, out_features, in_features]: [usize; 3],
    ) -> LinearCase {
        let implementation = self.implementation;
        let data = Data { seed: self.seed, ..Data::normal(1.0) };
        LinearCase {
            implementation,
            data,
            ..quantized(weights, GROUP, [num_rows, out_features, in_features])
        }
    }

    /// The GEMMs with quantized weights: the names of weights and scales, the number of experts,
    /// and the case of one of them.
    fn products(&self) -> [([&'static str; 2], usize, LinearCase); 4] {
        let (experts, hidden, width) = (self.num_experts, self.hidden_size, self.intermediate_size);
        let rows = self.num_positions();
        [
            (["w13", "w13_scales"], experts, self.layer(self.weights, [rows, 2 * width, hidden])),
            (["w2", "w2_scales"], experts, self.layer(self.weights, [rows, hidden, width])),
            (
                ["shared_w13", "shared_w13_scales"],
                1,
                self.layer(Weights::Fp8, [self.num_tokens, 2 * width, hidden]),
            ),
            (
                ["shared_w2", "shared_w2_scales"],
                1,
                self.layer(Weights::Fp8, [self.num_tokens, hidden, width]),
            ),
        ]
    }

    /// Weights and their scales, each with an axis of experts where `experts` is an axis.
    fn weight_tensors(&self) -> Vec<TensorSpec> {
        let experts = axis("num_experts", self.num_experts);
        let of = |(names, _, one): ([&'static str; 2], usize, LinearCase)| {
            let of_experts: &[Axis] = if names[0].starts_with("shared") { &[] } else { &[experts] };
            let bytes = one.of_launcher().row_bytes(one.in_features)[1];
            let (features, row, scale_rows) = match names[0] {
                "w13" => ("gate_and_up", "hidden_bytes", "w13_scale_rows"),
                "w2" => ("hidden_size", "intermediate_bytes", "w2_scale_rows"),
                "shared_w13" => ("gate_and_up", "hidden_size", "shared_w13_scale_rows"),
                _ => ("hidden_size", "intermediate_size", "shared_w2_scale_rows"),
            };
            let own = [axis(features, one.out_features), axis(row, bytes)];
            let scales = one.of_launcher().w_scales(one.out_features, one.in_features);
            let of_scales = [axis(scale_rows, scales.rows), axis(names[1], scales.groups)];
            [
                input(names[0], DType::U8, &[of_experts, &own].concat()).aligned_rows(),
                input(names[1], DType::U8, &[of_experts, &of_scales].concat()),
            ]
        };
        self.products().into_iter().flat_map(of).collect()
    }

    fn of_oracle(&self, t: &Bound<'_>) -> reference::Layer {
        reference::Layer {
            topk: self.topk,
            route_scale: t.scalar("route_scale", self.route_scale.into()),
            limit: t.scalar("limit", self.limit.into()),
            alignment: self.alignment,
            num_positions: self.num_positions(),
        }
    }
}

impl Operator for Moe {
    type Case = MoeCase;

    const ABOUT: About = About {
        name: "moe",
        family: Family::Experts,
        summary: "a layer of experts: router, map, both products with SwiGLU between them, shared expert and sum",
        specification: &["inference 10", "inference 11.1", "inference 11.2", "inference 11.3"],
        paths: &[
            "linear_forward_one",
            "linear_forward_small",
            "linear_forward_large",
            "linear_sum",
            "router_learned_vector",
            "router_learned_scalar",
            "router_hashed",
            "moe_map_small",
            "moe_expand_forward_vector",
            "moe_expand_forward_scalar",
            "quantize_fp8_vector",
            "grouped_linear_large<mxfp4, 128>",
            "grouped_linear_small<mxfp4, 128>",
            "grouped_linear_scalar<mxfp4, 128>",
            "grouped_linear_large<fp8>",
            "grouped_linear_small<fp8>",
            "grouped_linear_hopper<16>",
            "grouped_linear_hopper<64>",
            "grouped_linear_hopper<8, mxfp4, 128>",
            "grouped_linear_hopper<16, mxfp4, 128>",
            "grouped_linear_hopper<64, mxfp4, 128>",
            "grouped_linear_hopper_large",
            "grouped_linear_hopper_large_pairs",
            "swiglu_quantize_vector",
            "linear_quantized_small<fp8>",
            "linear_quantized_large<fp8>",
            "linear_quantized_sum<fp8>",
            "linear_hopper<16>",
            "linear_hopper<64>",
            "linear_hopper_large",
            "linear_hopper_large_pairs",
            "moe_reduce_forward_vector",
        ],
        modules: Vec::new,
        cases: [8, 20, 40],
    };

    const CHAIN: &'static [&'static str] = &[
        "linear",
        "router",
        "moe_map",
        "moe_expand",
        "quantize_fp8",
        "grouped_linear",
        "swiglu_quantize",
        "moe_reduce",
    ];

    fn tensors(c: &MoeCase) -> Specs {
        let (tokens, experts) =
            (axis("num_tokens", c.num_tokens), axis("num_experts", c.num_experts));
        let (topk, hidden) = (axis("topk", c.topk), axis("hidden_size", c.hidden_size));
        let (both, width) = (
            axis("gate_and_up", 2 * c.intermediate_size),
            axis("intermediate_size", c.intermediate_size),
        );
        let positions = axis("num_positions", c.num_positions());
        let groups = |extent: usize| axis("groups", extent.div_ceil(GROUP));
        let (bf16, f32, i32, u8) = (DType::Bf16, DType::F32, DType::I32, DType::U8);
        let normal = |name, axes: &[Axis]| {
            input(name, bf16, axes).aligned_rows().drawn(Distribution::Normal, 1.0)
        };
        let exact = |name, dtype, axes: &[Axis]| output(name, dtype, axes).exact();
        let given = [
            normal("hidden", &[tokens, hidden]),
            normal("gate_weight", &[experts.multiples(1, MAX_EXPERTS), hidden]),
            input("bias", f32, &[experts]).when(!c.hashed),
            input("tid2eid", i32, &[axis("vocab_size", VOCAB_SIZE), topk]).when(c.hashed),
            input("token_ids", i32, &[tokens]).when(c.hashed),
        ];
        let written = [
            exact("logits", f32, &[tokens, experts]),
            exact("topk_indices", i32, &[tokens, topk]),
            output("topk_weights", f32, &[tokens, topk]),
            exact("counts", i32, &[experts]),
            exact("expert_offsets", i32, &[axis("num_experts_and_one", c.num_experts + 1)]),
            exact("token_topk_to_pos", i32, &[tokens, topk]),
            exact("pos_to_expert", i32, &[positions]),
            exact("pos_to_token", i32, &[positions]),
            exact("pos_to_token_topk", i32, &[positions]),
            exact("rows", bf16, &[positions, hidden]).aligned_rows(),
            output("row_weights", f32, &[positions]),
            exact("row_codes", u8, &[positions, hidden]).aligned_rows(),
            exact("row_scales", u8, &[positions, groups(c.hidden_size)]),
            output("gate_up", bf16, &[positions, both]).aligned_rows(),
            scratch("product_codes", u8, &[positions, width]),
            scratch("product_scales", u8, &[positions, groups(c.intermediate_size)]),
            output("y", bf16, &[positions, hidden]).aligned_rows(),
            exact("hidden_codes", u8, &[tokens, hidden]).aligned_rows(),
            exact("hidden_scales", u8, &[tokens, groups(c.hidden_size)]),
            output("shared_gate_up", bf16, &[tokens, both]).aligned_rows(),
            scratch("shared_codes", u8, &[tokens, width]),
            scratch("shared_scales", u8, &[tokens, groups(c.intermediate_size)]),
            output("shared", bf16, &[tokens, hidden]).aligned_rows(),
            output("out", bf16, &[tokens, hidden]).aligned_rows(),
        ];
        let all = given.into_iter().chain(c.weight_tensors()).chain(written);
        Specs::new(c.seed, all).positive("route_scale", c.route_scale).positive("limit", c.limit)
    }

    fn check(c: &MoeCase) -> Result<(), Refused> {
        if !matches!(c.weights, Weights::Fp8 | Weights::Mxfp4) {
            return refuse("weights", "experts have FP8 or MXFP4 weights");
        }
        let multiple = c.multiple();
        for (field, extent) in
            [("hidden_size", c.hidden_size), ("intermediate_size", c.intermediate_size)]
        {
            // Sums of up to that many products of the grid are exact in fp32.
            if extent == 0 || !extent.is_multiple_of(multiple) || extent > 4096 {
                return refuse(
                    field,
                    format!("{extent} must be a multiple of {multiple}, {multiple} to 4096"),
                );
            }
        }
        if c.topk == 0 || c.topk > moe_map::MAX_TOPK.min(c.num_experts) {
            return refuse(
                "topk",
                format!("{} of {} experts: 1 to as many, and to 32", c.topk, c.num_experts),
            );
        }
        MoeMapCase::check_alignment(c.alignment)
    }

    fn cannot_run(c: &MoeCase, environment: &Environment) -> Option<String> {
        c.implementation.launcher().cannot_run_on(environment)
    }

    fn strategy(profile: Profile) -> BoxedStrategy<MoeCase> {
        let [tokens, sixteens] = profile.of([[20usize, 12], [60, 20], [300, 64]]);
        let extents = (extent(tokens, 4), 1..=6usize, 0..10usize, 1..=sixteens, 1..=sixteens);
        let kernels =
            (any::<bool>(), select(vec![Implementation::Portable, Implementation::Hopper]));
        let numbers = (select(vec![1.5f32, 2.5]), select(vec![10.0f32, 1.0]), 0..1000u64);
        (extents, select(vec![1usize, 4, 8, 37, 128]), 0..9usize, any::<bool>(), kernels, numbers)
            .prop_map(
                |(
                    (num_tokens, topk, more, hidden, width),
                    alignment,
                    spare_positions,
                    hashed,
                    kernels,
                    numbers,
                )| {
                    let (route_scale, limit, seed) = numbers;
                    let case = plain([num_tokens, topk, topk + more], 16 * hidden, 16 * width);
                    let case = MoeCase {
                        alignment,
                        spare_positions,
                        hashed,
                        route_scale,
                        limit,
                        seed,
                        ..case
                    };
                    let (of_fp8, implementation) = kernels;
                    let case = if of_fp8 {
                        fp8(implementation, case)
                    } else {
                        mxfp4(implementation, case)
                    };
                    let whole = |extent: usize| extent.next_multiple_of(case.multiple());
                    let (hidden_size, intermediate_size) =
                        (whole(case.hidden_size), whole(case.intermediate_size));
                    MoeCase { hidden_size, intermediate_size, ..case }
                },
            )
            .boxed()
    }

    fn typical() -> Vec<MoeCase> {
        let hashed = plain([7, 3, 5], 48, 32).with(|case| case.hashed = true);
        vec![plain([5, 2, 4], 32, 48), fp8(Implementation::Portable, hashed)]
    }

    fn edge_cases(profile: Profile) -> Vec<MoeCase> {
        let hashed = |case| MoeCase { hashed: true, ..case };
        let (portable, hopper) = (Implementation::Portable, Implementation::Hopper);
        let mut cases = vec![
            plain([0, 2, 4], 32, 48),
            plain([1, 6, 9], 144, 32),
            plain([9, 3, 6], 64, 160).then(|case| fp8(portable, case)).then(hashed),
            plain([5, 2, 7], 144, 48).then(|case| fp8(hopper, case)),
            // More tokens than a small tile has; all experts chosen by every token; active clamps.
            plain([18, 4, 4], 32, 16).with(|case| {
                case.limit = 0.7;
                case.alignment = 1;
            }),
            plain([19, 1, 3], 48, 32)
                .with(|case| {
                    case.route_scale = 2.5;
                    case.alignment = 128;
                })
                .then(|case| fp8(portable, case)),
            // Many rows for each expert, in matching tiles; rows of weights of eight bytes;
            // split-k.
            plain([40, 2, 2], 16, 32),
            plain([40, 2, 2], 32, 16).then(|case| fp8(portable, case)),
            plain([30, 2, 2], 16, 16).then(|case| fp8(hopper, case)),
            plain([70, 2, 2], 16, 16).then(|case| fp8(hopper, case)),
            plain([385, 1, 1], 16, 144).then(|case| fp8(hopper, case)),
            plain([5, 2, 7], 160, 64).then(|case| mxfp4(hopper, case)),
            plain([24, 2, 4], 32, 32).then(|case| mxfp4(hopper, case)),
            plain([30, 2, 2], 32, 32).then(|case| mxfp4(hopper, case)),
            plain([2, 2, 3], 576, 16),
        ];
        if profile == Profile::Full {
            cases.push(plain([64, 6, 32], 1024, 512).then(|case| fp8(hopper, case)));
        }
        cases
    }

    fn amend(c: &MoeCase, tensors: &mut Tensors) -> OracleResult<()> {
        let mut draw = Draw::new(c.seed, "routing");
        // Multiples of 1/2 and of 1/64: sums of their products need few bits. Logits are a few
        // units, and the distances between biases exceed those between scores.
        tensors.edit("hidden", |all| {
            all.iter_mut().for_each(|x| *x = (2.0 * *x).round().clamp(-6.0, 6.0) / 2.0)
        });
        let deviation = 64.0 * 1.5 / (c.hidden_size as f64).sqrt();
        tensors.edit("gate_weight", |all| {
            all.iter_mut().for_each(|x| *x = (*x * deviation).round() / 64.0)
        });
        if c.hashed {
            let slots = VOCAB_SIZE * c.topk;
            let table: Vec<i32> =
                (0..slots).map(|_| draw.rng().random_range(-1..c.num_experts as i32)).collect();
            tensors.set_i32s("tid2eid", &table);
            let id = |_| {
                [draw.rng().random_range(0..VOCAB_SIZE as i32), -1, VOCAB_SIZE as i32]
                    [draw.rng().random_range(0..6usize).saturating_sub(3)]
            };
            tensors.set_i32s("token_ids", &(0..c.num_tokens).map(id).collect::<Vec<_>>());
        } else {
            let bias: Vec<f64> = (0..c.num_experts)
                .map(|_| f64::from(draw.rng().random_range(0..2u8)) * 8.0)
                .collect();
            tensors.set("bias", &bias);
        }
        for ([w, scales], experts, one) in c.products() {
            let fp8 = one.weights == Weights::Fp8;
            set_codes(&one, w, fp8, tensors);
            // Products of a row of x with one of w are around 1 for scales of this exponent. The
            // experts' scales are up to 2^6 around it and somewhat less, so that the shared expert
            // counts next to them.
            let largest = if fp8 { 120.0 } else { 3.0 };
            let exponent = -(largest * (one.in_features as f64).sqrt()).log2().round() as i32;
            let of_w = one.of_oracle().w_scales(one.out_features, one.in_features);
            set_scales(&one, scales, (of_w, experts), exponent - 3, tensors);
            if scales.starts_with("shared") {
                // With few blocks all scales may be small by chance, and then the shared expert
                // vanishes next to the others.
                let blocks = tensors.bytes_mut(scales).unwrap_or_default().iter_mut().enumerate();
                blocks.for_each(|(block, scale)| {
                    *scale = (127 + exponent + (block % 3) as i32) as u8
                });
            }
        }
        Ok(())
    }

    fn forward(c: &MoeCase, t: &Bound<'_>, rounding: &mut Rounding) -> OracleResult<Named> {
        let named = t.named()?;
        let [(_, _, routed), _, (_, _, shared), _] = c.products();
        let (routed, shared) = (routed.of_oracle(), shared.of_oracle());
        let products = reference::QuantizedProducts { inputs: &named, routed, shared };
        let found = reference::forward(&named, &c.of_oracle(t), &products, rounding)?;
        let rows = reference::quantized_rows(found.tensor("rows")?, GROUP)?;
        let hidden = reference::quantized_rows(named.tensor("hidden")?, GROUP)?;
        let found = found.with("row_codes", rows.tensor("codes")?.clone());
        let found = found.with("row_scales", rows.tensor("scales")?.clone());
        let found = found.with("hidden_codes", hidden.tensor("codes")?.clone());
        Ok(found.with("hidden_scales", hidden.tensor("scales")?.clone()))
    }

    fn workspaces(
        c: &MoeCase,
        _: &Views,
        device: &Device,
    ) -> Result<Vec<(&'static str, usize)>, RuntimeError> {
        let gate =
            linear::forward_workspace_bytes(device, 1, c.num_tokens, c.num_experts, c.hidden_size);
        let [_, _, (_, _, first), (_, _, second)] = c.products();
        let of = |one: LinearCase| {
            linear::quantized_workspace_bytes(
                device,
                one.num_tokens,
                one.out_features,
                one.in_features,
            )
        };
        let products = gate.max(of(first)).max(of(second)).max(grouped_linear::WORKSPACE_BYTES);
        let maps = ("map_workspace", moe_map::workspace_bytes(c.num_slots(), c.num_experts));
        Ok([("workspace", products), maps].into_iter().filter(|(_, bytes)| *bytes > 0).collect())
    }

    fn launch(c: &MoeCase, v: &Views, run: &mut Launches<'_>) -> Result<(), RuntimeError> {
        route(c, v, run)?;
        let x = v.only(&["rows", "row_codes", "row_scales"]).renamed(QUANTIZED_ROWS);
        run.launch(|device| quantize_fp8::quantize(device, &x, of_rows()))?;
        let lists = ["counts", "expert_offsets", "workspace"];
        let first =
            [&["row_codes", "w13", "row_scales", "w13_scales", "gate_up"][..], &lists].concat();
        of_experts(c, 0, &v.only(&first).renamed(FIRST), run)?;
        let slots =
            v.only(&["row_weights", "pos_to_token_topk"]).renamed(&[("row_weights", "weight")]);
        gated(c, slots, v, run, ["gate_up", "product_codes", "product_scales"])?;
        let second =
            [&["product_codes", "w2", "product_scales", "w2_scales", "y"][..], &lists].concat();
        of_experts(c, 1, &v.only(&second).renamed(SECOND), run)?;
        shared_expert(c, v, run)?;
        let reduced = v.only(&["y", "shared", "token_topk_to_pos", "out"]);
        run.launch(|device| moe_reduce::launch(device, &reduced, false))
    }

    fn invariant(_: &MoeCase, path: bool) -> &'static [BatchAxis] {
        if path { BatchAxis::OF_ROWS } else { &[] }
    }

    fn batches(_: &MoeCase, batches: &mut Batches<'_, Self>) {
        // Where a row goes depends on all rows, by definition.
        batches.except(&["token_topk_to_pos"]);
        batches.of_rows();
    }

    fn laws(c: &MoeCase, laws: &mut Laws<'_, Self>) {
        if c.num_tokens == 0 {
            return;
        }
        // The second GEMMs of all experts doubled, and those of the shared one unchanged. This
        // shows a weight that is applied after them, or to the shared expert.
        laws.law(
            "the shared expert knows nothing of the router",
            |v| v.case.route_scale = 1.0,
            [
                ("shared", Relation::Times(1.0)),
                ("shared_gate_up", Relation::Times(1.0)),
                ("gate_up", Relation::Times(1.0)),
            ],
        );
        if c.num_tokens > 1 && c.hashed {
            let middle = c.num_tokens / 2;
            laws.law(
                "a token's experts are nothing to other tokens",
                |v| v.tensors.edit_i32s("token_ids", |ids| ids[middle] = -1),
                [("out", Relation::EqualRows(Rc::new(move |token| token != middle)))],
            );
        }
    }
}

type Names = [(&'static str, &'static str)];

/// The launchers' names for the layer's tensors.
const QUANTIZED_ROWS: &Names = &[("rows", "x"), ("row_codes", "codes"), ("row_scales", "scales")];
const QUANTIZED_HIDDEN: &Names =
    &[("hidden", "x"), ("hidden_codes", "codes"), ("hidden_scales", "scales")];
const FIRST: &Names = &[
    ("row_codes", "x"),
    ("w13", "w"),
    ("row_scales", "x_scales"),
    ("w13_scales", "w_scales"),
    ("gate_up", "y"),
];
const SECOND: &Names = &[
    ("product_codes", "x"),
    ("w2", "w"),
    ("product_scales", "x_scales"),
    ("w2_scales", "w_scales"),
];
const SHARED_FIRST: &Names = &[
    ("hidden_codes", "x"),
    ("shared_w13", "w"),
    ("hidden_scales", "x_scales"),
    ("shared_w13_scales", "w_scales"),
    ("shared_gate_up", "y"),
];
const SHARED_SECOND: &Names = &[
    ("shared_codes", "x"),
    ("shared_w2", "w"),
    ("shared_scales", "x_scales"),
    ("shared_w2_scales", "w_scales"),
    ("shared", "y"),
];

fn of_rows() -> quantize_fp8::Options {
    let (group, layout) = (quantize_fp8::Group::Row128, ScaleLayout::Plain);
    quantize_fp8::Options { group, scale: ScaleType::E8m0, layout }
}

/// Logits, experts and weights of tokens; rows of experts, with the weights of their slots.
fn route(c: &MoeCase, v: &Views, run: &mut Launches<'_>) -> Result<(), RuntimeError> {
    let gate = v.only(&["hidden", "gate_weight", "logits", "workspace"]);
    let gate = gate.renamed(&[("hidden", "x"), ("gate_weight", "w"), ("logits", "y")]);
    run.launch(|device| linear::forward(device, &gate, linear::Products::Own))?;
    let routed =
        v.only(&["logits", "bias", "tid2eid", "token_ids", "topk_indices", "topk_weights"]);
    run.launch(|device| router::forward(device, &routed, c.route_scale))?;
    let names = ["topk_indices", "counts", "expert_offsets", "token_topk_to_pos", "pos_to_expert"];
    let maps =
        v.only(&[&names[..], &["pos_to_token", "pos_to_token_topk", "map_workspace"]].concat());
    let maps = maps.renamed(&[("map_workspace", "workspace")]);
    run.launch(|device| moe_map::forward(device, &maps, c.alignment))?;
    let rows = v.only(&["hidden", "token_topk_to_pos", "pos_to_token", "rows"]);
    let rows = rows.renamed(&[("hidden", "x"), ("rows", "y")]);
    run.launch(|device| moe_expand::launch(device, &rows, false))?;
    // A slot is a token with one slot; its weight is a row of one channel.
    let column = |name: &str| {
        let view = &v[name];
        let shape = vec![view.elements(), 1];
        TensorView::dense(view.name.clone(), view.address, view.dtype, &shape)
    };
    let slots = v.only(&["pos_to_token_topk"]).renamed(&[("pos_to_token_topk", "pos_to_token")]);
    let slots = slots
        .with("x", &column("topk_weights"))
        .with("token_topk_to_pos", &column("token_topk_to_pos"));
    let slots = slots.with("y", &column("row_weights"));
    run.launch(|device| moe_expand::launch(device, &slots, false))
}

/// The first or the second GEMM of the experts.
fn of_experts(
    c: &MoeCase,
    number: usize,
    views: &Views,
    run: &mut Launches<'_>,
) -> Result<(), RuntimeError> {
    let quantized = c.products()[number].2.of_launcher();
    let expected_rows = c.num_slots() / c.num_experts;
    let grouped = Grouped { quantized, grouping: Grouping::Contiguous, expected_rows };
    run.launch(|device| grouped_linear::forward(device, views, grouped))
}

/// SwiGLU of gate and up, rounded to bf16 and quantized; `slots` holds weights and padding.
fn gated(
    c: &MoeCase,
    slots: Views,
    v: &Views,
    run: &mut Launches<'_>,
    [gate_up, codes, scales]: [&'static str; 3],
) -> Result<(), RuntimeError> {
    let width = c.intermediate_size;
    let views = slots
        .with("gate", &v[gate_up].narrow(1, 0, width)?)
        .with("up", &v[gate_up].narrow(1, width, width)?);
    let views = views.with("codes", &v[codes]).with("scales", &v[scales]);
    let (group, scale, layout) = (Group::Row128, ScaleType::E8m0, ScaleLayout::Plain);
    let options = swiglu_quantize::Options { group, scale, layout, round_to_bf16: true };
    run.launch(|device| swiglu_quantize::forward(device, &views, c.limit, options))
}

fn shared_expert(c: &MoeCase, v: &Views, run: &mut Launches<'_>) -> Result<(), RuntimeError> {
    let x = v.only(&["hidden", "hidden_codes", "hidden_scales"]).renamed(QUANTIZED_HIDDEN);
    run.launch(|device| quantize_fp8::quantize(device, &x, of_rows()))?;
    let quantized = c.products()[2].2.of_launcher();
    let names = [
        "hidden_codes",
        "shared_w13",
        "hidden_scales",
        "shared_w13_scales",
        "shared_gate_up",
        "workspace",
    ];
    let first = v.only(&names).renamed(SHARED_FIRST);
    run.launch(|device| linear::forward_quantized(device, &first, quantized))?;
    gated(c, Views::new(), v, run, ["shared_gate_up", "shared_codes", "shared_scales"])?;
    let names =
        ["shared_codes", "shared_w2", "shared_scales", "shared_w2_scales", "shared", "workspace"];
    let second = v.only(&names).renamed(SHARED_SECOND);
    run.launch(|device| linear::forward_quantized(device, &second, quantized))
}
