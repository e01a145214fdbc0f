//! Hopper's asynchronous features on both backends: MMAs, pipelines and barriers against sums
//! computed here. On the emulator also the same kernels with one line wrong. The kernels are in
//! `kernels/cuda/selftest/selftest_wgmma.cu` and `kernels/cuda/selftest/selftest_hopper.cu`.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use dsv4_reference::TensorCore;
use dsv4_reference::cache::kv_cache::e4m3_value;
use dsv4_runtime::arena::Layout;
use dsv4_runtime::emulator::EmulatorOptions;
use dsv4_runtime::params::Params;
use dsv4_runtime::tensor_map::BOX_ROW_BYTES;
use dsv4_runtime::{
    BackendKind, Contract, DType, Device, DeviceArena, DeviceOptions, HostTensor, LaunchConfig,
    Result, Role, RuntimeError, TensorMap,
};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::extent::left_out;
use crate::support;

/// Rooms whose changes run the long tests of this file.
const MALICE: [&str; 3] =
    ["kernels/runtime/src/", "kernels/runtime/emulator/", "kernels/cuda/ptx/"];

const WGMMA: &str = "selftest_wgmma.cu";
const HOPPER: &str = "selftest_hopper.cu";
/// Random schedules under which a correct kernel must be correct.
const SCHEDULES: u64 = 16;
/// Random schedules within which an incorrect kernel must fail.
const SCHEDULES_TO_SHOW: u64 = 8;

/// The device under test if it has these features; otherwise `None`, which is counted and reported.
fn hopper_device() -> Option<&'static Device> {
    static SKIPPED: AtomicU32 = AtomicU32::new(0);
    let device = support::device();
    if support::backend() == BackendKind::Cuda && device.environment().target != "sm_90a" {
        let number = 1 + SKIPPED.fetch_add(1, Ordering::Relaxed);
        let target = &device.environment().target;
        eprintln!("skipped (number {number}): this test needs sm_90a, and the device is {target}");
        return None;
    }
    Some(device)
}

/// A separate emulator whose schedule no other test changes; `None` where another backend is under
/// test.
fn own_emulator() -> Option<Device> {
    if support::backend() != BackendKind::Emulator {
        return None;
    }
    let emulator =
        EmulatorOptions { time_limit: Duration::from_secs(20), ..EmulatorOptions::default() };
    let options = DeviceOptions { emulator, ..dsv4_kernels::device_options() };
    Some(Device::open(BackendKind::Emulator, options).expect("the emulator opens"))
}

/// The device with `right` replaced by `wrong` in one of the sources.
fn with_change(device: &Device, file: &str, right: &str, wrong: &str) -> Device {
    let text = dsv4_kernels::sources().text(file).expect("embedded").to_owned();
    assert_eq!(text.matches(right).count(), 1, "`{right}` is not once in {file}");
    device.with_tree(dsv4_kernels::sources().with_text(
        file,
        text.replace(right, wrong),
        "a mutant",
    ))
}

/// Runs a test on the device under test, and under random schedules where it is the emulator.
fn under_every_schedule(test: impl Fn(&Device)) {
    let Some(device) = hopper_device() else { return };
    test(device);
    let Some(own) = own_emulator() else { return };
    for seed in 1..=SCHEDULES {
        own.backend().set_schedule_seed(Some(seed));
        test(&own);
    }
}

/// One launch under the memory contract, with the shared memory that the kernel requires.
fn launch(
    arena: &DeviceArena<'_>,
    (file, kernel): (&str, &str),
    blocks: u32,
    params: &Params,
) -> Result<()> {
    let config = LaunchConfig { grid: [blocks, 1, 1], block: [256, 1, 1], shared_bytes: 0 };
    let violations =
        arena.run(|device| device.kernel(file, &[], kernel)?.launch(config, params))?;
    assert!(violations.is_empty(), "{kernel}: {violations:?}");
    Ok(())
}

/// Small integers; neighbours along both axes differ.
fn integers(rows: usize, columns: usize, factors: (usize, usize), modulus: usize) -> Vec<f64> {
    let value = |i: usize| (factors.0 * (i / columns) + factors.1 * (i % columns)) % modulus;
    (0..rows * columns).map(|i| value(i) as f64 - (modulus / 2) as f64).collect()
}

fn assert_same(what: &str, found: &[f64], expected: &[f64]) {
    assert_eq!(found.len(), expected.len(), "{what}: number of elements");
    let wrong: Vec<usize> = (0..found.len()).filter(|&i| found[i] != expected[i]).collect();
    if let Some(&i) = wrong.first() {
        let (number, of) = (wrong.len(), found.len());
        panic!("{what}: {number} of {of} differ; first at {i}: {}, not {}", found[i], expected[i]);
    }
}

// ---------------------------------------------------------------- matrix products

const M: usize = 128;
const K: usize = 128;

/// One MMA: `[n, source of a, b transposed, accumulate]`.
type Way = [i32; 4];

