//! Both backends against references computed here, on the host, from definitions: the number
//! formats, the CUDA programming guide's warp functions, f64 GEMMs. The kernels are in
//! `kernels/cuda/selftest/selftest.cu`.

use dsv4_reference::TensorCore;
use dsv4_runtime::arena::Layout;
use dsv4_runtime::params::{DeviceAddress, Params};
use dsv4_runtime::{
    BackendKind, Contract, DType, Device, DeviceArena, HostTensor, LaunchConfig, Role,
};
use half::bf16;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::support;

const FILE: &str = "selftest.cu";
/// Random schedules under which the emulator repeats each test.
const SCHEDULES: u64 = 4;

/// Runs a test on the device under test, and under random schedules where it is the emulator.
fn under_every_schedule(test: impl Fn(&Device)) {
    test(support::device());
    if support::backend() == BackendKind::Cuda {
        return;
    }
    // A separate device: the schedule belongs to the device, and other tests share theirs.
    let own = Device::open(BackendKind::Emulator, dsv4_kernels::device_options())
        .expect("the emulator opened before");
    for seed in 1..=SCHEDULES {
        own.backend().set_schedule_seed(Some(seed));
        test(&own);
    }
}

/// One launch under the memory contract; nothing but the declared outputs may have changed.
fn launch(arena: &DeviceArena<'_>, kernel: &str, blocks: u32, threads: u32, params: &Params) {
    let config = LaunchConfig { grid: [blocks, 1, 1], block: [threads, 1, 1], shared_bytes: 0 };
    let violations = arena
        .run(|device| device.kernel(FILE, &[], kernel)?.launch(config, params))
        .unwrap_or_else(|error| panic!("{kernel}: {error}"));
    assert!(violations.is_empty(), "{kernel}: {violations:?}");
}

fn params() -> Params {
    Params::new("selftest")
}

fn random(seed: u64) -> ChaCha8Rng {
    ChaCha8Rng::seed_from_u64(seed)
}

fn f32_tensor(values: &[f32]) -> HostTensor {
    let bytes = values.iter().flat_map(|v| v.to_ne_bytes()).collect();
    HostTensor { dtype: DType::F32, shape: vec![values.len()], bytes }
}

fn u16s(tensor: &HostTensor) -> Vec<u16> {
    tensor.bytes.chunks_exact(2).map(|b| u16::from_ne_bytes([b[0], b[1]])).collect()
}

fn f32s(tensor: &HostTensor) -> Vec<f32> {
    tensor.bytes.chunks_exact(4).map(|b| f32::from_ne_bytes([b[0], b[1], b[2], b[3]])).collect()
}

/// Checks that two lists are equal, element by element, and reports where they differ.
fn assert_same<T: PartialEq + std::fmt::Debug>(what: &str, found: &[T], expected: &[T]) {
    assert_eq!(found.len(), expected.len(), "{what}: number of elements");
    assert!(!found.is_empty(), "{what}: nothing to compare");
    let wrong: Vec<usize> = (0..found.len()).filter(|&i| found[i] != expected[i]).collect();
    if let Some(&i) = wrong.first() {
        panic!(
            "{what}: {} of {} differ; first at {i}: {:?}, not {:?}",
            wrong.len(),
            found.len(),
            found[i],
            expected[i]
        );
    }
}

// ---------------------------------------------------------------- number formats

/// A binary format by its definition: the magnitude of each code, ascending.
struct Format {
    magnitudes: Vec<f64>,
}

impl Format {
    /// Codes `0..count` of an unsigned format with IEEE-like subnormals.
    fn new(count: u32, mantissa_bits: u32, bias: i32) -> Self {
        let value = |code: u32| {
            let (exponent, mantissa) =
                ((code >> mantissa_bits) as i32, code & ((1 << mantissa_bits) - 1));
            let fraction = f64::from(mantissa) / f64::from(1u32 << mantissa_bits);
            if exponent == 0 {
                fraction * 2f64.powi(1 - bias)
            } else {
                (1.0 + fraction) * 2f64.powi(exponent - bias)
            }
        };
        Self { magnitudes: (0..count).map(value).collect() }
    }

