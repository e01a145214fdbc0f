//! The classes of mutants: each inspects one node of a function's body and proposes edits.

use tree_sitter::Node;

use super::source::Source;
use super::{Class, Edit};

/// Functions that order threads, memory or asynchronous copies, by full name.
const SYNCHRONIZATION: [&str; 22] = [
    "__syncthreads",
    "__syncthreads_and",
    "__syncthreads_count",
    "__syncthreads_or",
    "__syncwarp",
    "__threadfence",
    "__threadfence_block",
    "__threadfence_system",
    "cluster_arrive",
    "cluster_arrive_relaxed",
    "cluster_sync",
    "cluster_wait",
    "copy_commit",
    "copy_wait",
    "mbarrier_arrive",
    "mbarrier_arrive_expect",
    "mbarrier_expect",
    "mbarrier_wait",
    "wgmma_arrive",
    "wgmma_commit",
    "wgmma_fence",
    "wgmma_wait",
];
/// Families of them, by prefix of the name.
const SYNCHRONIZATION_FAMILIES: [&str; 7] =
    ["barrier_", "bulk_commit", "bulk_wait", "cp_async_", "fence_", "named_barrier_", "wait_"];
/// Barriers that also reduce a value over the block: without the barrier, each thread keeps its own
/// value.
const REDUCING_BARRIERS: [&str; 3] =
    ["__syncthreads_and", "__syncthreads_count", "__syncthreads_or"];
/// Functions of two arguments, one of which they return.
const SELECTIONS: [&str; 10] = [
    "fmax",
    "fmaxf",
    "fmin",
    "fminf",
    "max",
    "maximum",
    "maximum_f32",
    "min",
    "minimum",
    "minimum_f32",
];

type Mutator = fn(&Source<'_>, Node<'_>) -> Vec<Edit>;

const MUTATORS: [(Class, Mutator); 12] = [
    (Class::Comparison, comparison),
    (Class::Synchronization, synchronization),
    (Class::Index, index),
    (Class::Scale, scale),
    (Class::Extent, extent),
    (Class::MinMax, min_max),
    (Class::Constant, constant),
    (Class::Predicate, predicate),
    (Class::Accumulate, accumulate),
    (Class::Period, period),
    (Class::Guard, guard),
    (Class::Company, company),
];

/// Every edit of a function's body.
pub(super) fn edits(source: &Source<'_>, function: Node<'_>) -> Vec<(Class, Edit)> {
    let mut found = Vec::new();
    if let Some(body) = function.child_by_field_name("body") {
        collect(source, body, &mut found);
    }
    found
}

fn collect(source: &Source<'_>, node: Node<'_>, found: &mut Vec<(Class, Edit)>) {
    for (class, mutator) in MUTATORS {
        found.extend(mutator(source, node).into_iter().map(|edit| (class, edit)));
    }
    for index in 0..node.child_count() {
        let Some(child) = node.child(index) else { continue };
        if !only_compiler_evaluates(node, child) && !is_guess(source, node, child) {
            collect(source, child, found);
        }
    }
}

/// Whether `child` of `parent` decides what is compiled and not what is computed.
fn only_compiler_evaluates(parent: Node<'_>, child: Node<'_>) -> bool {
    let is_field = |name: &str| parent.child_by_field_name(name) == Some(child);
    match parent.kind() {
        "if_statement" => is_constexpr(parent) && is_field("condition"),
        "preproc_if" | "preproc_elif" => is_field("condition"),
        "case_statement" => is_field("value"),
        "array_declarator" => is_field("size"),
        _ => matches!(
            child.kind(),
            "static_assert_declaration"
                | "template_argument_list"
                | "sizeof_expression"
                | "type_descriptor"
        ),
    }
}

