//! Invented reports with everything that a report can hold, for the tests of the pages.

use dsv4_runtime::{BackendKind, Environment};
use serde_json::json;

use crate::case::Case;
use crate::operator::Family;
use crate::operators::registry;
use crate::record::{
    BenchmarkRecord, CaseRecord, Ceilings, CheckRecord, HeatMap, Metrics, MutantRecord,
    MutantStatus, OperatorRecord, Origin, Power, Report, Revision, SCHEMA_VERSION, Seen, Skip,
    Verdict, Worst,
};

/// Operators with their forward and gradient tensors.
const OPERATORS: [(&str, &[&str], &[&str]); 3] = [
    ("rms_norm", &["y", "rstd"], &["dx", "dweight"]),
    ("rope", &["y"], &["dx"]),
    ("sparse_attention", &["out", "lse", "max_logits"], &["dq", "dk", "dv", "dsink"]),
];

/// Checks of a whole case.
const WHOLE: [&str; 9] = [
    "launch",
    "finite",
    "inputs_unchanged",
    "guards",
    "fully_written",
    "repeatable",
    "poison_independent",
    "independence",
    "law: scale by a power of two",
];

/// A small generator of numbers in 0..1, so that the samples need no seed of their own.
pub struct Dice(u64);

impl Dice {
    fn roll(&mut self) -> f64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 11) as f64 / (1_u64 << 53) as f64
    }
}

/// A run in which `cases` cases agreed.
pub fn passing(cases: usize) -> Report {
    let mut dice = Dice(7);
    Report {
        schema_version: SCHEMA_VERSION,
        command: "parity run --profile ci --seed 20250630 --backend cuda --report reports/h200"
            .into(),
        started_unix: 1_751_292_309,
        seconds: 192.4,
        revision: Revision {
            commit: "3f9c1d2a7be04c55a1f0c2d9e8b7a6958473625f".into(),
            dirty: false,
            kernels: "the embedded kernels".into(),
            kernels_digest: "b3d1f0a9c8e7465544332211ffeeddccbbaa99887766554433221100ffeeddcc"
                .into(),
        },
        environment: environment(),
        profile: "ci".into(),
        seed: 20_250_630,
        schedules: 0,
        operators: OPERATORS
            .iter()
            .map(|(name, _, gradients)| operator(name, !gradients.is_empty()))
            .collect(),
        cases: (0..cases).map(|number| case(number, &mut dice)).collect(),
        benchmarks: benchmarks(),
        ceilings: Some(Ceilings {
            copy_bytes_per_second: 4.24e12,
            matrix_flops_per_second: Some(7.9e14),
            e4m3_flops_per_second: Some(1.42e15),
        }),
        mutants: mutants(),
        kill_matrix: None,
        skips: Vec::new(),
        unsupported: Vec::new(),
        unfinished: None,
        saved: Vec::new(),
        base: None,
        shards: Vec::new(),
    }
}

/// A run of all operators in which `cases` cases of each agreed, with as many checks as in real
/// sweeps.
pub fn whole(cases: usize) -> Report {
    let mut report = passing(0);
    let mut dice = Dice(11);
    report.operators = registry::OPERATORS
        .iter()
        .map(|known| OperatorRecord {
            family: Some(known.family()),
            ..operator(known.name(), true)
        })
        .collect();
    for (place, known) in registry::OPERATORS.iter().enumerate() {
        for number in 0..cases {
            // One of the sample's operators provides its checks.
            let lent = place % OPERATORS.len();
            let mut case = case(OPERATORS.len() * (number + cases * place) + lent, &mut dice);
            case.operator = known.name().into();
            case.case["operator"] = known.name().into();
            let line = serde_json::from_value::<Case>(case.case.clone()).expect("a case").line();
            case.replay = format!("parity replay --backend cuda '{line}'");
            for _ in 0..10 {
                let tensors = OPERATORS[lent].1.iter().chain(OPERATORS[lent].2);
                case.checks.extend(tensors.map(|tensor| pass("sequence", tensor, 4096)));
            }
            report.cases.push(case);
        }
    }
    report.mutants.clear();
    report
}

