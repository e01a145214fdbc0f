//! Benchmarks of the declarations, at sizes for the emulator. Each is placed, called and compared
//! with the oracle, and each comparison must fail on a planted bug.

use std::collections::BTreeSet;

use dsv4_parity::case::Case;
use dsv4_parity::judge::recheck::recheck;
use dsv4_parity::mutants::planted;
use dsv4_parity::operator::benchmarks::{Benchmark, Call, Timed, Whole};
use dsv4_parity::operator::declared::Operator;
use dsv4_parity::operator::tensors::{Tensors, permuted_along};
use dsv4_parity::operators::attention::attention_combine::AttentionCombine;
use dsv4_parity::operators::attention::decode_attention::DecodeAttention;
use dsv4_parity::operators::attention::inverse_rope_quantize::InverseRopeQuantize;
use dsv4_parity::operators::attention::sparse_attention::SparseAttention;
use dsv4_parity::operators::cache::compressor::Compressor;
use dsv4_parity::operators::cache::compressor_stream::CompressorStream;
use dsv4_parity::operators::cache::indexer_cache_write::IndexerCacheWrite;
use dsv4_parity::operators::cache::kv_cache_write::KvCacheWrite;
use dsv4_parity::operators::cache::kv_norm_rope_write::KvNormRopeWrite;
use dsv4_parity::operators::experts::grouped_linear::GroupedLinear;
use dsv4_parity::operators::experts::grouped_linear_swiglu::GroupedLinearSwiglu;
use dsv4_parity::operators::experts::moe_expand::MoeExpand;
use dsv4_parity::operators::experts::moe_map::MoeMap;
use dsv4_parity::operators::experts::moe_reduce::MoeReduce;
use dsv4_parity::operators::experts::router::Router;
use dsv4_parity::operators::experts::swiglu::Swiglu;
use dsv4_parity::operators::experts::swiglu_quantize::SwigluQuantize;
use dsv4_parity::operators::formats::gate_up_interleave::GateUpInterleave;
use dsv4_parity::operators::formats::hadamard::Hadamard;
use dsv4_parity::operators::formats::quantize_fp8::QuantizeFp8;
use dsv4_parity::operators::formats::quantize_mxfp4::QuantizeMxfp4;
use dsv4_parity::operators::formats::quantize_nvfp4::QuantizeNvfp4;
use dsv4_parity::operators::formats::scale_swizzle::ScaleSwizzle;
use dsv4_parity::operators::head::lm_head::LmHead;
use dsv4_parity::operators::head::sampler::Sampler;
use dsv4_parity::operators::indexer::indexer_backward::IndexerBackward;
use dsv4_parity::operators::indexer::indexer_logits::IndexerLogits;
use dsv4_parity::operators::indexer::indexer_loss::IndexerLoss;
use dsv4_parity::operators::indexer::indexer_query::IndexerQuery;
use dsv4_parity::operators::indexer::indexer_recompute::IndexerRecompute;
use dsv4_parity::operators::indexer::score_recompute::ScoreRecompute;
use dsv4_parity::operators::indexer::topk::Topk;
use dsv4_parity::operators::projections::linear::{Linear, LinearCase};
use dsv4_parity::operators::projections::query_norm_rope::QueryNormRope;
use dsv4_parity::operators::projections::rms_norm::RmsNorm;
use dsv4_parity::operators::projections::rope::Rope;
use dsv4_parity::operators::registry::OPERATORS;
use dsv4_parity::operators::streams::embed_streams::EmbedStreams;
use dsv4_parity::operators::streams::mhc_head::MhcHead;
use dsv4_parity::operators::streams::mhc_mix::MhcMix;
use dsv4_parity::operators::streams::mhc_post::MhcPost;
use dsv4_parity::operators::streams::mhc_post_mix_pre::MhcPostMixPre;
use dsv4_parity::operators::streams::mhc_pre::MhcPre;
use dsv4_runtime::{BackendKind, Device, Environment};
use serde_json::{Value, json};

use crate::extent::{concerned_operators, left_out};
use crate::support::fixtures;

/// Rooms whose changes run the long tests of this file.
const TIMING: [&str; 3] = ["src/operator/benchmarks.rs", "src/operator/timing.rs", "benches/"];