fn multiply(device: &Device, way: Way, a: &[f64], b: &[f64], c: &[f64]) -> Result<Vec<f64>> {
    let n = way[0] as usize;
    let mut arena = DeviceArena::new(device, Contract::NAN);
    let a = arena.input("a", &HostTensor::from_f64(DType::Bf16, &[M, K], a))?;
    let b = arena.input("b", &HostTensor::from_f64(DType::Bf16, &[K, n], b))?;
    let c = arena.input("c", &HostTensor::from_f64(DType::F32, &[M, n], c))?;
    let y = arena.output("y", DType::F32, &[M, n])?;
    let [n, a_source, b_transposed, accumulate] = way.map(|number| number as usize);
    let params =
        Params::new("selftest").ptr("a", &a).ptr("b", &b).ptr("c", &c).ptr("y", &y).i32("n", n)?;
    let params = params
        .i32("a_source", a_source)?
        .i32("b_transposed", b_transposed)?
        .i32("accumulate", accumulate)?;
    launch(&arena, (WGMMA, "selftest_wgmma"), 1, &params)?;
    Ok(arena.download(&y)?.to_f64())
}

/// Inputs of an MMA, and `c + a b` or `a b`.
fn product(way: Way) -> [Vec<f64>; 4] {
    let n = way[0] as usize;
    let (a, b) = (integers(M, K, (7, 3), 17), integers(K, n, (5, 11), 13));
    let c: Vec<f64> = (0..M * n).map(|i| i as f64 * 2.0 - 3000.0).collect();
    let sum = |i: usize| (0..K).map(|k| a[i / n * K + k] * b[k * n + i % n]).sum::<f64>();
    let expected = (0..M * n).map(|i| sum(i) + f64::from(way[3]) * c[i]).collect();
    [a, b, c, expected]
}

fn ways() -> impl Iterator<Item = Way> {
    let shapes = [64, 128, 256].into_iter().flat_map(|n| (0..3).map(move |source| (n, source)));
    // For the narrow shapes A comes only from registers, and B is not transposed.
    let narrow = [24, 72].into_iter().flat_map(|n| [[n, 2, 0, 1], [n, 2, 0, 0]]);
    shapes.flat_map(|(n, source)| [[n, source, 0, 1], [n, source, 1, 0]]).chain(narrow)
}

#[test]
fn warpgroup_products_of_small_integers_are_exact_for_every_shape_and_source() {
    let Some(device) = hopper_device() else { return };
    for way in ways() {
        let [a, b, c, expected] = product(way);
        assert_same(
            &format!("{way:?}"),
            &multiply(device, way, &a, &b, &c).expect("a product"),
            &expected,
        );
    }
}

#[test]
fn warpgroup_products_have_the_bits_that_an_h100_gave() {
    let Some(device) = hopper_device() else { return };
    let n = 64;
    for (seed, binades) in [(0, 1), (1, 6), (2, 20), (3, 60)] {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let mut numbers = |count: usize| -> Vec<f64> {
            let mut number =
                || random.random_range(-1.0..1.0) * 2f64.powi(random.random_range(-binades..=0));
            (0..count).map(|_| half::bf16::from_f64(number()).to_f64()).collect()
        };
        let (a, b, c) = (numbers(M * K), numbers(K * n), numbers(M * n));
        let sum = |i: usize| {
            let column: Vec<f64> = (0..K).map(|k| b[k * n + i % n]).collect();
            TensorCore::HOPPER_BF16.sum(&a[i / n * K..][..K], &column, c[i])
        };
        let expected: Vec<f64> = (0..M * n).map(sum).collect();
        for way in [[64, 0, 0, 1], [64, 1, 1, 1], [64, 2, 0, 1]] {
            let found = multiply(device, way, &a, &b, &c).expect("a product");
            assert_same(&format!("{binades} binades, {way:?}"), &found, &expected);
        }
    }
}

/// `c + a b^T`, or `a b^T`, of e4m3 codes: a `[M, K]`, b `[n, K]`.
fn multiply_e4m3(
    device: &Device,
    accumulate: bool,
    a: &[u8],
    b: &[u8],
    c: &[f64],
) -> Result<Vec<f64>> {
    let n = b.len() / K;
    let codes = |rows: usize, bytes: &[u8]| HostTensor {
        dtype: DType::U8,
        shape: vec![rows, K],
        bytes: bytes.to_vec(),
    };
    let mut arena = DeviceArena::new(device, Contract::NAN);
    let (a, b) = (arena.input("a", &codes(M, a))?, arena.input("b", &codes(n, b))?);
    let c = arena.input("c", &HostTensor::from_f64(DType::F32, &[M, n], c))?;
    let y = arena.output("y", DType::F32, &[M, n])?;
    let params =
        Params::new("selftest").ptr("a", &a).ptr("b", &b).ptr("c", &c).ptr("y", &y).i32("n", n)?;
    launch(&arena, (WGMMA, "selftest_wgmma_e4m3"), 1, &params.flag("accumulate", accumulate))?;
    Ok(arena.download(&y)?.to_f64())
}

/// Random e4m3 codes that are numbers, with exponents within that many binades below the largest.
fn codes(random: &mut ChaCha8Rng, count: usize, binades: u8) -> Vec<u8> {
    let code = |random: &mut ChaCha8Rng| {
        let exponent = 14 - random.random_range(0..binades);
        exponent << 3 | random.random_range(0..8) | random.random_range(0..2) << 7
    };
    (0..count).map(|_| code(random)).collect()
}

