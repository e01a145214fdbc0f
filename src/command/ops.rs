//! `parity ops`.

use anyhow::{Result, bail};
use clap::Args;

use super::{Exit, output};
use crate::case::Case;
use crate::external::definition::definition;
use crate::operator::AnyOperator;
use crate::operators::registry;
use crate::record::family::Family;
use crate::record::{BatchAxis, InvariantRecord, OperatorRecord, TensorRecord};
use crate::specification::Citation;

/// Options of `parity ops`.
#[derive(Debug, Args)]
#[command(after_help = "\
A case to start from: parity replay \"$(parity ops rope --example)\"")]
pub struct OpsArguments {
    /// Operators to describe: files, types, axes, tensors; without one all are listed, a line each
    #[arg(value_name = "NAME")]
    names: Vec<String>,
    /// Print a case of each operator, which `parity replay` runs, as one line of JSON
    #[arg(long)]
    example: bool,
    /// Print which operators declare batch invariance, by axis: of all cases, of those that take
    /// the invariant path, or of some
    #[arg(long, conflicts_with = "example")]
    invariance: bool,
    /// Print a Definition of FlashInfer-Bench's format, whose Solutions `parity external --solution`
    /// judges: the forward of an operator, for calls like the example, or like --case
    #[arg(long, conflicts_with_all = ["example", "invariance", "json"])]
    trace_definition: bool,
    /// The case whose types, options and sizes the Definition fixes, as one line of JSON
    #[arg(long, value_name = "CASE", requires = "trace_definition")]
    case: Option<String>,
    /// Print JSON
    #[arg(long, conflicts_with_all = ["example", "invariance"])]
    json: bool,
}

/// Lists operators.
pub fn execute(arguments: &OpsArguments) -> Result<Exit> {
    let operators = match &arguments.names[..] {
        [] => registry::OPERATORS.to_vec(),
        names => names.iter().map(|name| registry::find(name)).collect::<Result<_, _>>()?,
    };
    if arguments.example {
        for operator in operators {
            outln!("{}", operator.example().line());
        }
        return Ok(Exit::Agreed);
    }
    if arguments.trace_definition {
        return trace_definition(arguments, &operators);
    }
    if arguments.invariance {
        matrix(&operators);
        return Ok(Exit::Agreed);
    }
    if arguments.names.is_empty() && !arguments.json {
        list(&operators);
        return Ok(Exit::Agreed);
    }
    let records: Vec<_> = operators.iter().map(|operator| operator.describe()).collect();
    if arguments.json {
        output::json(&records)?;
    } else {
        records.iter().for_each(describe);
    }
    Ok(Exit::Agreed)
}