/// For each group a bug that its comparison must see.
const MUTANTS: &[(&str, &str)] = &[
    ("linear_forward", "linear_tail_of_k_dropped"),
    ("linear_backward", "linear_dx_halves_swapped"),
    ("mhc_head_forward", "mhc_head_base_of_the_first_stream"),
    ("mhc_head_backward", "mhc_head_direct_term_missing"),
    ("mhc_mix_forward", "mhc_mix_comb_transposed"),
    ("mhc_mix_backward", "mhc_mix_radial_term_missing"),
    ("mhc_pre_forward", "mhc_pre_stream_left_out"),
    ("mhc_pre_backward", "mhc_pre_dstreams_unweighted"),
    ("mhc_post_forward", "mhc_post_comb_transposed"),
    ("mhc_post_backward", "mhc_post_dstreams_transposed"),
    ("mhc_post_mix_pre_forward", "mhc_post_mix_pre_comb_transposed"),
    ("mhc_post_mix_pre_backward", "mhc_post_mix_pre_out_gradient_dropped"),
    ("scale_swizzle_forward", "swizzle_quarters_in_order"),
    ("gate_up_interleave_forward", "gate_up_swapped"),
    ("rms_norm_forward", "rms_norm_sum_of_one_warp"),
    ("rms_norm_backward", "rms_norm_mean_term_missing"),
    ("rope_forward", "rope_sign_of_the_sine"),
    ("inverse_rope_quantize_forward", "inverse_rope_quantize_turned_forward"),
    ("query_norm_rope_forward", "query_norm_rope_without_the_mean"),
    ("query_norm_rope_backward", "query_norm_rope_mean_term_missing"),
    ("kv_norm_rope_write_forward", "kv_norm_rope_write_without_the_mean"),
    ("sparse_attention_forward", "attention_sink_dropped"),
    ("sparse_attention_backward", "attention_dq_scale_twice"),
    ("decode_attention_forward", "decode_scales_of_the_first_row"),
    ("attention_combine_forward", "combine_lse_in_base_2"),
    ("kv_cache_write_forward", "cache_write_scale_rounded_down"),
    ("score_recompute_forward", "recompute_scale_twice"),
    ("embed_streams_forward", "embed_streams_first_stream_alone"),
    ("embed_streams_backward", "embed_streams_gradient_of_the_first_stream"),
    ("router_forward", "router_scale_left_out"),
    ("router_backward", "router_scale_not_in_the_gradient"),
    ("moe_map_forward", "moe_map_not_aligned"),
    ("lm_head_forward", "lm_head_halves_of_a_fragment_exchanged"),
    ("sampler_forward", "sampler_unlikely_wins"),
    ("compressor_forward", "compressor_halves_swapped"),
    ("compressor_backward", "compressor_mean_term_missing"),
    ("moe_expand_forward", "moe_expand_first_slot_alone"),
    ("moe_expand_backward", "moe_expand_gradient_of_the_first_slot"),
    ("grouped_linear_forward", "grouped_linear_scales_of_the_first_experts_weights"),
    ("grouped_linear_swiglu_forward", "grouped_linear_swiglu_weight_left_out"),
    ("moe_reduce_forward", "moe_reduce_shared_row_left_out"),
    ("moe_reduce_backward", "moe_reduce_gradient_without_the_weight"),
    ("compressor_stream_forward", "compressor_stream_halves_swapped"),
    ("swiglu_forward", "swiglu_weight_not_applied"),
    ("swiglu_backward", "swiglu_weight_applied_twice"),
    ("swiglu_quantize_forward", "swiglu_quantize_weight_left_out"),
    ("swiglu_quantize_backward", "swiglu_quantize_gradient_through_the_clamp"),
    ("quantize_fp8_forward", "fp8_scale_without_its_ceiling"),
    ("quantize_mxfp4_forward", "mxfp4_scale_without_its_ceiling"),
    ("quantize_nvfp4_forward", "nvfp4_global_scale_missing"),
    ("hadamard_forward", "hadamard_normalised_twice"),
    ("topk_forward", "topk_columns_beyond_256"),
    ("indexer_loss_forward", "loss_normalisation_term_missing"),
    ("indexer_loss_backward", "loss_grad_loss_ignored"),
    ("indexer_backward_forward", "backward_dq_scale_twice"),
    ("indexer_query_forward", "indexer_query_scale_twice"),
    ("indexer_logits_forward", "indexer_logits_relu_left_out"),
    ("indexer_recompute_forward", "indexer_recompute_weight_inside_relu"),
    ("indexer_cache_write_forward", "indexer_cache_without_transform"),
];

fn emulator() -> Device {
    Device::open(BackendKind::Emulator, dsv4_kernels::device_options()).expect("the emulator opens")
}

pub fn gpu(target: &str) -> Environment {
    Environment {
        backend: BackendKind::Cuda,
        device: "a GPU".into(),
        driver: String::new(),
        compiler: String::new(),
        target: target.into(),
        processors: 132,
        shared_bytes_per_block: 227 << 10,
    }
}

fn all(environment: &Environment) -> Vec<Box<dyn Timed>> {
    OPERATORS.iter().flat_map(|operator| operator.benchmarks(environment)).collect()
}

/// One call on each set, and the result of comparing the last one.
fn called(benchmark: &dyn Timed, device: &Device) -> Result<u64, String> {
    let buffers = benchmark.place(device).expect("buffers");
    assert!(buffers.sets() > 1, "the buffers do not rotate");
    for set in 0..buffers.sets() {
        buffers.call(set).map_err(|error| error.to_string())?;
    }
    recheck(&*buffers, buffers.sets() - 1).map_err(|error| error.to_string())
}

