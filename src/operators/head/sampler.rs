//! `sampler` (inference 12.3): `kernels/cuda/head/sampler.cu` against
//! `reference/src/head/sampler.rs`.
//!
//! The kept ids depend on sums that kernels round. So shares and least probabilities are moved
//! between two ids that differ by more than any rounding. Equal weights are an exception, because
//! their sums are exact. The kept set then has one right answer. The winner in it is checked with
//! the scores of the race, by margin.

use dsv4_kernels::head::sampler as launcher;
use dsv4_reference::head::sampler::{self as reference, Filters as Limits};
use rand::Rng;

use crate::operator::fields::extent;
use crate::operator::prelude::*;

/// The operator.
pub struct Sampler;

/// The contents of the rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Logits {
    /// Values of the case's distribution and magnitude.
    Drawn,
    /// A few small integers, including zeros of both signs: nearly all are ties.
    Ties,
    /// One value, the case's magnitude.
    Equal,
    /// One large value; all others are -60.
    OneHot,
    /// Only negative values, the largest last.
    Rising,
    /// Some are NaN or infinite. In every fifth row all are NaN or -infinity.
    NotFinite,
    /// Drawn values; about every 40th is NaN and none is infinite. The sum of a row with an
    /// infinite logit is not compared.
    NotANumber,
    /// Drawn values, but in every [`CROWD`] ids the first 128 are far above the others. One warp of
    /// a block reads these.
    Crowded,
    /// Drawn values, but three of a row, at any index, are 5 and a little more above the largest.
    Few,
    /// Two of the first four ids have the largest scores of a row at a temperature of 1. The first
    /// or the second is ahead by [`CLOSE`]; all others are far below.
    Close,
}

/// The temperatures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Temperature {
    /// 0.
    Zero,
    /// 1.
    One,
    /// A different one for each row: 0, negative, tiny, usual, large and infinite values.
    Mixed,
}

/// The filters that limit the ids of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Filters {
    /// Nothing.
    Absent,
    /// `top_k`; some rows have none.
    TopK,
    /// `top_p`; some rows have none.
    TopP,
    /// `top_p` of each row in the usual range, from 0.8 to 0.99.
    UsualTopP,
    /// `min_p`; some rows have none.
    MinP,
    /// All three; some rows have none of them.
    All,
}

/// The random words.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Words {
    /// Words of drawn seeds and steps.
    Drawn,
    /// In every row one word is 0, or has all bits set. Its id has no chance, a tiny one or a large
    /// one.
    Extreme,
    /// In every row one word is 0. Its id wins with a share of the weights that fp32's sum may
    /// lose. Another id has a still smaller share, and the largest `top_k` of a limited row skips
    /// it.
    Faint,
}

/// A case: sizes, contents of rows, filters.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SamplerCase {
    /// Rows; 0 is allowed.
    pub num_rows: usize,
    /// Logits of a row; 40 or more where words are not drawn.
    pub vocab_size: usize,
    /// The contents of the rows.
    pub logits: Logits,
    /// The temperatures.
    pub temperature: Temperature,
    /// The filters that limit the ids of a row.
    pub filters: Filters,
    /// The random words.
    pub words: Words,
    /// The generated logits.
    #[serde(flatten)]
    pub data: Data,
}

fn plain(num_rows: usize, vocab_size: usize, filters: Filters) -> SamplerCase {
    let (logits, temperature, words) = (Logits::Drawn, Temperature::One, Words::Drawn);
    SamplerCase {
        num_rows,
        vocab_size,
        logits,
        temperature,
        filters,
        words,
        data: Data::normal(3.0),
    }
}

impl SamplerCase {
    fn limits_by(&self, filter: Filters) -> bool {
        self.filters == filter
            || self.filters == Filters::All
            || (self.filters == Filters::UsualTopP && filter == Filters::TopP)
    }
}

impl Operator for Sampler {
    type Case = SamplerCase;

    const ABOUT: About = About {
        name: "sampler",
        family: Family::Head,
        summary: "one token of each row of logits: temperature, top-k, top-p and min-p by the exponential race",
        specification: &["inference 12.3"],
        paths: &["sampler_vector", "sampler_scalar"],
        modules: launcher::modules,
        cases: [24, 60, 120],
    };

