//! `topk` (inference 7, 7.2): `kernels/cuda/indexer/topk.cu` against
//! `reference/src/indexer/topk.rs`.
//!
//! Nothing is rounded, ties have a fixed rule, and indices follow the order of their columns. So
//! every index must equal the oracle's.

use dsv4_kernels::indexer::topk as launcher;
use dsv4_reference::indexer::topk as reference;
use rand::Rng;
use rand::seq::SliceRandom;

use crate::operator::fields::extent;
use crate::operator::prelude::*;
use crate::operators::lists::{Hostile, Lengths};

/// The operator.
pub struct Topk;

/// The contents of the rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Scores {
    /// Values of the case's distribution and magnitude.
    Drawn,
    /// A few small integers, including zeros of both signs: nearly all are ties.
    Ties,
    /// Adjacent values, which differ only in the last bits.
    Close,
    /// One value.
    Equal,
    /// Values from the lowest to the largest; reversed in every second row.
    Sorted,
    /// Some are NaN or infinite.
    NotFinite,
}

/// The meaning of an index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Index {
    /// The column.
    Column,
    /// The column plus the row's offset.
    Offset,
    /// The slot of a paged store; every fifth page does not exist.
    Paged,
}

/// A case: sizes, what counts, what is written, data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TopkCase {
    /// Rows; 0 is allowed.
    pub num_rows: usize,
    /// Scores of a row.
    pub num_columns: usize,
    /// Indices of a row.
    pub topk: usize,
    /// How many columns count.
    pub lengths: Lengths,
    /// The contents of the rows.
    pub scores: Scores,
    /// The meaning of an index.
    pub index: Index,
    /// Slots of a page of a paged store.
    pub page_size: usize,
    /// Whether the scores are written as well.
    pub with_values: bool,
    /// The generated scores.
    #[serde(flatten)]
    pub data: Data,
}

fn plain(num_rows: usize, num_columns: usize, topk: usize) -> TopkCase {
    let (lengths, scores, index) = (Lengths::Within, Scores::Drawn, Index::Column);
    let (page_size, with_values, data) = (64, true, Data::normal(1.0));
    TopkCase { num_rows, num_columns, topk, lengths, scores, index, page_size, with_values, data }
}

impl TopkCase {
    fn num_pages(&self) -> usize {
        self.num_columns.div_ceil(self.page_size.max(1))
    }
}

impl Operator for Topk {
    type Case = TopkCase;

    const ABOUT: About = About {
        name: "topk",
        family: Family::Indexer,
        summary: "the topk largest scores of each row, by index: columns, offset or mapped by pages",
        specification: &["inference 7", "inference 7.2"],
        paths: &["topk"],
        modules: launcher::modules,
        cases: [24, 60, 120],
    };

    fn tensors(c: &TopkCase) -> Specs {
        let rows = axis("num_rows", c.num_rows);
        let columns = axis("num_columns", c.num_columns).multiples(1, launcher::MAX_COLUMNS);
        let topk = axis("topk", c.topk).multiples(1, launcher::MAX_TOPK);
        let tensors = [
            input("scores", DType::F32, &[rows, columns]).rows().drawn_as(c.data),
            input("lengths", DType::I32, &[rows]).when(c.lengths != Lengths::Absent),
            input("offsets", DType::I32, &[rows]).when(c.index == Index::Offset),
            input("block_table", DType::I32, &[rows, axis("num_pages", c.num_pages())])
                .rows()
                .when(c.index == Index::Paged),
            output("indices", DType::I32, &[rows, topk]).rows().exact(),
            output("values", DType::F32, &[rows, topk]).rows().exact().when(c.with_values),
        ];
        Specs::new(c.data.seed, tensors)
    }

    fn check(c: &TopkCase) -> Result<(), Refused> {
        match c.page_size {
            1..=0x10_0000 => Ok(()),
            other => refuse("page_size", format!("{other} must be 1 to 2^20")),
        }
    }

    fn strategy(profile: Profile) -> BoxedStrategy<TopkCase> {
        let [rows, columns, most] =
            profile.of([[8usize, 3000, 600], [20, 9000, 1200], [60, 70_000, 4096]]);
        let topk = prop_oneof![1 => Just(1usize), 4 => 1..=most];
        let lengths = select(vec![Lengths::Absent, Lengths::Within, Lengths::Hostile]);
        let scores = select(vec![
            Scores::Drawn,
            Scores::Drawn,
            Scores::Ties,
            Scores::Close,
            Scores::Equal,
            Scores::Sorted,
            Scores::NotFinite,
        ]);
        let index = (
            select(vec![Index::Column, Index::Offset, Index::Paged]),
            select(vec![1usize, 7, 64, 128]),
        );
        (
            extent(rows, 4),
            extent(columns, 64),
            topk,
            lengths,
            scores,
            index,
            any::<bool>(),
            Data::strategy(-100..=100),
        )
            .prop_map(
                |(
                    num_rows,
                    num_columns,
                    topk,
                    lengths,
                    scores,
                    (index, page_size),
                    with_values,
                    data,
                )| {
                    TopkCase {
                        num_rows,
                        num_columns,
                        topk,
                        lengths,
                        scores,
                        index,
                        page_size,
                        with_values,
                        data,
                    }
                },
            )
            .boxed()
    }