/// A run with failures, errors, an unfounded pass, NaN, a survivor, skips and a dirty tree.
pub fn failing(cases: usize) -> Report {
    let mut report = passing(cases);
    report.revision.dirty = true;
    report.mutants.push(MutantRecord {
        killed_by: Vec::new(),
        status: MutantStatus::Survived,
        ..mutant("sink_added_twice_in_backward", "FM-07", "sparse_attention", "gradient")
    });
    report.skips = vec![
        Skip {
            what: "fp8 cases of sparse_attention".into(),
            why: "the device has no sm_100a instructions".into(),
            count: 12,
        },
        Skip {
            what: "schedule_independent".into(),
            why: "schedules are the emulator's".into(),
            count: 1_204,
        },
    ];
    report.benchmarks[1].percent_of_limit = None;
    overshoot(&mut report.cases[2], "dv", 37.4);
    report.cases[2].origin = Origin::Shrunk;
    overshoot(&mut report.cases[5], "out", 1.31);
    undefined(&mut report.cases[4]);
    refused(&mut report.cases[6]);
    report.cases[7].checks[0].compared = 0;
    report
}

/// A run in which `sorry` of `cases` cases fail in many tensors.
pub fn disastrous(cases: usize, sorry: usize) -> Report {
    let mut report = failing(cases);
    for case in report.cases.iter_mut().take(sorry) {
        for tensor in ["y", "out", "dx", "dk"] {
            overshoot(case, tensor, 4.0);
        }
    }
    report
}

fn environment() -> Environment {
    Environment {
        backend: BackendKind::Cuda,
        device: "NVIDIA H200".into(),
        driver: "580.95.05".into(),
        compiler: "NVRTC 13.0.88".into(),
        target: "sm_90a".into(),
        processors: 132,
        shared_bytes_per_block: 232_448,
    }
}

fn operator(name: &str, has_backward: bool) -> OperatorRecord {
    OperatorRecord {
        name: name.into(),
        family: Some(if name == "sparse_attention" { Family::Attention } else { Family::Projections }),
        summary: match name {
            "rms_norm" => "Divides each row by its root mean square and scales it by a weight.".into(),
            "rope" => "Rotates the last rope_dim channels of each head by its token's position.".into(),
            _ => "Attention of each token over the keys that its index list selects, with an optional sink.".into(),
        },
        specification: vec!["inference 8.1".into(), "training 4".into()],
        kernel_file: format!("kernels/cuda/{name}.cu"),
        oracle_file: format!("reference/src/{name}.rs"),
        dtypes: vec!["bf16".into(), "f32".into()],
        axes: vec![
            "num_tokens".into(),
            "head_dim".into(),
            "mask class".into(),
            "aliasing".into(),
            "scale".into(),
            "row stride".into(),
        ],
        has_backward,
        paths: ["forward_block", "forward_warp", "backward"].map(|path| format!("{name}_{path}")).to_vec(),
        tensors: Vec::new(),
        invariant: Vec::new(),
        conventions: Vec::new(),
        not_expressible: Vec::new(),
    }
}

