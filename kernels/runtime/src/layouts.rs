//! The layouts of parameter structs, derived from the sources.
//!
//! C++ does not list the fields of a struct. So a compiler gets the sources with a list,
//! `PARAMS_LAYOUT(NAME, FIELDS)`, after each struct that a `KERNEL` names, on the line on which the
//! struct ends. `params.h` hashes the list. A list that is written stays as it is.

use std::borrow::Cow;
use std::collections::BTreeSet;

use crate::error::Result;
use crate::source::{SourceTree, without_comments};

/// The macros that define a kernel, with the name of its parameter struct as second argument.
pub(crate) const KERNELS: [&str; 4] =
    ["KERNEL", "KERNEL_OF", "KERNEL_OF_CLUSTERS", "KERNEL_OF_RESIDENT_CLUSTERS"];

/// The parameter structs of a file's kernels that have no list.
pub(crate) struct Layouts {
    structs: BTreeSet<String>,
}

impl Layouts {
    /// Of the kernels of `file` and of the headers that it includes.
    ///
    /// # Errors
    /// [`RuntimeError::SourceMissing`](crate::RuntimeError::SourceMissing).
    pub fn of(tree: &SourceTree, file: &str) -> Result<Self> {
        let files = tree.headers_of(file)?.into_iter().chain([file]);
        let texts = files
            .map(|file| tree.text(file).map(without_comments))
            .collect::<Result<Vec<String>>>()?;
        let arguments = |name: &'static str| texts.iter().flat_map(move |text| calls(text, name));
        let listed: BTreeSet<&str> =
            arguments("PARAMS_LAYOUT").filter_map(|list| list.split(',').next()).collect();
        let named = KERNELS.into_iter().flat_map(arguments);
        let structs = named.filter_map(|kernel| kernel.split(',').nth(1)).map(str::trim);
        let structs = structs.filter(|name| !listed.contains(name)).map(str::to_owned);
        Ok(Self { structs: structs.collect() })
    }

    /// A text of the same tree with the lists of these structs that it declares.
    pub fn complete<'t>(&self, text: &'t str) -> Cow<'t, str> {
        let mut ends: Vec<(usize, String)> = Vec::new();
        for name in &self.structs {
            let Some(Declared { end, fields }) = declared(text, name) else { continue };
            let names: Vec<&str> = fields.iter().map(|field| field.name.as_str()).collect();
            ends.push((end, format!(" PARAMS_LAYOUT({name}, {})", names.join(", "))));
        }
        if ends.is_empty() {
            return Cow::Borrowed(text);
        }
        // From the end, so that the places before stay where they are.
        ends.sort();
        let insert = |mut whole: String, (end, list): &(usize, String)| {
            whole.insert_str(*end, list);
            whole
        };
        Cow::Owned(ends.iter().rev().fold(text.to_owned(), insert))
    }
}

/// What stands in the parentheses of each `name(`, up to the first closing one.
fn calls<'t>(text: &'t str, name: &'static str) -> impl Iterator<Item = &'t str> {
    text.match_indices(name).filter_map(move |(at, _)| {
        let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
        if text[..at].ends_with(is_word) {
            return None;
        }
        Some(text[at + name.len()..].strip_prefix('(')?.split_once(')')?.0)
    })
}

/// A struct that a source declares.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Declared {
    /// The place after its last semicolon.
    end: usize,
    /// Its fields, in their order.
    pub fields: Vec<FieldText>,
}

/// A field of a struct.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FieldText {
    pub name: String,
    /// Its type; that of a pointer ends in `*`.
    pub kind: String,
}

/// The struct `name` of plain fields. `None` if the text does not declare it, or if it has
/// functions or initialisers.
pub(crate) fn declared(text: &str, name: &str) -> Option<Declared> {
    let opening = format!("struct {name} {{");
    let is_code = |at: &usize| {
        let line = text[..*at].rsplit('\n').next().unwrap_or_default();
        !line.contains("//")
    };
    let begin = text.match_indices(&opening).map(|(at, _)| at).find(is_code)? + opening.len();
    let (mut code, mut at) = (String::new(), begin);
    loop {
        let rest = &text[at..];
        let next = rest.find(['/', '}', '{', '('])?;
        code.push_str(&rest[..next]);
        let comment = match &rest[next..] {
            found if found.starts_with("//") => found.find('\n')?,
            found if found.starts_with("/*") => found.find("*/")? + 2,
            found if found.starts_with('}') => {
                let end = at + next + 1 + found[1..].find(';')? + 1;
                return Some(Declared { end, fields: fields_of(&code) });
            }
            _ => return None,
        };
        at += next + comment;
    }
}

