//! What verdicts could have seen, tensor by tensor over the cases of a sweep.

use std::collections::BTreeMap;

use super::numbers::{aligned, scientific};
use crate::bisect::sequential::{lower_bound, upper_bound};
use crate::power::{Alarms, Verdict};
use crate::record::{Check, Power, Report, Seen, figures};

/// The power of all verdicts over one tensor of an operator.
#[derive(Clone, Debug, Default)]
pub struct TensorPower {
    /// Operator.
    pub operator: String,
    /// Tensor.
    pub tensor: String,
    /// One for each case in which something can be seen.
    pub cases: Vec<Power>,
    /// Cases that are no agreement: an error of 10 % would have passed.
    pub powerless: u64,
}

/// The name of a verdict's tensor in the tables.
pub fn name_of(verdict: &Verdict) -> String {
    match verdict.given_what_was_saved {
        true => given_what_was_saved(&verdict.tensor),
        false => verdict.tensor.clone(),
    }
}

/// The share of correct tensors that are rejected: the 95 % interval of Clopper and Pearson.
pub fn interval(alarms: &Alarms) -> [f64; 2] {
    let Alarms { draws, failed, .. } = *alarms;
    [lower_bound(failed, draws, 0.025), upper_bound(failed, draws, 0.025)]
}

/// How many correct tensors were rejected, with the interval.
pub fn alarms(alarms: &Alarms) -> String {
    let Alarms { draws, failed, .. } = alarms;
    let [low, high] = interval(alarms).map(|bound| figures::measure(bound, 2));
    format!("{failed} of {draws} tensors that are right were failed: {low} to {high} (95 %)")
}

