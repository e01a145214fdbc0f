//! The structure of the project: which part may depend on which, and where an operator's files are.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;

use dsv4_parity::mutants::generated;
use dsv4_parity::operator::AnyOperator;
use dsv4_parity::operators::registry;
use dsv4_parity::record::OperatorRecord;
use regex::Regex;

const KERNELS_MANIFEST: &str = include_str!("../../kernels/Cargo.toml");
const RUNTIME_MANIFEST: &str = include_str!("../../kernels/runtime/Cargo.toml");
const REGISTRY: &str = include_str!("../../src/operators/registry.rs");

/// Kernel sources that belong to no operator.
const SELFTESTS: [&str; 4] =
    ["selftest.cu", "selftest_faults.cu", "selftest_hopper.cu", "selftest_wgmma.cu"];

/// Crates in the dependency tables of a manifest.
fn dependencies(manifest: &str) -> Vec<String> {
    let manifest: toml::Table = manifest.parse().expect("a manifest");
    let tables = ["dependencies", "dev-dependencies", "build-dependencies"];
    let named = tables.iter().filter_map(|name| manifest.get(*name)?.as_table());
    named.flat_map(|table| table.keys().cloned()).collect()
}

#[test]
fn the_kernels_do_not_depend_on_the_oracles() {
    let direct = dependencies(KERNELS_MANIFEST);
    assert!(
        direct.contains(&"dsv4-runtime".to_owned()),
        "the manifest was not understood: {direct:?}"
    );
    assert!(
        !direct.iter().any(|name| name.contains("reference") || name.contains("candle")),
        "{direct:?}"
    );
    // The whole tree, if cargo and the sources of the binary exist.
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command.args([
        "tree",
        "--offline",
        "--locked",
        "-p",
        "dsv4-kernels",
        "--edges",
        "all",
        "--prefix",
        "none",
    ]);
    let Some(output) = root
        .join("Cargo.toml")
        .is_file()
        .then(|| command.current_dir(root).output().ok())
        .flatten()
    else {
        eprintln!(
            "only kernels/Cargo.toml was looked at: no cargo, or no sources, on this machine"
        );
        return;
    };
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let tree = String::from_utf8(output.stdout).expect("UTF-8");
    assert!(
        tree.contains("dsv4-kernels v") && tree.contains("corosensei v"),
        "no dependency tree:\n{tree}"
    );
    assert!(!tree.contains("dsv4-reference") && !tree.contains("candle"), "{tree}");
}

#[test]
fn the_runtime_knows_no_other_crate_of_the_project() {
    let direct = dependencies(RUNTIME_MANIFEST);
    assert!(direct.contains(&"cudarc".to_owned()), "the manifest was not understood: {direct:?}");
    assert!(!direct.iter().any(|name| name.starts_with("dsv4")), "{direct:?}");
}

/// A source without comments.
fn code_of(text: &str) -> String {
    let mut code = String::new();
    let mut rest = text;
    while let Some(start) = rest.find("/*") {
        code.push_str(&rest[..start]);
        rest = rest[start..].find("*/").map_or("", |end| &rest[start + end + 2..]);
    }
    code.push_str(rest);
    code.lines()
        .map(|line| line.split("//").next().unwrap_or_default())
        .collect::<Vec<_>>()
        .join("\n")
}

/// The rooms of `src`. A room may depend only on rooms before it in this list.
const ROOMS: [&str; 23] = [
    "specification",
    "case",
    "record",
    "parallel_time",
    "operator",
    "model",
    "operators",
    "calls",
    "change",
    "compile",
    "judge",
    "external",
    "blame",
    "sweep",
    "coverage",
    "mutants",
    "power",
    "bisect",
    "report",
    "gallery",
    "command",
    "main",
    "lib",
];

/// Every source of `src`, without its unit tests, with its room.
fn sources(folder: &Path, found: &mut Vec<(String, String)>) {
    let mut entries: Vec<_> = std::fs::read_dir(folder)
        .expect("a folder")
        .map(|entry| entry.expect("one").path())
        .collect();
    entries.sort();
    for path in entries {
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = std::fs::read_to_string(&path).expect("UTF-8");
            let code = text.split("#[cfg(test)]\nmod tests").next().unwrap_or_default();
            found.push((path.display().to_string(), code_of(code)));
        }
    }
}

/// The rooms that a source names as `crate::ROOM` or `crate::{ROOM…, ROOM…}`.
fn named_rooms(code: &str) -> Vec<&str> {
    let named = code.match_indices("crate::").flat_map(|(at, path)| {
        let rest = &code[at + path.len()..];
        match rest.strip_prefix('{') {
            Some(list) => words(list.split(';').next().unwrap_or_default()).collect::<Vec<_>>(),
            None => words(rest).take(1).collect(),
        }
    });
    named.filter(|word| ROOMS.contains(word)).collect()
}