#[test]
fn warpgroup_products_of_e4m3_have_the_bits_that_an_h100_gave_for_every_shape() {
    let Some(device) = hopper_device() else { return };
    for (seed, binades) in [(0, 1), (1, 4), (2, 9), (3, 15)] {
        for (n, accumulate) in [8, 16, 64, 128].into_iter().flat_map(|n| [(n, true), (n, false)]) {
            let mut random = ChaCha8Rng::seed_from_u64(seed);
            let (a, b) = (codes(&mut random, M * K, binades), codes(&mut random, n * K, binades));
            let mut number =
                || random.random_range(-1.0..1.0f32) * 2f32.powi(random.random_range(-8..=16));
            let c: Vec<f64> = (0..M * n).map(|_| number().into()).collect();
            let values =
                |codes: &[u8]| codes.iter().map(|&code| e4m3_value(code)).collect::<Vec<_>>();
            let (a_values, b_values) = (values(&a), values(&b));
            let sum = |i: usize| {
                let (row, column) = (&a_values[i / n * K..][..K], &b_values[i % n * K..][..K]);
                TensorCore::HOPPER_E4M3.sum(row, column, if accumulate { c[i] } else { 0.0 })
            };
            let expected: Vec<f64> = (0..M * n).map(sum).collect();
            let found = multiply_e4m3(device, accumulate, &a, &b, &c).expect("a product");
            assert_same(
                &format!("{binades} binades, n {n}, accumulate {accumulate}"),
                &found,
                &expected,
            );
        }
    }
}

#[test]
fn a_nan_among_codes_of_e4m3_is_one_in_its_row_and_nowhere_else() {
    let Some(device) = hopper_device() else { return };
    let mut random = ChaCha8Rng::seed_from_u64(9);
    let (mut a, b) = (codes(&mut random, M * K, 3), codes(&mut random, 64 * K, 3));
    let before = multiply_e4m3(device, false, &a, &b, &[0.0; M * 64]).expect("a product");
    a[70 * K + 5] = 0x7f;
    let found = multiply_e4m3(device, false, &a, &b, &[0.0; M * 64]).expect("a product");
    let right = |(i, y): (usize, &f64)| if i / 64 == 70 { y.is_nan() } else { *y == before[i] };
    assert!(found.iter().enumerate().all(right));
}

#[test]
fn a_nan_in_one_row_of_bf16_moves_no_bit_of_another() {
    let Some(device) = hopper_device() else { return };
    let mut random = ChaCha8Rng::seed_from_u64(11);
    let mut numbers = |count: usize| -> Vec<f64> {
        let mut number =
            || random.random_range(-1.0..1.0) * 2f64.powi(random.random_range(-20..=0));
        (0..count).map(|_| half::bf16::from_f64(number()).to_f64()).collect()
    };
    let (mut a, b, c) = (numbers(M * K), numbers(K * 64), numbers(M * 64));
    for way in [[64, 0, 0, 1], [64, 2, 0, 1]] {
        let before = multiply(device, way, &a, &b, &c).expect("a product");
        let number = std::mem::replace(&mut a[70 * K + 5], f64::NAN);
        let found = multiply(device, way, &a, &b, &c).expect("a product");
        a[70 * K + 5] = number;
        let right = |(i, y): (usize, &f64)| if i / 64 == 70 { y.is_nan() } else { *y == before[i] };
        assert!(found.iter().enumerate().all(right), "{way:?}");
    }
}

#[test]
fn warpgroup_products_are_the_same_whenever_they_read_their_operands() {
    under_every_schedule(|device| {
        for way in [[64, 0, 1, 1], [128, 2, 0, 1]] {
            let [a, b, c, expected] = product(way);
            assert_same(
                &format!("{way:?}"),
                &multiply(device, way, &a, &b, &c).expect("a product"),
                &expected,
            );
        }
    });
}

#[test]
fn the_two_strides_of_a_transposed_operand_are_told_apart() {
    let Some(device) = own_emulator() else { return };
    let right = "matrix_descriptor(base, WGMMA_K * ROW_BYTES, GROUP_BYTES)";
    let wrong = "matrix_descriptor(base, GROUP_BYTES, WGMMA_K * ROW_BYTES)";
    let device = with_change(&device, WGMMA, right, wrong);
    let way = [128, 2, 1, 1];
    let [a, b, c, expected] = product(way);
    match multiply(&device, way, &a, &b, &c) {
        Ok(found) => assert_ne!(found, expected),
        Err(error) => {
            assert!(error.to_string().contains("beyond the dynamic shared memory"), "{error}")
        }
    }
}

// ---------------------------------------------------------------- pipeline

const TILE: usize = 64;
const STEPS: usize = 7;
const BLOCKS: u32 = 2;

/// `(a, b, y)`: b has the chunks of its rows where the kernel reads them, y is computed in f64.
fn pipeline_data() -> (Vec<f64>, Vec<f64>, Vec<f64>) {
    let (a, b) =
        (integers(STEPS * TILE, TILE, (3, 7), 11), integers(STEPS * TILE, TILE, (5, 2), 7));
    let sum = |m: usize, n: usize| -> f64 {
        let at = |x: &[f64], step: usize, row: usize, k: usize| x[(step * TILE + row) * TILE + k];
        (0..STEPS * TILE)
            .map(|k| at(&a, k / TILE, m, k % TILE) * at(&b, k / TILE, n, k % TILE))
            .sum()
    };
    let factor = f64::from(3 * BLOCKS);
    let y = (0..TILE * TILE).map(|i| factor * sum(i / TILE, i % TILE)).collect();
    let swizzled = |i: usize| {
        let (row, column) = (i / TILE, i % TILE);
        b[row * TILE + ((column / 8) ^ (row % 8)) * 8 + column % 8]
    };
    (a.clone(), (0..b.len()).map(swizzled).collect(), y)
}

