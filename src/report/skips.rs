//! Merges skips with the same reason into one line.

use super::diagnosis::listed;
use crate::record::Skip;

/// The skips of one reason together: what was skipped, and how many in all, in the order in which
/// reasons first occur.
pub(crate) fn by_reason(skips: &[Skip]) -> Vec<Skip> {
    let mut reasons: Vec<(&str, Vec<String>, u64)> = Vec::new();
    for skip in skips {
        match reasons.iter_mut().find(|(why, ..)| *why == skip.why) {
            Some((_, what, count)) => {
                what.push(skip.what.clone());
                *count = count.saturating_add(skip.count);
            }
            None => reasons.push((&skip.why, vec![skip.what.clone()], skip.count)),
        }
    }
    reasons
        .into_iter()
        .map(|(why, what, count)| Skip { what: listed(&what), why: why.to_owned(), count })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn skips_of_one_reason_are_one_line() {
        let skip =
            |what: &str, why: &str, count| Skip { what: what.into(), why: why.into(), count };
        let skips = [
            skip("guards", "blind", 3),
            skip("bias", "undeclared", 5),
            skip("fully_written", "blind", 4),
        ];
        assert_eq!(
            by_reason(&skips),
            [skip("guards and fully_written", "blind", 7), skip("bias", "undeclared", 5)]
        );
    }
}
