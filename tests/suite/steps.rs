//! A declared operator whose forward is several launches on one state. It writes a sequence to the
//! paged cache chunk by chunk, and what is final is frozen between the steps. The operator and its
//! planted errors exist only in this test.

use std::collections::BTreeSet;

use candle_core::Tensor;
use dsv4_kernels::cache::kv_cache::RowFormat;
use dsv4_kernels::cache::kv_cache_write as launcher;
use dsv4_parity::case::Draw;
use dsv4_parity::judge::checks::{self, CheckOptions, Outcome};
use dsv4_parity::operator::declaration::{observed, state};
use dsv4_parity::operator::golden_file::GoldenFile;
use dsv4_parity::operator::prelude::*;
use dsv4_parity::operator::{AnyOperator, Relation};
use dsv4_reference::cache::kv_cache_write as reference;
use dsv4_runtime::{HostTensor, TensorView};
use rand::Rng;

use crate::support;

const FORMAT: RowFormat = RowFormat { nope_dim: 64, rope_dim: 64 };
const LAW: &str = "law: in chunks equals at once";

struct WriteInChunks;

/// What happens at the border between two chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Border {
    /// Nothing.
    Right,
    /// A chunk skips its first token.
    TokenLeftOut,
    /// A chunk starts in the slot of the token before it, which was final.
    SlotOfTheTokenBefore,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Chunks {
    /// Tokens of each step.
    chunks: Vec<usize>,
    num_pages: usize,
    page_size: usize,
    border: Border,
    /// Whether the state is observed and an extra output is written: all slots of a cache without a
    /// past.
    observes: bool,
    seed: u64,
}

impl Chunks {
    fn plain(chunks: &[usize], page_size: usize) -> Self {
        Self {
            chunks: chunks.to_vec(),
            num_pages: 5,
            page_size,
            border: Border::Right,
            observes: false,
            seed: 1,
        }
    }

    fn num_tokens(&self) -> usize {
        self.chunks.iter().sum()
    }

    /// First token, first slot and number of tokens that a step actually writes, where it should
    /// write `len` tokens from `from` on.
    fn step(&self, from: usize, len: usize) -> [usize; 3] {
        match self.border {
            Border::TokenLeftOut if from > 0 && len > 0 => [from + 1, from + 1, len - 1],
            Border::SlotOfTheTokenBefore if from > 0 => [from, from - 1, len],
            _ => [from, from, len],
        }
    }

    /// What no later step may change once `tokens` tokens are written: whole pages, then data and
    /// scales of the rows of a partial page.
    fn finished(&self, cache: &TensorView, tokens: usize) -> Result<Vec<TensorView>, RuntimeError> {
        let (pages, rows) = (tokens / self.page_size, tokens % self.page_size);
        let mut views = vec![cache.narrow(0, 0, pages)?];
        if rows > 0 {
            let page = cache.narrow(0, pages, 1)?;
            views.push(page.narrow(1, 0, rows * FORMAT.data_bytes())?);
            views.push(page.narrow(
                1,
                self.page_size * FORMAT.data_bytes(),
                rows * FORMAT.scale_bytes(),
            )?);
        }
        Ok(views)
    }
}

impl Operator for WriteInChunks {
    type Case = Chunks;

    const ABOUT: About = About {
        name: "write_in_chunks",
        family: Family::Cache,
        summary: "a sequence written to the paged cache chunk by chunk",
        specification: &["inference 8.3"],
        paths: &["kv_cache_write"],
        modules: launcher::modules,
        cases: [0, 0, 0],
    };