    const CONVENTIONS: &'static [Convention] = &[Convention::TopPOfKept, Convention::TiesKept];

    fn tensors(c: &SamplerCase) -> Specs {
        let rows = axis("num_rows", c.num_rows);
        let vocabulary = axis("vocab_size", c.vocab_size).multiples(1, launcher::MAX_VOCAB_SIZE);
        let tensors = [
            input("logits", DType::F32, &[rows, vocabulary]).rows().drawn_as(c.data),
            input("temperature", DType::F32, &[rows]),
            input("top_k", DType::I32, &[rows]).when(c.limits_by(Filters::TopK)),
            input("top_p", DType::F32, &[rows]).when(c.limits_by(Filters::TopP)),
            input("min_p", DType::F32, &[rows]).when(c.limits_by(Filters::MinP)),
            input("seed", DType::I64, &[rows]),
            input("step", DType::I64, &[rows]),
            output("tokens", DType::I32, &[rows]).selected_from("scores"),
        ];
        Specs::new(c.data.seed, tensors)
    }

    fn check(c: &SamplerCase) -> Result<(), Refused> {
        if c.logits == Logits::Close && c.vocab_size < CLOSE_IDS {
            return refuse(
                "vocab_size",
                format!("{}: scores of {CLOSE_IDS} ids are made close", c.vocab_size),
            );
        }
        if c.words != Words::Drawn && c.vocab_size < EXTREME_IDS {
            return refuse(
                "vocab_size",
                format!("{}: words that are not drawn need {EXTREME_IDS} ids", c.vocab_size),
            );
        }
        Ok(())
    }

    fn strategy(profile: Profile) -> BoxedStrategy<SamplerCase> {
        let [rows, columns] = profile.of([[6usize, 600], [10, 3000], [40, 60_000]]);
        use Filters::{Absent, All, MinP, TopK, TopP, UsualTopP};
        let filters = select(vec![Absent, TopK, TopP, UsualTopP, MinP, All]);
        let logits = select(vec![
            Logits::Drawn,
            Logits::Drawn,
            Logits::Ties,
            Logits::Equal,
            Logits::OneHot,
            Logits::Rising,
            Logits::NotFinite,
            Logits::NotANumber,
            Logits::Few,
            Logits::Close,
        ]);
        let temperature = select(vec![Temperature::Zero, Temperature::One, Temperature::Mixed]);
        let words = select(vec![Words::Drawn, Words::Drawn, Words::Extreme, Words::Faint]);
        (
            extent(rows, 4),
            extent(columns, 64),
            filters,
            logits,
            temperature,
            words,
            Data::strategy(-6..=6),
        )
            .prop_map(|(num_rows, vocab_size, filters, logits, temperature, words, data)| {
                let words = if vocab_size >= EXTREME_IDS { words } else { Words::Drawn };
                let logits = if vocab_size >= CLOSE_IDS { logits } else { Logits::Drawn };
                SamplerCase { num_rows, vocab_size, logits, temperature, filters, words, data }
            })
            .boxed()
    }

    fn typical() -> Vec<SamplerCase> {
        vec![plain(2, 64, Filters::Absent), plain(3, 61, Filters::All)]
    }