fn case(number: usize, dice: &mut Dice) -> CaseRecord {
    let (operator, forward, gradients) = OPERATORS[number % OPERATORS.len()];
    let tensors = forward
        .iter()
        .map(|tensor| ("forward", *tensor))
        .chain(gradients.iter().map(|tensor| ("gradient", *tensor)));
    let mut checks: Vec<_> = WHOLE.iter().map(|name| pass(name, "", 4096)).collect();
    for (name, tensor) in tensors {
        let compared = 1 << (8 + number % 11);
        checks.push(CheckRecord {
            metrics: Some(Box::new(metrics(compared, dice))),
            ..pass(name, tensor, compared)
        });
        checks.push(pass("special_values", tensor, 12));
        checks.push(pass("bias", tensor, compared));
        if tensor == "dsink" {
            let metrics = Some(Box::new(metrics(compared, dice)));
            checks.push(CheckRecord { metrics, ..pass("gradient_of_saved", tensor, compared) });
        }
    }
    let case = json!({
        "operator": operator, "num_tokens": 1 + number % 97, "num_heads": 64, "head_dim": 512, "topk": 128, "num_keys": 1031,
        "values": {"kind": "prefix", "v_dim": 448}, "mask": "partially_empty_rows", "aliasing": "none", "sink": "mixed_with_infinities",
        "scale": 0.044_194_173, "dtypes": {"q": "bf16", "k": "bf16", "dk": "f32"}, "seed": 0x9e37_79b9_u64 * number as u64,
    });
    CaseRecord {
        operator: operator.into(),
        replay: format!("parity replay '{case}'"),
        case,
        origin: if number % 40 == 1 { Origin::Regression } else { Origin::Drawn },
        paths: vec![
            format!(
                "{operator}_forward_{}",
                if number.is_multiple_of(2) { "block" } else { "warp" }
            ),
            format!("{operator}_backward"),
        ],
        checks,
        kernel_seconds: 0.002,
        oracle_seconds: 0.31,
        skips: Vec::new(),
        plan_number: Some(number as u64),
        untestable: None,
        seconds: None,
        our_seconds: None,
        batches: Vec::new(),
        unsupported: None,
    }
}

fn pass(name: &str, tensor: &str, compared: u64) -> CheckRecord {
    CheckRecord {
        check: name.into(),
        tensor: tensor.into(),
        verdict: Verdict::Pass,
        compared,
        message: String::new(),
        metrics: None,
        failing: None,
    }
}

fn metrics(compared: u64, dice: &mut Dice) -> Metrics {
    let used = 0.25 + 0.6 * dice.roll();
    let mut use_histogram: Vec<u64> =
        (0..16).map(|bin| (compared as f64 * 0.5_f64.powi(bin + 1)) as u64).collect();
    use_histogram.iter_mut().skip((used * 8.0) as usize + 1).for_each(|bin| *bin = 0);
    use_histogram[0] += compared - use_histogram.iter().sum::<u64>();
    Metrics {
        whole: None,
        power: Some(Power {
            bias: Seen::Bias(11),
            powerless: false,
            element: 4.3e-2,
            assert_close: Seen::FalseAlarm,
            cosine: Seen::Nothing,
            flash_mla: Seen::Bias(9),
            flash_attention: Seen::Bias(8),
        }),
        cosine: 1.0 - 1e-6 * dice.roll(),
        norm_ratio: 1.0 + 2e-4 * (dice.roll() - 0.5),
        relative_l2: 1.6e-3 * dice.roll(),
        max_abs: 0.031 * dice.roll(),
        ulp_p50: 0.25,
        ulp_p99: 0.5,
        ulp_max: 1.0 + 3.0 * dice.roll(),
        budget_used: used,
        budget_relative: 4e-3 * (0.5 + dice.roll()),
        budget_multiple: 5.2,
        worst_row: 17,
        worst_row_relative_l2: 2.9e-3,
        worst: Worst {
            index: vec![3, 17, 250],
            kernel: 0.177_734_375,
            oracle: 0.177_312_498_1,
            allowed: 5.4e-4,
        },
        use_histogram,
        heat: heat(used, dice),
    }
}

fn heat(used: f64, dice: &mut Dice) -> HeatMap {
    let mut cells: Vec<f32> = (0..48 * 64).map(|_| (used * dice.roll().powf(0.4)) as f32).collect();
    cells[20 * 64 + 33] = used as f32;
    HeatMap { rows: 48, columns: 64, total_rows: 6144, total_columns: 512, cells }
}