/// The benchmarks of the operators that a commit runs.
fn of_concerned_operators(mut benchmarks: Vec<Box<dyn Timed>>) -> Vec<Box<dyn Timed>> {
    let drawn = concerned_operators();
    benchmarks.retain(|benchmark| {
        drawn.iter().any(|operator| operator.name() == benchmark.work().operator)
    });
    benchmarks
}

#[test]
fn every_operator_but_a_chain_is_timed_on_a_gpu_and_on_the_emulator_under_names_of_their_own() {
    let emulator = emulator();
    for environment in [&gpu("sm_90a"), &gpu("sm_80"), emulator.environment()] {
        let ids: BTreeSet<_> =
            all(environment).iter().map(|b| (b.group(), b.name().to_owned())).collect();
        assert_eq!(ids.len(), all(environment).len(), "two benchmarks have one name");
        for operator in OPERATORS.iter().filter(|operator| operator.chain().is_empty()) {
            let benchmarks = operator.benchmarks(environment);
            let (name, has_backward) = (operator.name(), operator.describe().has_backward);
            assert!(!benchmarks.is_empty(), "`{name}` is not timed on {}", environment.device);
            for benchmark in benchmarks {
                assert_eq!(benchmark.cannot_run(environment), None, "{}", benchmark.name());
                assert!(benchmark.group().starts_with(name) && benchmark.work().operator == name);
                assert!(has_backward || benchmark.group().ends_with("_forward"));
                assert!(benchmark.work().bytes > 0.0);
            }
        }
    }
}

#[test]
fn what_a_timed_call_writes_agrees_with_the_oracle() {
    if left_out(&TIMING) {
        return;
    }
    let device = emulator();
    for benchmark in all(device.environment()) {
        let id = format!("{}/{}", benchmark.group(), benchmark.name());
        let compared =
            called(&*benchmark, &device).unwrap_or_else(|problem| panic!("{id}: {problem}"));
        assert!(compared > 0, "{id}");
    }
}

#[test]
fn what_no_call_wrote_is_not_taken_for_a_result() {
    let device = emulator();
    for group in ["rms_norm_forward", "rms_norm_backward"] {
        let benchmark =
            all(device.environment()).into_iter().find(|benchmark| benchmark.group() == group);
        let benchmark = benchmark.expect("a benchmark");
        let buffers = benchmark.place(&device).expect("buffers");
        buffers.call(0).expect("a call");
        assert!(recheck(&*buffers, 0).is_ok());
        let problem = recheck(&*buffers, 1).expect_err("nobody called the second set").to_string();
        assert!(problem.contains("sampled along num_rows"), "{problem}");
    }
}

#[test]
fn a_planted_bug_of_every_timed_direction_is_seen_by_the_recheck() {
    if left_out(&TIMING) {
        return;
    }
    let device = emulator();
    let mutants = planted::load(&fixtures().join("mutants"))
        .expect("fixtures/mutants holds lists of mutants");
    let groups: BTreeSet<String> =
        all(device.environment()).iter().map(|benchmark| benchmark.group()).collect();
    assert_eq!(groups, MUTANTS.iter().map(|(group, _)| (*group).to_owned()).collect());
    let drawn: BTreeSet<String> =
        of_concerned_operators(all(device.environment())).iter().map(|b| b.group()).collect();
    for &(group, id) in MUTANTS.iter().filter(|(group, _)| drawn.contains(*group)) {
        let mutant = mutants
            .iter()
            .find(|mutant| mutant.id == id)
            .unwrap_or_else(|| panic!("no mutant `{id}`"));
        let mutated =
            device.with_tree(mutant.plant(device.tree()).expect("an anchor that matches"));
        let of_group =
            all(device.environment()).into_iter().filter(|benchmark| benchmark.group() == group);
        let seen: Vec<_> = of_group.map(|benchmark| called(&*benchmark, &mutated)).collect();
        assert!(seen.iter().any(Result::is_err), "{group}: `{id}` was not seen: {seen:?}");
    }
}

/// A benchmark of the model's shapes by its name, reduced to a size for the emulator. `whole`
/// changes fields of its case. `drawn` changes the fields in which the drawn case differs from it.
fn reduced<K: Operator>(group: &str, name: &str, whole: Value, drawn: Value) -> Benchmark<K> {
    let with = |case: &K::Case, changed: &Value| -> K::Case {
        let mut line = Case::new(K::ABOUT.name, case);
        line.fields.extend(changed.as_object().expect("fields").clone());
        line.fields().expect("a case")
    };
    let called_so = |benchmark: &Benchmark<K>| {
        benchmark.name == name && group == format!("{:?}", benchmark.direction).to_lowercase()
    };
    let found = K::benchmarks(&gpu("sm_90a")).into_iter().find(called_so);
    let benchmark = found.unwrap_or_else(|| panic!("no {group} `{name}` of {}", K::ABOUT.name));
    let case = with(&benchmark.case, &whole);
    Benchmark { drawn: with(&case, &drawn), case, ..benchmark }
}

