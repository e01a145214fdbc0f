//! A kernel source as a syntax tree: functions, their callers, and which names are floating point.
//!
//! tree-sitter parses C++ but not this project's macros. So they are overwritten, byte for byte,
//! with C++ of the same length before parsing. Every position in the tree is therefore a position
//! in the source.

use std::collections::{BTreeMap, BTreeSet};

use dsv4_runtime::SourceTree;
use tree_sitter::{Node, Parser, Tree};

use super::MutationError;

/// Macros that replace a specifier, and C++ of the same length.
const SPECIFIERS: [(&str, &str); 3] =
    [("DEVICE", "static"), ("__shared__", "static    "), ("UNROLL", "      ")];
/// Macros with arguments that define nothing that a mutant could change.
const DECLARATIONS: [&str; 3] = ["PARAMS_LAYOUT", "SHARED_MEMORY", "UNROLL_BY"];
/// The macro that a header tests if it has another body for the emulator.
const BACKEND: &str = "PARITY_EMULATOR";
/// The macros that start a kernel.
const KERNELS: [&str; 4] =
    ["KERNEL", "KERNEL_OF", "KERNEL_OF_CLUSTERS", "KERNEL_OF_RESIDENT_CLUSTERS"];

/// A parsed kernel file.
pub(super) struct Source<'a> {
    /// File within the kernel tree.
    pub(super) file: &'a str,
    /// The unchanged text of the file.
    pub(super) text: &'a str,
    tree: Tree,
    kernels: BTreeSet<String>,
    /// Names of variables, fields, constants and functions that are float or double.
    floats: BTreeSet<String>,
}

impl<'a> Source<'a> {
    /// Parses `file` of a kernel tree.
    pub(super) fn parse(tree: &'a SourceTree, file: &str) -> Result<Self, MutationError> {
        let text = tree.text(file)?;
        let (file, _) = tree.files().get_key_value(file).expect("its text was found");
        let (masked, kernels) = masked(text);
        let unread = |reason: String| MutationError::Parser { file: file.to_owned(), reason };
        let mut parser = Parser::new();
        parser
            .set_language(&tree_sitter_cpp::LANGUAGE.into())
            .map_err(|e| unread(e.to_string()))?;
        let parsed = parser.parse(&masked, None).ok_or_else(|| unread("no syntax tree".into()))?;
        if let Some(error) = first_error(parsed.root_node()) {
            let line = error.start_position().row + 1;
            return Err(unread(format!("line {line} is no C++ that the mutator knows")));
        }
        let mut floats = BTreeSet::new();
        tree.headers().for_each(|(_, header)| floats.extend(words_after_float(header)));
        let mut source = Self { file, text, tree: parsed, kernels, floats };
        let declared = source.declared_floats();
        source.floats.extend(declared);
        Ok(source)
    }

    /// The source text of a node.
    pub(super) fn text_of(&self, node: Node<'_>) -> &'a str {
        &self.text[node.byte_range()]
    }

    /// Every function with a body, in the order of the file.
    pub(super) fn functions(&self) -> Vec<Node<'_>> {
        let mut functions = Vec::new();
        descend(self.tree.root_node(), &mut |node| {
            if node.kind() == "function_definition" && node.child_by_field_name("body").is_some() {
                functions.push(node);
            }
        });
        functions
    }

