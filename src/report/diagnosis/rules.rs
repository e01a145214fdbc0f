//! A decision list: the shortest rules that tell failing cases from the others.
//!
//! A rule is one question or a few joined by `and`. The chosen rule describes in the fewest bits
//! which cases fail. It counts the bits to name the rule ([`Atom::cost`]). It adds the bits below
//! for the `n` cases that meet it, of which `k` fail, and the same bits for the others:
//!
//! ```text
//! log2(n + 1) + log2 C(n, k)
//! ```
//!
//! It is reported only where chance does not explain it and where it explains most of the failures:
//!
//! ```text
//! P(as many failing ones or more meet it, were failures spread at random) * 2^cost  <=  FALSE
//! bits of which cases fail, given the whole list  <=  half of the bits without it
//! ```
//!
//! The first is Fisher's exact test, corrected for the number of rules that might have been named
//! instead: a rule of `cost` bits is one of about `2^cost` that are as short. The cases that a rule
//! does not meet are used for the next one.

use std::collections::HashMap;

use statrs::function::factorial::ln_binomial;

use super::bits::Bits;
use super::features::Atom;

/// How often a sentence may be reported for failures that are spread at random: for one in twenty
/// operators that fail so.
pub(super) const FALSE: f64 = 0.05;
/// Rules of a list: failures that need more have no single cause.
const MOST_RULES: usize = 3;
/// Pairs of questions that are each tried with every possible third question.
const MOST_PAIRS: usize = 24;

/// A rule of the list.
#[derive(Clone, Debug)]
pub(super) struct Rule {
    /// Its questions, all of which must be answered with yes.
    pub(super) atoms: Vec<Atom>,
    /// For each of them other questions with the same answers.
    pub(super) same: Vec<Vec<String>>,
    /// The cases that the rule was chosen for: those that no earlier rule meets.
    pub(super) asked: Bits,
    /// Those of them that meet it.
    pub(super) meets: Bits,
}

/// Questions with the same answers.
struct Class {
    atom: Atom,
    same: Vec<Atom>,
}

impl Class {
    /// Other questions with the same answers: those on another subject first, and each text once.
    fn others(&self) -> Vec<String> {
        let mut same: Vec<&Atom> = self.same.iter().collect();
        same.sort_by_key(|atom| (atom.feature == self.atom.feature, atom.is_negative()));
        let mut features = vec![self.atom.feature];
        let (mut others, mut rest): (Vec<String>, Vec<String>) = (Vec::new(), Vec::new());
        for atom in same.iter().filter(|atom| atom.text != self.atom.text) {
            let is_new = !features.contains(&atom.feature);
            features.push(atom.feature);
            if is_new { others.push(atom.text.clone()) } else { rest.push(atom.text.clone()) }
        }
        others.extend(rest);
        others.dedup();
        others
    }
}

/// The rules of `failing` among that many cases; empty where nothing separates them.
pub(super) fn decision_list(atoms: &[Atom], failing: &Bits, cases: usize) -> Vec<Rule> {
    let classes = classes(atoms);
    let mut asked = Bits::full(cases);
    let mut rules: Vec<Rule> = Vec::new();
    while rules.len() < MOST_RULES && asked.common(failing) > 0 {
        let Some(rule) = best(&classes, failing, &asked) else { break };
        asked = asked.and(&rule.meets.not());
        rules.push(rule);
    }
    let of = |cases: &Bits| log2_binomial(cases.count(), cases.common(failing));
    let left = rules.iter().map(|rule| of(&rule.meets)).sum::<f64>() + of(&asked);
    if left <= of(&Bits::full(cases)) / 2.0 { rules } else { Vec::new() }
}

/// One question for each set of answers, the cheapest.
fn classes(atoms: &[Atom]) -> Vec<Class> {
    let mut sorted: Vec<&Atom> = atoms.iter().collect();
    sorted.sort_by(|a, b| a.cost.total_cmp(&b.cost).then(a.is_negative().cmp(&b.is_negative())));
    let mut places: HashMap<&Bits, usize> = HashMap::new();
    let mut classes: Vec<Class> = Vec::new();
    for atom in sorted {
        match places.get(&atom.holds) {
            Some(&place) => classes[place].same.push(atom.clone()),
            None => {
                places.insert(&atom.holds, classes.len());
                classes.push(Class { atom: atom.clone(), same: Vec::new() });
            }
        }
    }
    classes
}

/// Counts of a rule: cases that meet it, and failing ones among them; then the same counts of all
/// its cases.
#[derive(Clone, Copy)]
struct Counts {
    meet: u64,
    meet_and_fail: u64,
    asked: u64,
    fail: u64,
}

fn log2_binomial(n: u64, k: u64) -> f64 {
    ln_binomial(n, k) / std::f64::consts::LN_2
}

impl Counts {
    fn of(meets: &Bits, failing: &Bits, asked: u64, fail: u64) -> Self {
        Self { meet: meets.count(), meet_and_fail: meets.common(failing), asked, fail }
    }

    /// Bits to describe which cases fail, given the rule.
    fn left(self) -> f64 {
        let (others, other_failures) = (self.asked - self.meet, self.fail - self.meet_and_fail);
        let which =
            log2_binomial(self.meet, self.meet_and_fail) + log2_binomial(others, other_failures);
        which + ((self.meet + 1) as f64).log2() + ((others + 1) as f64).log2()
    }