/// Puts one tensor above its budget, in a band of rows.
fn overshoot(case: &mut CaseRecord, tensor: &str, used: f64) {
    for check in
        case.checks.iter_mut().filter(|check| check.tensor == tensor && check.metrics.is_some())
    {
        check.verdict = Verdict::Fail;
        check.message =
            format!("{used} times the budget at [3, 17, 250]; 52 elements in 21 rows are above it");
        let Some(metrics) = check.metrics.as_mut() else { continue };
        metrics.budget_used = used;
        metrics.norm_ratio = 1.049_3;
        metrics.worst = Worst {
            index: vec![3, 17, 250],
            kernel: 0.241_210_937_5,
            oracle: 0.177_312_498_1,
            allowed: 0.063_9 / used,
        };
        for (bin, elements) in [(9, 40), (15, 12)] {
            metrics.use_histogram[bin] += elements;
            metrics.use_histogram[0] -= elements;
        }
        for cell in &mut metrics.heat.cells[20 * 64..26 * 64] {
            *cell *= used as f32 * 1.3;
        }
    }
}

/// Puts NaN into a gradient.
fn undefined(case: &mut CaseRecord) {
    for check in case.checks.iter_mut().filter(|check| check.check == "gradient") {
        check.verdict = Verdict::Fail;
        check.message =
            "the kernel's value is NaN in 64 elements, first at [0, 5, 0] <oracle: finite>".into();
        let Some(metrics) = check.metrics.as_mut() else { continue };
        metrics.use_histogram[0] -= 64;
        (metrics.cosine, metrics.norm_ratio, metrics.relative_l2, metrics.max_abs) =
            (f64::NAN, f64::NAN, f64::NAN, f64::INFINITY);
        (metrics.budget_used, metrics.ulp_max, metrics.worst_row_relative_l2) =
            (f64::NAN, f64::INFINITY, f64::NAN);
        metrics.worst =
            Worst { index: vec![0, 5, 0], kernel: f64::NAN, oracle: -1.25e-9, allowed: 3.1e-11 };
    }
}

/// A case whose kernel did not launch.
fn refused(case: &mut CaseRecord) {
    case.paths.clear();
    case.checks = vec![CheckRecord {
        verdict: Verdict::Error,
        message: "rms_norm.cu(112): error: identifier \"warp_sum\" is undefined\n    const float total = warp_sum(x);\n                        ^\n1 error detected".into(),
        ..pass("launch", "", 0)
    }];
}

fn benchmarks() -> Vec<BenchmarkRecord> {
    let rows = [
        ("rms_norm", "rms_norm_forward/16384x7168 bf16", 125_300.0, 4.7e8, 4.7e8, 88.5),
        ("rms_norm", "rms_norm_backward/16384x7168 bf16", 245_800.0, 7.0e8, 1.1e9, 67.4),
        (
            "sparse_attention",
            "sparse_attention_forward/4096x64x512 topk 2048",
            3_910_000.0,
            5.4e8,
            1.1e12,
            35.6,
        ),
    ];
    let record =
        |(operator, id, median_ns, bytes, flops, percent): (&str, &str, f64, f64, f64, f64)| {
            BenchmarkRecord {
                id: id.into(),
                operator: operator.into(),
                median_ns,
                low_ns: median_ns * 0.996,
                high_ns: median_ns * 1.005,
                samples: 100,
                bytes,
                flops,
                percent_of_limit: Some(percent),
            }
        };
    rows.map(record).into()
}

fn mutant(id: &str, catalogue: &str, operator: &str, expected: &str) -> MutantRecord {
    MutantRecord {
        id: id.into(),
        catalogue: catalogue.into(),
        operator: operator.into(),
        summary:
            "The saved denominator is multiplied by the scale a second time, which only rows with a large sink show."
                .into(),
        expected: expected.into(),
        killed_by: vec![expected.into()],
        status: MutantStatus::Killed,
        ..MutantRecord::default()
    }
}

fn mutants() -> Vec<MutantRecord> {
    vec![
        mutant("eps_outside_root", "FM-172", "rms_norm", "forward"),
        MutantRecord {
            killed_by: vec!["forward".into(), "special_values".into()],
            ..mutant("row_stride_ignored", "FM-76", "rms_norm", "guards")
        },
        mutant("inverse_flag_dropped", "FM-52", "rope", "gradient"),
    ]
}