    /// All finite bf16, and the code of infinity with the value that the next exponent would have.
    /// IEEE rounds to infinity what is nearer to that value than to the largest finite number.
    fn bf16() -> Self {
        Self::new(0x7f81, 7, 127)
    }

    fn e4m3() -> Self {
        Self::new(0x7f, 3, 7)
    }

    fn e2m1() -> Self {
        Self::new(8, 1, 1)
    }

    /// The code whose value is nearest to `|x|`; at a tie the even code; beyond the last, the last.
    fn nearest(&self, x: f32) -> u32 {
        let x = f64::from(x).abs();
        let above = self.magnitudes.partition_point(|&m| m < x);
        if above == 0 || above == self.magnitudes.len() {
            return above.min(self.magnitudes.len() - 1) as u32;
        }
        let (down, up) = (x - self.magnitudes[above - 1], self.magnitudes[above] - x);
        let even = if above % 2 == 0 { above } else { above - 1 };
        (if down < up {
            above - 1
        } else if up < down {
            above
        } else {
            even
        }) as u32
    }

    /// Every midpoint of two neighbours, and the floats next to it, with both signs.
    fn ties(&self) -> Vec<f32> {
        let middles = self.magnitudes.windows(2).map(|pair| ((pair[0] + pair[1]) / 2.0) as f32);
        middles
            .flat_map(|m| [m, m.next_up(), m.next_down(), -m, (-m).next_up(), (-m).next_down()])
            .collect()
    }
}

fn sign(x: f32, bit: u32) -> u32 {
    u32::from(x.is_sign_negative()) << bit
}

fn bf16_of(format: &Format, x: f32) -> u16 {
    if x.is_nan() { 0x7fff } else { (format.nearest(x) | sign(x, 15)) as u16 }
}

fn e4m3_of(format: &Format, x: f32) -> u8 {
    if x.is_nan() { 0x7f } else { (format.nearest(x) | sign(x, 7)) as u8 }
}

/// NaN saturates to +6, as `cvt.satfinite` does for a format without NaN.
fn e2m1_of(format: &Format, x: f32) -> u8 {
    if x.is_nan() { 7 } else { (format.nearest(x) | sign(x, 3)) as u8 }
}

/// The smallest `2^(code - 127)` that is not below `x`.
fn e8m0_of(x: f32) -> u8 {
    if x.is_nan() || x < 0.0 {
        return 255;
    }
    (0..254).find(|&code| 2f64.powi(i32::from(code) - 127) >= f64::from(x)).unwrap_or(254)
}

/// All bf16 patterns, the ties of every format, corners, random bit patterns.
fn conversion_inputs() -> Vec<f32> {
    let mut inputs: Vec<f32> = (0..=u16::MAX).map(|bits| bf16::from_bits(bits).to_f32()).collect();
    for format in [Format::bf16(), Format::e4m3(), Format::e2m1()] {
        inputs.extend(format.ties());
    }
    // Around every power of two: where e8m0 steps, down to the smallest subnormal.
    for exponent in 0..=254u32 {
        let power = f32::from_bits(exponent << 23);
        inputs.extend([power, power.next_up(), power.next_down(), -power]);
    }
    inputs.extend((0..=22).map(|bit| f32::from_bits(1 << bit)));
    inputs.extend([
        f32::MAX,
        -f32::MAX,
        f32::MIN_POSITIVE,
        f32::from_bits(0x7f80_0001),
        f32::from_bits(0xffff_ffff),
    ]);
    let mut random = random(1);
    inputs.extend((0..1 << 16).map(|_| f32::from_bits(random.random())));
    inputs
}