    /// Whether more of those that meet the rule fail than of the others.
    fn points_at_failures(self) -> bool {
        let (others, other_failures) = (self.asked - self.meet, self.fail - self.meet_and_fail);
        self.meet_and_fail * others > other_failures * self.meet
    }

    /// log2 of the probability that as many of the failing cases meet the rule by chance.
    fn log2_chance(self) -> f64 {
        let term = |k: u64| {
            log2_binomial(self.meet, k) + log2_binomial(self.asked - self.meet, self.fail - k)
                - log2_binomial(self.asked, self.fail)
        };
        let possible = (self.meet_and_fail..=self.meet.min(self.fail))
            .filter(|k| self.fail - k <= self.asked - self.meet);
        possible.map(|k| term(k).exp2()).sum::<f64>().log2()
    }

    fn separates(self, cost: f64) -> bool {
        self.points_at_failures() && self.log2_chance() + cost <= FALSE.log2()
    }
}

/// The bits that name that many questions: each by itself, in no order, and how many there are.
fn cost(atoms: &[&Atom]) -> f64 {
    let orders: f64 = (1..=atoms.len()).map(|number| (number as f64).log2()).sum();
    atoms.iter().map(|atom| atom.cost).sum::<f64>() - orders + atoms.len() as f64
}

/// A candidate: indices of its classes, the cases that meet it, its score.
struct Candidate {
    places: Vec<usize>,
    meets: Bits,
    score: f64,
}

fn best(classes: &[Class], failing: &Bits, asked: &Bits) -> Option<Rule> {
    let (failing, total) = (failing.and(asked), asked.count());
    let fail = failing.count();
    let judged = |places: Vec<usize>, meets: Bits| {
        let counts = Counts::of(&meets, &failing, total, fail);
        let atoms: Vec<&Atom> = places.iter().map(|&place| &classes[place].atom).collect();
        let cost = cost(&atoms);
        counts.points_at_failures().then(|| Candidate {
            places,
            score: cost + counts.left(),
            meets,
        })
    };
    let single = |place: usize| judged(vec![place], classes[place].atom.holds.and(asked));
    let mut candidates: Vec<Candidate> = (0..classes.len()).filter_map(single).collect();
    let mut pairs: Vec<Candidate> = Vec::new();
    for first in 0..classes.len() {
        let holds = classes[first].atom.holds.and(asked);
        if holds.common(&failing) == 0 {
            continue;
        }
        for (second, class) in classes.iter().enumerate().skip(first + 1) {
            pairs.extend(judged(vec![first, second], holds.and(&class.atom.holds)));
        }
    }
    pairs.sort_by(|a, b| a.score.total_cmp(&b.score));
    for pair in pairs.iter().take(MOST_PAIRS) {
        for third in (0..classes.len()).filter(|third| !pair.places.contains(third)) {
            let places = pair.places.iter().copied().chain([third]).collect();
            candidates.extend(judged(places, pair.meets.and(&classes[third].atom.holds)));
        }
    }
    candidates.extend(pairs);
    candidates
        .sort_by(|a, b| a.score.total_cmp(&b.score).then(a.places.len().cmp(&b.places.len())));
    let separates = |candidate: &&Candidate| {
        let atoms: Vec<&Atom> =
            candidate.places.iter().map(|&place| &classes[place].atom).collect();
        Counts::of(&candidate.meets, &failing, total, fail).separates(cost(&atoms))
    };
    let candidate = candidates.iter().take(MOST_PAIRS).find(separates)?;
    let chosen = || candidate.places.iter().map(|&place| &classes[place]);
    Some(Rule {
        atoms: chosen().map(|class| class.atom.clone()).collect(),
        same: chosen().map(Class::others).collect(),
        asked: asked.clone(),
        meets: candidate.meets.clone(),
    })
}

impl Rule {
    /// Its questions.
    pub(super) fn text(&self) -> String {
        self.atoms.iter().map(|atom| atom.text.as_str()).collect::<Vec<_>>().join(" and ")
    }

    /// `29 of 29 failing cases: weight present and a scalar path; 0 of 18 with weight absent, 0 of
    /// 24 with no scalar path`.
    pub(super) fn sentence(&self, failing: &Bits) -> String {
        /// Other questions with the same answers that are named.
        const MOST_SAME: usize = 2;
        let (all, failing) = (failing.count(), failing.and(&self.asked));
        let (met, wrong) = (self.meets.count(), self.meets.common(&failing));
        let mut text = format!("{wrong} of {all} failing cases: {}", self.text());
        if met > wrong {
            text += &format!(
                " (and so {} that agree{})",
                met - wrong,
                if met - wrong == 1 { "s" } else { "" }
            );
        }
        let without = |atom: &Atom| {
            let without = self.asked.and(&atom.holds.not());
            format!("{} of {} with {}", without.common(&failing), without.count(), atom.negation)
        };
        text += &format!("; {}", self.atoms.iter().map(without).collect::<Vec<_>>().join(", "));
        let same: Vec<&str> = self
            .same
            .iter()
            .flat_map(|same| same.iter().take(MOST_SAME))
            .map(String::as_str)
            .collect();
        if !same.is_empty() {
            text += &format!(". The same cases: {}", same.join("; "));
        }
        text
    }
}
