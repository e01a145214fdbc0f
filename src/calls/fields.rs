//! The fields of a case as a flat list: a number, a word, a truth value, null or a list by its
//! path, such as `window.page_size`.

use std::collections::BTreeMap;

use crate::case::Case;
use serde_json::{Map, Value};

/// Values by path.
pub type Leaves = BTreeMap<String, Value>;

/// Every field of a case that holds no further fields.
pub fn leaves(case: &Case) -> Leaves {
    let mut found = Leaves::new();
    add(&mut found, "", &case.fields);
    found
}

fn add(found: &mut Leaves, within: &str, fields: &Map<String, Value>) {
    for (name, value) in fields {
        let path = if within.is_empty() { name.clone() } else { format!("{within}.{name}") };
        match value {
            Value::Object(fields) => add(found, &path, fields),
            value => {
                found.insert(path, value.clone());
            }
        }
    }
}

/// Replaces the value of a field that the case has; returns whether it has it.
pub fn set(case: &mut Case, path: &str, value: &Value) -> bool {
    let mut names = path.split('.').peekable();
    let mut fields = &mut case.fields;
    while let Some(name) = names.next() {
        let Some(field) = fields.get_mut(name) else { return false };
        if names.peek().is_none() {
            *field = value.clone();
            return true;
        }
        let Value::Object(within) = field else { return false };
        fields = within;
    }
    false
}

/// Whether it is a whole number.
pub fn is_whole(value: &Value) -> bool {
    value.as_u64().is_some()
}

/// Whether it is a number that is not whole by its type.
pub fn is_real(value: &Value) -> bool {
    value.is_number() && !is_whole(value)
}