/// Whether `child` is a hint to the compiler about the value of another expression. No result
/// depends on such a hint.
fn is_guess(source: &Source<'_>, parent: Node<'_>, child: Node<'_>) -> bool {
    let of_expect = parent
        .parent()
        .and_then(|outer| call(source, outer))
        .filter(|(name, _)| *name == "__builtin_expect");
    of_expect.is_some_and(|(_, arguments)| arguments.iter().skip(1).any(|guess| *guess == child))
}

fn is_constexpr(statement: Node<'_>) -> bool {
    (0..statement.child_count())
        .filter_map(|index| statement.child(index))
        .any(|child| child.kind() == "constexpr")
}

fn edit(node: Node<'_>, replacement: impl Into<String>, summary: impl Into<String>) -> Edit {
    Edit { range: node.byte_range(), replacement: replacement.into(), summary: summary.into() }
}

/// An expression as one line, for the summary.
fn quoted(source: &Source<'_>, node: Node<'_>) -> String {
    let line = source.text_of(node).split_whitespace().collect::<Vec<_>>().join(" ");
    match line.char_indices().nth(60) {
        Some((end, _)) => format!("`{}…`", &line[..end]),
        None => format!("`{line}`"),
    }
}

/// Left, operator and right of a binary expression.
fn binary<'t>(node: Node<'t>) -> Option<(Node<'t>, Node<'t>, Node<'t>)> {
    (node.kind() == "binary_expression").then_some(())?;
    Some((
        node.child_by_field_name("left")?,
        node.child_by_field_name("operator")?,
        node.child_by_field_name("right")?,
    ))
}

/// The callee's name, without template arguments, and the arguments of a call.
fn call<'t, 's>(source: &Source<'s>, node: Node<'t>) -> Option<(&'s str, Vec<Node<'t>>)> {
    (node.kind() == "call_expression").then_some(())?;
    let function = node.child_by_field_name("function")?;
    let name = function.child_by_field_name("name").unwrap_or(function);
    let list = node.child_by_field_name("arguments")?;
    let arguments =
        (0..list.named_child_count()).filter_map(|index| list.named_child(index as u32));
    Some((
        source.text_of(name),
        arguments.filter(|argument| argument.kind() != "comment").collect(),
    ))
}

/// Whether this is the complete condition of a `for`, or a part of it.
fn in_loop_condition(node: Node<'_>) -> bool {
    let mut at = node;
    while let Some(parent) = at.parent() {
        match parent.kind() {
            "for_statement" => return parent.child_by_field_name("condition") == Some(at),
            "binary_expression" | "parenthesized_expression" => at = parent,
            _ => return false,
        }
    }
    false
}

/// `<` ↔ `<=`, `>` ↔ `>=`, `==` ↔ `!=`; [`extent`] changes the ends of loops.
fn comparison(source: &Source<'_>, node: Node<'_>) -> Vec<Edit> {
    let Some((_, operator, _)) = binary(node) else { return Vec::new() };
    let other = match source.text_of(operator) {
        "<" => "<=",
        "<=" => "<",
        ">" => ">=",
        ">=" => ">",
        "==" => "!=",
        "!=" => "==",
        _ => return Vec::new(),
    };
    if in_loop_condition(node) {
        return Vec::new();
    }
    vec![edit(operator, other, format!("{} compares with `{other}`.", quoted(source, node)))]
}

fn synchronizes(name: &str) -> bool {
    SYNCHRONIZATION.contains(&name)
        || SYNCHRONIZATION_FAMILIES.iter().any(|family| name.starts_with(family))
}

/// The call is missing. For a barrier that reduces a value, the barrier and the reduction are
/// missing.
fn synchronization(source: &Source<'_>, node: Node<'_>) -> Vec<Edit> {
    let Some((name, arguments)) = call(source, node) else { return Vec::new() };
    if !synchronizes(name) {
        return Vec::new();
    }
    let summary = format!("{} is missing.", quoted(source, node));
    match (node.parent(), arguments.as_slice()) {
        (_, [value]) if REDUCING_BARRIERS.contains(&name) => {
            vec![edit(node, format!("({})", source.text_of(*value)), summary)]
        }
        (Some(statement), _) if statement.kind() == "expression_statement" => {
            vec![edit(statement, ";", summary)]
        }
        _ => Vec::new(),
    }
}

