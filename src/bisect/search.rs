//! The search: the first bad position of a sequence that starts good and ends bad.

/// The result at one position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// Like the first position.
    Good,
    /// Like the last position.
    Bad,
    /// Undecided: it does not compile, or no decision was reached.
    Skip,
}

/// Where the sequence turns from good to bad.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Turn {
    /// The last position that is known to be good.
    pub last_good: usize,
    /// The first position that is known to be bad. Everything between the two was skipped: if this
    /// is not `last_good + 1`, the turn is one of `last_good + 1 ..= first_bad`.
    pub first_bad: usize,
}

impl Turn {
    /// Whether no skipped position hides the answer.
    pub fn is_exact(self) -> bool {
        self.last_good + 1 == self.first_bad
    }
}

/// Finds the turn among positions `0..count`. The first is known to be good and the last to be bad.
/// Each answer halves the interval.
///
/// After a skip it does not try the neighbour, which probably has the same error. More attempts in
/// one interval go to 1/2, 1/4, 3/4, 1/8, 5/8, … of the untested part (van der Corput's sequence).
/// So the search leaves a run of broken positions after few attempts.
///
/// # Errors
/// The first error of `probe`.
///
/// # Panics
/// When `count` is below 2: then both ends are the same position.
pub fn first_bad<E>(
    count: usize,
    mut probe: impl FnMut(usize) -> Result<Answer, E>,
) -> Result<Turn, E> {
    assert!(count >= 2, "a row has two ends");
    let mut turn = Turn { last_good: 0, first_bad: count - 1 };
    let mut skipped = vec![false; count];
    let mut attempts = 0;
    loop {
        let untested: Vec<usize> =
            (turn.last_good + 1..turn.first_bad).filter(|&i| !skipped[i]).collect();
        if untested.is_empty() {
            return Ok(turn);
        }
        attempts += 1;
        let at = untested[(van_der_corput(attempts) * untested.len() as f64) as usize];
        match probe(at)? {
            Answer::Good => turn.last_good = at,
            Answer::Bad => turn.first_bad = at,
            Answer::Skip => {
                skipped[at] = true;
                continue;
            }
        }
        attempts = 0;
    }
}

/// The binary digits of `n`, mirrored at the binary point: 1 is 1/2, 2 is 1/4, 3 is 3/4, 4 is 1/8.
fn van_der_corput(n: u32) -> f64 {
    f64::from(n.reverse_bits()) / 2f64.powi(32)
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use super::*;

    /// The turn of a sequence that is bad from `bad` on, and how many positions were tried.
    fn search(count: usize, bad: usize, broken: impl Fn(usize) -> bool) -> (Turn, usize) {
        let mut tried = Vec::new();
        let turn = first_bad::<Infallible>(count, |at| {
            assert!(at > 0 && at < count - 1, "an end was tried again");
            assert!(!tried.contains(&at), "{at} was tried twice");
            tried.push(at);
            Ok(match at {
                _ if broken(at) => Answer::Skip,
                _ if at < bad => Answer::Good,
                _ => Answer::Bad,
            })
        });
        (turn.unwrap(), tried.len())
    }

    #[test]
    fn every_turn_of_every_short_row_is_found_in_logarithmic_time() {
        for count in 2..=130 {
            for bad in 1..count {
                let (turn, tried) = search(count, bad, |_| false);
                assert_eq!(turn, Turn { last_good: bad - 1, first_bad: bad }, "row of {count}");
                assert!(tried <= (count as f64).log2().ceil() as usize, "{tried} tried of {count}");
            }
        }
    }

    #[test]
    fn broken_positions_away_from_the_turn_do_not_hide_it() {
        for bad in 1..65 {
            let (turn, tried) = search(65, bad, |at| at % 3 == 0 && at != bad && at + 1 != bad);
            assert_eq!(turn, Turn { last_good: bad - 1, first_bad: bad });
            assert!(tried <= 24, "{tried} tried");
        }
    }

    #[test]
    fn broken_positions_at_the_turn_leave_exactly_the_range_that_they_hide() {
        for bad in 3..60 {
            for width in 1..=3 {
                let (turn, _) = search(65, bad, |at| (bad..bad + width).contains(&at));
                assert_eq!(turn, Turn { last_good: bad - 1, first_bad: bad + width });
                assert!(!turn.is_exact());
            }
        }
    }

    #[test]
    fn a_row_that_is_broken_throughout_leaves_all_of_it() {
        let (turn, tried) = search(10, 4, |_| true);
        assert_eq!((turn, tried), (Turn { last_good: 0, first_bad: 9 }, 8));
    }

    #[test]
    fn a_long_run_of_broken_positions_is_left_after_few_of_them() {
        let (turn, tried) = search(1025, 200, |at| (400..700).contains(&at));
        assert_eq!(turn, Turn { last_good: 199, first_bad: 200 });
        assert!(tried <= 14, "{tried} tried");
    }

    #[test]
    fn neighbours_need_no_probe_and_an_error_ends_the_search() {
        assert_eq!(first_bad::<()>(2, |_| Err(())), Ok(Turn { last_good: 0, first_bad: 1 }));
        assert_eq!(first_bad(9, Err), Err(4));
    }
}
