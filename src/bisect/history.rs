//! Revisions of the kernels, read from git objects through the `git` command, without a checkout.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use dsv4_runtime::SourceTree;

use super::BisectError;

/// Where a revision has its kernels.
pub const KERNELS: &str = "kernels/cuda";
/// The same as a git path from the top of the tree, in any working directory.
const KERNELS_FROM_TOP: &str = ":(top)kernels/cuda";

/// A repository.
pub struct Repository {
    dir: PathBuf,
    objects: RefCell<Objects>,
}

/// One commit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Commit {
    /// Full id.
    pub id: String,
    /// First line of its message.
    pub subject: String,
    /// Author and date, as text for the user.
    pub signature: String,
    /// Ids of its parents.
    pub parents: Vec<String>,
}

impl Commit {
    /// The abbreviated id.
    pub fn short(&self) -> &str {
        &self.id[..self.id.len().min(10)]
    }
}

impl Repository {
    /// Opens the repository that contains `dir`.
    ///
    /// # Errors
    /// When no repository contains it, or `git` is missing.
    pub fn open(dir: &Path) -> Result<Self, BisectError> {
        git(dir, &["rev-parse", "--git-dir"])?;
        Ok(Self { dir: dir.to_owned(), objects: RefCell::new(Objects::start(dir)?) })
    }

    /// The commit that `revision` names.
    ///
    /// # Errors
    /// When it names no commit.
    pub fn commit(&self, revision: &str) -> Result<Commit, BisectError> {
        let name = format!("{revision}^{{commit}}");
        let id = git(&self.dir, &["rev-parse", "--verify", "--quiet", "--end-of-options", &name])
            .map_err(|_| {
            BisectError::Input(format!("`{revision}` names no commit of {}", self.dir.display()))
        })?;
        let shown =
            git(&self.dir, &["show", "--no-patch", "--format=%s%n%an, %as%n%P", id.trim()])?;
        let mut lines = shown.lines();
        let mut line = || lines.next().unwrap_or_default().to_owned();
        Ok(Commit {
            id: id.trim().to_owned(),
            subject: line(),
            signature: line(),
            parents: line().split_whitespace().map(str::to_owned).collect(),
        })
    }

    /// `good`, then every commit up to `bad` that changed the kernels, oldest first. A merge
    /// counts as one commit: only first parents are followed.
    ///
    /// # Errors
    /// When `good` is not on the line of first parents of `bad`.
    pub fn line(&self, good: &Commit, bad: &Commit) -> Result<Vec<Commit>, BisectError> {
        let ancestors = git(&self.dir, &["rev-list", "--first-parent", &bad.id])?;
        if !ancestors.lines().any(|id| id == good.id) {
            return Err(BisectError::Input(format!(
                "{} is not on the line of first parents of {}; name the commit at which it was merged, or its branch's own tip",
                good.short(),
                bad.short()
            )));
        }
        let range = format!("{}..{}", good.id, bad.id);
        let ids = git(
            &self.dir,
            &["rev-list", "--first-parent", "--reverse", &range, "--", KERNELS_FROM_TOP],
        )?;
        let mut line = vec![good.clone()];
        for id in ids.lines() {
            line.push(self.commit(id)?);
        }
        Ok(line)
    }

    /// The kernels of a commit.
    ///
    /// # Errors
    /// When it has none, or one of them is not UTF-8.
    pub fn kernels(&self, commit: &Commit) -> Result<SourceTree, BisectError> {
        let listing =
            git(&self.dir, &["ls-tree", "-r", "-z", "--full-tree", &commit.id, "--", KERNELS])?;
        let mut files = BTreeMap::new();
        for entry in listing.split('\0').filter(|entry| !entry.is_empty()) {
            // MODE blob ID<tab>PATH
            let Some((head, path)) = entry.split_once('\t') else { continue };
            let mut head = head.split(' ').skip(1);
            let (Some("blob"), Some(id)) = (head.next(), head.next()) else { continue };
            let name =
                path.strip_prefix(KERNELS).and_then(|name| name.strip_prefix('/')).unwrap_or(path);
            if name.ends_with(".cu") || name.ends_with(".h") {
                let text =
                    String::from_utf8(self.objects.borrow_mut().read(id)?).map_err(|_| {
                        BisectError::Git(format!("{path} of {} is no UTF-8", commit.short()))
                    })?;
                files.insert(name.to_owned(), text);
            }
        }
        Ok(SourceTree::from_files(format!("{KERNELS} of {}", commit.short()), files)?)
    }