    fn edge_cases(profile: Profile) -> Vec<SamplerCase> {
        let mixed = |num_rows, vocab_size, filters| {
            plain(num_rows, vocab_size, filters).with(|case| case.temperature = Temperature::Mixed)
        };
        let extreme = |filters| plain(6, 44, filters).with(|case| case.words = Words::Extreme);
        let faint = |num_rows, vocab_size, filters| {
            plain(num_rows, vocab_size, filters).with(|case| case.words = Words::Faint)
        };
        let of = |logits, filters| plain(5, 41, filters).with(|case| case.logits = logits);
        let last_is_largest = |num_rows, vocab_size| {
            plain(num_rows, vocab_size, Filters::Absent).with(|case| {
                case.logits = Logits::Rising;
                case.temperature = Temperature::Zero;
            })
        };
        let mut cases = vec![
            plain(0, 64, Filters::All),
            plain(1, 1, Filters::All),
            plain(4, 1, Filters::Absent),
            plain(2, 61, Filters::Absent).with(|case| case.temperature = Temperature::Zero),
            mixed(9, 61, Filters::Absent),
            mixed(9, 64, Filters::All),
            plain(5, 300, Filters::TopK),
            plain(6, 40, Filters::TopP),
            plain(5, 3000, Filters::UsualTopP),
            plain(5, 300, Filters::MinP),
            extreme(Filters::Absent),
            extreme(Filters::TopK),
            // The first id of a row loses, and the weights of all others underflow.
            extreme(Filters::TopK).with(|case| {
                case.num_rows = 18;
                case.temperature = Temperature::Mixed;
            }),
            extreme(Filters::TopP).with(|case| {
                case.num_rows = 18;
                case.temperature = Temperature::Mixed;
            }),
            // Limits that skip one id, where the winner's share may be lost in the sum: listed, and
            // read for each race.
            faint(64, 44, Filters::TopK),
            faint(21, 2100, Filters::TopK),
            // The largest logit is among the last that a thread reads of a tile, in a short row and
            // in a long one.
            last_is_largest(2, 2000),
            last_is_largest(1, 16_000),
            // A warp's last round of staged ids is partial, and the memory after it holds ids that
            // were listed before.
            faint(61, 700, Filters::TopK),
            faint(5, 40, Filters::Absent),
            // The only ids of a row's last warp are those of one access, staged but not yet listed
            // when the row ends.
            plain(200, 260, Filters::UsualTopP).with(|case| case.data = Data::normal(0.25)),
            // The last id that a warp has listed is before the requested ones, and counts once.
            plain(200, 40, Filters::UsualTopP).with(|case| case.data = Data::normal(1.0)),
            // Scores that only exact logarithms distinguish, for ids of one thread: in a row that
            // is raced, and in a list.
            plain(24, 44, Filters::Absent).with(|case| case.logits = Logits::Close),
            plain(24, 44, Filters::UsualTopP).with(|case| case.logits = Logits::Close),
            // Larger logits in the second half of a thread's ids, so the sum of the first half must
            // be kept.
            plain(40, 2048, Filters::UsualTopP).with(|case| case.data = Data::normal(2.0)),
            // Blocks of either size, which list whole rows.
            plain(1, 2048, Filters::TopP),
            plain(1, 2049, Filters::TopK).with(|case| case.logits = Logits::Ties),
            // More ids than a block can list.
            plain(1, 9200, Filters::TopP).with(|case| case.logits = Logits::Equal),
            // A list that does not reach the end of the order, and one that does, for a long row.
            plain(1, 9200, Filters::TopP).with(|case| case.data = Data::normal(0.25)),
            plain(1, 129_280, Filters::TopP).with(|case| case.data = Data::normal(6.0)),
            // Rows where every limit takes more than is listed, or ends within it; rows without a
            // dominant weight.
            plain(9, 9000, Filters::TopP).with(|case| case.data = Data::normal(0.25)),
            plain(8, 9000, Filters::TopK).with(|case| case.data = Data::normal(0.25)),
            plain(12, 9000, Filters::All).with(|case| case.data = Data::normal(0.25)),
            plain(9, 9000, Filters::MinP).with(|case| case.logits = Logits::Equal),
            // More large logits than one warp can collect.
            plain(2, 60_000, Filters::TopP).with(|case| case.logits = Logits::Crowded),
            // The order ends among a few ids that are larger than any that a kernel may have read
            // first.
            plain(10, 30_000, Filters::UsualTopP).with(|case| {
                case.logits = Logits::Few;
                case.data = Data::normal(3.0);
            }),
            // The best score of some rows is far below 0.
            mixed(9, 300, Filters::Absent).with(|case| case.logits = Logits::Rising),
            // Rows of several tiles: the largest logit last, NaN and infinities, and no filter.
            plain(2, 20_000, Filters::TopP).with(|case| case.logits = Logits::Rising),
            plain(2, 20_001, Filters::All).with(|case| case.logits = Logits::NotFinite),
            // NaN in every load of a thread, whose weights are not in the sum.
            plain(20, 2000, Filters::UsualTopP).with(|case| case.logits = Logits::NotANumber),
            // A temperature at which logits of 100 leave only a whole number of a score after
            // rounding. Among equal ones the lowest id wins, in any order of arrival.
            mixed(36, 300, Filters::UsualTopP).with(|case| {
                case.logits = Logits::Equal;
                case.data = Data::normal(100.0);
            }),
            // The same for a row that is raced, tile after tile.
            mixed(18, 9000, Filters::Absent).with(|case| {
                case.logits = Logits::Equal;
                case.data = Data::normal(100.0);
            }),
            plain(2, 20_000, Filters::Absent),
        ];
        let logits =
            [Logits::Ties, Logits::Equal, Logits::OneHot, Logits::Rising, Logits::NotFinite];
        cases.extend(logits.map(|logits| of(logits, Filters::All)));
        cases.push(of(Logits::NotFinite, Filters::Absent));
        if profile == Profile::Full {
            let filters = [Filters::Absent, Filters::TopP, Filters::UsualTopP, Filters::All];
            cases.extend(filters.map(|filters| mixed(128, 129_280, filters)));
            cases.push(plain(1, launcher::MAX_VOCAB_SIZE, Filters::All));
        }
        cases
    }