fn run_pipeline(device: &Device, a: &[f64], b: &[f64]) -> Result<Vec<f64>> {
    let mut arena = DeviceArena::new(device, Contract::NAN);
    let a = arena.input("a", &HostTensor::from_f64(DType::Bf16, &[STEPS, TILE, TILE], a))?;
    let b = arena.input("b", &HostTensor::from_f64(DType::Bf16, &[STEPS, TILE, TILE], b))?;
    let zeros = HostTensor::from_f64(DType::F32, &[TILE, TILE], &[0.0; TILE * TILE]);
    let y = arena.upload("y", &zeros, &Layout::dense(&[TILE, TILE]), Role::InPlace)?;
    let params =
        Params::new("selftest").ptr("a", &a).ptr("b", &b).ptr("y", &y).i32("steps", STEPS)?;
    launch(&arena, (HOPPER, "selftest_pipeline"), BLOCKS, &params)?;
    Ok(arena.download(&y)?.to_f64())
}

#[test]
fn a_pipeline_of_copies_and_products_gives_the_exact_sums_under_every_schedule() {
    let (a, b, expected) = pipeline_data();
    under_every_schedule(|device| {
        assert_same("y", &run_pipeline(device, &a, &b).expect("a pipeline"), &expected);
    });
}

/// The results of the pipeline with `right` replaced by `wrong`, for each schedule: the fault's
/// text, or "wrong sums", or nothing.
fn outcomes(right: &str, wrong: &str) -> Option<Vec<String>> {
    let device = with_change(&own_emulator()?, HOPPER, right, wrong);
    let (a, b, expected) = pipeline_data();
    let outcome = |seed| {
        device.backend().set_schedule_seed(seed);
        match run_pipeline(&device, &a, &b) {
            Ok(y) if y == expected => String::new(),
            Ok(_) => "wrong sums".to_owned(),
            Err(RuntimeError::Fault { what, .. }) => what,
            Err(error) => panic!("`{wrong}` for `{right}`: {error}"),
        }
    };
    Some([None].into_iter().chain((1..=SCHEDULES_TO_SHOW).map(Some)).map(outcome).collect())
}

/// The change must fail under some schedule, with a message that contains `needle`.
fn assert_shows(right: &str, wrong: &str, needle: &str) {
    let Some(outcomes) = outcomes(right, wrong) else { return };
    assert!(
        outcomes.iter().any(|what| what.contains(needle)),
        "`{wrong}` for `{right}`: {outcomes:?}"
    );
}

#[test]
fn a_missing_wait_for_a_full_stage_shows() {
    assert_shows("mbarrier_wait(stage.full, stage.parity);", "", "wrong sums");
}

#[test]
fn a_wait_whose_parity_never_flips_shows() {
    assert_shows(
        "mbarrier_wait(stage.full, stage.parity);",
        "mbarrier_wait(stage.full, 0);",
        "wrong sums",
    );
}

#[test]
fn a_missing_wait_for_an_empty_stage_shows() {
    assert_shows("mbarrier_wait(stage.empty, stage.parity ^ 1);", "", "have come already");
}

#[test]
fn a_wait_for_an_empty_stage_of_the_wrong_parity_shows() {
    assert_shows(
        "mbarrier_wait(stage.empty, stage.parity ^ 1);",
        "mbarrier_wait(stage.empty, stage.parity);",
        "; it waits at selftest_hopper.cu:",
    );
}

#[test]
fn a_missing_proxy_fence_before_a_product_shows() {
    assert_shows(
        "        fence_async_proxy();\n        wgmma_fence();",
        "        wgmma_fence();",
        "wrong sums",
    );
}

#[test]
fn a_missing_proxy_fence_before_a_bulk_addition_shows() {
    assert_shows(
        "    fence_async_proxy();\n    named_barrier_sync(1",
        "    named_barrier_sync(1",
        "wrong sums",
    );
}

#[test]
fn a_missing_wgmma_wait_shows() {
    assert_shows("    wgmma_wait<0>();\n", "", "wrong sums");
}

#[test]
fn a_stage_that_is_released_while_a_product_reads_it_shows() {
    assert_shows("        wgmma_wait<1>();\n", "        wgmma_wait<2>();\n", "(a race)");
}

#[test]
fn a_missing_wgmma_fence_shows() {
    assert_shows("        wgmma_fence();\n", "", "without a wgmma_fence");
}

#[test]
fn a_missing_wgmma_commit_shows() {
    assert_shows("        wgmma_commit();\n", "", "wrong sums");
}

#[test]
fn an_arrival_that_does_not_wait_for_the_copies_shows() {
    assert_shows("copy_arrive(stage.full);", "mbarrier_arrive(stage.full);", "wrong sums");
}

