//! A case: one fully determined comparison, one line of JSON that replays on any machine. Also how
//! its inputs are drawn ([`Draw`]).

use std::borrow::Cow;

use dsv4_runtime::emulator::SMS;
use dsv4_runtime::{BackendKind, Device};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use thiserror::Error;

pub mod condition;
mod draw;
pub mod shell;

pub use draw::{Distribution, Draw, NORMAL_WORDS, permutation};

/// One comparison: the operator, and the fields of the operator's own case type.
///
/// As JSON: the operator's fields, with `"operator"` next to them.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Case {
    /// Operator name.
    pub operator: String,
    /// The operator's fields.
    #[serde(flatten)]
    pub fields: serde_json::Map<String, Value>,
}

/// Why a case cannot be run.
#[derive(Debug, Error)]
pub enum CaseError {
    /// The line is not a JSON object with an `operator`.
    #[error("malformed case: {0}")]
    Malformed(String),
    /// The registry has no such operator.
    #[error("unknown operator `{name}`{hint} (`parity ops` lists all)")]
    UnknownOperator {
        /// The requested name.
        name: String,
        /// The operators with similar names, if any.
        hint: String,
    },
    /// A list names an operator twice.
    #[error("operator `{name}` is named twice")]
    NamedTwice {
        /// The operator.
        name: String,
    },
    /// A field has a value that the operator cannot take.
    #[error("case of `{operator}`: field `{field}`: {reason}")]
    Field {
        /// Operator.
        operator: &'static str,
        /// Field. A field of a nested case has the name of that part before it.
        field: Cow<'static, str>,
        /// Value and rule.
        reason: String,
    },
    /// A condition on cases that no case can meet, or that cannot be evaluated.
    #[error("the condition {0}")]
    Condition(String),
    /// Kernels that do not compile, or cannot be run on this machine.
    #[error("the kernels of `{operator}` cannot be run: {why}")]
    Untestable {
        /// Operator.
        operator: String,
        /// The message of the compiler or the system.
        why: String,
    },
    /// The oracle rejected the inputs.
    #[error("oracle of `{operator}`: {reason}")]
    Oracle {
        /// Operator.
        operator: &'static str,
        /// The oracle's error.
        reason: String,
    },
}

impl Case {
    /// Parses one line.
    ///
    /// # Errors
    /// [`CaseError::Malformed`] with the parser's message.
    pub fn parse(line: &str) -> Result<Self, CaseError> {
        serde_json::from_str(line)
            .map_err(|e| CaseError::Malformed(format!("{e} in `{}`", shorten(line))))
    }

    /// Makes a case from an operator's own case type.
    ///
    /// # Panics
    /// If `fields` does not serialize to a JSON object, which every case type does.
    pub fn new(operator: &str, fields: &impl Serialize) -> Self {
        let Ok(Value::Object(fields)) = serde_json::to_value(fields) else {
            panic!("the case type of `{operator}` is no struct")
        };
        Self { operator: operator.to_owned(), fields }
    }

    /// The operator's own case type.
    ///
    /// # Errors
    /// [`CaseError::Malformed`] naming the field that is missing, unknown or of the wrong type.
    pub fn fields<T: DeserializeOwned>(&self) -> Result<T, CaseError> {
        serde_json::from_value(Value::Object(self.fields.clone()))
            .map_err(|e| CaseError::Malformed(format!("{e} in a case of `{}`", self.operator)))
    }

    /// The line that replays this case.
    pub fn line(&self) -> String {
        serde_json::to_string(self).expect("a case is JSON already")
    }

    /// A short name that identifies the case as its line does. `FILE#DIGEST` is the line of a file.
    pub fn digest(&self) -> String {
        blake3::hash(self.line().as_bytes()).to_hex()[..12].to_owned()
    }

    /// The command that replays this case on a device like this one, with the same number of random
    /// schedules (emulator).
    pub fn replay_command(&self, device: &Device, schedules: u32) -> String {
        let backend = device.environment().backend;
        let mut command = format!("parity replay --backend {backend}");
        if let Some(directory) = device.tree().directory() {
            command += &format!(" --kernels {}", shell::quoted(&directory.display().to_string()));
        }
        let sms = device.environment().processors;
        if backend == BackendKind::Emulator && sms != SMS {
            command += &format!(" --sms {sms}");
        }
        if backend == BackendKind::Emulator && schedules > 0 {
            command += &format!(" --schedules {schedules}");
        }
        format!("{command} {}", shell::quoted(&self.line()))
    }
}

fn shorten(line: &str) -> String {
    if line.chars().count() <= 120 {
        line.to_owned()
    } else {
        line.chars().take(120).chain("…".chars()).collect()
    }
}