#[test]
fn arrows_between_the_rooms_of_the_harness_point_one_way() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    if !root.is_dir() {
        return eprintln!("skipped: there are no sources on this machine");
    }
    let mut found = Vec::new();
    sources(&root, &mut found);
    let place = |room: &str| ROOMS.iter().position(|known| *known == room);
    let (mut arrows, mut back) = (0, Vec::new());
    for (file, code) in &found {
        let inside = file.strip_prefix(&format!("{}/", root.display())).expect("a file of src");
        let room = inside.split(['/', '.']).next().expect("a room");
        if room == "build" {
            continue;
        }
        let own = place(room)
            .unwrap_or_else(|| panic!("{inside}: a room that has no place among {ROOMS:?}"));
        for named in named_rooms(code).into_iter().filter(|named| *named != room) {
            arrows += 1;
            if place(named).is_some_and(|other| other > own) {
                back.push(format!("src/{inside} -> {named}"));
            }
        }
    }
    assert!(arrows > 300, "only {arrows} arrows were found");
    assert!(back.is_empty(), "against the order {ROOMS:?}:\n{}", back.join("\n"));
}

#[test]
fn an_arrow_is_found_in_every_form() {
    let code = "use crate::case::Case;\nuse crate::{judge, report};\nfn f() -> crate::sweep::Plan { crate::nothing(record) }";
    assert_eq!(named_rooms(code), ["case", "judge", "report", "sweep"]);
}

/// What only an engine needs: oracles and their verdicts, launches of a case, planted bugs, drawn
/// cases, threads and processes.
const OF_ENGINES: [&str; 15] = [
    "use dsv4_reference",
    "Contract",
    "KernelRun",
    "OracleTensor",
    "PreparedCase",
    "Truth",
    "TestRunner",
    "TempDir",
    "tempdir",
    "par_iter",
    "thread::spawn",
    "thread::scope",
    "process::Child",
    "set_tap",
    "with_tree",
];

/// What a source has of [`OF_ENGINES`].
fn engine_of(code: &str) -> Vec<&'static str> {
    let has = |name: &&str| Regex::new(&format!(r"\b{name}\b")).expect("valid").is_match(code);
    OF_ENGINES.iter().copied().filter(has).collect()
}

#[test]
fn files_of_commands_parse_arguments_and_print() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/command");
    if !root.is_dir() {
        return eprintln!("skipped: there are no sources on this machine");
    }
    let mut found = Vec::new();
    sources(&root, &mut found);
    assert!(found.len() > 25, "only {} files were found", found.len());
    let of_engines = |(file, code): &(String, String)| {
        let names = engine_of(code);
        (!names.is_empty()).then(|| format!("{file}: {}", names.join(", ")))
    };
    let wrong: Vec<String> = found.iter().filter_map(of_engines).collect();
    assert!(wrong.is_empty(), "an engine belongs to its room:\n{}", wrong.join("\n"));
}

#[test]
fn an_engine_in_a_command_is_found() {
    let code = "fn run(case: &dyn PreparedCase) { case.kernel(device, Contract::NAN) }";
    assert_eq!(engine_of(code), ["Contract", "PreparedCase"]);
    assert!(engine_of("/// `Contracts`\nfn print(report: &Report) {}").is_empty());
}

/// The paths that a source names from `crate`, `super` or `self`, groups in braces taken apart.
fn named_paths(code: &str) -> Vec<(String, Vec<String>)> {
    let pattern =
        Regex::new(r"\b(crate|self|(?:super::)*super)::((?:\w+::)*\w+|\{[^;]*?\})").expect("valid");
    let mut paths = Vec::new();
    for found in pattern.captures_iter(code) {
        let (mut depth, mut items) = (0, vec![String::new()]);
        for character in found[2].trim_start_matches('{').chars() {
            depth += i32::from(character == '{') - i32::from(character == '}');
            match character {
                ',' if depth == 0 => items.push(String::new()),
                other => items.last_mut().expect("one").push(other),
            }
        }
        let parts = |item: &String| {
            item.split("::")
                .map(|part| part.trim_matches([' ', '\n', '{', '}']).to_owned())
                .collect()
        };
        paths.extend(items.iter().map(|item| (found[1].to_owned(), parts(item))));
    }
    paths
}