    /// How the kernels differ between two commits.
    ///
    /// # Errors
    /// Git's.
    pub fn kernel_diff(&self, from: &Commit, to: &Commit) -> Result<String, BisectError> {
        git(
            &self.dir,
            &["diff", "--no-color", "--no-ext-diff", &from.id, &to.id, "--", KERNELS_FROM_TOP],
        )
    }

    /// The best common ancestor of a merge's two parents, if one exists.
    pub fn merge_base(&self, merge: &Commit) -> Option<String> {
        let [first, second, ..] = &merge.parents[..] else { return None };
        git(&self.dir, &["merge-base", first, second]).ok().map(|id| id.trim().to_owned())
    }

    /// Checks out a commit in a new directory.
    ///
    /// # Errors
    /// Git's.
    pub fn worktree(&self, commit: &Commit, at: PathBuf) -> Result<Worktree<'_>, BisectError> {
        let shown = at.display().to_string();
        git(&self.dir, &["worktree", "add", "--quiet", "--force", "--detach", &shown, &commit.id])?;
        Ok(Worktree { repository: self, at })
    }
}

/// A temporary worktree; removed when dropped.
pub struct Worktree<'a> {
    repository: &'a Repository,
    at: PathBuf,
}

impl Worktree<'_> {
    /// Its directory.
    pub fn dir(&self) -> &Path {
        &self.at
    }
}

impl Drop for Worktree<'_> {
    fn drop(&mut self) {
        let shown = self.at.display().to_string();
        if let Err(error) = git(&self.repository.dir, &["worktree", "remove", "--force", &shown]) {
            tracing::warn!("the temporary worktree stays: {error}");
        }
    }
}

/// Runs git and returns what it prints.
fn git(dir: &Path, arguments: &[&str]) -> Result<String, BisectError> {
    let output = Command::new("git")
        .arg("-C")
        .arg(dir)
        .args(arguments)
        .output()
        .map_err(|error| BisectError::Git(format!("git could not be started: {error}")))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        let said = said.lines().next().unwrap_or("it said nothing");
        return Err(BisectError::Git(format!(
            "git {} in {}: {said}",
            arguments.join(" "),
            dir.display()
        )));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// A running `git cat-file --batch`: one process reads every blob.
struct Objects {
    process: Child,
    // Taken on drop: git ends when its input closes.
    ask: Option<ChildStdin>,
    answer: BufReader<ChildStdout>,
}

impl Objects {
    fn start(dir: &Path) -> Result<Self, BisectError> {
        let failed = |error: std::io::Error| {
            BisectError::Git(format!("git cat-file could not be started: {error}"))
        };
        let mut process = Command::new("git")
            .arg("-C")
            .arg(dir)
            .args(["cat-file", "--batch"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(failed)?;
        let (Some(ask), Some(answer)) = (process.stdin.take(), process.stdout.take()) else {
            return Err(BisectError::Git("git cat-file has no pipes".into()));
        };
        Ok(Self { process, ask: Some(ask), answer: BufReader::new(answer) })
    }

    fn read(&mut self, id: &str) -> Result<Vec<u8>, BisectError> {
        self.exchange(id).map_err(|error| BisectError::Git(format!("git cat-file {id}: {error}")))
    }

    /// One request, one answer: `ID TYPE SIZE`, a line feed, the bytes, a line feed.
    fn exchange(&mut self, id: &str) -> std::io::Result<Vec<u8>> {
        let other = |what: String| std::io::Error::other(what);
        let ask = self.ask.as_mut().ok_or_else(|| other("it has ended".into()))?;
        writeln!(ask, "{id}")?;
        ask.flush()?;
        let mut head = String::new();
        self.answer.read_line(&mut head)?;
        let size = head.split_whitespace().nth(2).and_then(|size| size.parse::<usize>().ok());
        let size = size.ok_or_else(|| other(format!("it answered `{}`", head.trim())))?;
        let mut bytes = vec![0; size + 1];
        self.answer.read_exact(&mut bytes)?;
        bytes.pop();
        Ok(bytes)
    }
}

impl Drop for Objects {
    fn drop(&mut self) {
        drop(self.ask.take());
        // Its exit status does not matter: every answer was checked when it arrived.
        let _ = self.process.wait();
    }
}
