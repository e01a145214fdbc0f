//! What a commit must run: planted mutants, edge cases, saved cases, golden files, operators of
//! long tests, and modules to compile. A commit runs those that it concerns, and a smoke test of
//! the others.
//!
//! A commit concerns a candidate when it changed a file that the candidate is made of or judged by.
//! For a module these are its source and every header that the source includes. For a mutant these
//! are the files of all modules of its operator, the launcher, the oracle, the operator's file and
//! the mutant's list.
//!
//! Git reports what changed, against the commit at which this branch left `origin/main`, or else
//! against the parent commit. Where git cannot report it (a shallow clone of one commit, a binary
//! far from its sources), everything runs.
//!
//! Of too many candidates a commit runs those whose own file changed first. The others are the same
//! ones each time, so that no failure depends on a random choice. `PARITY_TESTS=all`, which runs at
//! night, skips nothing.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use dsv4_runtime::{RuntimeError, SourceTree};

use crate::operator::AnyOperator;

/// Of the candidates that a commit does not concern, one in this many runs anyway, and at least
/// one: the same for each commit.
const SMOKE: usize = 256;
/// The most mutants that run for a commit. A header that all kernels include concerns every mutant
/// of every operator. The run of everything covers the skipped ones.
pub const MOST_MUTANTS: usize = 16;
/// The most modules that are compiled for a commit, for each target.
pub const MOST_MODULES: usize = 10;

/// The most edge cases of sweeps that run for a commit, of all operators that it concerns together.
pub const MOST_EDGE_CASES: usize = 24;
/// The same for saved cases.
pub const MOST_REMEMBERED_CASES: usize = 12;
/// The most operators for a commit in a test that takes minutes for all operators.
pub const MOST_OPERATORS: usize = 2;
/// The same for pairs of a golden file and an operator that it covers.
pub const MOST_GOLDEN_FILES: usize = 4;

/// What a commit changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// The commit.
    pub commit: String,
    /// The commit that is compared with it.
    pub base: String,
    /// Files that differ, by their path from the root of the project, with uncommitted and new
    /// files.
    pub files: BTreeSet<String>,
}

/// A candidate: something that a commit may concern.
#[derive(Clone, Copy, Debug)]
pub struct Candidate<'a> {
    /// Identifies it among all candidates.
    pub id: &'a str,
    /// The one file that defines it, from the root of the project.
    pub own: &'a str,
    /// Every file that it is made of or judged by.
    pub files: &'a BTreeSet<String>,
}

/// What an operator has of one kind, all of it made of or judged by the same files.
#[derive(Clone, Debug)]
pub struct Stock {
    /// How many.
    pub count: usize,
    /// Every file that they are made of or judged by.
    pub files: BTreeSet<String>,
}

/// What a commit chose among its candidates.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chosen {
    /// One flag a candidate, in the order of the candidates.
    pub flags: Vec<bool>,
    /// How many candidates the commit does not concern and the smoke test does not contain.
    pub unconcerned: usize,
    /// How many candidates it concerns beyond the most that a commit runs.
    pub too_many: usize,
}

impl Change {
    /// The change of the checkout in `root`.
    ///
    /// # Errors
    /// The reason why git cannot report what changed.
    pub fn of_checkout(root: &Path) -> Result<Self, String> {
        let git = |arguments: &[&str]| git(root, arguments);
        git(&["ls-files", "--error-unmatch", "Cargo.toml"])
            .map_err(|_| "this is no checkout of the project")?;
        let commit = git(&["rev-parse", "HEAD"])?;
        let branched =
            git(&["merge-base", "origin/main", "HEAD"]).ok().filter(|base| *base != commit);
        let parent = || {
            git(&["rev-parse", "--verify", "HEAD~1"])
                .map_err(|_| "git knows no commit before this one")
        };
        let base = branched.map_or_else(parent, Ok)?;
        let changed = git(&["diff", "--name-status", "--find-renames=100%", "--relative", &base])?;
        // STATE<tab>FILE. A file that only moved has two names and changes nothing.
        let changed =
            changed.lines().filter_map(|line| line.split_once('\t').map(|(_, file)| file));
        let changed = changed.filter(|file| !file.contains('\t'));
        let new = git(&["ls-files", "--others", "--exclude-standard"])?;
        let files = changed.chain(new.lines()).map(str::to_owned).collect();
        Ok(Self { commit, base, files })
    }