/// `bf16, pairs, e4m3, e2m1, e8m0` of the inputs, then the values of every e4m3, e2m1 and e8m0
/// code.
fn convert(device: &Device, inputs: &[f32]) -> [HostTensor; 8] {
    let mut arena = DeviceArena::new(device, Contract::NAN);
    let count = inputs.len();
    let x = arena.input("x", &f32_tensor(inputs)).unwrap();
    let outputs = [
        ("bf16_bits", DType::Bf16, count),
        ("pairs", DType::I32, count),
        ("e4m3_bits", DType::U8, count),
        ("e2m1_codes", DType::U8, count),
        ("e8m0_bits", DType::U8, count),
        ("e4m3_values", DType::F32, 256),
        ("e2m1_values", DType::F32, 16),
        ("e8m0_values", DType::F32, 256),
    ]
    .map(|(name, dtype, elements)| arena.output(name, dtype, &[elements]).unwrap());
    let params = params()
        .ptr("x", &x)
        .ptr("bf16_bits", &outputs[0])
        .ptr("pairs", &outputs[1])
        .ptr("e4m3_bits", &outputs[2])
        .ptr("e2m1_codes", &outputs[3])
        .ptr("e8m0_bits", &outputs[4])
        .ptr("e4m3_values", &outputs[5])
        .ptr("e2m1_values", &outputs[6])
        .ptr("e8m0_values", &outputs[7])
        .i64("count", count)
        .unwrap();
    launch(&arena, "selftest_conversions", 13, 96, &params);
    outputs.map(|view| arena.download(&view).unwrap())
}

/// Compares converted codes with a definition, showing the input where they differ.
fn assert_codes<T: PartialEq + std::fmt::Debug>(
    what: &str,
    inputs: &[f32],
    found: &[T],
    expected: impl Fn(f32) -> T,
) {
    let pair = |code: &T, x: f32| (format!("{code:x?}"), x.to_bits());
    let found: Vec<_> = found.iter().zip(inputs).map(|(code, &x)| pair(code, x)).collect();
    let expected: Vec<_> = inputs.iter().map(|&x| pair(&expected(x), x)).collect();
    assert_same(what, &found, &expected);
}

#[test]
fn conversions_give_the_nearest_representable_value_and_ties_go_to_the_even_one() {
    let inputs = conversion_inputs();
    let [bf16_bits, pairs, e4m3_bits, e2m1_codes, e8m0_bits, ..] =
        convert(support::device(), &inputs);
    let (bf16, e4m3, e2m1) = (Format::bf16(), Format::e4m3(), Format::e2m1());
    assert_codes("bf16", &inputs, &u16s(&bf16_bits), |x| bf16_of(&bf16, x));
    let pair = |x: f32| i32::from(bf16_of(&bf16, x)) | i32::from(bf16_of(&bf16, -x)) << 16;
    assert_codes("bf16 pairs", &inputs, &pairs.to_i32(), pair);
    assert_codes("e4m3", &inputs, &e4m3_bits.bytes, |x| e4m3_of(&e4m3, x));
    assert_codes("e2m1", &inputs, &e2m1_codes.bytes, |x| e2m1_of(&e2m1, x));
    assert_codes("e8m0", &inputs, &e8m0_bits.bytes, e8m0_of);
}

#[test]
fn codes_widen_to_the_values_that_their_formats_define() {
    let [.., e4m3_values, e2m1_values, e8m0_values] = convert(support::device(), &[0.0]);
    let signed = |format: &Format, code: usize, codes: usize| {
        let magnitude = format.magnitudes[code % codes] as f32;
        if code < codes { magnitude } else { -magnitude }
    };
    let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect::<Vec<_>>();
    let nan = f32::from_bits(0x7fff_ffff);
    let e4m3 = Format::e4m3();
    let expected =
        (0..256).map(|c| if c % 128 == 127 { nan } else { signed(&e4m3, c, 128) }).collect();
    assert_same("e4m3 values", &bits(f32s(&e4m3_values)), &bits(expected));
    let expected = (0..16).map(|c| signed(&Format::e2m1(), c, 8)).collect();
    assert_same("e2m1 values", &bits(f32s(&e2m1_values)), &bits(expected));
    let expected =
        (0..256).map(|c| if c == 255 { nan } else { 2f64.powi(c - 127) as f32 }).collect();
    assert_same("e8m0 values", &bits(f32s(&e8m0_values)), &bits(expected));
}