#[test]
fn a_missing_wait_before_the_source_of_an_addition_is_reused_shows() {
    assert_shows(
        "        bulk_wait_read<0>();\n",
        "        if (factor > 1) bulk_wait_read<0>();\n",
        "wrong sums",
    );
}

#[test]
fn a_thread_that_returns_before_its_addition_has_read_its_source_shows() {
    assert_shows("        bulk_wait_read<0>();\n", "", "may still read");
}

#[test]
fn a_bulk_copy_that_nobody_waits_for_shows() {
    let last = "add_sums(d, 2.0f, params.y, shared, thread);";
    let wrong = format!(
        "{last} if (thread == 0) bulk_copy_in(shared, params.b, TILE_BYTES, shared + FULL);"
    );
    assert_shows(last, &wrong, "did not wait for");
}

#[test]
fn a_bulk_copy_from_behind_a_buffer_shows_with_the_buffers_name() {
    let right = "bulk_copy_in(stage.b, params.b + step * TILE * TILE,";
    assert_shows(
        right,
        "bulk_copy_in(stage.b, params.b + params.steps * TILE * TILE,",
        "`b` 0 bytes past the end",
    );
}

#[test]
fn a_bulk_copy_to_an_address_that_is_not_a_multiple_of_16_shows() {
    assert_shows(
        "bulk_copy_in(stage.b,",
        "bulk_copy_in(stage.b + 8,",
        "misaligned 16-byte access (bulk copy): 8",
    );
}

#[test]
fn accumulators_that_are_written_while_a_product_is_under_way_show() {
    assert_shows(
        "    wgmma_wait<0>();\n",
        "    d[3][1] = 0.0f;\n    wgmma_wait<0>();\n",
        "were written to before its wait",
    );
}

#[test]
fn warps_of_a_warpgroup_that_disagree_about_a_product_show() {
    assert_shows(
        "step > 0 || k > 0",
        "step > 0 || k > 0 || threadIdx.x / 32 == 6",
        "differs from that of its warpgroup",
    );
}

#[test]
fn lanes_of_a_warp_that_disagree_about_a_product_show() {
    assert_shows(
        "step > 0 || k > 0",
        "step > 0 || k > 0 || threadIdx.x == 200",
        "lanes of a warp disagree",
    );
}

#[test]
fn a_warp_that_leaves_a_product_out_shows() {
    assert_shows(
        "k < TILE; k += 16",
        "k < (threadIdx.x < 224 || step + 1 < steps ? TILE : TILE - 16); k += 16",
        "another warp of its warpgroup",
    );
}

#[test]
fn a_tile_whose_chunks_are_not_where_the_product_looks_for_them_shows() {
    assert_shows("(chunk ^ row % 8) * 16", "(chunk ^ row % 4) * 16", "wrong sums");
}

#[test]
fn a_bulk_copy_whose_bytes_nobody_expects_shows() {
    assert_shows(
        "mbarrier_arrive_expect(stage.full, TILE_BYTES);",
        "mbarrier_arrive(stage.full);",
        "and -8192 bytes are missing",
    );
}

#[test]
fn too_many_bytes_expected_show_as_divergence() {
    assert_shows(
        "mbarrier_arrive_expect(stage.full, TILE_BYTES);",
        "mbarrier_arrive_expect(stage.full, 2 * TILE_BYTES);",
        "8192 bytes are missing",
    );
}

#[test]
fn too_many_arrivals_show() {
    assert_shows(
        "copy_arrive(stage.full);",
        "copy_arrive(stage.full);\n        if (thread == 5) mbarrier_arrive(stage.full);",
        "wrong sums",
    );
}

#[test]
fn too_few_arrivals_show_as_divergence() {
    assert_shows(
        "mbarrier_init(shared + EMPTY + stage * 8, WARPGROUP_SIZE);",
        "mbarrier_init(shared + EMPTY + stage * 8, WARPGROUP_SIZE + 1);",
        "1 of 129 arrivals",
    );
}

#[test]
fn an_mbarrier_that_nobody_initialised_shows() {
    assert_shows(
        "            mbarrier_init(shared + EMPTY + stage * 8, WARPGROUP_SIZE);\n",
        "",
        "before its init",
    );
}

#[test]
fn a_misaligned_mbarrier_shows() {
    assert_shows(
        "FULL = OFFSET_OF(PipelinePlan, full);",
        "FULL = OFFSET_OF(PipelinePlan, full) + 4;",
        "not 8-byte aligned",
    );
}

#[test]
fn an_mbarrier_under_data_shows() {
    assert_shows(
        "FULL = OFFSET_OF(PipelinePlan, full);",
        "FULL = OFFSET_OF(PipelinePlan, full) - 8;",
        "over the mbarrier",
    );
}

#[test]
fn an_mbarrier_that_is_stored_over_through_a_pointer_shows() {
    let wait = "mbarrier_wait(stage.empty, stage.parity ^ 1);";
    for value in ["step", "0", "__uint_as_float(0xffffffffu)"] {
        let store = format!(
            "if (thread == 3) reinterpret_cast<float*>(dynamic_shared() + EMPTY)[1] = {value};"
        );
        assert_shows(wait, &format!("{store}\n        {wait}"), "stored over the mbarrier");
    }
}