    fn amend(c: &SamplerCase, tensors: &mut Tensors) -> OracleResult<()> {
        let temperatures = draw_temperatures(c);
        tensors.set("temperature", &temperatures);
        let (seeds, steps) = draw_seeds(c);
        tensors.set("logits", &draw_logits(c, &tensors.values("logits"), &seeds, &steps));
        for (name, numbers) in [("seed", seeds), ("step", steps)] {
            tensors.put(name, HostTensor::from_f64(DType::I64, &[c.num_rows], &numbers));
        }
        // As stored, which is what the sampler reads.
        let (logits, temperatures) = (tensors.values("logits"), tensors.values("temperature"));
        let mut limits = draw_limits(c);
        for (row, limits) in limits.iter_mut().enumerate() {
            let logits = &logits[row * c.vocab_size..][..c.vocab_size];
            make_clear(&reference::ranked(logits, temperatures[row]).1, limits);
        }
        tensors.edit_i32s("top_k", |all| {
            all.iter_mut().zip(&limits).for_each(|(to, from)| *to = from.top_k as i32)
        });
        tensors.edit("top_p", |all| {
            all.iter_mut().zip(&limits).for_each(|(to, from)| *to = from.top_p)
        });
        tensors.edit("min_p", |all| {
            all.iter_mut().zip(&limits).for_each(|(to, from)| *to = from.min_p)
        });
        Ok(())
    }

    /// The scores of all ids, which every run keeps, and those of their ranks in the race.
    fn oracle_elements(c: &SamplerCase) -> u128 {
        2 * c.num_rows as u128 * c.vocab_size as u128
    }

    fn forward(_: &SamplerCase, t: &Bound<'_>, rounding: &mut Rounding) -> OracleResult<Named> {
        reference::forward(&t.named()?, rounding)
    }

    fn launch(_: &SamplerCase, v: &Views, run: &mut Launches<'_>) -> Result<(), RuntimeError> {
        run.launch(|device| launcher::forward(device, v))
    }

