//! Which planted mutants a commit has to run: those that it may concern, and a rotating share of the others.
//!
//! A mutant is concerned when one of the files changed that it is made of or judged by: the kernel files of its operator and
//! every header that these include, its launcher, its oracle, its operator's file, its list of mutants. What changed is
//! told by git, against the commit at which this branch left `origin/main`, or else against the parent commit. Where git
//! cannot tell (a shallow clone of one commit, a binary far from its sources), every mutant runs. Of very many ([`MOST`])
//! a commit draws lots.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use dsv4_kernels::runtime::{RuntimeError, SourceTree};

use crate::mutants::planted::Mutant;
use crate::operator::Operator;

/// One in so many of the mutants that a commit does not concern runs all the same.
pub const SHARE: u64 = 8;
/// So many mutants run for a commit at most. A header that all kernels include concerns every mutant of every operator;
/// then the commit draws lots, and what is left out is for the run of everything.
pub const MOST: usize = 160;

/// What a commit changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// The commit, which chooses the rotating share: a rerun has the same one.
    pub commit: String,
    /// The commit that it is compared with.
    pub base: String,
    /// Files that differ, by their path from the root of the project; uncommitted and new ones, too.
    pub files: BTreeSet<String>,
}

impl Change {
    /// Of the checkout in `root`.
    ///
    /// # Errors
    /// Why git cannot tell what changed.
    pub fn of_checkout(root: &Path) -> Result<Self, String> {
        let git = |arguments: &[&str]| git(root, arguments);
        git(&["ls-files", "--error-unmatch", "Cargo.toml"]).map_err(|_| "this is no checkout of the project")?;
        let commit = git(&["rev-parse", "HEAD"])?;
        let branched = git(&["merge-base", "origin/main", "HEAD"]).ok().filter(|base| *base != commit);
        let parent = || git(&["rev-parse", "--verify", "HEAD~1"]).map_err(|_| "git knows no commit before this one");
        let base = branched.map_or_else(parent, Ok)?;
        let changed = git(&["diff", "--name-only", "--relative", &base])?;
        let new = git(&["ls-files", "--others", "--exclude-standard"])?;
        let files = changed.lines().chain(new.lines()).map(str::to_owned).collect();
        Ok(Self { commit, base, files })
    }

    /// Whether a mutant runs: `files` are those of its operator ([`files_of`]).
    pub fn selects(&self, mutant: &Mutant, files: &BTreeSet<String>) -> bool {
        !self.files.is_disjoint(files) || slot(&mutant.id) == slot(&self.commit)
    }
}

/// Of the mutants that a commit's run would have, by `selected`, the first [`MOST`] in an order that the commit draws.
pub fn at_most(commit: &str, ids: &[&str], selected: &[bool]) -> Vec<bool> {
    let lot = |at: &usize| *blake3::hash(format!("{commit} {}", ids[*at]).as_bytes()).as_bytes();
    let mut order: Vec<usize> = (0..ids.len()).filter(|&at| selected[at]).collect();
    order.sort_by_key(lot);
    order.truncate(MOST);
    (0..ids.len()).map(|at| order.contains(&at)).collect()
}

fn git(root: &Path, arguments: &[&str]) -> Result<String, String> {
    let output = Command::new("git").current_dir(root).args(arguments).output();
    let output = output.map_err(|error| format!("git cannot be run in {}: {error}", root.display()))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned());
    }
    Err(format!("git {}: {}", arguments.join(" "), String::from_utf8_lossy(&output.stderr).trim()))
}

fn slot(name: &str) -> u64 {
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&blake3::hash(name.as_bytes()).as_bytes()[..8]);
    u64::from_le_bytes(bytes) % SHARE
}