// ---------------------------------------------------------------- warps

const WARP_TESTS: usize = 22;

/// The results for one warp whose lanes hold `x`, by the programming guide, row by row.
fn warp_truth(x: &[i32; 32]) -> Vec<[i32; 32]> {
    let lanes = |f: &dyn Fn(usize) -> i32| -> [i32; 32] { std::array::from_fn(f) };
    let ballot = |mask: u32, predicate: &dyn Fn(i32) -> bool| {
        (0..32)
            .filter(|&l| mask >> l & 1 == 1 && predicate(x[l]))
            .fold(0u32, |bits, l| bits | 1 << l) as i32
    };
    let sum = |lanes: &[i32]| lanes.iter().fold(0i32, |a, &b| a.wrapping_add(b));
    let unsigned = |f: fn(u32, u32) -> u32| x.iter().map(|&v| v as u32).reduce(f).unwrap() as i32;
    let (lowest, highest) = (*x.iter().min().unwrap(), *x.iter().max().unwrap());
    let all = |value: i32| [value; 32];
    vec![
        lanes(&|l| x[(7 * l + 3) % 32]),
        lanes(&|l| x[l / 8 * 8 + 3]),
        lanes(&|l| if l >= 3 { x[l - 3] } else { x[l] }),
        lanes(&|l| if l % 8 >= 3 { x[l - 3] } else { x[l] }),
        lanes(&|l| if l + 5 < 32 { x[l + 5] } else { x[l] }),
        lanes(&|l| if l % 16 + 5 < 16 { x[l + 5] } else { x[l] }),
        lanes(&|l| x[l ^ 1]),
        lanes(&|l| x[l ^ 16]),
        // A lane of an earlier segment may be read, one of a later segment may not.
        lanes(&|l| if (l ^ 9) / 8 <= l / 8 { x[l ^ 9] } else { x[l] }),
        all(ballot(u32::MAX, &|v| v & 1 != 0)),
        all(i32::from(x.iter().any(|&v| v > 0))),
        all(i32::from(x.iter().all(|&v| v > 0))),
        all(sum(x)),
        all(lowest),
        all(highest),
        all(unsigned(u32::max)),
        all(unsigned(|a, b| a & b)),
        all(unsigned(|a, b| a | b)),
        all(unsigned(|a, b| a ^ b)),
        lanes(&|l| if l < 16 { sum(&x[..16]) } else { *x[16..].iter().max().unwrap() }),
        lanes(&|l| if l % 2 == 0 { ballot(0x5555_5555, &|v| v & 2 != 0) } else { x[l ^ 2] }),
        lanes(&|l| x[31 - l]),
    ]
}

/// Warps with different votes: mixed signs, all positive, none positive, extremes, one bit each,
/// random.
fn warp_inputs() -> Vec<[i32; 32]> {
    let mut random = random(2);
    vec![
        std::array::from_fn(|l| l as i32 - 16),
        std::array::from_fn(|l| 1 + l as i32),
        std::array::from_fn(|l| -(l as i32)),
        std::array::from_fn(|l| if l % 3 == 0 { i32::MAX } else { i32::MIN }),
        std::array::from_fn(|l| 1i32 << l),
        [i32::MAX; 32],
        std::array::from_fn(|_| random.random()),
        std::array::from_fn(|_| random.random::<i32>() | 1),
    ]
}

#[test]
fn shuffles_votes_and_reductions_do_what_the_programming_guide_says() {
    let warps = warp_inputs();
    let x: Vec<i32> = warps.iter().flatten().copied().collect();
    let threads = x.len();
    under_every_schedule(|device| {
        let mut arena = DeviceArena::new(device, Contract::NAN);
        let x_view = arena.input("x", &HostTensor::from_i32(&[threads], &x)).unwrap();
        let y = arena.output("y", DType::I32, &[WARP_TESTS, threads]).unwrap();
        let params = params().ptr("x", &x_view).ptr("y", &y);
        launch(&arena, "selftest_warp", 1, threads as u32, &params);
        let found = arena.download(&y).unwrap().to_i32();
        for (warp, x) in warps.iter().enumerate() {
            for (test, expected) in warp_truth(x).iter().enumerate() {
                let start = test * threads + 32 * warp;
                assert_same(
                    &format!("test {test}, warp {warp}"),
                    &found[start..start + 32],
                    expected,
                );
            }
        }
    });
}

