use std::path::Path;

use super::list::List;

/// Reads a list with this text, beside a worker and an adapter.
fn read(text: &str) -> Result<List, String> {
    let dir = tempfile::tempdir().expect("a scratch directory");
    for name in ["kernel.py", "adapter.toml"] {
        std::fs::write(dir.path().join(name), "").expect("written");
    }
    let path = dir.path().join("gallery.toml");
    std::fs::write(&path, text).expect("written");
    List::read(&path).map_err(|error| error.to_string())
}

const LIBRARY: &str = r#"
    [[library]]
    name = "Lib"
    source = "https://example.com"
    requires = ["lib"]
    distribution = "lib"
"#;

fn kernel(more: &str) -> String {
    format!("{LIBRARY}\n[[kernel]]\nlibrary = \"Lib\"\nname = \"norm\"\n{more}\n")
}

#[test]
fn a_list_names_its_kernels_and_their_folders() {
    let list = read(&kernel(
        "operator = \"rms_norm\"\nworker = \"kernel.py rms_norm\"\nadapter = \"adapter.toml\"",
    ));
    let list = list.expect("a list");
    let [kernel] = &list.kernels[..] else { panic!("{:?}", list.kernels) };
    assert_eq!(
        (kernel.title().as_str(), kernel.folder().as_str()),
        ("Lib norm", "lib-norm-rms-norm")
    );
    assert!(kernel.is_among(&[]) && kernel.is_among(&["lib".into()]));
    assert!(kernel.is_among(&["rms_norm".into()]) && !kernel.is_among(&["rope".into()]));
    assert_eq!(
        list.libraries.iter().map(|one| one.distribution.as_str()).collect::<Vec<_>>(),
        ["lib"]
    );
}

#[test]
fn a_wrong_entry_is_an_error_that_names_it() {
    let operator = "operator = \"rms_norm\"";
    for (more, named) in [
        ("operator = \"rms_nrom\"\nworker = \"kernel.py\"", "rms_norm"),
        (&format!("{operator}\nworker = \"other.py\""), "other.py"),
        (&format!("{operator}\nworker = \"kernel.py\"\nadapter = \"none.toml\""), "none.toml"),
        (&format!("{operator}\nworker = \"kernel.py\"\nspeed = 3"), "speed"),
    ] {
        let error = read(&kernel(more)).expect_err(more);
        assert!(error.contains(named), "{error}");
    }
    let one = format!("{operator}\nworker = \"kernel.py\"");
    let twice = format!("{}\n[[kernel]]\nlibrary = \"Lib\"\nname = \"norm\"\n{one}", kernel(&one));
    assert!(read(&twice).expect_err("twice").contains("listed twice"));
    let unknown = kernel(&one).replacen("library = \"Lib\"", "library = \"Other\"", 1);
    assert!(read(&unknown).expect_err("unknown").contains("[[library]] `Other`"));
    assert!(List::read(Path::new("/nonexistent")).is_err());
}