/// `a[i][j]` is `a[j][i]`; `a * s + b * t` is `a * t + b * s`; `/` ↔ `%`.
fn index(source: &Source<'_>, node: Node<'_>) -> Vec<Edit> {
    swapped_subscripts(source, node)
        .or_else(|| swapped_strides(source, node))
        .or_else(|| quotient_and_remainder(source, node))
        .into_iter()
        .collect()
}

fn swapped_subscripts(source: &Source<'_>, node: Node<'_>) -> Option<Edit> {
    let inner = node
        .child_by_field_name("argument")
        .filter(|inner| inner.kind() == "subscript_expression")?;
    (node.kind() == "subscript_expression").then_some(())?;
    let (first, second) =
        (inner.child_by_field_name("indices")?, node.child_by_field_name("indices")?);
    let (first, second) = (source.text_of(first), source.text_of(second));
    let array = source.text_of(inner.child_by_field_name("argument")?);
    let summary = format!("The subscripts of {} change places.", quoted(source, node));
    (first != second).then(|| edit(node, format!("{array}{second}{first}"), summary))
}

fn swapped_strides(source: &Source<'_>, node: Node<'_>) -> Option<Edit> {
    let (left, operator, right) = binary(node)?;
    (source.text_of(operator) == "+" && !source.is_float(node)).then_some(())?;
    // `base + a * s + b * t` is `(base + a * s) + b * t`.
    let last_of_left = binary(left)
        .filter(|(_, sign, _)| source.text_of(*sign) == "+")
        .map_or(left, |(_, _, last)| last);
    let (_, times, first) = binary(last_of_left)?;
    let (_, other_times, second) = binary(right)?;
    (source.text_of(times) == "*" && source.text_of(other_times) == "*").then_some(())?;
    let (one, other) = (source.text_of(first), source.text_of(second));
    (one != other).then_some(())?;
    let start = node.start_byte();
    let mut swapped = source.text_of(node).to_owned();
    swapped.replace_range(second.start_byte() - start..second.end_byte() - start, one);
    swapped.replace_range(first.start_byte() - start..first.end_byte() - start, other);
    Some(edit(node, swapped, format!("`{one}` and `{other}` change places.")))
}

fn quotient_and_remainder(source: &Source<'_>, node: Node<'_>) -> Option<Edit> {
    let (_, operator, _) = binary(node)?;
    let other = match source.text_of(operator) {
        "/" if !source.is_float(node) => "%",
        "%" => "/",
        _ => return None,
    };
    Some(edit(operator, other, format!("{} is computed with `{other}`.", quoted(source, node))))
}

/// Floating-point `a * b` is `a`, `b` or `a * b * b`; `a / b` is `a`; `a *= b` is missing or done
/// twice; `-a` is `a`.
fn scale(source: &Source<'_>, node: Node<'_>) -> Vec<Edit> {
    match node.kind() {
        "assignment_expression" => scaled_assignment(source, node),
        "unary_expression" => negated(source, node),
        _ => product(source, node),
    }
}

fn product(source: &Source<'_>, node: Node<'_>) -> Vec<Edit> {
    let Some((left, operator, right)) = binary(node) else { return Vec::new() };
    let (a, b) = (source.text_of(left), source.text_of(right));
    match source.text_of(operator) {
        "*" if source.is_float(left) && source.is_float(right) => {
            let mut edits = vec![
                edit(node, a, format!("The factor {} is missing.", quoted(source, right))),
                edit(
                    node,
                    format!("{a} * {b} * {b}"),
                    format!("The factor {} counts twice.", quoted(source, right)),
                ),
            ];
            if a != b {
                edits.push(edit(
                    node,
                    b,
                    format!("The factor {} is missing.", quoted(source, left)),
                ));
            }
            edits
        }
        "/" if source.is_float(node) => {
            vec![edit(node, a, format!("The divisor {} is missing.", quoted(source, right)))]
        }
        _ => Vec::new(),
    }
}