    /// The name of a function.
    pub(super) fn name_of(&self, function: Node<'_>) -> &'a str {
        let mut declarator = function.child_by_field_name("declarator");
        while let Some(node) = declarator {
            match node.child_by_field_name("declarator") {
                Some(inner) => declarator = Some(inner),
                None => return self.text_of(node),
            }
        }
        "?"
    }

    /// Whether an expression has a floating-point value, as far as names and literals show.
    pub(super) fn is_float(&self, node: Node<'_>) -> bool {
        let field =
            |name: &str| node.child_by_field_name(name).is_some_and(|child| self.is_float(child));
        match node.kind() {
            "number_literal" => self.text_of(node).contains('.'),
            "identifier" => self
                .is_local_float(node)
                .unwrap_or_else(|| self.floats.contains(self.text_of(node))),
            "field_identifier" => self.floats.contains(self.text_of(node)),
            // `threadIdx.x` is not an `x` of the file.
            "field_expression" => !self.is_launch_index(node) && field("field"),
            "subscript_expression" => field("argument"),
            "call_expression" => field("function"),
            "unary_expression" => field("argument"),
            "binary_expression" => field("left") || field("right"),
            "conditional_expression" => field("consequence") || field("alternative"),
            "parenthesized_expression" => {
                node.named_child(0).is_some_and(|inner| self.is_float(inner))
            }
            "template_function" => {
                let text = self.text_of(node);
                text.ends_with("<float>") || text.ends_with("<double>")
            }
            _ => false,
        }
    }

    /// Whether the local variable or parameter of this name is declared as float or double, not as
    /// a pointer. The innermost declaration counts. `None` where none is around.
    fn is_local_float(&self, name: Node<'_>) -> Option<bool> {
        let mut inner = name;
        while let Some(outer) = inner.parent() {
            let mut cursor = outer.walk();
            let before =
                outer.children(&mut cursor).filter(|one| one.start_byte() < name.start_byte());
            let found = before.filter_map(|one| self.declares(one, self.text_of(name))).last();
            if found.is_some() {
                return found;
            }
            inner = outer;
        }
        None
    }

    /// Whether this declaration, or list of parameters, declares `name` as float or double; `None`
    /// where it declares no such name.
    fn declares(&self, node: Node<'_>, name: &str) -> Option<bool> {
        let mut cursor = node.walk();
        match node.kind() {
            "declaration" | "parameter_declaration" | "optional_parameter_declaration" => {
                let declarators = node.children_by_field_name("declarator", &mut cursor);
                let named = declarators.map(|declarator| self.innermost(declarator));
                let (_, is_pointer) = named.into_iter().find(|(found, _)| *found == name)?;
                Some(self.has_float_type(node) && !is_pointer)
            }
            "function_declarator"
            | "parameter_list"
            | "abstract_function_declarator"
            | "pointer_declarator"
            | "reference_declarator" => {
                let inner: Vec<_> = node.named_children(&mut cursor).collect();
                inner.into_iter().find_map(|inner| self.declares(inner, name))
            }
            _ => None,
        }
    }

    /// Whether a declaration begins with `float` or `double`.
    fn has_float_type(&self, declaration: Node<'_>) -> bool {
        let of_type = declaration.child_by_field_name("type").map(|kind| self.text_of(kind));
        matches!(of_type, Some("float" | "double"))
    }

    /// The name that a declarator declares, if any, and whether it is a pointer.
    fn innermost(&self, declarator: Node<'_>) -> (&str, bool) {
        match declarator.kind() {
            "identifier" | "field_identifier" => (self.text_of(declarator), false),
            kind => {
                let inner = declarator.child_by_field_name("declarator");
                let inner = inner.or_else(|| declarator.named_child(0));
                let (name, is_pointer) = inner.map_or(("", false), |inner| self.innermost(inner));
                (name, is_pointer || kind == "pointer_declarator")
            }
        }
    }

    /// Whether a field belongs to CUDA's built-in indices and sizes.
    fn is_launch_index(&self, node: Node<'_>) -> bool {
        let of = node.child_by_field_name("argument").map(|argument| self.text_of(argument));
        matches!(of, Some("threadIdx" | "blockIdx" | "blockDim" | "gridDim"))
    }

    /// Names that the file declares as float or double, but not as pointers.
    fn declared_floats(&self) -> Vec<String> {
        let mut found = Vec::new();
        descend(self.tree.root_node(), &mut |node| {
            let declares = matches!(
                node.kind(),
                "declaration"
                    | "parameter_declaration"
                    | "field_declaration"
                    | "function_definition"
            );
            if declares && self.has_float_type(node) {
                let mut cursor = node.walk();
                let declarators = node.children_by_field_name("declarator", &mut cursor);
                let named = declarators.map(|declarator| self.innermost(declarator));
                let floats = named.filter(|(name, is_pointer)| !name.is_empty() && !is_pointer);
                found.extend(floats.map(|(name, _)| name.to_owned()));
            }
        });
        found
    }
}

/// For each function of a kernel file and its headers, the kernels that may call it.
///
/// It is all kernels where no kernel calls the function but code outside of functions does, such
/// as a computed constant. It is also all kernels where calls have no name, as for an overloaded
/// operator. It is none where nothing calls the function, as for much of a shared header.
pub(super) fn callers<'a>(unit: &[&Source<'a>]) -> BTreeMap<&'a str, BTreeSet<&'a str>> {
    let all = || {
        unit.iter().flat_map(|source| {
            source.functions().into_iter().map(move |function| (source, function))
        })
    };
    let names: BTreeSet<&str> = all().map(|(source, function)| source.name_of(function)).collect();
    let mut mentions: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for (source, function) in all() {
        let mentioned = mentions.entry(source.name_of(function)).or_default();
        descend(function, &mut |node| {
            if matches!(node.kind(), "identifier" | "field_identifier")
                && names.contains(source.text_of(node))
            {
                mentioned.insert(source.text_of(node));
            }
        });
    }
    let is_kernel = |name: &&str| unit.iter().any(|source| source.kernels.contains(*name));
    let kernels: BTreeSet<&str> = names.iter().copied().filter(is_kernel).collect();
    let mut callers: BTreeMap<&str, BTreeSet<&str>> =
        names.iter().map(|name| (*name, BTreeSet::new())).collect();
    for kernel in &kernels {
        let mut pending = vec![*kernel];
        while let Some(name) = pending.pop() {
            if callers.get_mut(name).is_some_and(|kernels| kernels.insert(kernel)) {
                pending.extend(mentions[name].iter().copied());
            }
        }
    }
    let mut pending: Vec<&str> =
        names.iter().copied().filter(|name| !is_identifier(name)).collect();
    for source in unit {
        descend_outside_functions(source.tree.root_node(), &mut |node| {
            pending.extend(
                names.get(source.text_of(node)).filter(|_| node.kind().ends_with("identifier")),
            );
        });
    }
    while let Some(name) = pending.pop() {
        if callers[name].is_empty() {
            callers.insert(name, kernels.clone());
            pending.extend(mentions[name].iter().copied());
        }
    }
    callers
}