/// The fields of a struct's body without comments.
fn fields_of(code: &str) -> Vec<FieldText> {
    let mut fields = Vec::new();
    for declaration in code.split(';') {
        let mut kind = String::new();
        for declarator in declaration.split(',') {
            let declarator = declarator.split('[').next().unwrap_or_default().trim();
            let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
            let begin = declarator.rfind(|c: char| !is_word(c)).map_or(0, |before| before + 1);
            let (before, name) = declarator.split_at(begin);
            if name.is_empty() {
                continue;
            }
            let own = before.trim();
            if kind.is_empty() {
                own.clone_into(&mut kind);
            }
            let kind = if own.is_empty() { kind.trim_end_matches('*').trim_end() } else { &kind };
            fields.push(FieldText { name: name.to_owned(), kind: kind.to_owned() });
        }
    }
    fields
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn tree(files: &[(&str, &str)]) -> SourceTree {
        let texts: BTreeMap<String, String> =
            files.iter().map(|&(name, text)| (name.into(), text.into())).collect();
        SourceTree::from_files("a test".into(), texts).expect("a kernel")
    }

    fn completed(header: &str, source: &str) -> [String; 2] {
        let tree = tree(&[("p.h", header), ("probe.cu", source)]);
        let layouts = Layouts::of(&tree, "probe.cu").expect("the tree is whole");
        [header, source].map(|text| layouts.complete(text).into_owned())
    }

    const SOURCE: &str = "#include \"p.h\"\nKERNEL(probe, ProbeParams, 32) {}\n";

    #[test]
    fn the_list_of_a_kernels_struct_stands_on_the_line_on_which_the_struct_ends() {
        let header = "struct ProbeParams {\n    const bf16* x;  // [n]; of bf16\n    int64_t x_stride;\n};\nint after;\n";
        let [header, source] = completed(header, SOURCE);
        let line = header.lines().nth(3).expect("the end of the struct");
        assert_eq!(line, "}; PARAMS_LAYOUT(ProbeParams, x, x_stride)");
        assert_eq!((header.lines().nth(4), source.as_str()), (Some("int after;"), SOURCE));
    }

    #[test]
    fn declarators_pointers_arrays_and_comments_are_read() {
        let fields = declared(
            "struct P { const T *a, *b; int32_t c, d; /* e; */ float f[2]; TensorMap g; };",
            "P",
        );
        let fields = fields.expect("plain fields").fields;
        let texts: Vec<_> =
            fields.iter().map(|field| (field.name.as_str(), field.kind.as_str())).collect();
        let expected = [
            ("a", "const T *"),
            ("b", "const T *"),
            ("c", "int32_t"),
            ("d", "int32_t"),
            ("f", "float"),
            ("g", "TensorMap"),
        ];
        assert_eq!(texts, expected);
    }

    #[test]
    fn only_structs_of_kernels_without_a_written_list_get_one() {
        let other = "struct Other { int a; };\nstruct ProbeParams { int n; };\n";
        assert!(completed(other, SOURCE)[0].starts_with("struct Other { int a; };\n"));
        let written = "struct ProbeParams { int n; };\nPARAMS_LAYOUT(ProbeParams, n)\n";
        assert_eq!(completed(written, SOURCE)[0], written);
        let in_a_comment = "// PARAMS_LAYOUT(ProbeParams, n)\nstruct ProbeParams { int n; };\n";
        assert!(completed(in_a_comment, SOURCE)[0].contains("}; PARAMS_LAYOUT(ProbeParams, n)"));
    }

    #[test]
    fn a_struct_with_functions_gets_no_list() {
        let header = "struct ProbeParams { int n; int twice() const { return 2 * n; } };\n";
        assert_eq!(completed(header, SOURCE)[0], header);
    }
}