fn scaled_assignment(source: &Source<'_>, node: Node<'_>) -> Vec<Edit> {
    let parts =
        (node.child_by_field_name("left"), node.child_by_field_name("right"), node.parent());
    let (Some(left), Some(right), Some(statement)) = parts else { return Vec::new() };
    let is_scale = node
        .child_by_field_name("operator")
        .is_some_and(|operator| source.text_of(operator) == "*=");
    if !is_scale || statement.kind() != "expression_statement" {
        return Vec::new();
    }
    let (a, b) = (source.text_of(left), quoted(source, right));
    vec![
        edit(statement, ";", format!("The factor {b} is missing.")),
        edit(
            node,
            format!("{a} *= {0} * {0}", source.text_of(right)),
            format!("The factor {b} counts twice."),
        ),
    ]
}

fn negated(source: &Source<'_>, node: Node<'_>) -> Vec<Edit> {
    let minus = node
        .child_by_field_name("operator")
        .is_some_and(|operator| source.text_of(operator) == "-");
    match node.child_by_field_name("argument") {
        Some(argument) if minus && source.is_float(argument) => {
            vec![edit(
                node,
                source.text_of(argument),
                format!("The sign of {} is missing.", quoted(source, argument)),
            )]
        }
        _ => Vec::new(),
    }
}

/// `i < n` at the end of a loop is `i < n - 1`, or `i <= n`.
fn extent(source: &Source<'_>, node: Node<'_>) -> Vec<Edit> {
    let Some((_, operator, right)) = binary(node) else { return Vec::new() };
    let other = match source.text_of(operator) {
        "<" => "<=",
        "<=" => "<",
        ">" => ">=",
        ">=" => ">",
        _ => return Vec::new(),
    };
    if !in_loop_condition(node) {
        return Vec::new();
    }
    let mut edits = vec![edit(
        operator,
        other,
        format!("The loop runs while {} with `{other}`.", quoted(source, node)),
    )];
    if source.text_of(operator) == "<" {
        let (range, end) = (right.byte_range(), source.text_of(right));
        let summary = format!("The loop ends before the last of {}.", quoted(source, right));
        edits.push(Edit { range, replacement: format!("{end} - 1"), summary });
    }
    edits
}

/// A minimum or maximum is one of its arguments.
fn min_max(source: &Source<'_>, node: Node<'_>) -> Vec<Edit> {
    match call(source, node) {
        Some((name, arguments)) if SELECTIONS.contains(&name) && arguments.len() == 2 => arguments
            .iter()
            .map(|argument| {
                let summary =
                    format!("{} is {} always.", quoted(source, node), quoted(source, *argument));
                edit(node, format!("({})", source.text_of(*argument)), summary)
            })
            .collect(),
        _ => Vec::new(),
    }
}

/// An integer is the next one; a floating-point number is doubled, and 0 is 1.
fn constant(source: &Source<'_>, node: Node<'_>) -> Vec<Edit> {
    if node.kind() != "number_literal" {
        return Vec::new();
    }
    let text = source.text_of(node);
    let summary = |other: &str| format!("`{text}` is `{other}`.");
    if text.contains('.') {
        let number = text.trim_end_matches('f');
        let suffix = &text[number.len()..];
        let other = match number.parse::<f64>() {
            Ok(0.0) => format!("1.0{suffix}"),
            _ => format!("(2.0{suffix} * {text})"),
        };
        return vec![edit(node, other.as_str(), summary(&other))];
    }
    let digits = text.trim_end_matches(['u', 'U', 'l', 'L']);
    match digits.parse::<u64>() {
        Ok(value) => {
            let other = format!("{}{}", value.wrapping_add(1), &text[digits.len()..]);
            vec![edit(node, other.as_str(), summary(&other))]
        }
        Err(_) => vec![edit(node, format!("({text} + 1)"), summary(&format!("{text} + 1")))],
    }
}