fn timed<K: Operator>(group: &str, name: &str, whole: &Value, drawn: Value) -> Box<dyn Timed> {
    reduced::<K>(group, name, whole.clone(), drawn).timed()
}

/// Benchmarks of every operator, with repeated tensors and samples of only some rows.
fn all_reduced() -> Vec<Box<dyn Timed>> {
    let families = [
        norms_and_rotations(),
        linears(),
        attention(),
        caches(),
        streams(),
        experts(),
        fused_experts(),
        quantizers(),
        indexer(),
        losses(),
        heads(),
    ];
    families.into_iter().flatten().collect()
}

fn norms_and_rotations() -> Vec<Box<dyn Timed>> {
    let (rows, heads) =
        (json!({"num_rows": 21, "width": 512}), json!({"num_tokens": 11, "num_heads": 3}));
    let rms_norm = |group, name| timed::<RmsNorm>(group, name, &rows, json!({"num_rows": 4}));
    let rope = |name| timed::<Rope>("forward", name, &heads, json!({"num_tokens": 2}));
    let keys = json!({"num_tokens": 32, "num_pages": 2, "page_size": 16, "page_padding": 64});
    let query = |group| {
        timed::<QueryNormRope>(group, "16384x128x512 bf16", &heads, json!({"num_tokens": 2}))
    };
    let groups = json!({"num_tokens": 11, "num_heads": 6, "o_groups": 2, "head_dim": 128});
    let output =
        |name| timed::<InverseRopeQuantize>("forward", name, &groups, json!({"num_tokens": 2}));
    vec![
        rms_norm("forward", "4096x7168 bf16"),
        rms_norm("forward", "2097152x512 bf16 unweighted"),
        rms_norm("backward", "16384x7168 bf16"),
        rope("16384x128x512 bf16"),
        rope("16384x128x512 bf16 inverse"),
        rope("16384x128x512 bf16 in place"),
        query("forward"),
        query("backward"),
        timed::<KvNormRopeWrite>("forward", "65536x512 page 64", &keys, json!({"num_tokens": 8})),
        // One token, whose slot in the cache is part of the comparison.
        timed::<KvNormRopeWrite>("forward", "1x512 page 64", &json!({}), json!({})),
        output("4096x128x512 in 16 groups e8m0"),
        output("4096x64x512 in 8 groups fp32"),
    ]
}

fn linears() -> Vec<Box<dyn Timed>> {
    // More features than are sampled, and a partial last block of them.
    let layer = json!({"num_tokens": 21, "out_features": 400, "in_features": 72});
    let fewer = json!({"num_tokens": 4, "out_features": 16});
    let linear = |name| timed::<Linear>("forward", name, &layer, fewer.clone());
    let transposed = json!({"num_tokens": 21, "out_features": 40, "in_features": 400});
    let gradients = |name| timed::<Linear>("backward", name, &transposed, fewer.clone());
    let of_groups =
        json!({"num_tokens": 21, "num_groups": 3, "out_features": 400, "in_features": 72});
    let transposed_groups =
        json!({"num_tokens": 21, "num_groups": 3, "out_features": 40, "in_features": 400});
    let coded = json!({"num_tokens": 21, "out_features": 400, "in_features": 160});
    let quantized = |name| timed::<Linear>("forward", name, &coded, fewer.clone());
    vec![
        linear("4096x65536x1536 bf16"),
        linear("4096x65536x1536 bf16 portable"),
        gradients("4096x7168x16384 bf16"),
        gradients("4096x7168x16384 bf16 portable"),
        timed::<Linear>("forward", "4096x1024x4096 bf16 in 16 groups", &of_groups, fewer.clone()),
        timed::<Linear>(
            "backward",
            "4096x1024x4096 bf16 in 16 groups",
            &transposed_groups,
            fewer.clone(),
        ),
        quantized("4096x7168x16384 fp8"),
        quantized("4096x7168x16384 fp8 portable"),
        quantized("4096x7168x16384 mxfp4"),
        quantized("4096x7168x16384 nvfp4"),
    ]
}

