//! The sampler's results have the right distribution, and never an id that a filter excludes
//! (inference 12.3). The tests count many rows of one distribution that differ only in their steps.

use dsv4_kernels::head::sampler;
use dsv4_runtime::{Contract, DType, Device, DeviceArena, HostTensor, Views};

use crate::support;

/// A distribution, and its filters.
struct Asked {
    logits: Vec<f64>,
    temperature: f64,
    top_k: i32,
    top_p: f64,
    min_p: f64,
}

impl Asked {
    fn of(probabilities: &[f64]) -> Self {
        let logits = probabilities.iter().map(|p| p.ln()).collect();
        Self { logits, temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0 }
    }

    /// How often each id occurs in `rows` rows of steps 0, 1, 2 and so on.
    fn counts(&self, device: &Device, rows: usize) -> Vec<u64> {
        let width = self.logits.len();
        let of_rows =
            |dtype, number: f64| HostTensor::from_f64(dtype, &[rows], &vec![number; rows]);
        let steps: Vec<f64> = (0..rows).map(|row| row as f64).collect();
        let tensors = [
            ("logits", HostTensor::from_f64(DType::F32, &[rows, width], &self.logits.repeat(rows))),
            ("temperature", of_rows(DType::F32, self.temperature)),
            ("top_k", of_rows(DType::I32, f64::from(self.top_k))),
            ("top_p", of_rows(DType::F32, self.top_p)),
            ("min_p", of_rows(DType::F32, self.min_p)),
            ("seed", of_rows(DType::I64, 20_261_123.0)),
            ("step", HostTensor::from_f64(DType::I64, &[rows], &steps)),
        ];
        let mut arena = DeviceArena::new(device, Contract::NAN);
        let given: Vec<_> = tensors
            .iter()
            .map(|(name, host)| (*name, arena.input(name, host).expect("memory")))
            .collect();
        let tokens = arena.output("tokens", DType::I32, &[rows]).expect("memory");
        let views = given
            .iter()
            .fold(Views::new(), |views, (name, view)| views.with(name, view))
            .with("tokens", &tokens);
        let violations =
            arena.run(|device| sampler::forward(device, &views).map(drop)).expect("a launch");
        assert!(violations.is_empty(), "{violations:?}");
        let mut counts = vec![0; width];
        for token in arena.download(&tokens).expect("tokens").to_i32() {
            counts[usize::try_from(token).expect("an id")] += 1;
        }
        counts
    }
}

/// The sum of (found - expected)^2 / expected over the ids with a probability. An id without
/// probability never occurs.
fn chi_square(counts: &[u64], probabilities: &[f64]) -> f64 {
    let (draws, sum) = (counts.iter().sum::<u64>() as f64, probabilities.iter().sum::<f64>());
    let term = |(&count, &p): (&u64, &f64)| match p * draws / sum {
        0.0 => {
            assert_eq!(count, 0, "an id without a probability was drawn: {counts:?}");
            0.0
        }
        expected => (count as f64 - expected).powi(2) / expected,
    };
    counts.iter().zip(probabilities).map(term).sum()
}

/// The value that a chi-square of this many degrees of freedom exceeds with a probability of 1e-6.
/// By the approximation of Wilson and Hilferty its cube root is nearly normal; 4.753 is that
/// quantile of the normal distribution.
fn threshold(degrees: usize) -> f64 {
    let (degrees, quantile) = (degrees as f64, 4.753);
    let spread = 2.0 / (9.0 * degrees);
    degrees * (1.0 - spread + quantile * spread.sqrt()).powi(3)
}

#[test]
fn the_threshold_is_that_of_the_tables() {
    // The value that a chi-square of this many degrees of freedom exceeds with a probability of
    // 1e-6; the approximation is on the far side.
    for (degrees, table) in [(3, 30.66), (7, 40.52), (30, 82.04)] {
        let ratio = threshold(degrees) / table;
        assert!((1.0..1.08).contains(&ratio), "{degrees}: {ratio}");
    }
}

#[test]
fn tokens_come_as_often_as_their_probabilities_say() {
    let device = support::device();
    let four = [0.4, 0.3, 0.2, 0.1];
    let many: Vec<f64> = (1..=30).map(|id| f64::from(id % 7 + 1)).collect();
    // Twice the temperature gives the square roots.
    let roots: Vec<f64> = many.iter().map(|p| p.sqrt()).collect();
    let asked = |temperature| Asked { temperature, ..Asked::of(&many) };
    let filtered = |temperature| Asked { top_k: 29, ..asked(temperature) };
    // The rarest id, the highest among equal ones, is excluded.
    let mut without = roots.clone();
    without[27] = 0.0;
    let cases: [(&str, Asked, &[f64]); 4] = [
        ("four", Asked::of(&four), &four),
        ("thirty", asked(1.0), &many),
        ("temperature of 2", asked(2.0), &roots),
        ("29 of thirty", filtered(2.0), &without),
    ];
    for (name, asked, probabilities) in cases {
        let found = chi_square(&asked.counts(device, 1500), probabilities);
        let kept = probabilities.iter().filter(|&&p| p > 0.0).count();
        println!("{name}: {found:.1} of {:.1}", threshold(kept - 1));
        assert!(found < threshold(kept - 1), "{name}: {found}");
    }
}

#[test]
fn what_a_filter_leaves_out_never_comes_and_all_else_does() {
    let device = support::device();
    let four = || Asked::of(&[0.4, 0.3, 0.2, 0.1]);
    let least = || Asked::of(&[1.0, 0.1, 0.055, 0.04]);
    let support = |asked: &Asked, rows| -> Vec<usize> {
        let counts = asked.counts(device, rows);
        (0..counts.len()).filter(|&id| counts[id] > 0).collect()
    };
    assert_eq!(support(&Asked { top_p: 0.65, ..four() }, 300), [0, 1]);
    assert_eq!(support(&Asked { top_p: 0.75, ..four() }, 300), [0, 1, 2]);
    assert_eq!(support(&Asked { top_p: 0.95, ..four() }, 300), [0, 1, 2, 3]);
    assert_eq!(support(&Asked { min_p: 0.05, ..least() }, 300), [0, 1, 2]);
    assert_eq!(support(&Asked { top_k: 3, ..least() }, 300), [0, 1, 2]);
    assert_eq!(support(&Asked { top_k: 3, top_p: 0.9, ..least() }, 300), [0, 1]);
    // More equal weights than a block lists: exactly half of them, the lower ids.
    let flat = Asked { top_p: 0.5, ..Asked::of(&[1.0; 9000]) };
    let seen = support(&flat, 40);
    assert!(seen.iter().all(|&id| id < 4500) && seen.len() > 30, "{seen:?}");
}

#[test]
fn a_race_by_the_uniform_numbers_themselves_is_seen_by_the_counts() {
    let device = support::device();
    let (file, right) = ("sampler.cu", "log2f(-log1pf(-uniform(word)))");
    let text = dsv4_kernels::sources().text(file).expect("embedded").to_owned();
    assert_eq!(text.matches(right).count(), 1);
    let text = text.replace(right, "log2f(uniform(word))");
    let near = "approximate_power(uniform(new_word))";
    assert_eq!(text.matches(near).count(), 1);
    let text = text.replace(near, "log2_approx(uniform(new_word))");
    let biased = device.with_tree(dsv4_kernels::sources().with_text(
        file,
        text,
        "a race by uniform numbers",
    ));
    let four = [0.4, 0.3, 0.2, 0.1];
    let found = chi_square(&Asked::of(&four).counts(&biased, 1500), &four);
    assert!(found > threshold(3), "{found}");
}