/// A condition is `true` or `false`; `a && b` is `a` or `b`; [`extent`] changes the ends of loops.
fn predicate(source: &Source<'_>, node: Node<'_>) -> Vec<Edit> {
    match node.kind() {
        "if_statement" if !is_constexpr(node) => {
            let condition = node.child_by_field_name("condition");
            condition.map_or_else(Vec::new, |condition| {
                always_and_never(source, condition, "(true)", "(false)")
            })
        }
        "conditional_expression" => {
            let condition = node.child_by_field_name("condition");
            condition.map_or_else(Vec::new, |condition| {
                always_and_never(source, condition, "true", "false")
            })
        }
        "binary_expression" if !in_loop_condition(node) => one_term(source, node),
        _ => Vec::new(),
    }
}

fn always_and_never(
    source: &Source<'_>,
    condition: Node<'_>,
    always: &str,
    never: &str,
) -> Vec<Edit> {
    let shown = quoted(source, condition);
    vec![
        edit(condition, always, format!("{shown} is taken to hold always.")),
        edit(condition, never, format!("{shown} is taken to hold never.")),
    ]
}

fn one_term(source: &Source<'_>, node: Node<'_>) -> Vec<Edit> {
    let Some((left, operator, right)) = binary(node) else { return Vec::new() };
    if !matches!(source.text_of(operator), "&&" | "||") {
        return Vec::new();
    }
    [(left, right), (right, left)]
        .map(|(kept, dropped)| {
            edit(
                node,
                source.text_of(kept),
                format!("The term {} is missing.", quoted(source, dropped)),
            )
        })
        .into()
}

/// `a += b` is `a = b`; `true` and `false` are swapped.
fn accumulate(source: &Source<'_>, node: Node<'_>) -> Vec<Edit> {
    match node.kind() {
        "true" => vec![edit(node, "false", "`true` is `false`.")],
        "false" => vec![edit(node, "true", "`false` is `true`.")],
        "assignment_expression"
            if node.parent().is_some_and(|parent| !ends_a_loop(parent, node)) =>
        {
            match node.child_by_field_name("operator") {
                Some(operator) if matches!(source.text_of(operator), "+=" | "-=") => {
                    vec![edit(
                        operator,
                        "=",
                        format!("{} overwrites instead of adding.", quoted(source, node)),
                    )]
                }
                _ => Vec::new(),
            }
        }
        _ => Vec::new(),
    }
}

/// `x % n == c` is `x == c`, and so with `!=`: what comes round comes once. A case shows it only if
/// it is longer than the period.
fn period(source: &Source<'_>, node: Node<'_>) -> Vec<Edit> {
    let Some((left, operator, _)) = binary(node) else { return Vec::new() };
    if !matches!(source.text_of(operator), "==" | "!=") {
        return Vec::new();
    }
    let inner = if left.kind() == "parenthesized_expression" {
        left.named_child(0).unwrap_or(left)
    } else {
        left
    };
    let Some((dividend, remainder, divisor)) = binary(inner) else { return Vec::new() };
    if source.text_of(remainder) != "%" {
        return Vec::new();
    }
    let every = source.text_of(divisor);
    let once = format!("{} holds once, not every {every}.", quoted(source, node));
    vec![edit(left, format!("({})", source.text_of(dividend)), once)]
}