/// The files that an operator's mutants are made of or judged by, from the root of the project. `lists` are the names
/// of the lists of mutants that have one of its own.
///
/// # Errors
/// A kernel file that the tree does not have.
pub fn files_of(
    operator: &dyn Operator,
    tree: &SourceTree,
    lists: &BTreeSet<String>,
) -> Result<BTreeSet<String>, RuntimeError> {
    let described = operator.describe();
    let name = &described.name;
    let mut files: BTreeSet<String> = lists.iter().map(|list| format!("fixtures/mutants/{list}")).collect();
    files.extend([described.kernel_file, described.oracle_file]);
    files.extend([format!("src/operators/{name}.rs"), format!("kernels/src/{name}.rs")]);
    let kernels: BTreeSet<String> = operator.modules().into_iter().map(|(file, _)| file).collect();
    for kernel in &kernels {
        files.insert(format!("kernels/cuda/{kernel}"));
        files.extend(tree.headers_of(kernel)?.iter().map(|header| format!("kernels/cuda/{header}")));
    }
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::operator::registry;

    /// A repository in which `commits` commits were made, each of which wrote its number to `kernels/cuda/rope.cu`.
    fn repository(commits: usize) -> tempfile::TempDir {
        let dir = tempfile::tempdir().expect("a scratch directory");
        std::fs::create_dir_all(dir.path().join("kernels/cuda")).expect("folders");
        std::fs::write(dir.path().join("Cargo.toml"), "").expect("a manifest");
        run(dir.path(), &["init", "--quiet", "--initial-branch", "main"]);
        for number in 0..commits {
            std::fs::write(dir.path().join("kernels/cuda/rope.cu"), number.to_string()).expect("a kernel");
            commit(dir.path());
        }
        dir
    }

    fn run(dir: &Path, arguments: &[&str]) {
        let settings = ["-c", "user.name=test", "-c", "user.email=test@localhost", "-c", "commit.gpgsign=false"];
        git(dir, &[&settings[..], arguments].concat()).unwrap_or_else(|error| panic!("{error}"));
    }

    fn commit(dir: &Path) {
        run(dir, &["add", "."]);
        run(dir, &["commit", "--quiet", "--message", "a change"]);
    }

    fn files(change: &Change) -> Vec<&str> {
        change.files.iter().map(String::as_str).collect()
    }

    #[test]
    fn a_clone_is_compared_with_its_parent_commit_and_a_branch_with_where_it_left_main() {
        let (origin, clone) = (repository(2), tempfile::tempdir().expect("a scratch directory"));
        let (from, to) = (origin.path().display().to_string(), clone.path().join("clone"));
        run(clone.path(), &["clone", "--quiet", &from, "clone"]);
        assert_eq!(files(&Change::of_checkout(&to).expect("a change")), ["kernels/cuda/rope.cu"]);
        for name in ["one.rs", "two.rs"] {
            std::fs::write(to.join(name), "").expect("a file");
            commit(&to);
        }
        std::fs::write(to.join("new.rs"), "").expect("a file");
        std::fs::write(to.join("Cargo.toml"), "[package]").expect("a file");
        assert_eq!(files(&Change::of_checkout(&to).expect("a change")), ["Cargo.toml", "new.rs", "one.rs", "two.rs"]);
    }

    #[test]
    fn what_git_cannot_tell_is_said() {
        let (origin, clone) = (repository(2), tempfile::tempdir().expect("a scratch directory"));
        let from = format!("file://{}", origin.path().display());
        run(clone.path(), &["clone", "--quiet", "--depth", "1", &from, "clone"]);
        let shallow = Change::of_checkout(&clone.path().join("clone")).expect_err("nothing to compare with");
        assert!(shallow.contains("no commit before"), "{shallow}");
        assert!(Change::of_checkout(clone.path()).is_err(), "a folder without a repository");
        assert!(Change::of_checkout(&clone.path().join("gone")).is_err(), "a folder that is not there");
    }

    fn mutant(id: &str) -> Mutant {
        Mutant {
            id: id.into(),
            catalogue: String::new(),
            operator: "rope".into(),
            file: "rope.cu".into(),
            summary: String::new(),
            find: String::new(),
            replace: String::new(),
            expected: String::new(),
            cases: Vec::new(),
            list: String::new(),
            hidden_on_gpu: None,
        }
    }

    #[test]
    fn a_change_concerns_the_operators_that_are_made_of_it() {
        let tree = SourceTree::embedded();
        let concerned = |file: &str| -> Vec<String> {
            let concerns = |operator: &&&dyn Operator| {
                files_of(**operator, &tree, &BTreeSet::new()).expect("the kernels are there").contains(file)
            };
            registry::OPERATORS.iter().filter(concerns).map(|operator| operator.describe().name).collect()
        };
        assert_eq!(concerned("kernels/cuda/rope.cu"), ["rope"]);
        assert_eq!(concerned("reference/src/rope.rs"), ["rope"]);
        assert_eq!(concerned("src/operators/rope.rs"), ["rope"]);
        assert_eq!(concerned("kernels/cuda/include/combine.h"), ["decode_attention", "attention_combine"]);
        assert_eq!(concerned("kernels/cuda/sparse_attention_hopper_backward.cu"), ["sparse_attention"]);
        assert_eq!(concerned("README.md"), [""; 0]);
    }

    #[test]
    fn a_commit_that_concerns_very_many_mutants_draws_lots_and_each_ones_turn_comes() {
        let ids: Vec<String> = (0..3 * MOST).map(|number| format!("mutant {number}")).collect();
        let ids: Vec<&str> = ids.iter().map(String::as_str).collect();
        let mut selected = vec![true; ids.len()];
        selected[7] = false;
        let drawn = |commit: &str| at_most(commit, &ids, &selected);
        assert_eq!(drawn("a"), drawn("a"));
        let mut seen = vec![false; ids.len()];
        for commit in 0..64 {
            let drawn = drawn(&format!("commit {commit}"));
            assert_eq!(drawn.iter().filter(|drawn| **drawn).count(), MOST);
            seen.iter_mut().zip(drawn).for_each(|(seen, drawn)| *seen |= drawn);
        }
        assert_eq!(seen, selected);
        assert_eq!(at_most("a", &ids[..9], &selected[..9]), selected[..9], "a few all run");
    }

    #[test]
    fn every_mutant_of_a_change_runs_and_of_the_others_a_share_that_another_commit_draws_anew() {
        let ids: Vec<String> = (0..800).map(|number| format!("mutant {number}")).collect();
        let own: BTreeSet<String> = ["kernels/cuda/rope.cu".to_owned()].into();
        let selected = |commit: &str, file: &str| -> Vec<&String> {
            let change = Change { commit: commit.into(), base: String::new(), files: [file.to_owned()].into() };
            ids.iter().filter(|id| change.selects(&mutant(id), &own)).collect()
        };
        assert_eq!(selected("a", "kernels/cuda/rope.cu").len(), ids.len());
        let share = selected("a", "README.md");
        assert!((60..=140).contains(&share.len()), "{} of 800", share.len());
        assert_eq!(share, selected("a", "README.md"));
        let seen: BTreeSet<&String> =
            (0..64).flat_map(|commit| selected(&format!("commit {commit}"), "README.md")).collect();
        assert_eq!(seen.len(), ids.len(), "some mutant's turn never comes");
    }
}