fn attention() -> Vec<Box<dyn Timed>> {
    let lists = json!({"num_tokens": 7, "num_heads": 5, "num_keys": 90, "topk": 40});
    let fewer = json!({"num_tokens": 2, "num_keys": 44});
    let sparse = |group, name| timed::<SparseAttention>(group, name, &lists, fewer.clone());
    let target = |name| timed::<ScoreRecompute>("forward", name, &lists, fewer.clone());
    let keys = json!({"num_tokens": 9, "num_heads": 5, "num_keys": 30});
    let dense = |name| timed::<ScoreRecompute>("forward", name, &keys, json!({"num_tokens": 2}));
    let store = |topk, num_pages, page_size| json!({"topk": topk, "num_pages": num_pages, "page_size": page_size});
    let stores = json!({
        "batch": 6, "num_heads": 20, "num_blocks": 5, "window": store(70, 27, 16), "compressed": store(70, 210, 8),
    });
    let few_pages = json!({"batch": 2, "window": store(70, 5, 16), "compressed": store(70, 9, 8)});
    let decode = |name| timed::<DecodeAttention>("forward", name, &stores, few_pages.clone());
    let parts = json!({"num_tokens": 9, "num_heads": 3});
    vec![
        sparse("forward", "q4096 k8192 H64 D512 topk512"),
        sparse("backward", "q4096 k8192 H64 D512 topk512"),
        sparse("forward", "q4096 k8192 H64 D512 topk512 V"),
        sparse("backward", "q4096 k8192 H64 D512 topk512 V"),
        sparse("backward", "q4096 k8192 H64 D512 topk512 deterministic"),
        decode("b128 H64 w128+512 fp8"),
        decode("b128 H64 w128+512 bf16"),
        decode("b128 H64 w128+512 fp8 portable"),
        timed::<AttentionCombine>(
            "forward",
            "8 parts 128x128x512",
            &parts,
            json!({"num_tokens": 2}),
        ),
        target("q4096 k8192 H64 D512 topk512"),
        target("q4096 k8192 H64 D512 topk512 portable"),
        dense("q4096 k2048 H64 D512 dense"),
        dense("q4096 k2048 H64 D512 dense portable"),
    ]
}

fn caches() -> Vec<Box<dyn Timed>> {
    let pages = |padding| json!({"num_tokens": 96, "num_pages": 6, "page_size": 16, "page_padding": padding});
    let fewer = json!({"num_tokens": 32, "num_pages": 2});
    let rows =
        |name, padding| timed::<KvCacheWrite>("forward", name, &pages(padding), fewer.clone());
    let keys = |name| timed::<IndexerCacheWrite>("forward", name, &pages(64), fewer.clone());
    let entries = |group, name, ratio: usize| {
        let sizes = json!({"num_tokens": 12 * ratio, "num_sequences": 3, "num_entries": 12, "head_dim": 128});
        let mut whole = sizes.as_object().expect("fields").clone();
        whole.insert("table_rows".into(), json!(4 * ratio));
        timed::<Compressor>(
            group,
            name,
            &whole.into(),
            json!({"num_tokens": 6 * ratio, "num_entries": 5}),
        )
    };
    let sequences = json!({"num_sequences": 6, "num_slots": 6, "head_dim": 128});
    vec![
        rows("65536x512 page 64 fp8", 448),
        rows("65536x512 page 64 bf16", 0),
        keys("32768x128 page 32 e2m1"),
        keys("32768x128 page 32 e4m3"),
        timed::<CompressorStream>("forward", "128 sequences x512 ratio 4", &sequences, json!({})),
        // One entry in e2m1, where no value has power by itself: the state is compared.
        timed::<CompressorStream>("forward", "1 sequences x128 ratio 4", &json!({}), json!({})),
        entries("forward", "32768x512 ratio 4", 4),
        entries("backward", "32768x512 ratio 4", 4),
        entries("forward", "32768x512 ratio 128", 128),
        entries("backward", "32768x512 ratio 128", 128),
    ]
}

fn streams() -> Vec<Box<dyn Timed>> {
    let (tokens, fewer) =
        (json!({"num_tokens": 11, "hidden_size": 72}), || json!({"num_tokens": 2}));
    let mhc_post = |group| timed::<MhcPost>(group, "4096x4x7168 bf16", &tokens, fewer());
    let mhc_pre = |group, name| timed::<MhcPre>(group, name, &tokens, fewer());
    let mhc_fused = |group, name| timed::<MhcPostMixPre>(group, name, &tokens, fewer());
    let mhc_mix = |group| timed::<MhcMix>(group, "8192x4x4096 bf16", &tokens, fewer());
    let mhc_head = |group| timed::<MhcHead>(group, "4096x4x7168 bf16", &tokens, fewer());
    let named = json!({"num_tokens": 21, "vocab_size": 12, "hidden_size": 96});
    let fewer_rows = json!({"num_tokens": 5, "vocab_size": 3});
    let embed = |group| {
        timed::<EmbedStreams>(
            group,
            "32768 of 129280 rows of 7168 bf16",
            &named,
            fewer_rows.clone(),
        )
    };
    vec![
        embed("forward"),
        embed("backward"),
        mhc_head("forward"),
        mhc_head("backward"),
        mhc_mix("forward"),
        mhc_mix("backward"),
        mhc_post("forward"),
        mhc_post("backward"),
        mhc_pre("forward", "4096x4x7168 bf16"),
        mhc_pre("forward", "4096x4x7168 bf16 norm"),
        mhc_pre("backward", "4096x4x7168 bf16"),
        mhc_pre("backward", "4096x4x7168 bf16 norm"),
        mhc_fused("forward", "4096x4x7168 bf16"),
        mhc_fused("forward", "4096x4x7168 bf16 separate"),
        mhc_fused("backward", "4096x4x7168 bf16"),
    ]
}