    fn invariant(_: &SamplerCase, _: bool) -> &'static [BatchAxis] {
        BatchAxis::OF_ROWS
    }

    fn laws(c: &SamplerCase, laws: &mut Laws<'_, Self>) {
        // For every batch, and every index of a row in it.
        laws.separate("num_rows", "rows may be permuted");
        if c.num_rows == 0 {
            return;
        }
        let equal = laws.all(Relation::Times(1.0));
        if c.temperature != Temperature::Mixed {
            let twice = |v: &mut Variant<Self>| {
                ["logits", "temperature"].iter().for_each(|name| v.tensors.scale(name, 2.0))
            };
            laws.law("logits are divided by the temperature", twice, equal.clone());
        }
        if c.vocab_size + UNREACHABLE <= launcher::MAX_VOCAB_SIZE {
            laws.law("ids without a chance change nothing", add_unreachable_ids, equal);
        }
    }

    /// The model's vocabulary, with the usual filters and without, for batches of decode steps.
    fn benchmarks(environment: &Environment) -> Vec<Benchmark<Self>> {
        use Temperature::{One, Zero};
        let gpu = [
            ("top-p", 128, Filters::UsualTopP, One),
            ("top-p", 32, Filters::UsualTopP, One),
            ("top-p", 1, Filters::UsualTopP, One),
            // Some rows without a limit, and limits that keep all but one id, or only one.
            ("edges of top-p", 128, Filters::TopP, One),
            ("top-k", 128, Filters::TopK, One),
            ("all filters", 128, Filters::All, One),
            ("no filter", 128, Filters::Absent, One),
            ("no filter", 1, Filters::Absent, One),
            ("argmax", 128, Filters::Absent, Zero),
        ];
        let (shapes, vocab_size) =
            if on_gpu(environment) { (&gpu[..], 129_280) } else { (&gpu[..1], 3000) };
        let benchmark =
            |&(kind, num_rows, filters, temperature): &(&str, usize, Filters, Temperature)| {
                let num_rows = if on_gpu(environment) { num_rows } else { 4 };
                let case = SamplerCase {
                    temperature,
                    data: Data::normal(4.0),
                    ..plain(num_rows, vocab_size, filters)
                };
                // A difference, a product, an exponential and a sum for each logit.
                Benchmark::new(
                    Direction::Forward,
                    format!("{kind}, {num_rows} rows of {vocab_size}"),
                    case,
                    "num_rows",
                )
                .streaming(&[], 4.0)
            };
        shapes.iter().map(benchmark).collect()
    }

    fn reduced_benchmarks() -> Vec<Reduced> {
        vec![Reduced::forward(
            &["top-p, 128 rows of 129280", "no filter, 128 rows of 129280"],
            json!({"num_rows": 11, "vocab_size": 300}),
            json!({"num_rows": 3}),
        )]
    }
}

/// A multiple of the ids that a block of either size reads at once.
const CROWD: usize = 4096;

/// Ids that the law adds to rows.
const UNREACHABLE: usize = 5;

/// Added ids after the last one, with logits of -infinity.
fn add_unreachable_ids(v: &mut Variant<Sampler>) {
    let (rows, width) = (v.case.num_rows, v.case.vocab_size);
    let logits = v.tensors.values("logits");
    let longer = |row: &[f64]| [row, &[f64::NEG_INFINITY; UNREACHABLE]].concat();
    let longer: Vec<f64> = logits.chunks(width).flat_map(longer).collect();
    v.case.vocab_size = width + UNREACHABLE;
    v.tensors
        .put("logits", HostTensor::from_f64(DType::F32, &[rows, width + UNREACHABLE], &longer));
}

/// Seeds whose word for this id, at step 0, is 0 or has all bits set.
const EXTREME: [(u64, usize, u32); 2] = [(1_343_428, 3, 0), (40_222_668, 38, u32::MAX)];
/// Ids of a row that contain both.
const EXTREME_IDS: usize = 40;

/// How far the logit of a faint id is below the largest: its weight is 2^-27 of that one's. The
/// word 0 gives it a score 5 above that of the largest with a median word.
const FAINT: f64 = 19.0;

/// The lead of one of two scores, 2^-14: less than approximate logarithms distinguish, and many
/// steps of fp32.
const CLOSE: f64 = 6.103_515_625e-5;
/// Ids of a row, two of which are close.
const CLOSE_IDS: usize = 4;

/// Makes an id's score as large as the first one's except for [`CLOSE`], and all others small. A
/// score at a temperature of 1 is, in natural units, `logit - ln(g)`.
fn make_close(row: usize, seed: u64, step: u64, logits: &mut [f64]) {
    let time = |id| {
        let v = f64::from(reference::uniform(reference::word(seed, step, id)));
        (-(-v).ln_1p()).ln()
    };
    let (second, ahead) = (
        1 + row % (CLOSE_IDS - 1),
        if (row / (CLOSE_IDS - 1)).is_multiple_of(2) { 1.0 } else { -1.0 },
    );
    let first = logits[0];
    let close = first - time(0) + time(second) - ahead * CLOSE * std::f64::consts::LN_2;
    logits.fill(first.min(close) - 60.0);
    (logits[0], logits[second]) = (first, close);
}

