//! What a commit has to run of the planted mutants, the edge cases, the remembered ones, the golden files and the operators of
//! long tests, and compile of the modules: those that it may concern, and a rotating share of the others.
//!
//! One is concerned when a file changed that it is made of or judged by: of a module its source and every header that this
//! includes; of a mutant those of all modules of its operator, its launcher, its oracle, its operator's file, its list.
//! What changed is told by git, against the commit at which this branch left `origin/main`, or else against the parent
//! commit. Where git cannot tell (a shallow clone of one commit, a binary far from its sources), everything runs. Of very
//! many a commit takes those whose own file changed first, and draws lots.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use dsv4_kernels::runtime::{RuntimeError, SourceTree};

use crate::operator::Operator;

/// One in so many of those that a commit does not concern runs all the same.
pub const SHARE: u64 = 8;
/// So many mutants run for a commit at most. A header that all kernels include concerns every mutant of every operator;
/// then the commit draws lots, and what is left out is for the run of everything.
pub const MOST_MUTANTS: usize = 16;
/// So many modules are compiled for a commit at most, for each target.
pub const MOST_MODULES: usize = 10;

/// So many edge cases of sweeps run for a commit at most, of all operators that it concerns together.
pub const MOST_EDGE_CASES: usize = 24;
/// The same for remembered cases.
pub const MOST_REMEMBERED_CASES: usize = 12;
/// So many operators does a test go through for a commit at most that takes minutes for all of them.
pub const MOST_OPERATORS: usize = 5;
/// The same as of edge cases for pairs of a golden file and an operator that it is about.
pub const MOST_GOLDEN_FILES: usize = 4;

/// Folders and files that judge every operator: a change there concerns all of them.
const HARNESS: [&str; 7] =
    ["kernels/src/", "reference/src/", "src/case/", "src/judge/", "src/operator/", "src/sweep/", "tests/operators/"];

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

/// What a commit may concern.
#[derive(Clone, Copy, Debug)]
pub struct Candidate<'a> {
    /// What tells it from all others.
    pub id: &'a str,
    /// The one file that it is of, from the root of the project.
    pub own: &'a str,
    /// Every file that it is made of or judged by.
    pub files: &'a BTreeSet<String>,
}

/// What an operator has of some kind, all of which is made of or judged by the same files.
#[derive(Clone, Debug)]
pub struct Stock {
    /// How many.
    pub count: usize,
    /// Every file that they are made of or judged by.
    pub files: BTreeSet<String>,
}

/// What a commit chose of its candidates.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chosen {
    /// Which ones, in the order of the candidates.
    pub flags: Vec<bool>,
    /// How many it does not concern, and whose turn it is not.
    pub unconcerned: usize,
    /// How many of the others drew no lot.
    pub without_lot: usize,
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

    /// Those that the commit runs, at most `most`.
    pub fn choose(&self, candidates: &[Candidate<'_>], most: usize) -> Chosen {
        let mut order: Vec<usize> = (0..candidates.len()).filter(|&at| self.selects(&candidates[at])).collect();
        let lot = |id: &str| lot(self.seed(), id);
        order.sort_by_key(|&at| (!self.files.contains(candidates[at].own), lot(candidates[at].id)));
        let (concerned, all) = (order.len(), candidates.len());
        order.truncate(most);
        let flags = (0..all).map(|at| order.contains(&at)).collect();
        Chosen { flags, unconcerned: all - concerned, without_lot: concerned - order.len() }
    }

    fn selects(&self, candidate: &Candidate<'_>) -> bool {
        self.files.contains(candidate.own)
            || !self.files.is_disjoint(candidate.files)
            || slot(candidate.id) == slot(&self.commit)
    }

    /// How much of each operator's stock the commit runs: all of those that it concerns, or together `most`, and a
    /// [`SHARE`]th, rounded up, of each of the others. A change of the harness concerns every operator.
    pub fn shares(&self, stocks: &[Stock], most: usize) -> Vec<usize> {
        let harness = self.harness(stocks.iter().map(|stock| &stock.files)).next().is_some();
        let concerned = |stock: &Stock| harness || !self.files.is_disjoint(&stock.files);
        let all: usize = stocks.iter().filter(|stock| concerned(stock)).map(|stock| stock.count).sum();
        let share = |stock: &Stock| match (concerned(stock), all <= most) {
            (true, true) => stock.count,
            (true, false) => (stock.count * most).div_ceil(all),
            (false, _) => stock.count.div_ceil(SHARE as usize),
        };
        stocks.iter().map(share).collect()
    }

    /// The files of the harness that changed, which judge every operator: those of no operator, of which each has `files`.
    pub fn harness<'a>(
        &'a self,
        files: impl Iterator<Item = &'a BTreeSet<String>>,
    ) -> impl Iterator<Item = &'a String> {
        let of_operators: BTreeSet<&String> = files.flatten().collect();
        let judges = |file: &String| HARNESS.iter().any(|harness| file.starts_with(harness));
        self.files.iter().filter(move |file| judges(file) && !of_operators.contains(file))
    }

    /// What lots are drawn from: the commit's hash, so that each commit draws others and a rerun the same.
    pub fn seed(&self) -> u64 {
        number(&self.commit)
    }

    /// What was left out, and why, in words; `what` they are.
    pub fn left_out(&self, chosen: &Chosen, what: &str, most: usize) -> String {
        let Chosen { flags, unconcerned, without_lot } = chosen;
        format!(
            "{} of {} {what} are left out: of {unconcerned} nothing that they are made of or judged by changed since \
             {:.12}, and it is not their turn (one in {SHARE}, by the commit's hash); {without_lot} others drew no lot \
             among the {most} that a commit runs",
            unconcerned + without_lot,
            flags.len(),
            self.base,
        )
    }
}