/// A rule and what it sees.
pub type Rule = (&'static str, fn(&Power) -> Seen);

/// The harness and the rules of other projects.
pub const RULES: [Rule; 5] = [
    ("parity", |power| power.bias),
    ("assert_close", |power| power.assert_close),
    ("cosine 0.999", |power| power.cosine),
    ("FlashMLA", |power| power.flash_mla),
    ("FlashAttention", |power| power.flash_attention),
];

impl TensorPower {
    /// Adds the verdict of one case.
    pub fn add(&mut self, power: Power) {
        self.powerless += u64::from(power.powerless);
        self.cases.push(power);
    }

    /// What a rule sees in at least this share of the cases, without those in which it fails a
    /// correct tensor; and the number of the latter.
    pub fn seen_in(&self, share: f64, rule: fn(&Power) -> Seen) -> (Seen, usize) {
        let mut seen: Vec<Seen> =
            self.cases.iter().map(rule).filter(|&seen| seen != Seen::FalseAlarm).collect();
        seen.sort_unstable_by(|a, b| b.cmp(a));
        let needed = (share * seen.len() as f64).ceil().max(1.0) as usize;
        (seen.get(needed - 1).copied().unwrap_or(Seen::Nothing), self.cases.len() - seen.len())
    }

    /// Share of the cases in which the harness sees a bias of `2^-exponent`.
    pub fn share_seeing(&self, exponent: u32) -> f64 {
        let sees = |power: &&Power| matches!(power.bias, Seen::Bias(k) if k >= exponent);
        self.cases.iter().filter(sees).count() as f64 / self.cases.len().max(1) as f64
    }

    /// The error of a single element, over the root mean square of its tensor, that is seen in half
    /// of the cases.
    pub fn element(&self) -> f64 {
        let mut elements: Vec<f64> = self.cases.iter().map(|power| power.element).collect();
        elements.sort_by(f64::total_cmp);
        elements.get(elements.len() / 2).copied().unwrap_or(f64::NAN)
    }
}

/// Gathers by operator and tensor, in the order in which they come.
#[derive(Debug, Default)]
pub struct Gathered {
    places: BTreeMap<(String, String), usize>,
    /// What was gathered.
    pub tensors: Vec<TensorPower>,
}

impl Gathered {
    /// What was gathered of one tensor.
    pub fn of(&mut self, operator: &str, tensor: &str) -> &mut TensorPower {
        let next = self.tensors.len();
        let place = *self.places.entry((operator.to_owned(), tensor.to_owned())).or_insert(next);
        if place == next {
            let (operator, tensor) = (operator.to_owned(), tensor.to_owned());
            self.tensors.push(TensorPower { operator, tensor, ..TensorPower::default() });
        }
        &mut self.tensors[place]
    }
}

/// The name of a gradient's [`Check::GradientOfSaved`] verdicts, next to those of the gradient itself.
pub fn given_what_was_saved(gradient: &str) -> String {
    format!("{gradient} (saved)")
}

/// The power of a report's verdicts. Those without power are only counted: they have no metrics.
pub fn of_report(report: &Report) -> Vec<TensorPower> {
    let mut gathered = Gathered::default();
    for case in &report.cases {
        for check in &case.checks {
            if let Some(power) = check.metrics.as_ref().and_then(|metrics| metrics.power.clone()) {
                let of_saved = check.check == Check::GradientOfSaved;
                let tensor = if of_saved {
                    given_what_was_saved(&check.tensor)
                } else {
                    check.tensor.clone()
                };
                gathered.of(&case.operator, &tensor).add(power);
            }
        }
    }
    for case in &report.cases {
        for (tensor, count) in case.powerless() {
            gathered.of(&case.operator, tensor).powerless += count;
        }
    }
    gathered.tensors
}

/// `2^-k`, or the text for nothing seen, and the number of false alarms.
pub fn words((seen, alarms): (Seen, usize)) -> String {
    let seen = match seen {
        Seen::Bias(k) => format!("2^-{k}"),
        Seen::Nothing | Seen::FalseAlarm => "-".to_owned(),
    };
    if alarms == 0 { seen } else { format!("{seen} ({alarms} alarms)") }
}

/// The table as text: for each tensor what is seen in half of its cases, by the harness and by
/// other rules.
pub fn table(tensors: &[TensorPower]) -> String {
    let mut rows = vec![
        ["operator", "tensor", "cases", "powerless", "best", "half of them", "9 of 10", "element"]
            .iter()
            .chain(RULES[1..].iter().map(|(name, _)| name))
            .map(|title| (*title).to_owned())
            .collect::<Vec<_>>(),
    ];
    for tensor in tensors {
        let ours = |share: f64| words(tensor.seen_in(share, RULES[0].1));
        let row = [tensor.operator.clone(), tensor.tensor.clone(), tensor.cases.len().to_string()];
        let row =
            row.into_iter().chain([tensor.powerless.to_string(), ours(0.0), ours(0.5), ours(0.9)]);
        let others = RULES[1..].iter().map(|(_, rule)| words(tensor.seen_in(0.5, *rule)));
        rows.push(row.chain([scientific(tensor.element())]).chain(others).collect());
    }
    aligned(&rows)
}

/// Each rule with the bias that it sees in half of all verdicts, without those in which it fails a
/// correct tensor; and the number of the latter.
fn by_rule(tensors: &[TensorPower]) -> Vec<(&'static str, Seen, usize)> {
    let all = TensorPower {
        cases: tensors.iter().flat_map(|tensor| tensor.cases.clone()).collect(),
        ..TensorPower::default()
    };
    RULES
        .iter()
        .map(|(name, rule)| (*name, all.seen_in(0.5, *rule)))
        .map(|(name, (seen, alarms))| (name, seen, alarms))
        .collect()
}

/// The page `power.md`: a table of the rules, then one of the tensors. `made` is the command and
/// what it was made of. `alarms` is what the harness itself rejected among correct runs.
pub fn markdown(tensors: &[TensorPower], made: &str, alarms: Option<&str>) -> String {
    let verdicts: usize = tensors.iter().map(|tensor| tensor.cases.len()).sum();
    let mut page = format!("# What a verdict sees\n\n{made}\n\n");
    page += &format!(
        "{verdicts} verdicts over {} tensors. A rule sees a bias when it rejects the tensor times (1 + bias).\n\n",
        tensors.len()
    );
    page += "| rule | bias seen in half of the verdicts | correct tensors rejected |\n| --- | --: | --: |\n";
    for (rule, seen, alarms) in by_rule(tensors) {
        let bias = match seen {
            Seen::Bias(k) => format!("2^-{k}"),
            Seen::Nothing | Seen::FalseAlarm => "none".to_owned(),
        };
        let share = 100.0 * alarms as f64 / verdicts.max(1) as f64;
        page += &format!("| {rule} | {bias} | {alarms} ({share:.1} %) |\n");
    }
    if let Some(alarms) = alarms {
        page += &format!(
            "\nNew runs of the oracles, judged by parity as if kernels had written them: {alarms}\n"
        );
    }
    page + &format!("\n## By tensor\n\n```text\n{}```\n", table(tensors))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn power(bias: u32, assert_close: Seen) -> Power {
        let (nothing, element) = (Seen::Nothing, 0.5);
        Power {
            bias: Seen::Bias(bias),
            powerless: false,
            element,
            assert_close,
            cosine: nothing,
            flash_mla: nothing,
            flash_attention: nothing,
        }
    }

    #[test]
    fn the_page_counts_what_each_rule_rejects_although_it_is_right() {
        let cases =
            vec![power(9, Seen::FalseAlarm), power(10, Seen::Bias(6)), power(11, Seen::Bias(7))];
        let tensor =
            TensorPower { operator: "rope".into(), tensor: "y".into(), cases, powerless: 0 };
        let page = markdown(&[tensor], "Made by `parity power`.", Some("0 of 3"));
        for line in [
            "| parity | 2^-10 | 0 (0.0 %) |",
            "| assert_close | 2^-7 | 1 (33.3 %) |",
            "| FlashMLA | none | 0 (0.0 %) |",
        ] {
            assert!(page.contains(line), "{line} is not in\n{page}");
        }
        assert!(
            page.contains("3 verdicts over 1 tensors")
                && page.contains("as if kernels had written them: 0 of 3")
        );
    }
}
