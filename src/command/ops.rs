//! `parity ops`.

use anyhow::Result;
use clap::Args;

use super::Exit;
use crate::operator::registry;
use crate::record::TensorRecord;
use crate::specification::Citation;

/// Options of `parity ops`.
#[derive(Debug, Args)]
pub struct OpsArguments {
    /// Operators to describe, with their tensors; all, without, when there is none
    #[arg(value_name = "NAME")]
    names: Vec<String>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Lists operators.
pub fn execute(arguments: &OpsArguments) -> Result<Exit> {
    let operators = match &arguments.names[..] {
        [] => registry::OPERATORS.to_vec(),
        names => names.iter().map(|name| registry::find(name)).collect::<Result<_, _>>()?,
    };
    let records: Vec<_> = operators.iter().map(|operator| operator.describe()).collect();
    if arguments.json {
        outln!("{}", serde_json::to_string_pretty(&records)?);
        return Ok(Exit::Agreed);
    }
    for record in records {
        outln!("{}: {}", record.name, record.summary);
        for (place, citation) in record.specification.iter().enumerate() {
            outln!("    {:<13}  {}", if place == 0 { "specification" } else { "" }, with_title(citation));
        }
        outln!("    kernel         {}", record.kernel_file);
        outln!("    oracle         {}", record.oracle_file);
        outln!("    types          {}", record.dtypes.join(", "));
        outln!("    axes           {}", record.axes.join(", "));
        outln!("    backward       {}", if record.has_backward { "yes" } else { "no" });
        if !arguments.names.is_empty() {
            record.tensors.iter().for_each(print_tensor);
        }
    }
    Ok(Exit::Agreed)
}

/// A citation and what its section is called.
fn with_title(citation: &str) -> String {
    let section = citation.parse::<Citation>().ok().and_then(|citation| citation.section());
    section.map_or_else(|| citation.to_owned(), |section| format!("{citation}, {}", section.title))
}

/// A line for a tensor: what it is, its axes and types, the layouts that the kernels take, how it is compared.
fn print_tensor(tensor: &TensorRecord) {
    let of = tensor.of.as_ref().map(|of| format!(" of {of}")).unwrap_or_default();
    let sometimes = match &tensor.when {
        _ if tensor.always => String::new(),
        Some(when) => format!(", in some cases ({when})"),
        None => ", in some cases".to_owned(),
    };
    let compared = tensor.compared.as_ref().map(|how| format!("; compared {how}")).unwrap_or_default();
    outln!(
        "    {:<14} {} {}, {}{of}{sometimes}, {}{compared}",
        tensor.name,
        tensor.dtypes.join("|"),
        format_args!("[{}]", tensor.axes.join(", ")),
        tensor.part,
        tensor.layouts,
    );
}