// ---------------------------------------------------------------- tensor cores

const M: usize = 16;
const N: usize = 8;
const K: usize = 16;

/// `c + a b` on the device: three times, each with other `ldmatrix` forms.
fn multiply(device: &Device, a: &[f64], b: &[f64], c: &[f64]) -> Vec<f64> {
    let mut arena = DeviceArena::new(device, Contract::NAN);
    let a = arena.input("a", &HostTensor::from_f64(DType::Bf16, &[M, K], a)).unwrap();
    let b = arena.input("b", &HostTensor::from_f64(DType::Bf16, &[K, N], b)).unwrap();
    let c = arena.input("c", &HostTensor::from_f64(DType::F32, &[M, N], c)).unwrap();
    let y = arena.output("y", DType::F32, &[3, M, N]).unwrap();
    let params = params().ptr("a", &a).ptr("b", &b).ptr("c", &c).ptr("y", &y);
    launch(&arena, "selftest_mma", 1, 32, &params);
    arena.download(&y).unwrap().to_f64()
}

/// `(c + a b, sum of the magnitudes of its 17 terms)` in f64, where each product is exact.
fn product(a: &[f64], b: &[f64], c: &[f64]) -> Vec<(f64, f64)> {
    (0..M * N)
        .map(|i| {
            let terms = |f: fn(f64) -> f64| {
                (0..K).map(|k| f(a[i / N * K + k] * b[k * N + i % N])).sum::<f64>() + f(c[i])
            };
            (terms(|t| t), terms(f64::abs))
        })
        .collect()
}

/// bf16 values over a few binades.
fn bf16_values(seed: u64, count: usize) -> Vec<f64> {
    let mut random = random(seed);
    let value = |r: &mut ChaCha8Rng| r.random_range(-1.0..1.0) * 2f64.powi(r.random_range(-4..=4));
    (0..count).map(|_| bf16::from_f64(value(&mut random)).to_f64()).collect()
}

#[test]
fn matrix_products_of_small_integers_are_exact_for_every_way_of_loading() {
    // Every element differs from its neighbours along both axes, so that a swap of rows, columns,
    // or halves of a register changes the result.
    let a: Vec<f64> = (0..M * K).map(|i| ((7 * (i / K) + 3 * (i % K)) % 17) as f64 - 8.0).collect();
    let b: Vec<f64> =
        (0..K * N).map(|i| ((5 * (i / N) + 11 * (i % N)) % 13) as f64 - 6.0).collect();
    let c: Vec<f64> = (0..M * N).map(|i| i as f64 * 64.0 - 3000.0).collect();
    let expected: Vec<f64> = product(&a, &b, &c).into_iter().map(|(value, _)| value).collect();
    under_every_schedule(|device| {
        let found = multiply(device, &a, &b, &c);
        for (way, found) in found.chunks(M * N).enumerate() {
            assert_same(&format!("way {way}"), found, &expected);
        }
    });
}

#[test]
fn matrix_products_stay_within_the_bound_of_truncated_sums() {
    // Tensor cores align the terms of a sum to the largest one and truncate them below 24 bits. One
    // unit there is at most 2^-23 of the largest term. Hardware may add the 16 products and c in
    // one step or in two. The largest magnitude that can occur is the sum of all. So each of the 17
    // terms, the intermediate sum, and the stored result lose less than 2^-23 of it. The f64
    // reference itself rounds 17 times by 2^-53, which 2^-23 covers.
    let losses = (K + 1) as f64 + 2.0;
    let bound = |magnitude: f64| losses * f64::from(f32::EPSILON) * magnitude;
    for seed in 0..8 {
        let (a, b) = (bf16_values(3 * seed, M * K), bf16_values(3 * seed + 1, K * N));
        let c: Vec<f64> =
            bf16_values(3 * seed + 2, M * N).iter().map(|v| f64::from((v * 1.37) as f32)).collect();
        let expected = product(&a, &b, &c);
        let found = multiply(support::device(), &a, &b, &c);
        for (i, y) in found.iter().enumerate() {
            let (value, magnitude) = expected[i % (M * N)];
            let error = (y - value).abs();
            assert!(
                error <= bound(magnitude),
                "seed {seed}, element {i}: {y:e} for {value:e}, error {error:e}"
            );
        }
        let (first, others) = found.split_at(M * N);
        others
            .chunks(M * N)
            .for_each(|other| assert_same("the same product by other loads", other, first));
    }
}

