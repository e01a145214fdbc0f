//! A run's findings by layer and operator, and how its error grows.

use serde::Serialize;

use super::judge::{Finding, ranked};

/// What was found about a run.
#[derive(Clone, Debug, Serialize)]
pub struct Blame {
    /// What ran, in a few words.
    pub run: String,
    /// Main layers, where they are known.
    pub num_layers: Option<usize>,
    /// Each call, in order.
    pub findings: Vec<Finding>,
}

/// The largest share of a budget over the calls of an operator in a layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cell {
    /// The share; `None` where nothing was compared.
    pub used: Option<f64>,
    /// Whether a call is outside its own budget.
    pub is_guilty: bool,
}

/// Operators, layers, and what was found of each pair.
pub struct Grid {
    /// Names of the operators, in the order in which they first ran.
    pub operators: Vec<String>,
    /// Names of the layers.
    pub layers: Vec<String>,
    /// A row for each operator.
    pub cells: Vec<Vec<Option<Cell>>>,
}

/// The error of the streams after a layer.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Growth {
    /// The layer.
    pub layer: String,
    /// The largest error relative to the run without roundings.
    pub total: f64,
    /// What the last call of these streams added itself.
    pub added: f64,
}

/// Operators that write the streams.
const OF_STREAMS: [&str; 2] = ["mhc_post_mix_pre", "mhc_post"];

impl Blame {
    /// The first call that is outside its own budget.
    pub fn first(&self) -> Option<&Finding> {
        self.findings.iter().find(|finding| finding.is_guilty())
    }

    /// Elements that were compared.
    pub fn compared(&self) -> u64 {
        self.findings.iter().map(|finding| finding.compared).sum()
    }

    /// Calls that could not be judged.
    pub fn skipped(&self) -> impl Iterator<Item = &Finding> {
        self.findings.iter().filter(|finding| finding.skipped.is_some())
    }

    /// The name of a layer.
    pub fn layer(&self, layer: Option<usize>) -> String {
        match layer {
            None => "-".to_owned(),
            Some(layer) if self.num_layers == Some(layer) => "mtp".to_owned(),
            Some(layer) => layer.to_string(),
        }
    }

    /// The findings by layer and operator. Calls outside the layers are the first column.
    pub fn grid(&self) -> Grid {
        let mut layers: Vec<Option<usize>> =
            self.findings.iter().map(|finding| finding.place.layer).collect();
        layers.sort_unstable();
        layers.dedup();
        let mut operators: Vec<String> = Vec::new();
        for finding in &self.findings {
            if !operators.contains(&finding.place.operator) {
                operators.push(finding.place.operator.clone());
            }
        }
        let cell = |operator: &String, layer: Option<usize>| {
            let of = |finding: &&Finding| {
                finding.place.operator == *operator && finding.place.layer == layer
            };
            let mut found = self.findings.iter().filter(of).peekable();
            found.peek()?;
            let found: Vec<&Finding> = found.collect();
            let judged = found.iter().filter(|finding| finding.compared > 0);
            let used = judged.map(|finding| finding.budget_used).max_by(f64::total_cmp);
            Some(Cell { used, is_guilty: found.iter().any(|finding| finding.is_guilty()) })
        };
        Grid {
            cells: operators
                .iter()
                .map(|operator| layers.iter().map(|&layer| cell(operator, layer)).collect())
                .collect(),
            layers: layers.into_iter().map(|layer| self.layer(layer)).collect(),
            operators,
        }
    }

    /// The error of the streams, layer by layer; empty where it is not known.
    pub fn growth(&self) -> Vec<Growth> {
        let mut growth: Vec<Growth> = Vec::new();
        for finding in &self.findings {
            let streams = finding.errors.iter().find(|error| error.tensor == "out");
            let Some(error) = streams else { continue };
            if !OF_STREAMS.contains(&finding.place.operator.as_str()) {
                continue;
            }
            let layer = self.layer(finding.place.layer);
            let (total, added) = (error.total, error.added);
            match growth.iter_mut().find(|known| known.layer == layer) {
                Some(known) if known.total >= total => {}
                Some(known) => (known.total, known.added) = (total, added),
                None => growth.push(Growth { layer, total, added }),
            }
        }
        growth
    }

    /// The calls outside their budgets in their order, then those that add most error.
    pub fn worst(&self, most: usize) -> Vec<&Finding> {
        ranked(&self.findings).into_iter().take(most).collect()
    }
}
