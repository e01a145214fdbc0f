//! `parity ops`.

use anyhow::Result;
use clap::Args;

use super::Exit;
use crate::registry;
use crate::specification::Citation;

/// Options of `parity ops`.
#[derive(Debug, Args)]
pub struct OpsArguments {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Lists operators.
pub fn execute(arguments: &OpsArguments) -> Result<Exit> {
    let records: Vec<_> = registry::OPERATORS.iter().map(|operator| operator.describe()).collect();
    if arguments.json {
        println!("{}", serde_json::to_string_pretty(&records)?);
        return Ok(Exit::Agreed);
    }
    for record in records {
        println!("{}: {}", record.name, record.summary);
        for (place, citation) in record.specification.iter().enumerate() {
            println!("    {:<13}  {}", if place == 0 { "specification" } else { "" }, with_title(citation));
        }
        println!("    kernel         {}", record.kernel_file);
        println!("    oracle         {}", record.oracle_file);
        println!("    types          {}", record.dtypes.join(", "));
        println!("    axes           {}", record.axes.join(", "));
        println!("    backward       {}", if record.has_backward { "yes" } else { "no" });
    }
    Ok(Exit::Agreed)
}

/// A citation and what its section is called.
fn with_title(citation: &str) -> String {
    let section = citation.parse::<Citation>().ok().and_then(|citation| citation.section());
    section.map_or_else(|| citation.to_owned(), |section| format!("{citation}, {}", section.title))
}