/// bf16 values over that many binades.
fn wide_values(seed: u64, count: usize, binades: i32) -> Vec<f64> {
    let mut random = random(seed);
    let value =
        |r: &mut ChaCha8Rng| r.random_range(-1.0..1.0) * 2f64.powi(r.random_range(-binades..=0));
    (0..count).map(|_| bf16::from_f64(value(&mut random)).to_f64()).collect()
}

#[test]
fn matrix_products_have_the_bits_that_an_h100_gave() {
    let device = support::device();
    // Other generations add in other block sizes.
    if support::backend() == BackendKind::Cuda && device.environment().target != "sm_90a" {
        return;
    }
    for (seed, binades) in [(0, 1), (1, 6), (2, 20), (3, 60), (4, 125)] {
        let (a, b) =
            (wide_values(3 * seed, M * K, binades), wide_values(3 * seed + 1, K * N, binades));
        let c = wide_values(3 * seed + 2, M * N, 2 * binades);
        let sum = |i: usize| {
            let column: Vec<f64> = (0..K).map(|k| b[k * N + i % N]).collect();
            TensorCore::HOPPER_BF16.sum(&a[i / N * K..][..K], &column, c[i])
        };
        let expected: Vec<f64> = (0..M * N).map(sum).collect();
        for found in multiply(device, &a, &b, &c).chunks(M * N) {
            assert_same(&format!("{binades} binades"), found, &expected);
        }
    }
}

#[test]
fn matrix_products_carry_infinities_and_nan_into_their_own_row_only() {
    let mut a = bf16_values(40, M * K);
    let (b, c) = (vec![1.0; K * N], vec![0.0; M * N]);
    a[3 * K + 5] = f64::INFINITY;
    a[9 * K] = f64::NAN;
    for (i, y) in multiply(support::device(), &a, &b, &c).iter().enumerate() {
        match i / N % M {
            3 => assert_eq!(*y, f64::INFINITY, "element {i}"),
            9 => assert!(y.is_nan(), "element {i} is {y}"),
            _ => assert!(y.is_finite(), "element {i} is {y}"),
        }
    }
}

// ---------------------------------------------------------------- asynchronous copies

#[test]
fn asynchronous_copies_gather_rows_and_fill_unwanted_ones_with_zeros() {
    const SOURCE_ROWS: usize = 37;
    let mut random = random(5);
    let source: Vec<i32> = (0..SOURCE_ROWS * 16).map(|_| random.random()).collect();
    for num_rows in [1usize, 31, 32, 33, 100] {
        let hostile = [-1, SOURCE_ROWS as i32, i32::MIN, i32::MAX, 0, SOURCE_ROWS as i32 - 1];
        let mut index = |row: usize| {
            *hostile.get(row % 11).unwrap_or(&random.random_range(0..SOURCE_ROWS as i32))
        };
        let indices: Vec<i32> = (0..num_rows).map(&mut index).collect();
        let row = |&index: &i32| match usize::try_from(index) {
            Ok(index) if index < SOURCE_ROWS => source[16 * index..16 * index + 16].to_vec(),
            _ => vec![0; 16],
        };
        let expected: Vec<i32> = indices.iter().flat_map(row).collect();
        under_every_schedule(|device| {
            let mut arena = DeviceArena::new(device, Contract::NAN);
            let source =
                arena.input("source", &HostTensor::from_i32(&[SOURCE_ROWS, 16], &source)).unwrap();
            let indices =
                arena.input("indices", &HostTensor::from_i32(&[num_rows], &indices)).unwrap();
            let y = arena.output("y", DType::I32, &[num_rows, 16]).unwrap();
            let params = params()
                .ptr("source", &source)
                .ptr("indices", &indices)
                .ptr("y", &y)
                .i32("source_rows", SOURCE_ROWS)
                .unwrap()
                .i32("num_rows", num_rows)
                .unwrap();
            launch(&arena, "selftest_async_copy", 1, 128, &params);
            assert_same(
                &format!("{num_rows} rows"),
                &arena.download(&y).unwrap().to_i32(),
                &expected,
            );
        });
    }
}

