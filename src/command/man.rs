//! `parity man`.

use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::{Args, CommandFactory as _};

use super::{Arguments, Exit};

/// Options of `parity man`.
#[derive(Debug, Args)]
#[command(after_help = "To read one without installing it: parity man | man -l -")]
pub struct ManArguments {
    /// Folder for parity.1 and one page for each command; without it parity.1 is printed
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

/// Writes the pages, or prints the first.
pub fn execute(arguments: &ManArguments) -> Result<Exit> {
    // The help command has no page.
    let command = Arguments::command().disable_help_subcommand(true);
    let Some(folder) = &arguments.out else {
        let mut page = Vec::new();
        clap_mangen::Man::new(command).render(&mut page).context("making the man page")?;
        out!("{}", String::from_utf8(page).context("the man page is not UTF-8")?);
        return Ok(Exit::Agreed);
    };
    let writing = || format!("--out {}", folder.display());
    std::fs::create_dir_all(folder).with_context(writing)?;
    clap_mangen::generate_to(command, folder).with_context(writing)?;
    outln!("man pages: {}", folder.display());
    Ok(Exit::Agreed)
}