/// Seed and step of each row: of more than 32 bits, and of either sign.
fn draw_seeds(c: &SamplerCase) -> (Vec<f64>, Vec<f64>) {
    let mut draw = Draw::new(c.data.seed, "seed");
    let drawn = |draw: &mut Draw| draw.rng().random_range(-(1i64 << 52)..1 << 52) as f64;
    let seeds = (0..c.num_rows).map(|row| match c.words {
        Words::Extreme => EXTREME[row % 2].0 as f64,
        Words::Faint => EXTREME[0].0 as f64,
        Words::Drawn => drawn(&mut draw),
    });
    let seeds = seeds.collect();
    let step = |row: usize| match c.words {
        Words::Drawn if row % 2 == 1 => drawn(&mut draw),
        Words::Drawn => row as f64,
        Words::Extreme | Words::Faint => 0.0,
    };
    (seeds, (0..c.num_rows).map(step).collect())
}

fn draw_temperatures(c: &SamplerCase) -> Vec<f64> {
    let mixed = [0.6, 0.0, 1.0, 1e-6, -1.0, 30.0, 2.0, f64::INFINITY, 1e-3];
    let of_row = |row: usize| match c.temperature {
        Temperature::Zero => 0.0,
        Temperature::One => 1.0,
        Temperature::Mixed => mixed[row % mixed.len()],
    };
    (0..c.num_rows).map(of_row).collect()
}

fn draw_logits(c: &SamplerCase, drawn: &[f64], seeds: &[f64], steps: &[f64]) -> Vec<f64> {
    let mut draw = Draw::new(c.data.seed, "logits");
    let bad = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY];
    let logit = |(at, &drawn): (usize, &f64)| {
        let (row, id) = (at / c.vocab_size, at % c.vocab_size);
        match c.logits {
            Logits::Drawn => drawn,
            Logits::Ties => [-0.0, 0.0, 1.0, -1.0, 2.0, 2.0][draw.rng().random_range(0..6)],
            Logits::Equal => c.data.magnitude,
            Logits::OneHot if id == (7 * row + 3) % c.vocab_size => 5.0,
            Logits::OneHot => -60.0,
            Logits::Rising => (id as f64 - c.vocab_size as f64) / 8.0,
            Logits::NotFinite if row % 5 == 4 => bad[2 * (id % 2)],
            Logits::NotFinite if draw.rng().random_ratio(1, if row % 2 == 0 { 4 } else { 400 }) => {
                bad[draw.rng().random_range(0..bad.len())]
            }
            Logits::NotANumber if draw.rng().random_ratio(1, 40) => f64::NAN,
            Logits::NotFinite | Logits::NotANumber => drawn,
            Logits::Crowded if id % CROWD < 128 => drawn + 20.0,
            Logits::Crowded | Logits::Few | Logits::Close => drawn,
        }
    };
    let mut logits: Vec<f64> = drawn.iter().enumerate().map(logit).collect();
    for (row, logits) in logits.chunks_mut(c.vocab_size).enumerate() {
        if c.logits == Logits::Close {
            make_close(row, seeds[row] as i64 as u64, steps[row] as i64 as u64, logits);
        }
        if c.logits == Logits::Few {
            let largest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            (0..3).for_each(|few| {
                logits[draw.rng().random_range(0..c.vocab_size)] =
                    largest + 5.0 + f64::from(few) / 4.0
            });
        }
        let largest = logits.iter().copied().filter(|logit| logit.is_finite()).fold(0.0, f64::max);
        match c.words {
            Words::Drawn => {}
            Words::Extreme => {
                logits[EXTREME[row % 2].1] =
                    [f64::NEG_INFINITY, largest - 30.0, largest + 3.0][row / 2 % 3];
            }
            Words::Faint => {
                logits[EXTREME[0].1] = largest - FAINT;
                logits[EXTREME[1].1] = largest - 2.0 * FAINT;
            }
        }
    }
    logits
}