fn experts() -> Vec<Box<dyn Timed>> {
    let tokens = json!({"num_tokens": 21, "num_experts": 40});
    let router = |group, name| timed::<Router>(group, name, &tokens, json!({"num_tokens": 4}));
    let table = json!({"num_tokens": 21, "num_experts": 40, "vocab_size": 30});
    let sorted = json!({"num_tokens": 21, "num_experts": 8, "hidden_size": 96, "alignment": 4});
    let name = "32768x7168 to 6 of 256 experts bf16";
    let rows = json!({"num_experts": 5, "num_rows": 48, "row_bytes": 48});
    let weights =
        |name| timed::<GateUpInterleave>("forward", name, &rows, json!({"num_experts": 2}));
    let slots = json!({
        "num_slots": 30, "num_experts": 5, "num_rows": 40, "alignment": 4, "out_features": 24, "in_features": 160,
    });
    let contiguous = |name| {
        timed::<GroupedLinear>("forward", name, &slots, json!({"num_experts": 2, "num_rows": 8}))
    };
    let masked = |name| {
        timed::<GroupedLinear>(
            "forward",
            name,
            &slots,
            json!({"num_experts": 2, "out_features": 8}),
        )
    };
    let expand = |group| timed::<MoeExpand>(group, name, &sorted, json!({"num_tokens": 5}));
    let reduce = |group| timed::<MoeReduce>(group, name, &sorted, json!({"num_tokens": 5}));
    vec![
        router("forward", "6 of 256, 32768 tokens"),
        router("backward", "6 of 256, 32768 tokens"),
        timed::<Router>(
            "forward",
            "6 of 384, 32768 tokens hashed",
            &table,
            json!({"num_tokens": 4}),
        ),
        timed::<MoeMap>("forward", "32768 tokens of 256 experts", &tokens, json!({})),
        expand("forward"),
        expand("backward"),
        contiguous("24576 contiguous 256x4096x4096 fp8"),
        masked("192 masked 256x4096x4096 fp8"),
        masked("192 masked 256x4096x4096 mxfp4"),
        reduce("forward"),
        reduce("backward"),
        weights("32x4096x2048"),
        weights("32x4096x128 inverse"),
    ]
}

fn fused_experts() -> Vec<Box<dyn Timed>> {
    // Rows of MXFP4 are whole 16-byte accesses, as the kernels for Hopper load them.
    let slots = |out_features: usize, in_features: usize| {
        json!({
            "num_slots": 30, "num_experts": 5, "num_rows": 40, "alignment": 4, "out_features": out_features,
            "in_features": in_features,
        })
    };
    let of = |name, features, in_features, drawn| {
        timed::<GroupedLinearSwiglu>("forward", name, &slots(features, in_features), drawn)
    };
    let contiguous =
        |name, features| of(name, features, 144, json!({"num_experts": 2, "num_rows": 8}));
    let masked = |name, [whole, drawn]: [usize; 2], in_features| {
        of(name, whole, in_features, json!({"num_experts": 2, "out_features": drawn}))
    };
    vec![
        contiguous("24576 contiguous 256x4096x4096 fp8 in groups of 128", 256),
        contiguous("24576 contiguous 256x4096x4096 fp8 in groups of 32 interleaved", 80),
        masked("192 masked 256x4096x4096 fp8 in groups of 128", [512, 256], 144),
        masked("192 masked 256x4096x4096 mxfp4 in groups of 32 interleaved", [80, 16], 160),
    ]
}

