//! Records the commit that the binary was built from, so that a report can name it without git.

use std::process::Command;

fn git(arguments: &[&str]) -> Option<String> {
    // `git status` would write the index, and its new time would rebuild everything.
    let output = Command::new("git").arg("--no-optional-locks").args(arguments).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

fn main() {
    let commit = git(&["rev-parse", "HEAD"]).unwrap_or_else(|| "unknown".into());
    // Untracked files do not make the build differ from the commit, unless they are sources.
    let dirty = git(&[
        "status",
        "--porcelain",
        "--",
        "src",
        "kernels",
        "reference",
        "Cargo.toml",
        "Cargo.lock",
        "build.rs",
    ])
    .is_some_and(|status| !status.is_empty());
    println!("cargo:rustc-env=PARITY_COMMIT={commit}");
    println!("cargo:rustc-env=PARITY_DIRTY={}", u8::from(dirty));
    let revision =
        if commit == "unknown" { "unknown revision" } else { &commit[..commit.len().min(12)] };
    let changes = if dirty { ", uncommitted changes" } else { "" };
    println!("cargo:rustc-env=PARITY_VERSION={} ({revision}{changes})", env!("CARGO_PKG_VERSION"));
    for path in [".git/HEAD", ".git/index", "src", "kernels", "reference"] {
        println!("cargo:rerun-if-changed={path}");
    }
}