fn git(root: &Path, arguments: &[&str]) -> Result<String, String> {
    let output = Command::new("git").current_dir(root).args(arguments).output();
    let output = output.map_err(|error| format!("git cannot be run in {}: {error}", root.display()))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned());
    }
    Err(format!("git {}: {}", arguments.join(" "), String::from_utf8_lossy(&output.stderr).trim()))
}

/// The lot of what has this name: of many those with the lowest are drawn.
pub fn lot(seed: u64, name: &str) -> [u8; 32] {
    *blake3::hash(format!("{seed} {name}").as_bytes()).as_bytes()
}

fn number(name: &str) -> u64 {
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&blake3::hash(name.as_bytes()).as_bytes()[..8]);
    u64::from_le_bytes(bytes)
}

fn slot(name: &str) -> u64 {
    number(name) % SHARE
}

/// The source of a kernel and every header that it includes, from the root of the project.
///
/// # Errors
/// A kernel file that the tree does not have.
pub fn sources_of(kernel: &str, tree: &SourceTree) -> Result<BTreeSet<String>, RuntimeError> {
    let files = [kernel].into_iter().chain(tree.headers_of(kernel)?);
    Ok(files.map(|file| format!("kernels/cuda/{file}")).collect())
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
        files.extend(sources_of(kernel, tree)?);
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

    #[test]
    fn a_change_concerns_the_operators_that_are_made_of_it() {
        let tree = SourceTree::embedded();
        let concerned = |file: &str| -> Vec<String> {
            let concerns = |operator: &&&dyn Operator| {
                files_of(**operator, &tree, &BTreeSet::new()).expect("the kernels are there").contains(file)
            };
            registry::OPERATORS.iter().filter(concerns).map(|operator| operator.name().to_owned()).collect()
        };
        assert_eq!(concerned("kernels/cuda/rope.cu"), ["rope"]);
        assert_eq!(concerned("reference/src/rope.rs"), ["rope"]);
        assert_eq!(concerned("src/operators/rope.rs"), ["rope"]);
        assert_eq!(concerned("kernels/cuda/include/combine.h"), ["decode_attention", "attention_combine"]);
        assert_eq!(concerned("kernels/cuda/sparse_attention_hopper_backward.cu"), ["sparse_attention"]);
        assert_eq!(concerned("README.md"), [""; 0]);
    }

    fn change(commit: &str, file: &str) -> Change {
        Change { commit: commit.into(), base: String::new(), files: [file.to_owned()].into() }
    }

    /// Candidates of `rope.cu`, made of a header, too.
    fn chosen(commit: &str, file: &str, ids: &[String], most: usize) -> Vec<bool> {
        let files = ["kernels/cuda/rope.cu", "kernels/cuda/include/header.h"].map(str::to_owned).into();
        let candidate = |id| Candidate { id, own: "kernels/cuda/rope.cu", files: &files };
        let candidates: Vec<_> = ids.iter().map(|id| candidate(id.as_str())).collect();
        change(commit, file).choose(&candidates, most).flags
    }

    #[test]
    fn operators_that_a_change_concerns_share_what_a_commit_runs_and_the_others_give_an_eighth() {
        let stock = |name: &str, count| Stock { count, files: [format!("kernels/src/{name}.rs"), "a.h".into()].into() };
        let stocks = [stock("rope", 30), stock("swiglu", 50), stock("rms_norm", 1)];
        let shares = |file: &str, most| change("a", file).shares(&stocks, most);
        assert_eq!(shares("kernels/src/rope.rs", 100), [30, 7, 1], "one operator");
        assert_eq!(shares("kernels/src/rope.rs", 20), [20, 7, 1], "one with very many");
        for everything in ["a.h", "kernels/src/runtime/emulator/emulator.h", "src/judge/checks.rs"] {
            assert_eq!(shares(everything, 81), [30, 50, 1], "{everything}");
            assert_eq!(shares(everything, 27), [10, 17, 1], "{everything}");
        }
        assert_eq!(shares("README.md", 100), [4, 7, 1]);
        assert_ne!(change("a", "").seed(), change("b", "").seed());
    }

    fn ids(count: usize) -> Vec<String> {
        (0..count).map(|number| format!("mutant {number}")).collect()
    }

    #[test]
    fn a_commit_that_concerns_very_many_draws_lots_and_each_ones_turn_comes() {
        let ids = ids(480);
        let drawn = |commit: &str| chosen(commit, "kernels/cuda/include/header.h", &ids, 160);
        assert_eq!(drawn("a"), drawn("a"));
        let mut seen = vec![false; ids.len()];
        for commit in 0..64 {
            let drawn = drawn(&format!("commit {commit}"));
            assert_eq!(drawn.iter().filter(|drawn| **drawn).count(), 160);
            seen.iter_mut().zip(drawn).for_each(|(seen, drawn)| *seen |= drawn);
        }
        assert!(seen.iter().all(|seen| *seen), "some one's turn never comes");
        assert_eq!(chosen("a", "kernels/cuda/include/header.h", &ids[..9], 160), [true; 9], "a few all run");
    }

    #[test]
    fn those_whose_own_file_changed_come_before_those_that_only_include_something() {
        let (header, ids) = ("kernels/cuda/include/header.h", ids(100));
        let files: BTreeSet<String> = [header.to_owned()].into();
        let own = |at: usize| if at.is_multiple_of(10) { "kernels/cuda/rope.cu" } else { "kernels/cuda/other.cu" };
        let candidates: Vec<_> =
            ids.iter().enumerate().map(|(at, id)| Candidate { id, own: own(at), files: &files }).collect();
        let both = Change { files: [header, "kernels/cuda/rope.cu"].map(str::to_owned).into(), ..change("a", "") };
        let chosen = both.choose(&candidates, 15);
        assert_eq!((chosen.unconcerned, chosen.without_lot), (0, 85));
        assert!((0..100).step_by(10).all(|at| chosen.flags[at]), "{:?}", chosen.flags);
        assert!(both.left_out(&chosen, "mutants", 15).starts_with("85 of 100 mutants are left out: of 0 nothing"));
    }

    #[test]
    fn every_one_that_a_change_concerns_runs_and_of_the_others_a_share_that_another_commit_draws_anew() {
        let ids = ids(800);
        let selected = |commit: &str, file: &str| -> BTreeSet<usize> {
            let flags = chosen(commit, file, &ids, ids.len());
            (0..ids.len()).filter(|&at| flags[at]).collect()
        };
        assert_eq!(selected("a", "kernels/cuda/rope.cu").len(), ids.len());
        let share = selected("a", "README.md");
        assert!((60..=140).contains(&share.len()), "{} of 800", share.len());
        assert_eq!(share, selected("a", "README.md"));
        let seen: BTreeSet<usize> =
            (0..64).flat_map(|commit| selected(&format!("commit {commit}"), "README.md")).collect();
        assert_eq!(seen.len(), ids.len(), "some one's turn never comes");
    }
}