fn quantizers() -> Vec<Box<dyn Timed>> {
    let (rows, fewer) = (json!({"num_rows": 21, "width": 512}), || json!({"num_rows": 4}));
    let swiglu = |group| timed::<Swiglu>(group, "4096x2048 bf16", &rows, fewer());
    let gated = |group, name| {
        timed::<SwigluQuantize>(group, name, &json!({"num_rows": 20, "width": 512}), fewer())
    };
    let fp8 = |name| timed::<QuantizeFp8>("forward", name, &rows, fewer());
    let mxfp4 = |name| timed::<QuantizeMxfp4>("forward", name, &rows, fewer());
    let nvfp4 = |name| timed::<QuantizeNvfp4>("forward", name, &rows, fewer());
    let squares = |name| {
        timed::<QuantizeFp8>(
            "forward",
            name,
            &json!({"num_rows": 261, "width": 256}),
            json!({"num_rows": 1}),
        )
    };
    let tiles = |name| {
        timed::<ScaleSwizzle>(
            "forward",
            name,
            &json!({"num_rows": 261, "num_groups": 35}),
            json!({}),
        )
    };
    vec![
        tiles("32768x224 inverse"),
        swiglu("forward"),
        swiglu("backward"),
        gated("forward", "24576x2048 bf16 groups of 128"),
        gated("forward", "24576x2048 bf16 groups of 32"),
        gated("backward", "24576x2048 bf16"),
        // One row, whose scales have space for four.
        timed::<SwigluQuantize>(
            "forward",
            "1x2048 bf16 groups of 128",
            &json!({"width": 512}),
            json!({}),
        ),
        fp8("quantize 32768x4096 1x128 fp32 mnmajor"),
        fp8("quantize 32768x4096 1x128 e8m0 mnmajor"),
        fp8("dequantize 32768x4096 1x128 e8m0 plain"),
        squares("quantize 32768x4096 128x128 e8m0 plain"),
        squares("dequantize 32768x4096 128x128 e8m0 plain"),
        mxfp4("quantize 32768x4096 plain"),
        mxfp4("dequantize 32768x4096 plain"),
        nvfp4("quantize 32768x4096 plain"),
        nvfp4("dequantize 32768x4096 plain"),
    ]
}

fn indexer() -> Vec<Box<dyn Timed>> {
    let hadamard =
        |name| timed::<Hadamard>("forward", name, &json!({"num_rows": 21}), json!({"num_rows": 4}));
    let heads = json!({"num_tokens": 11, "num_heads": 3});
    let query = |name| timed::<IndexerQuery>("forward", name, &heads, json!({"num_tokens": 2}));
    let rows = json!({"num_rows": 11, "num_columns": 300, "topk": 40});
    let logits = |name, whole, fewer| timed::<IndexerLogits>("forward", name, &whole, fewer);
    let prefill = json!({"num_tokens": 11, "num_heads": 5, "num_keys": 90, "columns": 90});
    let training = json!({"num_tokens": 40, "num_heads": 5, "num_keys": 10, "columns": 10});
    let paged =
        json!({"batch": 5, "num_heads": 5, "columns": 100, "num_pages": 10, "table_pages": 2});
    vec![
        hadamard("262144x128 bf16 to bf16"),
        hadamard("262144x128 bf16 to e2m1"),
        query("4096x64x128 to e2m1"),
        query("4096x64x128 to e4m3"),
        timed::<Topk>("forward", "512 of 16384, 4096 rows", &rows, json!({"num_rows": 3})),
        logits("e4m3 prefill q4096 k16384 H64", prefill, json!({"num_tokens": 2})),
        logits("bf16 dense q8192 k2048 ratio 4 H64", training, json!({"num_tokens": 2})),
        logits("e4m3 paged batch 128 context 8192 H64", paged, json!({"batch": 2, "num_pages": 4})),
    ]
}

fn heads() -> Vec<Box<dyn Timed>> {
    let rows = json!({"num_rows": 11, "vocab_size": 300});
    let sampler = |name| timed::<Sampler>("forward", name, &rows, json!({"num_rows": 3}));
    let few = json!({"num_tokens": 3, "num_rows": 3, "vocab_size": 200, "hidden_size": 72});
    let many = json!({"num_tokens": 140, "num_rows": 140, "vocab_size": 200, "hidden_size": 72});
    let head =
        |name, whole: &Value| timed::<LmHead>("forward", name, whole, json!({"vocab_size": 50}));
    vec![
        head("1x129280x7168 bf16", &few),
        head("128x129280x7168 bf16", &many),
        sampler("top-p, 128 rows of 129280"),
        sampler("no filter, 128 rows of 129280"),
    ]
}

fn losses() -> Vec<Box<dyn Timed>> {
    let listed = json!({"num_tokens": 7, "num_keys": 90, "topk": 40});
    let loss =
        |group| timed::<IndexerLoss>(group, "q4096 topk512", &listed, json!({"num_tokens": 2}));
    let rows = json!({"num_tokens": 9, "num_keys": 30});
    let dense_loss =
        |group| timed::<IndexerLoss>(group, "q4096 dense k4096", &rows, json!({"num_tokens": 2}));
    let lists = json!({"num_tokens": 7, "num_heads": 5, "num_keys": 90, "topk": 40});
    let fewer = json!({"num_tokens": 2, "num_keys": 44});
    let recompute = |name| timed::<IndexerRecompute>("forward", name, &lists, fewer.clone());
    let queries = |name| timed::<IndexerBackward>("forward", name, &lists, fewer.clone());
    let keys = json!({"num_tokens": 9, "num_heads": 5, "num_keys": 30});
    vec![
        loss("forward"),
        loss("backward"),
        dense_loss("forward"),
        dense_loss("backward"),
        recompute("q4096 k8192 H64 D128 topk512"),
        recompute("q4096 k8192 H64 D128 topk1024"),
        queries("q4096 k8192 H64 D128 topk512"),
        queries("q4096 k8192 H64 D128 topk512 deterministic"),
        timed::<IndexerBackward>(
            "forward",
            "q4096 k2048 H64 D128 dense",
            &keys,
            json!({"num_tokens": 2}),
        ),
    ]
}

