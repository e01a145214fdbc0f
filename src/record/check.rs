//! The checks of a case by name.

use std::borrow::Cow;
use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// What a check asks. In records, reports and lists of mutants it is written as its
/// [name](Check::as_str).
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Check {
    /// `launch`: the kernels ran to their end.
    Launch,
    /// `inputs`: the inputs of the case could be made.
    Inputs,
    /// `oracle`: the oracle could judge the case.
    Oracle,
    /// `golden`: the case is that of a golden file.
    Golden,
    /// `guards`: no byte beside a buffer, nor between its rows, was written.
    Guards,
    /// `inputs_unchanged`: no input was written.
    InputsUnchanged,
    /// `fully_written`: no element of an output still holds poison.
    FullyWritten,
    /// `law: NAME`, the whole of it: a variant of the case gives what this law requires.
    Law(String),
    /// `independence`: a row does not depend on the values of others.
    Independence,
    /// `repeatable`: a second run gives the same.
    Repeatable,
    /// `poison_independent`: nothing depends on what memory held before.
    PoisonIndependent,
    /// `sequence`: nothing is left of an earlier call with other data.
    Sequence,
    /// `batch_invariance`: a row's bits do not depend on the batch that it comes in.
    BatchInvariance,
    /// `beside`: another kernel gives the same bits.
    Beside,
    /// `schedule_independent`: nothing depends on the order in which threads run.
    ScheduleIndependent,
    /// `forward`: each element of an output is within its budget.
    Forward,
    /// `gradient`: the same of a gradient.
    Gradient,
    /// `gradient_of_saved`: the same, for a gradient that follows from what the kernels saved.
    GradientOfSaved,
    /// `special_values`: infinities, NaN and structural zeros are where the oracle has them.
    SpecialValues,
    /// `finite`: what is finite in the oracle is finite.
    Finite,
    /// `bias`: no uniform relative error.
    Bias,
    /// `precision`: no more error than rounding explains, and as many elements equal to it.
    Precision,
    /// `oracle_gradients`: three derivations of the oracle's gradients agree.
    OracleGradients,
    /// `power`: some case of an operator would have shown an error of 10 % of a tensor.
    Power,
    /// A check that this version does not make: of a report of another version.
    Other(String),
}

/// The checks whose names are fixed.
const NAMED: [(Check, &str); 23] = [
    (Check::Launch, "launch"),
    (Check::Inputs, "inputs"),
    (Check::Oracle, "oracle"),
    (Check::Golden, "golden"),
    (Check::Guards, "guards"),
    (Check::InputsUnchanged, "inputs_unchanged"),
    (Check::FullyWritten, "fully_written"),
    (Check::Independence, "independence"),
    (Check::Repeatable, "repeatable"),
    (Check::PoisonIndependent, "poison_independent"),
    (Check::Sequence, "sequence"),
    (Check::BatchInvariance, "batch_invariance"),
    (Check::Beside, "beside"),
    (Check::ScheduleIndependent, "schedule_independent"),
    (Check::Forward, "forward"),
    (Check::Gradient, "gradient"),
    (Check::GradientOfSaved, "gradient_of_saved"),
    (Check::SpecialValues, "special_values"),
    (Check::Finite, "finite"),
    (Check::Bias, "bias"),
    (Check::Precision, "precision"),
    (Check::OracleGradients, "oracle_gradients"),
    (Check::Power, "power"),
];

/// What the name of a law's check starts with.
pub(crate) const LAW: &str = "law: ";

impl Check {
    /// The check of the law of this name. The law `independence` is a check of its own.
    pub fn law(name: &str) -> Self {
        if name == "independence" { Self::Independence } else { Self::Law(format!("{LAW}{name}")) }
    }

    /// Whether it is the check of a law by its name.
    pub fn is_law(&self) -> bool {
        matches!(self, Self::Law(_))
    }

    /// Its name.
    pub fn as_str(&self) -> &str {
        match self {
            Self::Law(name) | Self::Other(name) => name,
            fixed => {
                let named = NAMED.iter().find(|(check, _)| check == fixed);
                named.map_or_else(|| unreachable!("{fixed:?} has no name"), |(_, name)| name)
            }
        }
    }

    /// Whether it compares a tensor with the oracle's, element by element.
    pub fn is_agreement(&self) -> bool {
        matches!(self, Self::Forward | Self::Gradient)
    }

    /// Whether it is about statistics of a tensor: errors that no single element shows.
    pub fn is_statistic(&self) -> bool {
        matches!(self, Self::Bias | Self::Precision)
    }
}

impl From<&str> for Check {
    fn from(name: &str) -> Self {
        match NAMED.iter().find(|(_, known)| *known == name) {
            Some((check, _)) => check.clone(),
            None if name.starts_with(LAW) => Self::Law(name.to_owned()),
            None => Self::Other(name.to_owned()),
        }
    }
}

impl fmt::Display for Check {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl PartialEq<str> for Check {
    fn eq(&self, name: &str) -> bool {
        self.as_str() == name
    }
}

impl PartialEq<&str> for Check {
    fn eq(&self, name: &&str) -> bool {
        self == *name
    }
}

impl Serialize for Check {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}

impl<'de> Deserialize<'de> for Check {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Ok(Self::from(&*Cow::<str>::deserialize(deserializer)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_is_written_is_read_as_the_same_check() {
        let laws = [Check::law("independence"), Check::law("weight scales once")];
        let other = Check::Other("of_another_version".to_owned());
        for check in NAMED.map(|(check, _)| check).into_iter().chain(laws).chain([other]) {
            let written = serde_json::to_string(&check).expect("written");
            assert_eq!(written, format!("\"{check}\""));
            assert_eq!(serde_json::from_str::<Check>(&written).expect("read"), check);
        }
        assert_eq!(Check::law("weight scales once"), "law: weight scales once");
    }
}