/// Prints the Definition of an operator.
fn trace_definition(arguments: &OpsArguments, operators: &[&'static AnyOperator]) -> Result<Exit> {
    let ([_], [operator]) = (&arguments.names[..], operators) else {
        bail!("--trace-definition is about one operator: parity ops NAME --trace-definition");
    };
    let case = match &arguments.case {
        Some(line) => Case::parse(line)?,
        None => operator.example(),
    };
    if case.operator != operator.name() {
        bail!("--case is about `{}`, not about `{}`", case.operator, operator.name());
    }
    operator.check(&case)?;
    output::json(&definition(operator, &case)?)?;
    Ok(Exit::Agreed)
}

/// A line for each operator, family by family, truncated to the width of the terminal, if output is
/// a terminal.
fn list(operators: &[&AnyOperator]) {
    let width = terminal_size::terminal_size().map(|(width, _)| usize::from(width.0));
    let names = operators.iter().map(|operator| operator.name().len()).max().unwrap_or(0);
    for (place, family) in Family::ALL.into_iter().enumerate() {
        let gap = if place == 0 { "" } else { "\n" };
        outln!("{gap}{}: {}", output::strong(family.name()), family.summary());
        for operator in operators.iter().filter(|operator| operator.family() == family) {
            let line = format!("  {:names$}  {}", operator.name(), operator.summary());
            outln!("{}", width.map_or_else(|| line.clone(), |width| cut(&line, width)));
        }
    }
    detailln!("\n{} operators; parity ops NAME describes one", operators.len());
}

/// A line for each operator: on which axes it declares batch invariance.
fn matrix(operators: &[&AnyOperator]) {
    let names = operators.iter().map(|operator| operator.name().len()).max().unwrap_or(0);
    let cells = |name: &str, cells: Vec<&str>| {
        let columns = BatchAxis::ALL.map(|axis| axis.name().len());
        let cells = cells.iter().zip(columns).map(|(cell, width)| format!("{cell:width$}"));
        let line = format!("{name:names$}  {}", cells.collect::<Vec<_>>().join("  "));
        outln!("{}", line.trim_end());
    };
    cells("", BatchAxis::ALL.map(BatchAxis::name).to_vec());
    for operator in operators {
        let declared = operator.describe().invariant;
        let cell = |axis: BatchAxis| match declared.iter().find(|record| record.axis == axis) {
            None => "-",
            Some(record) if record.always => "all",
            Some(record) if record.by_path => "path",
            Some(_) => "some",
        };
        cells(operator.name(), BatchAxis::ALL.map(cell).to_vec());
    }
}

/// The line within this many columns, with an ellipsis where it is truncated.
fn cut(line: &str, width: usize) -> String {
    if line.chars().count() <= width {
        return line.to_owned();
    }
    line.chars().take(width.saturating_sub(1)).collect::<String>().trim_end().to_owned() + "…"
}

/// Everything about an operator.
fn describe(record: &OperatorRecord) {
    outln!("{}: {}", output::strong(&record.name), record.summary);
    for (place, citation) in record.specification.iter().enumerate() {
        outln!(
            "    {:<13}  {}",
            if place == 0 { "specification" } else { "" },
            with_title(citation)
        );
    }
    if let Some(family) = record.family {
        outln!("    family         {family}, {}", family.summary());
    }
    outln!("    kernel         {}", record.kernel_file);
    outln!("    oracle         {}", record.oracle_file);
    outln!("    types          {}", record.dtypes.join(", "));
    outln!("    axes           {}", record.axes.join(", "));
    outln!("    backward       {}", if record.has_backward { "yes" } else { "no" });
    let invariant: Vec<String> = record.invariant.iter().map(InvariantRecord::words).collect();
    if !invariant.is_empty() {
        outln!("    invariant      {}", invariant.join(", "));
    }
    for [name, meaning] in &record.conventions {
        outln!("    convention     {name}: {meaning}");
    }
    for what in &record.not_expressible {
        outln!("    not expressible: {what}");
    }
    record.tensors.iter().for_each(print_tensor);
}

/// A citation and the title of its section.
fn with_title(citation: &str) -> String {
    let section = citation.parse::<Citation>().ok().and_then(|citation| citation.section());
    section.map_or_else(|| citation.to_owned(), |section| format!("{citation}, {}", section.title))
}

/// A line for a tensor: description, axes and types, the layouts that the kernels accept, and the
/// comparison.
fn print_tensor(tensor: &TensorRecord) {
    let of = tensor.of.as_ref().map(|of| format!(" of {of}")).unwrap_or_default();
    let sometimes = match &tensor.when {
        _ if tensor.always => String::new(),
        Some(when) => format!(", in some cases ({when})"),
        None => ", in some cases".to_owned(),
    };
    let compared =
        tensor.compared.as_ref().map(|how| format!("; compared {how}")).unwrap_or_default();
    outln!(
        "    {:<14} {} {}, {}{of}{sometimes}, {}{compared}",
        tensor.name,
        tensor.dtypes.join("|"),
        format_args!("[{}]", tensor.axes.join(", ")),
        tensor.part,
        tensor.layouts,
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_cut_at_the_width_of_the_terminal_and_shows_it() {
        assert_eq!(cut("sink · heads", 12), "sink · heads");
        assert_eq!(cut("sink · heads", 11), "sink · hea…");
        assert_eq!(cut("sink · heads", 8), "sink ·…");
    }
}