#[test]
fn no_modules_of_the_runtime_import_each_other_in_a_circle() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels/runtime/src");
    if !root.is_dir() {
        return eprintln!("skipped: there are no sources on this machine");
    }
    let mut found = Vec::new();
    sources(&root, &mut found);
    let module = |file: &str| -> Vec<String> {
        let inside = file.strip_prefix(&format!("{}/", root.display())).expect("a file of src");
        let parts =
            inside.trim_end_matches(".rs").split('/').filter(|part| !["mod", "lib"].contains(part));
        parts.map(str::to_owned).collect()
    };
    let code: BTreeMap<Vec<String>, &str> = found
        .iter()
        .map(|(file, code)| {
            (module(file), code.split("#[cfg(test)]\nmod tests").next().unwrap_or_default())
        })
        .filter(|(module, _)| {
            !module.iter().any(|part| part.starts_with("test")) && !module.is_empty()
        })
        .collect();
    let imports = |own: &Vec<String>| -> BTreeSet<Vec<String>> {
        let of = |(base, path): (String, Vec<String>)| {
            let above = own.len() - base.matches("super").count().min(own.len());
            let start = if base == "crate" { &[][..] } else { &own[..above] };
            let full = [start, &path[..]].concat();
            let longest = (1..=full.len()).rev().map(|length| full[..length].to_vec());
            // A folder's module declares those within it, and these use what it declares.
            longest
                .into_iter()
                .find(|module| code.contains_key(module))
                .filter(|module| !own.starts_with(module))
        };
        named_paths(code[own]).into_iter().filter_map(of).collect()
    };
    let mut left: BTreeMap<Vec<String>, BTreeSet<Vec<String>>> =
        code.keys().map(|own| (own.clone(), imports(own))).collect();
    assert!(
        left.values().map(BTreeSet::len).sum::<usize>() > 100,
        "the sources were not understood"
    );
    while let Some(lowest) =
        left.iter().find(|(_, imports)| imports.iter().all(|of| !left.contains_key(of)))
    {
        let lowest = lowest.0.clone();
        left.remove(&lowest);
    }
    assert!(left.is_empty(), "a circle among these, or what imports them: {:?}", left.keys());
}

/// Words of a source: runs of letters, digits and underscores.
fn words(code: &str) -> impl Iterator<Item = &str> {
    code.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|word| !word.is_empty())
}

#[test]
fn kernel_sources_hold_no_assembly_and_know_no_backend() {
    let tree = dsv4_kernels::sources();
    assert!(tree.kernel_files().count() >= registry::OPERATORS.len());
    for file in tree.kernel_files() {
        let code = code_of(tree.text(file).unwrap());
        let forbidden = [
            "asm",
            "__asm__",
            "__asm",
            "PARITY_EMULATOR",
            "__CUDA_ARCH__",
            "__CUDACC__",
            "__NVCC__",
        ];
        for word in words(&code) {
            assert!(!forbidden.contains(&word), "{file} holds `{word}`");
        }
    }
}

#[test]
fn the_only_conditionals_of_a_kernel_source_demand_its_defines() {
    let tree = dsv4_kernels::sources();
    for file in tree.kernel_files() {
        let code = code_of(tree.text(file).unwrap());
        let directives: Vec<&str> =
            code.lines().map(str::trim).filter(|line| line.starts_with('#')).collect();
        for (number, line) in directives.iter().enumerate() {
            let name = line[1..]
                .trim_start()
                .split(|c: char| !c.is_alphabetic())
                .next()
                .unwrap_or_default();
            match name {
                "include" | "define" | "undef" | "error" | "endif" | "pragma" => {}
                "if" | "ifndef" => assert!(
                    directives.get(number + 1).is_some_and(|next| next.starts_with("#error")),
                    "{file}: `{line}` chooses between two sources"
                ),
                _ => panic!("{file}: `{line}`"),
            }
        }
    }
}

#[test]
fn kernel_sources_include_the_projects_own_headers_only() {
    let tree = dsv4_kernels::sources();
    let headers: Vec<&str> = tree.headers().map(|(name, _)| name).collect();
    for file in tree.kernel_files() {
        for line in code_of(tree.text(file).unwrap())
            .lines()
            .filter(|line| line.trim().starts_with("#include"))
        {
            let name = line.split('"').nth(1).unwrap_or_else(|| panic!("{file}: `{line}`"));
            assert!(headers.contains(&name), "{file} includes `{name}`");
        }
    }
}

/// The layers of the headers, the lowest first, and what a family includes from others.
const LAYERS: [&str; 12] = [
    "base",
    "ptx",
    "tile",
    "formats",
    "projections",
    "cache",
    "attention",
    "indexer",
    "experts",
    "streams",
    "head",
    "parallel",
];
/// Folders that do not include each other.
const APART: [&str; 6] = ["attention", "indexer", "experts", "streams", "head", "parallel"];