#[test]
fn a_missing_named_barrier_before_a_bulk_addition_shows() {
    assert_shows("    named_barrier_sync(1, WARPGROUP_SIZE);\n", "", "wrong sums");
}

#[test]
fn a_missing_named_barrier_before_the_reuse_of_a_source_shows() {
    assert_shows("    named_barrier_sync(2, WARPGROUP_SIZE);\n", "", "wrong sums");
}

#[test]
fn a_named_barrier_for_the_wrong_number_of_threads_shows() {
    assert_shows(
        "named_barrier_sync(2, WARPGROUP_SIZE)",
        "named_barrier_sync(2, 2 * WARPGROUP_SIZE)",
        "128 of 256 threads",
    );
}

#[test]
fn a_descriptor_that_reaches_beyond_shared_memory_shows() {
    assert_shows(
        "matrix_descriptor(stage.b, 0, GROUP_BYTES)",
        "matrix_descriptor(stage.b, 0, 32 * GROUP_BYTES)",
        "beyond the dynamic shared memory",
    );
}

// ---------------------------------------------------------------- named barriers

#[test]
fn named_barriers_hand_each_round_over_to_the_other_warpgroup() {
    const ROUNDS: usize = 5;
    let values: Vec<i32> = (0..ROUNDS as i32 * 128).map(|i| i * i).collect();
    let expected: Vec<i32> =
        values.chunks(128).flat_map(|round| round.iter().rev().copied()).collect();
    under_every_schedule(|device| {
        let mut arena = DeviceArena::new(device, Contract::NAN);
        let x = arena.input("x", &HostTensor::from_i32(&[ROUNDS, 128], &values)).unwrap();
        let y = arena.output("y", DType::I32, &[ROUNDS, 128]).unwrap();
        let params =
            Params::new("selftest").ptr("x", &x).ptr("y", &y).i32("rounds", ROUNDS).unwrap();
        launch(&arena, (HOPPER, "selftest_named_barriers"), 1, &params).expect("a hand-over");
        assert_eq!(arena.download(&y).unwrap().to_i32(), expected);
    });
}

// ---------------------------------------------------------------- boxes of tensors

const BOX_ROWS: u32 = 40;
const MATRICES: usize = 2;
const MATRIX_ROWS: usize = 50;
const ROW_BYTES: usize = 208;

/// Bytes whose neighbours along all axes differ, none of them 0.
fn boxed_byte(matrix: usize, row: usize, column: usize) -> u8 {
    1 + ((7 * matrix + 31 * row + 5 * column) % 251) as u8
}

/// The box of a tensor from this position on, as the kernel loads it: column, row, matrix.
fn copied_box(device: &Device, from: [usize; 3]) -> Result<Vec<u8>> {
    let mut arena = DeviceArena::new(device, Contract::NAN);
    let places = (0..MATRICES * MATRIX_ROWS * ROW_BYTES)
        .map(|i| [i / ROW_BYTES / MATRIX_ROWS, i / ROW_BYTES % MATRIX_ROWS, i % ROW_BYTES]);
    let bytes = places.map(|[matrix, row, column]| boxed_byte(matrix, row, column)).collect();
    let tensor =
        HostTensor { dtype: DType::U8, shape: vec![MATRICES, MATRIX_ROWS, ROW_BYTES], bytes };
    let x = arena.input("x", &tensor)?;
    let y = arena.output("y", DType::U8, &[BOX_ROWS as usize, BOX_ROW_BYTES])?;
    let map = TensorMap::of(&x, BOX_ROWS).expect("rows at multiples of 16 bytes");
    let [column, row, matrix] = from;
    let params = Params::new("selftest")
        .ptr("y", &y)
        .i32("column", column)?
        .i32("row", row)?
        .i32("matrix", matrix)?;
    let params = params.tensor_map("map", Some(device.tensor_map(&map)?));
    launch(&arena, (HOPPER, "selftest_box"), 1, &params)?;
    Ok(arena.download(&y)?.bytes)
}

/// The bytes of the tensor there, and zeros after the tensor's end.
fn expected_box([first_column, first_row, matrix]: [usize; 3]) -> Vec<u8> {
    let byte = |i: usize| {
        let (row, column) = (first_row + i / BOX_ROW_BYTES, first_column + i % BOX_ROW_BYTES);
        let inside = matrix < MATRICES && row < MATRIX_ROWS && column < ROW_BYTES;
        if inside { boxed_byte(matrix, row, column) } else { 0 }
    };
    (0..BOX_ROWS as usize * BOX_ROW_BYTES).map(byte).collect()
}

#[test]
fn a_box_of_a_tensor_arrives_in_its_swizzle_with_zeros_behind_the_end() {
    under_every_schedule(|device| {
        for from in
            [[0, 0, 0], [16, 3, 1], [128, 30, 0], [0, 49, 1], [0, 50, 0], [208, 0, 1], [0, 0, 2]]
        {
            let found = copied_box(device, from).expect("a copy");
            assert!(found == expected_box(from), "the box from {from:?} on");
        }
    });
}

