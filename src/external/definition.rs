//! The formats of FlashInfer-Bench: a Definition of a kind of calls of an operator, Solutions, which
//! are kernels for it, and Traces, which are what was found.
//!
//! A Definition is about one kind of calls: types, options and all sizes but the number of rows are
//! fixed, as a case has them. Numbers such as `eps` are inputs without a shape. Its tags hold what
//! [`Task::read`] needs: the operator, the condition on its cases, and which field each number is.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result, anyhow, bail};
use dsv4_runtime::DType;
use serde::{Deserialize, Serialize, Serializer};
use serde_json::{Map, Value, json};

use crate::calls::fields::{is_whole, leaves};
use crate::calls::observed::{Observer, Seen, hopper};
use crate::calls::signature::{Kind, Signature};
use crate::case::Case;
use crate::case::condition::Condition;
use crate::operator::AnyOperator;
use crate::operator::batches::ROWS;
use crate::operator::declaration::Part;

/// What the tags of this tool start with.
const TAG: &str = "dsv4-parity";

/// A Definition, in the order in which people read it.
#[derive(Debug, Serialize)]
pub struct Definition {
    name: String,
    op_type: &'static str,
    description: String,
    tags: Vec<String>,
    axes: Ordered,
    inputs: Ordered,
    outputs: Ordered,
    reference: String,
}

/// An object whose order counts: Solutions take inputs and outputs in it.
#[derive(Debug)]
struct Ordered(Vec<(String, Value)>);

impl Serialize for Ordered {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(name, value)| (name, value)))
    }
}

/// The Definition of the calls that are like a case's forward.
///
/// # Errors
/// An operator that writes a cache or another state, or of several ranks, which the format cannot
/// say.
pub fn definition(operator: &'static AnyOperator, case: &Case) -> Result<Definition> {
    if operator.has_ranks() {
        bail!("{} is of several ranks; a Definition is of one", operator.name());
    }
    let call = operator.call(case)?;
    let observed = Observer::new(hopper()).observe(&call)?;
    let (given, written): (Vec<&Seen>, Vec<&Seen>) =
        (observed.given(0).collect(), observed.written(0).collect());
    if let Some(state) = given.iter().find(|seen| seen.spec.part == Part::State) {
        let (name, operator) = (state.spec.name, operator.name());
        bail!("{operator} writes over `{name}`; a Definition has inputs and outputs alone");
    }
    // The one that may vary.
    let has = |axis: &&str| given.iter().any(|seen| seen.spec.axis(axis).is_some());
    let rows = ROWS.into_iter().find(has);
    let Fields { numbers, condition } = Fields::of(operator, case, rows)?;
    let axes = axes(given.iter().chain(&written), rows)?;
    let input = |number: &Number| (number.keyword.clone(), number.input());
    let tensors = |all: &[&Seen]| all.iter().map(|seen| tensor(seen)).collect::<Vec<_>>();
    let inputs = [tensors(&given), numbers.iter().map(input).collect()].concat();
    let names: Vec<&str> = inputs.iter().map(|(name, _)| name.as_str()).collect();
    let digest = &blake3::hash(condition.as_bytes()).to_hex()[..8];
    let mut tags = vec![format!("{TAG}:operator:{}", operator.name())];
    tags.push(format!("{TAG}:where:{condition}"));
    tags.extend(numbers.iter().map(|one| format!("{TAG}:field:{}={}", one.keyword, one.path)));
    Ok(Definition {
        name: format!("{}_{digest}", operator.name()),
        op_type: operator.family().name(),
        description: format!("{} ({})", operator.summary(), operator.specification().join(", ")),
        tags,
        axes: Ordered(axes),
        reference: reference(operator, case, &names, &numbers),
        inputs: Ordered(inputs),
        outputs: Ordered(tensors(&written)),
    })
}

/// A number that the caller gives.
struct Number {
    keyword: String,
    path: String,
    whole: bool,
}

impl Number {
    fn input(&self) -> Value {
        let dtype = if self.whole { "int32" } else { "float32" };
        json!({ "shape": null, "dtype": dtype, "description": format!("`{}`", self.path) })
    }
}

/// The fields of a case that are not about data.
struct Fields {
    numbers: Vec<Number>,
    /// That the others have the case's values.
    condition: String,
}

impl Fields {
    fn of(operator: &'static AnyOperator, case: &Case, rows: Option<&str>) -> Result<Self> {
        let (leaves, mut numbers, mut terms) = (leaves(case), Vec::new(), Vec::new());
        for field in Signature::of(operator).fields {
            let Some(value) = leaves.get(&field.path) else { continue };
            let varies = rows == Some(&*field.path) || field.is_implementation();
            match (&field.kind, value) {
                _ if varies || !field.concerns[0] => {}
                (Kind::Number, Value::Number(_)) => numbers.push(Number {
                    whole: is_whole(value),
                    keyword: field.keyword,
                    path: field.path,
                }),
                (Kind::Data, _) => {}
                (_, Value::Array(_) | Value::Object(_)) => {
                    bail!("`{}` is a list, which no condition can hold", field.path)
                }
                _ => terms.push(format!("{} = {}", field.path, literal(value))),
            }
        }
        let condition = if terms.is_empty() { "true".to_owned() } else { terms.join(" and ") };
        Condition::parse(&condition).map_err(|reason| anyhow!("{condition}: {reason}"))?;
        Ok(Self { numbers, condition })
    }
}

/// A value as conditions have it.
fn literal(value: &Value) -> String {
    match value {
        Value::String(word) => format!("'{word}'"),
        value => value.to_string(),
    }
}