// ---------------------------------------------------------------- atomics

/// The memory after the atomics kernel, given the memory before it.
fn atomics(device: &Device, x: &[i32], start: [i32; 9]) -> [HostTensor; 5] {
    let mut arena = DeviceArena::new(device, Contract::NAN);
    let x_view = arena.input("x", &HostTensor::from_i32(&[x.len()], x)).unwrap();
    let mut place = |name: &str, tensor: HostTensor| {
        arena.upload(name, &tensor, &Layout::dense(&tensor.shape), Role::InPlace).unwrap()
    };
    let views = [
        place("integers", HostTensor::from_i32(&[9], &start)),
        place("floats", f32_tensor(&[0.0; 8])),
        place("wide", HostTensor::from_i32(&[2], &[0; 2])),
        place("tickets", HostTensor::from_i32(&[x.len()], &vec![0; x.len()])),
        place("next", HostTensor::from_i32(&[2], &[0, FIRST_EXCHANGED])),
    ];
    let params = params()
        .ptr("x", &x_view)
        .ptr("integers", &views[0])
        .ptr("floats", &views[1])
        .ptr("wide", &views[2])
        .ptr("tickets", &views[3])
        .ptr("next", &views[4])
        .i64("count", x.len())
        .unwrap();
    launch(&arena, "selftest_atomics", 7, 96, &params);
    views.map(|view| arena.download(&view).unwrap())
}

const FIRST_EXCHANGED: i32 = 77;

#[test]
fn atomics_lose_no_update_and_hand_out_each_ticket_once() {
    let mut random = random(6);
    let x: Vec<i32> = (0..2000).map(|_| random.random_range(-500..=500)).collect();
    let start = [1000, -1000, i32::MAX, i32::MIN, -1, 0, 0x5a5a, 0, 0];
    let sum: i32 = x.iter().sum();
    assert!(x.iter().map(|v| v.abs()).sum::<i32>() < 1 << 22, "floats would not be exact");
    under_every_schedule(|device| {
        let [integers, floats, wide, tickets, next] = atomics(device, &x, start);
        let (integers, next) = (integers.to_i32(), next.to_i32());
        let fold = |start: i32, f: fn(i32, i32) -> i32| x.iter().fold(start, |a, &b| f(a, b));
        let expected = [
            start[0] + sum,
            start[1] - sum,
            fold(start[2], i32::min),
            fold(start[3], i32::max),
            fold(start[4], |a, b| a & b),
            fold(start[5], |a, b| a | b),
            fold(start[6], |a, b| a ^ b),
            sum,
        ];
        assert_same("integers", &integers[..8], &expected);
        assert!(x.contains(&next[1]), "the exchanged value {} is none of those put in", next[1]);
        assert_eq!(integers[8] + next[1], FIRST_EXCHANGED + sum, "every value is taken out once");
        let sum = sum as f32;
        assert_same(
            "floats",
            &f32s(&floats),
            &[sum, 0.0, 0.0, 0.0, sum, 2.0 * sum, 3.0 * sum, 4.0 * sum],
        );
        let wide_expected =
            x.iter().fold(0u64, |a, &v| a.wrapping_add(((1i64 << 31) + i64::from(v)) as u64));
        assert_same("64 bits", &wide.bytes, &wide_expected.to_ne_bytes());
        assert_eq!(next[0], x.len() as i32);
        assert_same("tickets", &tickets.to_i32(), &vec![1; x.len()]);
    });
}