fn is_identifier(name: &str) -> bool {
    name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
}

/// The headers that hold more of a kernel file's code: those without code
/// for one backend.
pub(super) fn headers_of<'a>(
    tree: &'a SourceTree,
    file: &str,
) -> Result<Vec<&'a str>, MutationError> {
    let mut headers = Vec::new();
    for header in tree.headers_of(file)? {
        if !tree.text(header)?.contains(BACKEND) {
            headers.push(header);
        }
    }
    Ok(headers)
}

/// Calls `visit` on a node and all its descendants, outermost first.
pub(super) fn descend<'t>(node: Node<'t>, visit: &mut impl FnMut(Node<'t>)) {
    visit(node);
    for index in 0..node.child_count() {
        if let Some(child) = node.child(index) {
            descend(child, visit);
        }
    }
}

/// [`descend`], but not into functions with a body.
fn descend_outside_functions<'t>(node: Node<'t>, visit: &mut impl FnMut(Node<'t>)) {
    if node.kind() == "function_definition" && node.child_by_field_name("body").is_some() {
        return;
    }
    visit(node);
    for index in 0..node.child_count() {
        if let Some(child) = node.child(index) {
            descend_outside_functions(child, visit);
        }
    }
}

fn first_error(node: Node<'_>) -> Option<Node<'_>> {
    if node.is_error() || node.is_missing() {
        return Some(node);
    }
    if !node.has_error() {
        return None;
    }
    (0..node.child_count()).filter_map(|index| node.child(index)).find_map(first_error)
}

/// The text with the project's macros overwritten, and the names of its kernels.
fn masked(text: &str) -> (String, BTreeSet<String>) {
    let mut masked = text.to_owned();
    let mut kernels = BTreeSet::new();
    for (start, word) in code_words(text) {
        let end = start + word.len();
        if let Some((_, replacement)) = SPECIFIERS.iter().find(|(name, _)| *name == word) {
            masked.replace_range(start..end, replacement);
        } else if let Some(close) = closing_parenthesis(text, end) {
            if DECLARATIONS.contains(&word) {
                masked.replace_range(start..=close, &blank(&text[start..=close]));
            } else if KERNELS.contains(&word) {
                let name_end = text[end..close].find(',').map_or(close, |comma| end + comma);
                kernels.insert(text[end + 1..name_end].trim().to_owned());
                // KERNEL(name, Params, threads) becomes `void   name(               )`.
                masked.replace_range(
                    start..=end,
                    &format!("{:width$}", "void", width = word.len() + 1),
                );
                masked.replace_range(name_end..=name_end, "(");
                masked.replace_range(name_end + 1..close, &blank(&text[name_end + 1..close]));
            }
        }
    }
    (masked, kernels)
}

/// Spaces of the same length; line ends stay.
fn blank(text: &str) -> String {
    text.bytes().map(|byte| if byte == b'\n' { '\n' } else { ' ' }).collect()
}

/// The position of the parenthesis that closes the one at `open`, if `open` has one.
fn closing_parenthesis(text: &str, open: usize) -> Option<usize> {
    let opened = text.get(open..).filter(|rest| rest.starts_with('('))?;
    let mut depth = 0_usize;
    for (offset, byte) in opened.bytes().enumerate() {
        match byte {
            b'(' => depth += 1,
            b')' if depth == 1 => return Some(open + offset),
            b')' => depth -= 1,
            _ => {}
        }
    }
    None
}

/// Words with their positions, without `//` comments and directives.
fn code_words(text: &str) -> Vec<(usize, &str)> {
    let mut words = Vec::new();
    let mut line_start = 0;
    for line in text.split_inclusive('\n') {
        let code = if line.trim_start().starts_with('#') {
            ""
        } else {
            line.split("//").next().unwrap_or_default()
        };
        let mut at = 0;
        for piece in code.split(|c: char| !c.is_alphanumeric() && c != '_') {
            if !piece.is_empty() {
                words.push((line_start + at, piece));
            }
            // The separator after it may be longer than a byte.
            at += piece.len() + code[at + piece.len()..].chars().next().map_or(0, char::len_utf8);
        }
        line_start += line.len();
    }
    words
}

/// Constants and functions that a header declares as float or double.
fn words_after_float(header: &str) -> impl Iterator<Item = String> + '_ {
    let words = code_words(header);
    let pairs: Vec<_> = words.windows(2).map(|pair| (pair[0], pair[1])).collect();
    pairs.into_iter().filter_map(move |((at, kind), (next_at, name))| {
        let between = &header[at + kind.len()..next_at];
        (matches!(kind, "float" | "double") && between == " ").then(|| name.to_owned())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn macros_are_overwritten_without_moving_anything() {
        let text = "// DEVICE\nDEVICE float f() { UNROLL return 1.0f; }\nPARAMS_LAYOUT(A,\n x)\nKERNEL(k, P, 32) { f(); }\n";
        let (masked, kernels) = masked(text);
        assert_eq!(masked.len(), text.len());
        assert!(
            masked.starts_with("// DEVICE\nstatic float f() {        return 1.0f; }\n"),
            "{masked}"
        );
        assert!(masked.contains("void   k(      ) { f(); }"), "{masked}");
        assert_eq!(kernels.into_iter().collect::<Vec<_>>(), ["k"]);
        let text = "KERNEL_OF(k, P, 32, A <= 2 ? 4 : 1) { f(); }\n";
        let (masked, kernels) = super::masked(text);
        assert_eq!((masked.len(), kernels.len()), (text.len(), 1));
        assert!(masked.starts_with("void      k(") && masked.ends_with(") { f(); }\n"), "{masked}");
    }

    #[test]
    fn every_kernel_source_is_understood_completely() {
        let tree = dsv4_kernels::sources();
        for file in tree.kernel_files() {
            let headers = headers_of(&tree, file).expect("the tree is whole");
            for file in [file].into_iter().chain(headers) {
                let source = Source::parse(&tree, file).unwrap_or_else(|error| panic!("{error}"));
                // A header may hold only constants.
                assert!(
                    !source.functions().is_empty() || !source.text.contains("\nDEVICE "),
                    "{file}"
                );
            }
        }
    }

    #[test]
    fn headers_are_those_with_one_body_for_all_backends() {
        let tree = dsv4_kernels::sources();
        let of = |file: &str| headers_of(&tree, file).expect("the tree is whole");
        assert_eq!(of("rope.cu"), ["element.h", "rotation.h", "elements.h"]);
        let hopper = of("decode_attention_hopper.cu");
        let ours = [
            "hopper_attention.h",
            "gather.h",
            "panels.h",
            "decode_attention.h",
            "kv_cache.h",
            "tensor_map.h",
        ];
        assert_eq!(hopper.len(), ours.len(), "{hopper:?}");
        assert!(ours.iter().all(|name| hopper.contains(name)), "{hopper:?}");
    }

    #[test]
    fn a_function_belongs_to_the_kernels_that_reach_it() {
        let text = "DEVICE int deep() { return 1; }\nDEVICE int f() { return deep(); }\nDEVICE int twice() { return 2; }\n\
                    DEVICE int size() { return twice(); }\nconstexpr int SIZE = size();\n\
                    DEVICE int least() { return 3; }\nDEVICE int nobodys() { return least(); }\n\
                    KERNEL(a, P, 32) { f(); }\nKERNEL(b, P, 32) { }\n";
        let files = [("k.cu".to_owned(), text.to_owned())];
        let tree = SourceTree::from_files("a test".into(), files.into()).expect("a tree");
        let source = Source::parse(&tree, "k.cu").expect("C++");
        let callers = callers(&[&source]);
        assert_eq!(callers["deep"], ["a"].into());
        assert_eq!(callers["b"], ["b"].into());
        for of_a_constant in ["size", "twice"] {
            assert_eq!(callers[of_a_constant], ["a", "b"].into());
        }
        for of_nobody in ["nobodys", "least"] {
            assert!(callers[of_nobody].is_empty());
        }
    }
}