fn axes<'s>(
    tensors: impl Iterator<Item = &'s &'s Seen>,
    rows: Option<&str>,
) -> Result<Vec<(String, Value)>> {
    let mut known: Vec<(&str, usize)> = Vec::new();
    for axis in tensors.flat_map(|seen| &seen.spec.axes) {
        match known.iter().find(|(name, _)| *name == axis.name) {
            None => known.push((axis.name, axis.extent)),
            Some((_, extent)) if *extent == axis.extent => {}
            Some(_) => bail!("two tensors have axes `{}` of other sizes", axis.name),
        }
    }
    let described = |(name, extent): (&str, usize)| {
        let axis = match rows == Some(name) {
            true => json!({ "type": "var" }),
            false => json!({ "type": "const", "value": extent }),
        };
        (name.to_owned(), axis)
    };
    Ok(known.into_iter().map(described).collect())
}

fn tensor(seen: &Seen) -> (String, Value) {
    // The format has no unsigned bytes.
    let (dtype, bytes) = match seen.spec.dtype {
        DType::F32 => ("float32", false),
        DType::Bf16 => ("bfloat16", false),
        DType::I32 => ("int32", false),
        DType::I64 => ("int64", false),
        DType::U8 => ("int8", true),
    };
    let shape: Vec<&str> = seen.spec.axes.iter().map(|axis| axis.name).collect();
    let mut tensor = json!({ "shape": shape, "dtype": dtype });
    if bytes {
        tensor["description"] = "bytes".into();
    }
    (seen.spec.name.to_owned(), tensor)
}

/// Python that computes the outputs by the oracle.
fn reference(operator: &AnyOperator, case: &Case, names: &[&str], numbers: &[Number]) -> String {
    let is_number = |name: &&&str| numbers.iter().any(|number| number.keyword == **name);
    let tensors: Vec<String> = names
        .iter()
        .filter(|name| !is_number(name))
        .map(|name| format!("\"{name}\": {name}"))
        .collect();
    let fields: Vec<String> =
        numbers.iter().map(|one| format!("\"{}\": {}", one.path, one.keyword)).collect();
    let line = Value::String(case.line());
    format!(
        "\"\"\"{}, in f64 by the oracle of dsv4-parity.\"\"\"\n\n\
         from dsv4_parity.testing import oracle\n\n\
         CASE = {line}\n\n\n\
         def run({}):\n    return oracle(CASE, {{{}}}, {{{}}})\n",
        operator.name(),
        names.join(", "),
        tensors.join(", "),
        fields.join(", "),
    )
}

/// A Solution and its Definition, as a sweep of an external kernel.
#[derive(Debug)]
pub struct Task {
    /// The operator.
    pub operator: String,
    /// Which of its cases the Definition is about.
    pub condition: Condition,
    /// The name of the Definition.
    pub definition: String,
    /// The name of the Solution.
    pub solution: String,
    /// Names of the axes that vary.
    pub varying: Vec<String>,
    /// The inputs: the field of each that is a number.
    pub inputs: Vec<(String, Option<String>)>,
}

#[derive(Deserialize)]
struct DefinitionFile {
    name: String,
    #[serde(default)]
    tags: Vec<String>,
    axes: Map<String, Value>,
    inputs: Map<String, Value>,
}

#[derive(Deserialize)]
struct SolutionFile {
    name: String,
    definition: String,
}

fn parsed<T: for<'de> Deserialize<'de>>(path: &Path) -> Result<T> {
    let shown = || path.display().to_string();
    let text = std::fs::read_to_string(path).with_context(shown)?;
    serde_json::from_str(&text).with_context(shown)
}

impl Task {
    /// Reads both files.
    ///
    /// # Errors
    /// A file that cannot be read; a Definition of another tool, whose inputs no oracle knows; a
    /// Solution of another Definition.
    pub fn read(solution: &Path, definition: &Path) -> Result<Self> {
        let solved: SolutionFile = parsed(solution)?;
        let defined: DefinitionFile = parsed(definition)?;
        if solved.definition != defined.name {
            let (wanted, found) = (solved.definition, defined.name);
            bail!("{} is about `{wanted}`, --definition about `{found}`", solution.display());
        }
        let tag = |kind: &str| {
            let start = format!("{TAG}:{kind}:");
            defined.tags.iter().filter_map(move |tag| tag.strip_prefix(&start)).collect::<Vec<_>>()
        };
        let (operators, conditions, numbers) = (tag("operator"), tag("where"), tag("field"));
        let ([operator], [condition]) = (&operators[..], &conditions[..]) else {
            let shown = definition.display();
            bail!(
                "{shown}: no Definition of `parity ops NAME --trace-definition`: it has no such tags"
            );
        };
        let condition = Condition::parse(condition)
            .map_err(|reason| anyhow!("{}: where: {reason}", definition.display()))?;
        let fields: BTreeMap<&str, &str> =
            numbers.iter().filter_map(|number| number.split_once('=')).collect();
        let field = |name: &String| fields.get(name.as_str()).map(|&path| path.to_owned());
        let varies = |(_, axis): &(&String, &Value)| axis["type"] == "var";
        Ok(Self {
            operator: (*operator).to_owned(),
            condition,
            solution: solved.name,
            varying: defined.axes.iter().filter(varies).map(|(name, _)| name.clone()).collect(),
            inputs: defined.inputs.keys().map(|name| (name.clone(), field(name))).collect(),
            definition: defined.name,
        })
    }
}