    /// Chooses at most `most` of the candidates that the commit concerns, and the smoke test.
    pub fn choose(&self, candidates: &[Candidate<'_>], most: usize) -> Chosen {
        let mut order: Vec<usize> = (0..candidates.len()).collect();
        order.sort_by_key(|&at| lot(FIXED, candidates[at].id));
        let smoke: BTreeSet<usize> =
            order.iter().copied().take(candidates.len().div_ceil(SMOKE)).collect();
        order.retain(|&at| self.concerns(&candidates[at]));
        order.sort_by_key(|&at| !self.files.contains(candidates[at].own));
        let concerned = order.len();
        order.truncate(most);
        let flags: Vec<bool> =
            (0..candidates.len()).map(|at| smoke.contains(&at) || order.contains(&at)).collect();
        let left_out = flags.iter().filter(|runs| !**runs).count();
        let too_many = (concerned - order.len()).min(left_out);
        Chosen { flags, unconcerned: left_out - too_many, too_many }
    }

    fn concerns(&self, candidate: &Candidate<'_>) -> bool {
        self.files.contains(candidate.own) || !self.files.is_disjoint(candidate.files)
    }

    /// How much of each operator's stock the commit runs. Operators whose files it changed run all
    /// of it, or `most` of it together. Each other operator runs at most `rest`.
    pub fn shares(&self, stocks: &[Stock], most: usize, rest: usize) -> Vec<usize> {
        let concerned = |stock: &Stock| !self.files.is_disjoint(&stock.files);
        let all: usize =
            stocks.iter().filter(|stock| concerned(stock)).map(|stock| stock.count).sum();
        let share = |stock: &Stock| match (concerned(stock), all <= most) {
            (true, true) => stock.count,
            (true, false) => (stock.count * most).div_ceil(all),
            (false, _) => stock.count.min(rest),
        };
        stocks.iter().map(share).collect()
    }

    /// Describes what is skipped, and why. `what` names the candidates.
    pub fn left_out(&self, chosen: &Chosen, what: &str, most: usize) -> String {
        let Chosen { flags, unconcerned, too_many } = chosen;
        format!(
            "{} of {} {what} are left out: nothing that {unconcerned} of them are made of or judged by changed since \
             {:.12}; {too_many} are beyond the {most} that a commit runs",
            unconcerned + too_many,
            flags.len(),
            self.base,
        )
    }
}

fn git(root: &Path, arguments: &[&str]) -> Result<String, String> {
    let output = Command::new("git").current_dir(root).args(arguments).output();
    let output =
        output.map_err(|error| format!("git cannot be run in {}: {error}", root.display()))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned());
    }
    Err(format!("git {}: {}", arguments.join(" "), String::from_utf8_lossy(&output.stderr).trim()))
}

/// The seed of choices that are the same for each commit.
pub const FIXED: u64 = 0;

/// The random rank of a name: of many candidates those with the lowest ranks are chosen.
pub fn lot(seed: u64, name: &str) -> [u8; 32] {
    *blake3::hash(format!("{seed} {name}").as_bytes()).as_bytes()
}

/// The source of a kernel and every header that it includes, by paths from the root of the project.
///
/// # Errors
/// A kernel file that the tree does not have.
pub fn sources_of(kernel: &str, tree: &SourceTree) -> Result<BTreeSet<String>, RuntimeError> {
    let files = [kernel].into_iter().chain(tree.headers_of(kernel)?);
    Ok(files.map(|file| format!("kernels/cuda/{}", tree.path_of(file))).collect())
}