    const GOLDEN: &'static [&'static str] = &["chunks"];

    fn tensors(c: &Chunks) -> Specs {
        let tokens = [axis("num_tokens", c.num_tokens()), axis("head_dim", FORMAT.head_dim())];
        let pages =
            [axis("num_pages", c.num_pages), axis("page_bytes", c.page_size * FORMAT.row_bytes())];
        let both = [axis("num_pages_of_both", 2 * c.num_pages), pages[1]];
        Specs::new(
            c.seed,
            [
                input("kv", DType::Bf16, &tokens).aligned_rows().drawn(Distribution::Normal, 1.0),
                input("slots", DType::I32, &tokens[..1]),
                state("cache", DType::U8, &pages).aligned_rows(),
                output("fresh", DType::U8, &pages).aligned_rows().when(c.observes),
                observed("pages_of_both", DType::U8, &both).exact().when(c.observes),
            ],
        )
    }

    fn check(c: &Chunks) -> Result<(), Refused> {
        let num_slots = c.num_pages * c.page_size;
        if c.num_tokens() > num_slots || c.observes && c.num_tokens() < num_slots {
            return refuse("chunks", format!("{:?} do not fit {num_slots} slots", c.chunks));
        }
        Ok(())
    }

    fn strategy(_: Profile) -> BoxedStrategy<Chunks> {
        Just(Chunks::plain(&[3, 2], 4)).boxed()
    }

    fn typical() -> Vec<Chunks> {
        vec![Chunks::plain(&[3, 2, 0, 6, 4], 4)]
    }

    fn edge_cases(_: Profile) -> Vec<Chunks> {
        let full = Chunks { observes: true, ..Chunks::plain(&[7, 5, 8], 4) };
        vec![
            Chunks::plain(&[1; 7], 2),
            Chunks::plain(&[4, 4, 5], 4),
            Chunks::plain(&[17, 14], 7),
            full,
        ]
    }

    fn amend(c: &Chunks, tensors: &mut Tensors) -> OracleResult<()> {
        tensors.set_i32s("slots", &(0..c.num_tokens() as i32).collect::<Vec<_>>());
        let mut draw = Draw::new(c.seed, "before");
        tensors
            .bytes_mut("cache")
            .into_iter()
            .flatten()
            .for_each(|byte| *byte = draw.rng().random());
        Ok(())
    }

    /// All at once: the oracle has no chunks.
    fn forward(c: &Chunks, t: &Bound<'_>, _: &mut Rounding) -> OracleResult<Named> {
        let cache = t.host().tensor("cache");
        let inputs = reference::Inputs {
            kv: t.f64("kv")?,
            slots: t.host().i32s("slots"),
            format: dsv4_reference::cache::kv_cache::RowFormat {
                nope_dim: FORMAT.nope_dim,
                rope_dim: FORMAT.rope_dim,
            },
            page_size: c.page_size,
            pages: cache.bytes.clone(),
        };
        let pages: Vec<f64> = reference::forward(&inputs)?.into_iter().map(f64::from).collect();
        let pages = Tensor::from_vec(pages, cache.shape.as_slice(), &candle_core::Device::Cpu)?;
        Ok(Named::new().with("cache", pages.clone()).maybe("fresh", c.observes.then_some(pages)))
    }

    fn launch(c: &Chunks, v: &Views, run: &mut Launches<'_>) -> Result<(), RuntimeError> {
        let mut written = 0;
        for &len in &c.chunks {
            let [token, slot, count] = c.step(written, len);
            let (kv, slots) =
                (v["kv"].narrow(0, token, count)?, v["slots"].narrow(0, slot, count)?);
            let step = Views::from([("kv", &kv), ("slots", &slots), ("cache", &v["cache"])]);
            run.launch(|device| launcher::forward(device, &step, FORMAT, c.page_size))?;
            written += len;
            for view in c.finished(&v["cache"], written)? {
                run.freeze(&view)?;
            }
        }
        if let Some(fresh) = v.get("fresh") {
            let all = v.only(&["kv", "slots"]).with("cache", fresh);
            let path = launcher::forward(run.device(), &all, FORMAT, c.page_size)?;
            run.ran(path);
        }
        Ok(())
    }

    fn observe(
        _: &Chunks,
        _: &Tensors,
        written: &Tensors,
        _: Conventions,
    ) -> Vec<(&'static str, HostTensor)> {
        let Some(fresh) = written.get("fresh") else { return Vec::new() };
        let cache = written.tensor("cache");
        let shape = vec![2 * cache.shape[0], cache.shape[1]];
        let bytes = [&cache.bytes[..], &fresh.bytes].concat();
        vec![("pages_of_both", HostTensor { dtype: DType::U8, shape, bytes })]
    }

    fn laws(c: &Chunks, laws: &mut Laws<'_, Self>) {
        let whole = vec![c.num_tokens()];
        laws.alike("in chunks equals at once", Relation::Times(1.0), |v| v.case.chunks = whole);
    }

    fn golden(file: &mut Reading<'_>) -> Result<Vec<Golden<Chunks>>, String> {
        let plain = || Chunks::plain(&[3, 4], 4);
        let case = || Golden::new(plain());
        Ok(match file.config("made").as_str() {
            Some("whole") => vec![case()],
            Some("spared") => vec![case().kernel_skips(Some(("it is too long".into(), plain())))],
            _ => Vec::new(),
        })
    }
}