#[test]
fn integer_atomics_wrap_around() {
    let start = [i32::MAX, i32::MIN, 0, 0, 0, 0, 0, i32::MAX, 0];
    let [integers, ..] = atomics(support::device(), &[1], start);
    let integers = integers.to_i32();
    assert_eq!((integers[0], integers[1], integers[7]), (i32::MIN, i32::MAX, i32::MIN));
}

// ---------------------------------------------------------------- shared memory and barriers

#[test]
fn blocks_exchange_through_shared_memory_and_vote_at_barriers() {
    const BLOCKS: usize = 5;
    for threads in [1usize, 31, 100, 256] {
        let mut random = random(threads as u64);
        // Blocks with different votes: one mixed, one all positive, one all small, one all large,
        // one random.
        let x: Vec<i32> = (0..BLOCKS * threads)
            .map(|i| match i / threads {
                0 => i as i32 - 40,
                1 => 1 + (i as i32) % 90,
                2 => -(i as i32),
                3 => 101 + i as i32,
                _ => random.random(),
            })
            .collect();
        let mut expected = vec![0; 5 * BLOCKS * threads];
        for (block, x) in x.chunks(threads).enumerate() {
            let positive = x.iter().filter(|&&v| v > 0).count();
            let or_and = i32::from(x.iter().any(|&v| v > 100)) + 2 * i32::from(positive == threads);
            for thread in 0..threads {
                let results = [
                    x[threads - 1 - thread],
                    x[(thread + threads - 1) % threads],
                    positive as i32,
                    or_and,
                    0,
                ];
                for (test, result) in results.into_iter().enumerate() {
                    expected[(test * BLOCKS + block) * threads + thread] = result;
                }
            }
        }
        under_every_schedule(|device| {
            let mut arena = DeviceArena::new(device, Contract::NAN);
            let x = arena.input("x", &HostTensor::from_i32(&[BLOCKS, threads], &x)).unwrap();
            let y = arena.output("y", DType::I32, &[5, BLOCKS, threads]).unwrap();
            let params = params().ptr("x", &x).ptr("y", &y);
            launch(&arena, "selftest_shared", BLOCKS as u32, threads as u32, &params);
            assert_same(
                &format!("{threads} threads"),
                &arena.download(&y).unwrap().to_i32(),
                &expected,
            );
        });
    }
}

// ---------------------------------------------------------------- launches

#[test]
fn a_block_larger_than_the_kernel_was_compiled_for_is_refused() {
    let device = support::device();
    let kernel = device.kernel(FILE, &[], "selftest_warp").unwrap();
    let params = params().ptr("x", DeviceAddress(0)).ptr("y", DeviceAddress(0));
    let too_many = kernel.max_threads() + 1;
    let refused = |config| kernel.launch(config, &params).expect_err("refused").to_string();
    let error = refused(LaunchConfig { grid: [1, 1, 1], block: [too_many, 1, 1], shared_bytes: 0 });
    assert!(error.contains("selftest_warp") && error.contains(&too_many.to_string()), "{error}");
    let error = refused(LaunchConfig { grid: [1, 1 << 16, 1], block: [32, 1, 1], shared_bytes: 0 });
    assert!(error.contains("selftest_warp") && error.contains("65536"), "{error}");
    let shared = device.environment().shared_bytes_per_block as u32 + 1;
    let error = refused(LaunchConfig { grid: [1, 1, 1], block: [32, 1, 1], shared_bytes: shared });
    assert!(error.contains("selftest_warp") && error.contains(&shared.to_string()), "{error}");
}

#[test]
fn a_grid_without_blocks_is_no_launch() {
    let kernel = support::device().kernel(FILE, &[], "selftest_warp").unwrap();
    let params = params().ptr("x", DeviceAddress(0)).ptr("y", DeviceAddress(0));
    kernel
        .launch(LaunchConfig { grid: [0, 1, 1], block: [32, 1, 1], shared_bytes: 0 }, &params)
        .unwrap();
}