/// A named constant of a condition is a quarter larger: a guard with two sides that every case
/// violates on both, or on none, lets that pass.
fn guard(source: &Source<'_>, node: Node<'_>) -> Vec<Edit> {
    let name = source.text_of(node);
    let is_constant = node.kind() == "identifier"
        && name.len() > 1
        && name.starts_with(|first: char| first.is_ascii_uppercase())
        && name.chars().all(|c| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_');
    if !is_constant || !in_condition(node) {
        return Vec::new();
    }
    let larger = format!("({name} + {name} / 4 + 1)");
    vec![edit(node, larger, format!("`{name}` is a quarter larger in a condition."))]
}

/// Whether this is a part of the condition of an `if` or `?:` that the compiler does not decide, or
/// of `&&` and `||` outside of a loop's condition.
fn in_condition(node: Node<'_>) -> bool {
    let mut at = node;
    while let Some(parent) = at.parent() {
        let is_condition = parent.child_by_field_name("condition") == Some(at);
        match parent.kind() {
            "if_statement" => return is_condition && !is_constexpr(parent),
            "conditional_expression" if is_condition => return true,
            "binary_expression"
                if parent
                    .child_by_field_name("operator")
                    .is_some_and(|operator| matches!(operator.kind(), "&&" | "||")) =>
            {
                return !in_loop_condition(parent);
            }
            "template_argument_list" | "subscript_expression" => return false,
            kind if kind.ends_with("_statement") || kind.ends_with("_definition") => return false,
            _ => at = parent,
        }
    }
    false
}

/// Where [`company`] changes a number, in code and in words: with many rows or on a device with many
/// SMs, as splits and tiles by the number of rows do; with one block, as a path for few rows does;
/// and with an odd number of blocks, as a last tile does that is summed in another way.
const COMPANIES: [(&str, &str); 3] = [
    ("gridDim.x > 4", "more than four blocks"),
    ("gridDim.x == 1", "one block"),
    ("gridDim.x % 2 == 1", "an odd number of blocks"),
];

/// A floating-point product, or what is added to a sum, is larger by 2^-15 in grids of some sizes.
/// That is within the budget of most tensors, so only another batch shows it.
fn company(source: &Source<'_>, node: Node<'_>) -> Vec<Edit> {
    let text = |node| source.text_of(node);
    let is_product = |node| {
        binary(node).is_some_and(|(left, operator, right)| {
            text(operator) == "*" && source.is_float(left) && source.is_float(right)
        })
    };
    let edits = |changed: &dyn Fn(&str) -> String| {
        let of = |(condition, words): (&str, &str)| {
            let factor = format!("({condition} ? 1.00003f : 1.0f)");
            let summary = format!("{} is larger by 2^-15 with {words}.", quoted(source, node));
            edit(node, changed(&factor), summary)
        };
        COMPANIES.map(of).into()
    };
    match node.parent() {
        Some(parent) if is_product(node) && !is_product(parent) => {
            edits(&|factor| format!("({} * {factor})", text(node)))
        }
        Some(parent) if adds_float(source, parent, node) && !is_product(node) => {
            edits(&|factor| format!("({}) * {factor}", text(node)))
        }
        _ => Vec::new(),
    }
}

/// Whether `parent` adds `node` to a floating-point sum.
fn adds_float(source: &Source<'_>, parent: Node<'_>, node: Node<'_>) -> bool {
    let field = |name: &str| parent.child_by_field_name(name);
    parent.kind() == "assignment_expression"
        && field("right") == Some(node)
        && field("operator").is_some_and(|operator| source.text_of(operator) == "+=")
        && field("left").is_some_and(|left| source.is_float(left))
}

/// Whether an assignment is the step of a loop, which would never end without it.
fn ends_a_loop(parent: Node<'_>, node: Node<'_>) -> bool {
    match parent.kind() {
        "for_statement" => parent.child_by_field_name("update") == Some(node),
        "comma_expression" => parent.parent().is_some_and(|outer| ends_a_loop(outer, parent)),
        _ => false,
    }
}