    fn typical() -> Vec<TopkCase> {
        vec![
            plain(3, 70, 9),
            plain(3, 200, 40).with(|case| case.index = Index::Paged),
            plain(2, 33, 32).with(|case| case.index = Index::Offset),
        ]
    }

    fn edge_cases(profile: Profile) -> Vec<TopkCase> {
        let all = plain(2, 512, 512).with(|case| case.lengths = Lengths::Absent);
        let hostile = plain(9, 300, 64).with(|case| case.lengths = Lengths::Hostile);
        // More ties than fit, rows of the longer blocks, and rows where a sample is ranked first.
        let long = plain(2, 60_000, 700).with(|case| {
            case.lengths = Lengths::Absent;
            case.scores = Scores::Ties;
        });
        let longer = plain(3, 4500, 512).with(|case| case.index = Index::Paged);
        // More equal scores than candidate slots: the row is ranked as a whole, and the choice
        // takes more than one part of it.
        let whole = plain(2, 1500, 200).with(|case| {
            case.lengths = Lengths::Absent;
            case.scores = Scores::Equal;
        });
        let sampled = plain(2, 3001, 40).with(|case| case.lengths = Lengths::Absent);
        // The same, with chosen scores after more equal scores than are chosen. The last column is
        // one of them, the only one in the last round of its part.
        let behind = plain(3, 1025, 950).with(|case| {
            case.lengths = Lengths::Absent;
            case.scores = Scores::NotFinite;
        });
        // Rows of the longest blocks with scores in all bins. The second row does not allow vector
        // loads.
        let longest = plain(2, 33_001, 300).with(|case| case.lengths = Lengths::Absent);
        // More equal scores than are chosen, at the end of the order, in a row where threads mark
        // several words each.
        let many = plain(1, 33_001, 1024).with(|case| {
            case.lengths = Lengths::Absent;
            case.scores = Scores::NotFinite;
        });
        // The longest row that has a bit for each column in shared memory.
        let marked = plain(1, 1 << 17, 40).with(|case| case.lengths = Lengths::Absent);
        // The largest score is the last, in a separate tile.
        let last = plain(3, 1025, 64).with(|case| {
            case.lengths = Lengths::Absent;
            case.scores = Scores::Sorted;
        });
        let scores =
            [Scores::Ties, Scores::Close, Scores::Equal, Scores::Sorted, Scores::NotFinite];
        let mut cases = vec![
            plain(0, 64, 4),
            plain(4, 1, 1),
            plain(3, 65, 64),
            plain(3, 100, 300),
            all,
            hostile,
            long,
            longer,
            whole,
            sampled,
            behind,
            longest,
            many,
            marked,
            last,
        ];
        cases.extend(scores.map(|scores| {
            plain(5, 1030, 200).with(|case| {
                case.scores = scores;
                case.index = Index::Offset;
            })
        }));
        if profile == Profile::Full {
            cases.extend([
                plain(300, 16_384, 512),
                plain(2, launcher::MAX_COLUMNS, launcher::MAX_TOPK),
            ]);
        }
        cases
    }

    fn amend(c: &TopkCase, tensors: &mut Tensors) -> OracleResult<()> {
        tensors.set("scores", &draw_scores(c, &tensors.values("scores")));
        let offset = |draw: &mut Draw| draw.rng().random_range(-5..1 << 28);
        let mut draw = Draw::new(c.data.seed, "offsets");
        match c.index {
            Index::Column => {}
            Index::Offset => tensors.set_i32s(
                "offsets",
                &(0..c.num_rows).map(|_| offset(&mut draw)).collect::<Vec<_>>(),
            ),
            Index::Paged => tensors.set_i32s("block_table", &draw_pages(c)),
        }
        if c.lengths != Lengths::Absent {
            tensors.set_i32s("lengths", &draw_lengths(c));
        }
        Ok(())
    }