#[test]
fn repeated_tensors_and_samples_of_some_rows_agree_with_the_oracle_for_every_operator() {
    if left_out(&TIMING) {
        return;
    }
    let device = emulator();
    let all = all_reduced();
    let timed: BTreeSet<String> = all.iter().map(|benchmark| benchmark.work().operator).collect();
    let known = OPERATORS
        .iter()
        .filter(|operator| operator.chain().is_empty())
        .map(|operator| operator.name());
    assert_eq!(timed, known.map(str::to_owned).collect());
    for benchmark in of_concerned_operators(all) {
        let id = format!("{}/{}", benchmark.group(), benchmark.name());
        let compared =
            called(&*benchmark, &device).unwrap_or_else(|problem| panic!("{id}: {problem}"));
        println!("{id}: {compared}");
        assert!(compared > 0, "{id}");
    }
}

/// The error of a benchmark of an operator after a change.
fn problem<K: Operator>(benchmark: Benchmark<K>) -> String {
    let device = emulator();
    let timed = benchmark.timed();
    let placed = timed.place(&device);
    let problem = placed.and_then(|buffers| {
        buffers.call(0)?;
        recheck(&*buffers, 0)
    });
    problem.expect_err("a problem").to_string()
}

#[test]
fn a_sample_of_which_nothing_is_written_or_that_has_no_such_axis_is_an_error() {
    let parts = || {
        let small = json!({"num_tokens": 2, "num_heads": 3});
        reduced::<AttentionCombine>("forward", "8 parts 128x128x512", small, json!({}))
    };
    assert!(problem(Benchmark { axis: "num_parts", ..parts() }).contains("nothing was compared"));
    assert!(problem(Benchmark { axis: "num_rows", ..parts() }).contains("`num_rows`"));
}

#[test]
fn a_sample_that_its_operator_does_not_complete_disagrees() {
    let whole = json!({"num_tokens": 96, "num_pages": 6, "page_size": 16, "page_padding": 448});
    let cache = reduced::<KvCacheWrite>("forward", "65536x512 page 64 fp8", whole, json!({}));
    // Tokens of pages outside the sample are written to pages in it.
    assert!(problem(Benchmark { sampled: |_, _, _| {}, ..cache }).contains("elements differ"));
    let keys = json!({"num_tokens": 9, "num_heads": 5, "num_keys": 30});
    let dense = reduced::<ScoreRecompute>("forward", "q4096 k2048 H64 D512 dense", keys, json!({}));
    // Sampled tokens are not consecutive.
    assert!(problem(Benchmark { sampled: |_, _, _| {}, ..dense }).contains("forward"));
}

#[test]
fn scales_of_other_blocks_than_the_sampled_features_disagree() {
    let whole = json!({"num_tokens": 21, "out_features": 400, "in_features": 160});
    let drawn = json!({"num_tokens": 4, "out_features": 400});
    let product = reduced::<Linear>("forward", "4096x7168x16384 fp8", whole, drawn);
    let first_blocks = |_: &Whole<'_, Linear>, _: &mut LinearCase, tensors: &mut Tensors| {
        let scales = tensors.tensor("w_scales").clone();
        tensors.put("w_scales", permuted_along(&scales, 0, &[0, 1]));
    };
    assert!(problem(Benchmark { sampled: first_blocks, ..product }).contains("forward y"));
}

#[test]
fn features_that_were_not_written_are_among_the_sampled_ones() {
    let whole = json!({"num_tokens": 3, "out_features": 1000, "in_features": 72});
    let product =
        reduced::<Linear>("forward", "4096x65536x1536 bf16", whole, json!({"num_tokens": 3}));
    // As if the launch ended before the last block of features.
    let shortened: Call<Linear> = |case, views, run| {
        let narrow = |name: &str, axis| views[name].narrow(axis, 0, 896).expect("fewer features");
        let mut fewer = views.clone();
        fewer.put("w", narrow("w", 0));
        fewer.put("y", narrow("y", 1));
        let case = LinearCase { out_features: 896, ..case.clone() };
        Linear::launch(&case, &fewer, run)
    };
    assert!(problem(Benchmark { call: shortened, ..product }).contains("forward y"));
}

#[test]
fn tensors_that_do_not_repeat_to_those_of_the_case_are_refused_by_name() {
    let rows = json!({"num_rows": 8, "width": 512});
    let larger = reduced::<RmsNorm>("forward", "4096x7168 bf16", rows, json!({"num_rows": 9}));
    let problem = problem(larger);
    assert!(
        problem.contains("`dy` is [9, 512]") || problem.contains("`x` is [9, 512]"),
        "{problem}"
    );
}