/// The files that an operator's mutants are made of or judged by, by paths from the root of the
/// project. `lists` names the lists of mutants that have a file each.
///
/// # Errors
/// A kernel file that the tree does not have.
pub fn files_of(
    operator: &AnyOperator,
    tree: &SourceTree,
    lists: &BTreeSet<String>,
) -> Result<BTreeSet<String>, RuntimeError> {
    let described = operator.describe();
    let place = format!("{}/{}", operator.family(), described.name);
    let mut files: BTreeSet<String> =
        lists.iter().map(|list| format!("fixtures/mutants/{}/{list}", operator.family())).collect();
    files.extend([described.kernel_file, described.oracle_file]);
    files.extend([format!("src/operators/{place}.rs"), format!("kernels/src/{place}.rs")]);
    let kernels: BTreeSet<String> = operator.modules().into_iter().map(|(file, _)| file).collect();
    for kernel in &kernels {
        files.extend(sources_of(kernel, tree)?);
    }
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::operators::registry;

    /// A repository with `commits` commits, each of which wrote its number to
    /// `kernels/cuda/projections/rope.cu`.
    fn repository(commits: usize) -> tempfile::TempDir {
        let dir = tempfile::tempdir().expect("a scratch directory");
        std::fs::create_dir_all(dir.path().join("kernels/cuda/projections")).expect("folders");
        std::fs::write(dir.path().join("Cargo.toml"), "").expect("a manifest");
        run(dir.path(), &["init", "--quiet", "--initial-branch", "main"]);
        for number in 0..commits {
            std::fs::write(dir.path().join("kernels/cuda/projections/rope.cu"), number.to_string())
                .expect("a kernel");
            commit(dir.path());
        }
        dir
    }

    fn run(dir: &Path, arguments: &[&str]) {
        let settings = [
            "-c",
            "user.name=test",
            "-c",
            "user.email=test@localhost",
            "-c",
            "commit.gpgsign=false",
        ];
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
        assert_eq!(
            files(&Change::of_checkout(&to).expect("a change")),
            ["kernels/cuda/projections/rope.cu"]
        );
        for name in ["one.rs", "two.rs"] {
            std::fs::write(to.join(name), "").expect("a file");
            commit(&to);
        }
        std::fs::write(to.join("new.rs"), "").expect("a file");
        std::fs::write(to.join("Cargo.toml"), "[package]").expect("a file");
        assert_eq!(
            files(&Change::of_checkout(&to).expect("a change")),
            ["Cargo.toml", "new.rs", "one.rs", "two.rs"]
        );
    }

    #[test]
    fn a_file_that_only_moved_is_no_change_and_one_that_was_edited_as_well_is() {
        let repository = repository(1);
        let root = repository.path();
        let write = |file: &str, text: &str| {
            std::fs::write(root.join("kernels/cuda").join(file), text).expect("written")
        };
        let text = (0..40).map(|line| format!("line {line}\n")).collect::<String>();
        ["a.cu", "b.cu"].iter().for_each(|file| write(file, &format!("{file}\n{text}")));
        commit(root);
        for file in ["a.cu", "b.cu"] {
            let (from, to) =
                (format!("kernels/cuda/{file}"), format!("kernels/cuda/projections/{file}"));
            run(root, &["mv", &from, &to]);
        }
        write("projections/b.cu", &format!("b.cu\n{text}one more\n"));
        commit(root);
        let change = Change::of_checkout(root).expect("a change");
        assert_eq!(
            change.files.into_iter().collect::<Vec<_>>(),
            ["kernels/cuda/b.cu", "kernels/cuda/projections/b.cu"]
        );
    }

    #[test]
    fn what_git_cannot_tell_is_said() {
        let (origin, clone) = (repository(2), tempfile::tempdir().expect("a scratch directory"));
        let from = format!("file://{}", origin.path().display());
        run(clone.path(), &["clone", "--quiet", "--depth", "1", &from, "clone"]);
        let shallow =
            Change::of_checkout(&clone.path().join("clone")).expect_err("nothing to compare with");
        assert!(shallow.contains("no commit before"), "{shallow}");
        assert!(Change::of_checkout(clone.path()).is_err(), "a folder without a repository");
        assert!(
            Change::of_checkout(&clone.path().join("gone")).is_err(),
            "a folder that is not there"
        );
    }

    #[test]
    fn a_change_concerns_the_operators_that_are_made_of_it() {
        let tree = dsv4_kernels::sources();
        let concerned = |file: &str| -> Vec<String> {
            let concerns = |operator: &&&AnyOperator| {
                files_of(operator, &tree, &BTreeSet::new())
                    .expect("the kernels are there")
                    .contains(file)
            };
            registry::OPERATORS
                .iter()
                .filter(concerns)
                .map(|operator| operator.name().to_owned())
                .collect()
        };
        assert_eq!(concerned("kernels/cuda/projections/rope.cu"), ["rope"]);
        assert_eq!(concerned("reference/src/projections/rope.rs"), ["rope"]);
        assert_eq!(concerned("src/operators/projections/rope.rs"), ["rope"]);
        assert_eq!(
            concerned("kernels/cuda/attention/combine.h"),
            ["decode_attention", "attention_combine"]
        );
        assert_eq!(
            concerned("kernels/cuda/attention/sparse_attention_hopper_backward.cu"),
            ["sparse_attention"]
        );
        assert_eq!(concerned("README.md"), [""; 0]);
    }

    fn change(commit: &str, file: &str) -> Change {
        Change { commit: commit.into(), base: String::new(), files: [file.to_owned()].into() }
    }

    /// Candidates of `rope.cu`, which also depend on a header.
    fn chosen(commit: &str, file: &str, ids: &[String], most: usize) -> Vec<bool> {
        let files = ["kernels/cuda/projections/rope.cu", "kernels/cuda/base/header.h"]
            .map(str::to_owned)
            .into();
        let candidate =
            |id| Candidate { id, own: "kernels/cuda/projections/rope.cu", files: &files };
        let candidates: Vec<_> = ids.iter().map(|id| candidate(id.as_str())).collect();
        change(commit, file).choose(&candidates, most).flags
    }

    #[test]
    fn operators_whose_files_changed_share_what_a_commit_runs_and_the_others_run_a_rest() {
        let stock = |name: &str, count| Stock {
            count,
            files: [format!("kernels/src/{name}.rs"), "a.h".into()].into(),
        };
        let stocks = [
            stock("projections/rope", 30),
            stock("experts/swiglu", 50),
            stock("projections/rms_norm", 1),
        ];
        let shares = |file: &str, most| change("a", file).shares(&stocks, most, 2);
        assert_eq!(shares("kernels/src/projections/rope.rs", 100), [30, 2, 1], "one operator");
        assert_eq!(shares("kernels/src/projections/rope.rs", 20), [20, 2, 1], "one with very many");
        assert_eq!(shares("a.h", 81), [30, 50, 1], "a header of all");
        assert_eq!(shares("a.h", 27), [10, 17, 1], "a header of all, with very many");
        for nothing in ["src/judge/budget.rs", "README.md"] {
            assert_eq!(shares(nothing, 100), [2, 2, 1], "{nothing}");
        }
    }

    fn ids(count: usize) -> Vec<String> {
        (0..count).map(|number| format!("mutant {number}")).collect()
    }

    #[test]
    fn of_very_many_each_commit_runs_the_same() {
        let ids = ids(480);
        let chosen_by = |commit: &str| chosen(commit, "kernels/cuda/base/header.h", &ids, 160);
        assert_eq!(chosen_by("a"), chosen_by("b"));
        let run = chosen_by("a").into_iter().filter(|runs| *runs).count();
        assert!((160..=162).contains(&run), "{run}: 160 and a smoke test of two");
        assert_eq!(
            chosen("a", "kernels/cuda/base/header.h", &ids[..9], 160),
            [true; 9],
            "a few all run"
        );
    }

    #[test]
    fn those_whose_own_file_changed_come_before_those_that_only_include_something() {
        let (header, ids) = ("kernels/cuda/base/header.h", ids(100));
        let files: BTreeSet<String> = [header.to_owned()].into();
        let own = |at: usize| {
            if at.is_multiple_of(10) {
                "kernels/cuda/projections/rope.cu"
            } else {
                "kernels/cuda/other.cu"
            }
        };
        let candidates: Vec<_> = ids
            .iter()
            .enumerate()
            .map(|(at, id)| Candidate { id, own: own(at), files: &files })
            .collect();
        let both = Change {
            files: [header, "kernels/cuda/projections/rope.cu"].map(str::to_owned).into(),
            ..change("a", "")
        };
        let chosen = both.choose(&candidates, 15);
        let left_out = chosen.flags.iter().filter(|runs| !**runs).count();
        assert_eq!((chosen.unconcerned, chosen.too_many), (0, left_out));
        assert!((84..=85).contains(&left_out), "{left_out}: one may be of the smoke test");
        assert!((0..100).step_by(10).all(|at| chosen.flags[at]), "{:?}", chosen.flags);
        let words = both.left_out(&chosen, "mutants", 15);
        assert!(
            words.starts_with(&format!(
                "{left_out} of 100 mutants are left out: nothing that 0 of them"
            )),
            "{words}"
        );
    }

    #[test]
    fn every_one_that_a_change_concerns_runs_and_of_the_others_a_smoke_test() {
        let ids = ids(800);
        let selected = |commit: &str, file: &str| -> BTreeSet<usize> {
            let flags = chosen(commit, file, &ids, ids.len());
            (0..ids.len()).filter(|&at| flags[at]).collect()
        };
        assert_eq!(selected("a", "kernels/cuda/projections/rope.cu").len(), ids.len());
        let smoke = selected("a", "README.md");
        assert_eq!(smoke.len(), ids.len().div_ceil(SMOKE));
        assert_eq!(smoke, selected("b", "README.md"), "the same for each commit");
    }
}