#[test]
fn wrong_copies_of_boxes_show() {
    let Some(emulator) = own_emulator() else { return };
    let fault = |right: &str, wrong: &str| {
        let device = with_change(&emulator, HOPPER, right, wrong);
        match copied_box(&device, [0, 0, 0]) {
            Ok(found) if found == expected_box([0, 0, 0]) => String::new(),
            Ok(_) => "other bytes".to_owned(),
            Err(RuntimeError::Fault { what, .. }) => what,
            Err(error) => panic!("`{wrong}` for `{right}`: {error}"),
        }
    };
    let copy = "tensor_copy_in(shared, params.map,";
    for (right, wrong, needle) in [
        ("mbarrier_wait(landed, 0);\n    for (int i", "for (int i", "(a race)"),
        ("16 * (chunk ^ row % 8)", "16 * (chunk ^ row % 4)", "other bytes"),
        (copy, "tensor_copy_in(shared + 512, params.map,", "multiples of 1024 and 16"),
        (
            copy,
            "TensorMap none{};\n        tensor_copy_in(shared, none,",
            "that the launcher has not made",
        ),
        (
            "mbarrier_arrive_expect(landed, BOX_BYTES);",
            "mbarrier_arrive_expect(landed, BOX_BYTES - 128);",
            "mbarrier",
        ),
    ] {
        let found = fault(right, wrong);
        assert!(found.contains(needle), "`{wrong}` for `{right}`: {found:?}");
    }
}

// ---------------------------------------------------------------- clusters

const CLUSTER: usize = 2;
const CLUSTERS: usize = 2;
const ROUNDS: usize = 5;
const ROUND_ROWS: usize = CLUSTER * BOX_ROWS as usize;

/// What the blocks of clusters copy to each other, block by block and round by round; `blocks` is
/// the number of blocks.
fn shared_boxes(device: &Device, blocks: usize) -> Result<Vec<u8>> {
    let mut arena = DeviceArena::new(device, Contract::NAN);
    let shape = vec![CLUSTERS, ROUNDS * ROUND_ROWS, BOX_ROW_BYTES];
    let x = arena.input("x", &HostTensor { dtype: DType::U8, shape, bytes: boxes() })?;
    let y = arena.output("y", DType::U8, &[blocks, ROUNDS * ROUND_ROWS, BOX_ROW_BYTES])?;
    let map = TensorMap::of(&x, BOX_ROWS).expect("rows at multiples of 16 bytes");
    let params = Params::new("selftest").ptr("y", &y).i32("rounds", ROUNDS)?;
    let params = params.tensor_map("map", Some(device.tensor_map(&map)?));
    launch(&arena, (HOPPER, "selftest_cluster"), blocks as u32, &params)?;
    Ok(arena.download(&y)?.bytes)
}

/// The boxes of all rounds of both clusters, in the order of the blocks.
fn boxes() -> Vec<u8> {
    let rows = ROUNDS * ROUND_ROWS;
    let byte = |i: usize| {
        boxed_byte(i / BOX_ROW_BYTES / rows, i / BOX_ROW_BYTES % rows, i % BOX_ROW_BYTES)
    };
    (0..CLUSTERS * rows * BOX_ROW_BYTES).map(byte).collect()
}

/// Each block of a cluster has everything that the cluster's blocks copied.
fn expected_boxes() -> Vec<u8> {
    boxes()
        .chunks(ROUNDS * ROUND_ROWS * BOX_ROW_BYTES)
        .flat_map(|of_cluster| of_cluster.repeat(CLUSTER))
        .collect()
}

#[test]
fn blocks_of_a_cluster_copy_into_each_others_shared_memory() {
    under_every_schedule(|device| {
        let found = shared_boxes(device, CLUSTERS * CLUSTER).expect("a launch");
        assert!(found == expected_boxes());
    });
}