/// The limits of each row, before its values are considered.
fn draw_limits(c: &SamplerCase) -> Vec<Limits> {
    let mut draw = Draw::new(c.data.seed, "limits");
    let most = c.vocab_size.min(1 << 20) as f64;
    let top_k = [1.0, 5.0, most, -1.0, most - 1.0, 0.0, f64::from(i32::MAX), 50.0];
    let top_p = [0.9, 0.5, 0.999_999_9, 0.0, 1.0, 0.65, -1.0, 1.0 - 2f64.powi(-24), f64::NAN];
    let usual_top_p = [0.9, 0.95, 0.8, 0.99];
    let top_p = if c.filters == Filters::UsualTopP { &usual_top_p[..] } else { &top_p[..] };
    let min_p = [0.1, 0.0, 0.9, 1e-3, f64::NAN, 1.0, 0.3, -1.0, 5.0];
    let mut of = |by: Filters, all: &[f64], row: usize, none: f64| match c.limits_by(by) {
        true if c.filters == Filters::All => all[draw.rng().random_range(0..all.len())],
        true => all[row % all.len()],
        false => none,
    };
    let limits = |row: usize| Limits {
        top_k: of(Filters::TopK, &top_k, row, 0.0),
        top_p: of(Filters::TopP, top_p, row, 1.0),
        min_p: of(Filters::MinP, &min_p, row, 0.0),
    };
    (0..c.num_rows).map(limits).collect()
}

/// The least share of a row for the last id that top_p keeps. Sums of 2^20 weights have a relative
/// error below a hundredth of it.
const CLEAR_SHARE: f64 = 1.0 / 65_536.0;
/// The least relative difference of weights on either side of min_p. Exponentials have a relative
/// error below a hundredth of it.
const CLEAR_WEIGHT: f64 = 1.0 / 16_384.0;

/// Moves limits between two ids that no rounding can swap. Equal weights have exact sums.
fn make_clear(weights: &[f64], limits: &mut Limits) {
    if weights.iter().all(|&weight| weight == 1.0 || weight == 0.0) {
        return;
    }
    let none = Limits { top_k: 0.0, top_p: 1.0, min_p: 0.0 };
    if limits.top_p < 1.0 {
        let sum: f64 = weights.iter().sum();
        let mut kept = reference::num_kept(weights, Limits { top_p: limits.top_p, ..none });
        while kept > 1 && weights[kept - 1] < CLEAR_SHARE * sum {
            kept -= 1;
        }
        let before: f64 = weights[..kept - 1].iter().sum();
        limits.top_p = (before + weights[kept - 1] / 2.0) / sum;
    }
    if limits.min_p > 0.0 {
        let mut kept = reference::num_kept(weights, Limits { min_p: limits.min_p, ..none });
        let is_clear = |kept: usize| {
            weights.get(kept).is_none_or(|next| *next < (1.0 - CLEAR_WEIGHT) * weights[kept - 1])
        };
        while !is_clear(kept) {
            kept += 1;
        }
        let next = weights.get(kept).copied().unwrap_or(0.0);
        let beyond_the_largest = limits.min_p >= 1.0 && weights[kept - 1] == 1.0;
        if !beyond_the_largest {
            limits.min_p = if next > 0.0 {
                (weights[kept - 1] * next).sqrt()
            } else {
                weights[kept - 1] / 2.0
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_words_of_extreme_seeds_are_extreme() {
        for (seed, id, word) in EXTREME {
            assert_eq!(reference::word(seed, 0, id), word);
            assert!(id < EXTREME_IDS);
        }
    }

    #[test]
    fn limits_are_moved_away_from_every_sum_and_weight_unless_these_are_exact() {
        let weights = [1.0, 0.5, 0.5 - 1e-7, 0.25, 1e-7];
        let mut limits = Limits { top_k: 0.0, top_p: 0.999_999_99, min_p: 0.5 };
        make_clear(&weights, &mut limits);
        let sum: f64 = weights.iter().sum();
        assert_eq!(reference::num_kept(&weights, Limits { min_p: 0.0, ..limits }), 4);
        assert_eq!(limits.top_p, (1.0 + 0.5 + (0.5 - 1e-7) + 0.125) / sum);
        assert_eq!(limits.min_p, ((0.5 - 1e-7) * 0.25f64).sqrt());
        let exact = Limits { top_k: 0.0, top_p: 0.5, min_p: 1.0 };
        let mut moved = exact;
        make_clear(&[1.0; 16], &mut moved);
        assert_eq!(moved, exact);
    }
}