/// Whether a source of `folder` may not include a header of `other`.
fn upward(folder: &str, other: &str) -> bool {
    let layer = |name: &str| LAYERS.iter().position(|layer| *layer == name).unwrap_or(LAYERS.len());
    folder != other
        && (layer(other) > layer(folder) || (APART.contains(&folder) && APART.contains(&other)))
}

#[test]
fn headers_lie_in_layers_and_include_none_from_above_them() {
    let tree = dsv4_kernels::sources();
    let folder = |name: &str| tree.path_of(name).split('/').next().unwrap_or_default().to_owned();
    let mut wrong = Vec::new();
    for (name, text) in tree.files().iter().filter(|(name, _)| !SELFTESTS.contains(&name.as_str()))
    {
        assert!(LAYERS.contains(&folder(name).as_str()), "{} is in no layer", tree.path_of(name));
        let included =
            text.lines().filter_map(|line| line.strip_prefix("#include \"")?.split('"').next());
        let known = included.filter(|header| tree.text(header).is_ok());
        wrong.extend(
            known
                .filter(|header| upward(&folder(name), &folder(header)))
                .map(|header| format!("{name}: {header}")),
        );
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(
        upward("base", "ptx") && upward("attention", "experts") && upward("experts", "attention")
    );
    assert!(!upward("cache", "formats") && !upward("ptx", "ptx") && !upward("head", "tile"));
}

#[test]
fn every_operator_has_its_four_files_and_one_line_in_the_registry() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let here = root.join("Cargo.toml").is_file();
    let tree = dsv4_kernels::sources();
    let list = REGISTRY
        .split("OPERATORS: &[&AnyOperator] = &[")
        .nth(1)
        .and_then(|rest| rest.split("];").next());
    let lines: Vec<&str> =
        list.expect("the list").lines().map(str::trim).filter(|l| !l.is_empty()).collect();
    assert_eq!(lines.len(), registry::OPERATORS.len(), "{lines:?}");
    for (operator, line) in registry::OPERATORS.iter().zip(&lines) {
        let record = operator.describe();
        let name = &record.name;
        let place = format!("{}/{name}", operator.family());
        assert!(
            line.contains(&format!("::<super::{}::{name}::", operator.family())),
            "`{line}` is not {name}'s"
        );
        if !operator.chain().is_empty() {
            assert_chain(operator, &record, here.then_some(root));
            continue;
        }
        let files = [
            format!("kernels/cuda/{place}.cu"),
            format!("kernels/src/{place}.rs"),
            format!("reference/src/{place}.rs"),
            format!("src/operators/{place}.rs"),
        ];
        assert_eq!((&record.kernel_file, &record.oracle_file), (&files[0], &files[2]));
        tree.text(&format!("{name}.cu")).expect("the kernel is embedded");
        if here {
            files
                .iter()
                .for_each(|file| assert!(root.join(file).is_file(), "{name} has no {file}"));
        } else {
            eprintln!(
                "{name}: only the kernel was looked for, there are no sources on this machine"
            );
        }
    }
}

/// A chain has an operator file, and the kernels and oracles of the operators that it launches.
fn assert_chain(operator: &AnyOperator, record: &OperatorRecord, root: Option<&Path>) {
    let of: Vec<OperatorRecord> = operator
        .chain()
        .iter()
        .map(|name| registry::find(name).expect("an operator").describe())
        .collect();
    let joined =
        |file: fn(&OperatorRecord) -> &str| of.iter().map(file).collect::<Vec<_>>().join(", ");
    assert_eq!(
        (&record.kernel_file, &record.oracle_file),
        (&joined(|r| &r.kernel_file), &joined(|r| &r.oracle_file))
    );
    assert!(
        (of.len() > 1 || operator.has_ranks())
            && of.iter().all(|record| !record.kernel_file.contains(',')),
        "{}",
        record.name
    );
    if let Some(root) = root {
        assert!(
            root.join(format!("src/operators/{}/{}.rs", operator.family(), record.name)).is_file(),
            "{}",
            record.name
        );
    }
}

#[test]
fn every_kernel_source_is_some_operators() {
    let tree = dsv4_kernels::sources();
    let names = registry::names();
    for file in tree.kernel_files().filter(|file| !SELFTESTS.contains(file)) {
        let of =
            |name: &&str| *file == format!("{name}.cu") || generated::is_further_file(file, name);
        assert!(names.iter().any(of), "{file} belongs to no operator");
    }
}
