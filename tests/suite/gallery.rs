//! `parity gallery`: kernels of a list, right, wrong and not there, and the page about them.

use std::path::Path;

use dsv4_parity::report::gallery::list::List;

use crate::beside;
use crate::command_line::Parity;
use crate::external::python;
use crate::support::fixtures;

/// A right kernel, one that forgets eps, one whose process ends at once, and one whose library is
/// not installed.
fn write_list(dir: &Path) -> String {
    let external = fixtures().join("external");
    let right = std::fs::read_to_string(external.join("python_rms_norm.py")).unwrap();
    let wrong = right.replace("/ width + case[\"eps\"]", "/ width");
    assert_ne!(right, wrong);
    let path = format!("import sys; sys.path.insert(0, {:?})\n", external.display().to_string());
    for (name, text) in
        [("right.py", right), ("wrong.py", wrong), ("ends.py", "sys.exit('no GPU')".into())]
    {
        std::fs::write(dir.join(name), format!("{path}{text}")).unwrap();
    }
    let library = |name: &str, module: &str| {
        format!(
            "[[library]]\nname = '{name}'\nsource = 'https://example.com'\nrequires = ['{module}']\ndistribution = 'pip'\n"
        )
    };
    let kernel = |library: &str, name: &str, worker: &str| {
        format!(
            "[[kernel]]\nlibrary = '{library}'\nname = '{name}'\noperator = 'rms_norm'\nworker = '{worker}'\n"
        )
    };
    let list = [
        library("Here", "json"),
        library("Absent", "no_such_module"),
        library("Apart", "found_apart"),
        kernel("Here", "right", "right.py") + "times = ['a']\n",
        kernel("Here", "wrong", "wrong.py"),
        kernel("Here", "ends", "ends.py"),
        kernel("Absent", "norm", "right.py"),
        kernel("Apart", "norm", "right.py"),
    ];
    let path = dir.join("gallery.toml");
    std::fs::write(&path, list.concat()).unwrap();
    path.display().to_string()
}

#[test]
fn a_page_tells_which_kernels_agree_disagree_and_could_not_run_with_a_replay_line() {
    if !python("", "kernels of a gallery") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (list, out) = (write_list(dir.path()), dir.path().join("out").display().to_string());
    std::fs::create_dir(dir.path().join("site")).unwrap();
    std::fs::write(dir.path().join("site/found_apart.py"), "").unwrap();
    let site = format!("Apart={}", dir.path().join("site").display());
    let mut arguments = vec!["gallery", list.as_str(), "--out", &out, "--jobs", "2"];
    arguments.extend(["--site", &site]);
    arguments.extend(["--cases", "1", "--edge-cases", "4", "--profile", "quick"]);
    let logs: Vec<String> = beside::files()
        .into_iter()
        .map(|(name, text)| {
            let path = dir.path().join(name);
            std::fs::write(&path, text.replace("'torch'", "'Here'")).unwrap();
            path.display().to_string()
        })
        .collect();
    let page_path = dir.path().join("page.md").display().to_string();
    arguments.extend([
        "--pairs",
        &logs[0],
        "--log",
        &logs[1],
        "--log",
        &logs[2],
        "--markdown",
        &page_path,
    ]);
    let printed = Parity::new(&arguments).run();
    printed.assert_code(1);
    assert!(
        printed.stdout.contains("2 kernels agree, 1 disagree, 2 did not run"),
        "{}",
        printed.stdout
    );
    let page = std::fs::read_to_string(&page_path).unwrap();
    for words in [
        "5 kernels: 2 agree in every case, 1 do not, 2 did not run.",
        "| Here right | `rms_norm` | agrees |",
        "same bits in",
        "| 1.50 |",
        "| Here wrong | `rms_norm` | **disagrees in ",
        "### Here wrong",
        "oracle",
        "parity external --op rms_norm",
        "no_such_module is not installed",
        "no GPU",
    ] {
        assert!(page.contains(words), "{words}: {page}");
    }
    // A resumed run judges what has no report yet, and keeps the rest.
    std::fs::write(dir.path().join("right.py"), "import sys; sys.exit('gone')").unwrap();
    let apart = Path::new(&out).join("apart-norm-rms-norm");
    std::fs::remove_dir_all(&apart).expect("the folder of a kernel");
    let resumed = Parity::new(&[&arguments[..], &["--resume"]].concat()).run();
    resumed.assert_code(1);
    assert!(
        resumed.stdout.contains("1 kernels agree, 1 disagree, 3 did not run"),
        "{}",
        resumed.stdout
    );
    // Its own folders are taken again, and what an earlier run found is not told as found now.
    let again = Parity::new(&arguments).run();
    again.assert_code(1);
    assert!(
        again.stdout.contains("0 kernels agree, 1 disagree, 4 did not run"),
        "{}",
        again.stdout
    );
    let page = std::fs::read_to_string(page_path).unwrap();
    assert!(page.contains("gone"), "{page}");
    let own = std::fs::read_to_string(Path::new(&out).join("gallery.md")).unwrap();
    assert_eq!(own, page);
    assert!(Path::new(&out).join("here-wrong-rms-norm/index.html").is_file());
}

#[test]
fn a_wrong_selection_or_file_is_told_before_a_kernel_runs() {
    let dir = tempfile::tempdir().unwrap();
    let list = write_list(dir.path());
    Parity::new(&["gallery", &list, "--only", "rope"]).run().assert_bad_input(&["rope", &list]);
    Parity::new(&["gallery", "/nonexistent"]).run().assert_bad_input(&["/nonexistent"]);
    for (site, named) in [("Here=/nonexistent", "/nonexistent"), ("None=/tmp", "None")] {
        Parity::new(&["gallery", &list, "--site", site]).run().assert_bad_input(&[named]);
    }
    let out = dir.path().join("out").display().to_string();
    let nothing = ["gallery", list.as_str(), "--out", &out, "--resume"];
    Parity::new(&nothing).run().assert_bad_input(&["--resume", "gallery.json"]);
    let without = ["gallery", list.as_str(), "--out", &out, "--python", "no-such-python"];
    Parity::new(&without).run().assert_bad_input(&["no-such-python"]);
}

#[test]
fn the_list_of_public_kernels_can_be_read() {
    let list = List::read(&fixtures().join("external/gallery.toml")).unwrap();
    assert!(list.kernels.len() > 20, "{}", list.kernels.len());
}