    fn forward(c: &TopkCase, t: &Bound<'_>, _: &mut Rounding) -> OracleResult<Named> {
        let index = match c.index {
            Index::Paged => reference::Index::Paged { page_size: c.page_size },
            _ => reference::Index::Column,
        };
        let chosen = reference::forward(&t.named()?, c.topk, index)?;
        let indices = Named::new().with("indices", chosen.tensor("indices")?.clone());
        Ok(if c.with_values { chosen } else { indices })
    }

    fn launch(c: &TopkCase, v: &Views, run: &mut Launches<'_>) -> Result<(), RuntimeError> {
        run.launch(|device| launcher::forward(device, v, c.page_size))
    }

    fn invariant(_: &TopkCase, _: bool) -> &'static [BatchAxis] {
        BatchAxis::OF_ROWS
    }

    fn laws(_: &TopkCase, laws: &mut Laws<'_, Self>) {
        laws.separate("num_rows", "rows may be permuted");
        laws.scale(
            "a power of two moves no score past another",
            "scores",
            0.5,
            &[("indices", 1.0), ("values", 0.5)],
        );
    }

    /// The indexer's selections: of a prefill, and of a decode with long contexts.
    fn benchmarks(environment: &Environment) -> Vec<Benchmark<Self>> {
        let gpu = [(4096, 16_384, 512), (4096, 8192, 1024), (128, 16_384, 512), (32, 65_536, 512)];
        let shapes = if on_gpu(environment) { &gpu[..] } else { &[(8, 2048, 64)] };
        let benchmark = |&(num_rows, num_columns, topk): &(usize, usize, usize)| {
            let case = TopkCase {
                lengths: Lengths::Absent,
                with_values: false,
                ..plain(num_rows, num_columns, topk)
            };
            let name = format!("{topk} of {num_columns}, {num_rows} rows");
            Benchmark::new(Direction::Forward, name, case, "num_rows").streaming(&[], 0.0)
        };
        shapes.iter().map(benchmark).collect()
    }

    fn reduced_benchmarks() -> Vec<Reduced> {
        vec![Reduced::forward(
            &["512 of 16384, 4096 rows"],
            json!({"num_rows": 11, "num_columns": 300, "topk": 40}),
            json!({"num_rows": 3}),
        )]
    }
}

fn draw_scores(c: &TopkCase, drawn: &[f64]) -> Vec<f64> {
    let mut draw = Draw::new(c.data.seed, "scores");
    let bad = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY];
    let score = |(at, &drawn): (usize, &f64)| {
        let (row, column) = (at / c.num_columns, at % c.num_columns);
        match c.scores {
            Scores::Drawn => drawn,
            Scores::Ties => [-0.0, 0.0, 1.0, -1.0, 2.0, 2.0][draw.rng().random_range(0..6)],
            Scores::Close => {
                f64::from(f32::from_bits(0x3f80_0000 + draw.rng().random_range(0..5000u32)))
            }
            Scores::Equal => c.data.magnitude,
            Scores::Sorted if row % 2 == 0 => column as f64 - 300.0,
            Scores::Sorted => 300.0 - column as f64,
            Scores::NotFinite if draw.rng().random_ratio(1, 5) => {
                bad[draw.rng().random_range(0..bad.len())]
            }
            Scores::NotFinite => drawn,
        }
    };
    drawn.iter().enumerate().map(score).collect()
}

/// Around `topk`, and anything up to the columns; or invalid values.
fn draw_lengths(c: &TopkCase) -> Vec<i32> {
    let mut draw = Draw::new(c.data.seed, "lengths");
    let (columns, topk) = (c.num_columns as i32, c.topk as i32);
    let values = [-1, 0, columns + 1, i32::MIN, i32::MAX];
    let mut hostile = Hostile::new(c.data.seed, "lengths", &values);
    let around = [topk - 1, topk, topk + 1];
    (0..c.num_rows)
        .map(|row| match (c.lengths, row % 3) {
            (Lengths::Hostile, 0) => hostile.take(),
            (_, 1) => around[row / 3 % around.len()].clamp(0, columns),
            _ => draw.rng().random_range(0..=columns),
        })
        .collect()
}

/// Distinct pages in any order; every fifth does not exist.
fn draw_pages(c: &TopkCase) -> Vec<i32> {
    let mut draw = Draw::new(c.data.seed, "block_table");
    let mut pages: Vec<i32> = (0..2 * c.num_pages() as i32).collect();
    let mut table = Vec::with_capacity(c.num_rows * c.num_pages());
    for row in 0..c.num_rows {
        pages.shuffle(draw.rng());
        let page = |(at, &page): (usize, &i32)| if (row + at) % 5 == 4 { -1 - page } else { page };
        table.extend(pages.iter().take(c.num_pages()).enumerate().map(page));
    }
    table
}