#[test]
fn a_golden_file_of_a_declared_kind_is_a_case_that_the_kernels_run_unless_their_declaration_refuses_it()
 {
    let made_of = |name: &str| {
        let operator = dsv4_parity::operator::golden_file::kind_of(name).to_owned();
        let config = serde_json::json!({ "made": name.split_once("__").expect("a kind").1 });
        let (name, tensors) = (name.to_owned(), Default::default());
        let made = AnyOperator::of::<WriteInChunks>().golden(&GoldenFile {
            name,
            operator,
            config,
            tensors,
        });
        made.map(|cases| cases.len()).map_err(|error| error.to_string())
    };
    assert_eq!((made_of("chunks__whole"), made_of("pages__whole")), (Ok(1), Ok(0)));
    let unmatched = made_of("chunks__renamed").unwrap_err();
    assert!(
        unmatched.contains("chunks__renamed is about `write_in_chunks`, which makes no case"),
        "{unmatched}"
    );
    let spared = made_of("chunks__spared").unwrap_err();
    assert!(spared.contains("left out of the kernels, which take it: it is too long"), "{spared}");
}

/// Every edge case, and the typical one in every layout, with this border.
fn outcomes(border: Border) -> Vec<Outcome> {
    let operator = AnyOperator::of::<WriteInChunks>();
    let check = |mut line: dsv4_parity::case::Case| {
        line.fields.insert("border".into(), serde_json::json!(border));
        let prepared = operator.prepare(&line).expect("a sound case");
        checks::run(&*prepared, support::device(), CheckOptions::of_kernels(2))
    };
    operator.edge_cases(Profile::Quick).into_iter().map(check).collect()
}

fn failed(outcome: &Outcome) -> BTreeSet<&str> {
    outcome.failures().map(|check| check.check.as_str()).collect()
}

#[test]
fn a_state_written_in_steps_is_what_the_oracle_writes_at_once_in_every_layout() {
    let outcomes = outcomes(Border::Right);
    assert!(outcomes.len() >= 5, "{} cases: layouts are missing", outcomes.len());
    for outcome in outcomes {
        assert!(outcome.passed(), "{:?}", outcome.failures().collect::<Vec<_>>());
        for check in ["forward", "inputs_unchanged", LAW] {
            assert!(
                outcome.checks.iter().any(|record| record.check == check),
                "`{check}` was not made"
            );
        }
        assert!(outcome.paths.len() > 1, "one launch is no sequence of steps");
    }
}

#[test]
fn a_token_left_out_at_a_chunk_border_is_seen_by_the_oracle_and_by_the_law() {
    for outcome in outcomes(Border::TokenLeftOut) {
        let failed = failed(&outcome);
        assert!(failed.contains("forward") && failed.contains(LAW), "{failed:?}");
        assert!(!failed.contains("inputs_unchanged"), "{failed:?}");
    }
}

#[test]
fn a_step_that_changes_what_was_final_is_seen_between_the_steps() {
    for outcome in outcomes(Border::SlotOfTheTokenBefore) {
        let failed = failed(&outcome);
        assert!(
            ["forward", "inputs_unchanged", LAW].iter().all(|check| failed.contains(check)),
            "{failed:?}"
        );
        let frozen = outcome.failures().find(|check| check.check == "inputs_unchanged");
        assert_eq!(frozen.map(|check| check.tensor.as_str()), Some("cache"));
    }
}

#[test]
fn an_output_beside_a_state_that_is_observed_stays_compared() {
    let observing = outcomes(Border::Right)
        .into_iter()
        .filter(|outcome| outcome.checks.iter().any(|c| c.tensor == "fresh"));
    let observing: Vec<Outcome> = observing.collect();
    assert_eq!(observing.len(), 1);
    let forward = observing[0].checks.iter().filter(|check| check.check == "forward");
    assert_eq!(
        forward.map(|check| check.tensor.as_str()).collect::<Vec<_>>(),
        ["fresh", "pages_of_both"]
    );
}