#[test]
fn a_grid_that_is_no_multiple_of_its_clusters_is_refused() {
    let Some(device) = hopper_device() else { return };
    match shared_boxes(device, CLUSTERS * CLUSTER - 1) {
        Err(RuntimeError::Launch { reason, .. }) => {
            assert!(reason.contains("no multiple of a cluster's 2"), "{reason}")
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn static_shared_memory_of_clusters_is_refused_by_the_emulator() {
    let Some(emulator) = own_emulator() else { return };
    let right = "    const uint32_t rank = cluster_rank();\n";
    let wrong = "    __shared__ uint32_t rank;\n    rank = cluster_rank();\n";
    match shared_boxes(&with_change(&emulator, HOPPER, right, wrong), CLUSTERS * CLUSTER) {
        Err(RuntimeError::Launch { reason, .. }) => {
            assert!(reason.contains("static shared variable, `rank`"), "{reason}")
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn wrong_clusters_show() {
    if left_out(&MALICE) {
        return;
    }
    let Some(emulator) = own_emulator() else { return };
    let shows = |right: &str, wrong: &str, needle: &str| {
        let device = with_change(&emulator, HOPPER, right, wrong);
        let found = |seed| {
            device.backend().set_schedule_seed(seed);
            match shared_boxes(&device, CLUSTERS * CLUSTER) {
                Ok(found) if found == expected_boxes() => String::new(),
                Ok(_) => "other bytes".to_owned(),
                Err(RuntimeError::Fault { what, .. }) => what,
                Err(error) => panic!("`{wrong}` for `{right}`: {error}"),
            }
        };
        let seeds = [None].into_iter().chain((1..=SCHEDULES_TO_SHOW).map(Some));
        let all: Vec<String> = seeds.map(found).collect();
        assert!(all.iter().any(|found| found.contains(needle)), "`{wrong}` for `{right}`: {all:?}");
    };
    let (first, last) = (
        "    cluster_arrive();\n    cluster_wait();\n    for",
        "    cluster_arrive();\n    cluster_wait();\n}",
    );
    let (all, tells) = ("(1u << CLUSTER) - 1", "mbarrier_arrive_at(taken, threadIdx.x);");
    for (right, wrong, needle) in [
        (first, "    __syncthreads();\n    for", "before its init"),
        (last, "    cluster_arrive();\n    cluster_arrive();\n}", "a second time without waiting"),
        (first, "    cluster_wait();\n    for", "where it has not arrived"),
        (last, "}", "of its cluster, which has ended"),
        (
            last,
            "    if (rank == 0) cluster_arrive();\n    if (rank == 0) cluster_wait();\n}",
            "of its cluster, which has ended",
        ),
        (all, "1u << rank", "5120 bytes are missing"),
        (all, "1u << CLUSTER", "block 2 of its cluster, which has 2"),
        (all, "0u", "to no block"),
        (
            tells,
            "mbarrier_arrive_at(taken, threadIdx.x + 1);",
            "block 2 of its cluster, which has 2",
        ),
        (tells, "mbarrier_arrive_at(taken, rank);", "other bytes"),
        (tells, "if (rank == 0) mbarrier_arrive_at(taken, threadIdx.x);", "1 of 2 arrivals"),
        (
            "mbarrier_arrive_expect(landed, ROUND_BYTES);",
            "mbarrier_arrive_expect(landed, BOX_BYTES);",
            "bytes are missing",
        ),
        ("mbarrier_wait(landed, round % 2);\n        uint8_t", "uint8_t", "other bytes"),
        ("            mbarrier_wait(told, round % 2);\n", "", "other bytes"),
        ("told, block);", "told, rank);", "5120 bytes are missing"),
        ("told, block);", "told, block + 1);", "block 2 of its cluster, which has 2"),
        (
            "store_at(shared + TOLD_ROUND,",
            "store_at(shared + TOLD_ROUND + 2,",
            "must be a multiple of 4",
        ),
        ("mbarrier_arrive_expect(told, 4);", "mbarrier_arrive(told);", "bytes are missing"),
        (
            "KERNEL_OF_CLUSTERS(selftest_cluster, SelftestClusterParams, PIPELINE_THREADS, CLUSTER)",
            "KERNEL(selftest_cluster, SelftestClusterParams, PIPELINE_THREADS)",
            "in a launch without clusters",
        ),
    ] {
        shows(right, wrong, needle);
    }
}

// ---------------------------------------------------------------- four e4m3 codes at a time

/// Each code times each scale in each byte of a word, as a device converts it.
fn converted_words(device: &Device) -> Vec<f64> {
    let mut arena = DeviceArena::new(device, Contract::NAN);
    let y = arena.output("y", DType::Bf16, &[256, 256, 4]).expect("memory");
    let params = Params::new("selftest").ptr("y", &y);
    launch(&arena, (HOPPER, "selftest_e4m3_words"), 16, &params).expect("the launch");
    arena.download(&y).expect("a download").to_f64()
}

/// The elements of [`converted_words`] that are not the nearest bf16 of code times scale.
fn wrong_words(found: &[f64]) -> Vec<String> {
    let product = |i: usize| {
        let (scale, code) = (i / 1024, (i / 4 + 64 * (i % 4)) as u8);
        let scale = if scale == 255 { f64::NAN } else { 2f64.powi(scale as i32 - 127) };
        e4m3_value(code) * scale
    };
    let products: Vec<f64> = (0..found.len()).map(product).collect();
    let expected = HostTensor::from_f64(DType::Bf16, &[found.len()], &products).to_f64();
    let pairs = found.iter().zip(&expected).enumerate();
    pairs
        .filter(|(_, (found, expected))| {
            found.to_bits() != expected.to_bits() && !(found.is_nan() && expected.is_nan())
        })
        .map(|(i, (found, expected))| {
            format!("element {i}: {found:e} is not {expected:e}, of {:e}", products[i])
        })
        .collect()
}

#[test]
fn four_e4m3_codes_times_any_scale_convert_to_the_bf16_of_the_products() {
    let Some(device) = hopper_device() else { return };
    let wrong = wrong_words(&converted_words(device));
    assert!(wrong.is_empty(), "{} elements; first {}", wrong.len(), wrong[0]);
}

#[test]
fn a_conversion_that_takes_nan_for_480_or_loses_a_sign_or_a_bit_is_noticed() {
    let Some(device) = own_emulator() else { return };
    let changes = [
        ("multiply_add_bf16x2(value, scales, nan_or_zero)", "multiply_bf16x2(value, scales)"),
        ("(codes & 0x80808080u) | (codes >> 4", "(codes >> 4"),
        ("codes << 4 & 0xf0f0f0f0u", "codes << 4 & 0xe0e0e0e0u"),
    ];
    for (right, wrong) in changes {
        let found = wrong_words(&converted_words(&with_change(&device, "numeric.h", right, wrong)));
        assert!(!found.is_empty(), "`{wrong}` for `{right}` changes nothing");
    }
}
