//! `parity completions`.

use anyhow::{Context, Result};
use clap::{Args, CommandFactory as _};
use clap_complete::Shell;

use super::{Arguments, Exit};

/// Options of `parity completions`.
#[derive(Debug, Args)]
#[command(after_help = "\
Where shells look for them:
  bash  ~/.local/share/bash-completion/completions/parity
  zsh   _parity in a folder of $fpath
  fish  ~/.config/fish/completions/parity.fish")]
pub struct CompletionsArguments {
    /// Shell to complete in
    #[arg(value_enum, value_name = "SHELL")]
    shell: Shell,
}

/// Prints the completions.
pub fn execute(arguments: &CompletionsArguments) -> Result<Exit> {
    let mut script = Vec::new();
    clap_complete::generate(arguments.shell, &mut Arguments::command(), "parity", &mut script);
    out!("{}", String::from_utf8(script).context("the completions are not UTF-8")?);
    Ok(Exit::Agreed)
}
