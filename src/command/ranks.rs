//! `parity ranks`.

use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Args;
use dsv4_runtime::Device;
use dsv4_runtime::world::crew::Means;
use serde_json::json;

use super::{DeviceArguments, Exit, command_line, output};
use crate::operators::ranks::MOST_RANKS;
use crate::parallel_time::{self, Row, Shape};
use crate::report::beside::log;
use crate::report::parallel_time::{self as pages, Place};

const MOST: i64 = MOST_RANKS as i64;

/// Options of `parity ranks`.
#[derive(Debug, Args)]
pub struct RanksArguments {
    /// Numbers of ranks
    #[arg(long, value_name = "N,M", value_delimiter = ',', default_value = "2", value_parser = clap::value_parser!(u16).range(1..=MOST))]
    ranks: Vec<u16>,
    /// Tokens of all ranks together: queries, and as many keys
    #[arg(long, value_name = "N,M", value_delimiter = ',', default_value = "32768,131072", value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    tokens: Vec<u32>,
    /// Heads
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u16).range(1..=1024))]
    heads: u16,
    /// Slots of a token's list
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = clap::value_parser!(u16).range(1..=4096))]
    topk: u16,
    /// Samples of each time
    #[arg(long, value_name = "N", default_value_t = 9, value_parser = clap::value_parser!(u16).range(1..=1000))]
    samples: u16,
    /// Also write a page
    #[arg(long, value_name = "FILE")]
    markdown: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    pub(super) device: DeviceArguments,
}

/// Times the attention of ranks, its kernels alone, and its collectives alone.
pub fn execute(arguments: &RanksArguments) -> Result<Exit> {
    let device = arguments.device.open()?;
    let samples = usize::from(arguments.samples);
    let (mut rows, mut differences) = (Vec::new(), Vec::new());
    for &ranks in &arguments.ranks {
        for &tokens in &arguments.tokens {
            let shape = Shape {
                ranks: ranks.into(),
                tokens: tokens as usize,
                heads: arguments.heads.into(),
                topk: arguments.topk.into(),
            };
            let measured = parallel_time::measure(&device, shape, samples);
            let what = || format!("{tokens} tokens of {ranks} ranks");
            let measured = measured.with_context(what)?;
            rows.extend(measured.rows);
            let of_shape = |difference| format!("{}: {difference}", what());
            differences.extend(measured.differences.into_iter().map(of_shape));
        }
    }
    for difference in &differences {
        errln!("{} {difference}", output::bad("wrong:"));
    }
    if !differences.is_empty() {
        // Times of wrong results are none.
        return Ok(Exit::Disagreed);
    }
    if let Some(path) = &arguments.markdown {
        let page = pages::page(&place(&device, arguments)?, &rows);
        std::fs::write(path, page).with_context(|| format!("writing {}", path.display()))?;
    }
    if arguments.json {
        output::json(&rows.iter().map(as_json).collect::<Vec<_>>())?;
        return Ok(Exit::Agreed);
    }
    out!("{}", pages::table(&rows));
    detailln!("\n{}", output::faint(pages::LEGEND));
    Ok(Exit::Agreed)
}

fn as_json(row: &Row) -> serde_json::Value {
    let measured = serde_json::to_value(row).unwrap_or_default();
    json!({ "measured": measured, "ratio": row.ratio(), "hidden": row.hidden(), "bytes_per_second": row.rate() })
}

fn place(device: &Device, arguments: &RanksArguments) -> Result<Place> {
    let environment = device.environment();
    let mut worlds = Vec::new();
    for &ranks in &arguments.ranks {
        let world = match device.means(ranks.into())? {
            Some(Means::Nccl) => dsv4_runtime::cuda::nccl::find()?,
            _ => "shared memory".to_owned(),
        };
        worlds.push(format!("{ranks} by {world}"));
    }
    Ok(Place {
        command: command_line().join(" "),
        device: environment.device.clone(),
        software: format!("{}, {}", environment.driver, environment.compiler),
        world: worlds.join("; "),
        revision: log::revision(),
        unix: log::now(),
        samples: arguments.samples.into(),
    })
}
