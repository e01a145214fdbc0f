//! The oracle's results for a case, computed once for many kernels: every mutant of an operator
//! runs the same few cases.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};

use crate::case::{Case, CaseError};
use crate::judge::truth::Truth;
use crate::operator::PreparedCase;

/// Default limit of the bytes that are kept: many small cases, or a few dozen large ones.
const KEPT_BYTES: usize = 1 << 30;

/// Truths by the lines of their cases, for any number of threads. Of two threads that want the same
/// truth, the second waits.
pub struct Truths {
    store: Mutex<Store>,
    kept_bytes: usize,
}

/// Filled by the first thread that locks it.
type Slot = Arc<Mutex<Option<Arc<Truth>>>>;

#[derive(Default)]
struct Store {
    slots: HashMap<String, Slot>,
    /// Lines of the filled slots with their sizes, the oldest first.
    filled: VecDeque<(String, usize)>,
}

impl Default for Truths {
    fn default() -> Self {
        Self::keeping(KEPT_BYTES)
    }
}

impl Truths {
    /// Keeps at most that many bytes; the oldest truths are dropped first.
    pub fn keeping(kept_bytes: usize) -> Self {
        Self { store: Mutex::default(), kept_bytes }
    }

    /// The truth of a case, whose inputs are `prepared`.
    ///
    /// # Errors
    /// What the oracle rejects; the next call runs it again.
    pub fn of(&self, case: &Case, prepared: &dyn PreparedCase) -> Result<Arc<Truth>, CaseError> {
        let line = case.line();
        let slot = self.store().slots.entry(line.clone()).or_default().clone();
        let mut slot = slot.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(truth) = &*slot {
            return Ok(truth.clone());
        }
        let truth = Arc::new(Truth::of(prepared, prepared.arithmetic())?);
        *slot = Some(truth.clone());
        self.store().keep(line, truth.size(), self.kept_bytes);
        Ok(truth)
    }

    fn store(&self) -> MutexGuard<'_, Store> {
        self.store.lock().unwrap_or_else(|e| e.into_inner())
    }
}

impl Store {
    fn keep(&mut self, line: String, bytes: usize, limit: usize) {
        self.filled.push_back((line, bytes));
        while self.filled.iter().map(|(_, bytes)| bytes).sum::<usize>() > limit
            && let Some((oldest, _)) = self.filled.pop_front()
        {
            self.slots.remove(&oldest);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use dsv4_reference::precision::Precision;
    use dsv4_runtime::{Contract, Device, RuntimeError};

    use super::*;
    use crate::judge::yardstick::working_precisions;
    use crate::operator::{KernelRun, OracleTensor, Side};

    /// Counts how often its oracle runs.
    struct Counting(AtomicUsize);

    impl PreparedCase for Counting {
        fn operator(&self) -> &'static str {
            "counting"
        }

        fn oracle(&self, _precision: Precision) -> Result<Vec<OracleTensor>, CaseError> {
            self.0.fetch_add(1, Ordering::Relaxed);
            Ok(vec![OracleTensor {
                name: "y",
                side: Side::Forward,
                shape: vec![1],
                values: vec![1.0],
            }])
        }

        fn kernel(&self, _device: &Device, _contract: Contract) -> Result<KernelRun, RuntimeError> {
            unreachable!("no kernel is asked for")
        }
    }

    fn case(seed: u64) -> Case {
        Case::parse(&format!("{{\"operator\":\"counting\",\"seed\":{seed}}}")).expect("a case")
    }

    fn runs_of_one_truth() -> usize {
        1 + working_precisions().count()
    }

    #[test]
    fn a_case_that_several_threads_ask_for_is_worked_out_once() {
        let (truths, counting) = (Truths::default(), Counting(AtomicUsize::new(0)));
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| truths.of(&case(1), &counting).expect("a truth"));
            }
        });
        assert_eq!(counting.0.load(Ordering::Relaxed), runs_of_one_truth());
        truths.of(&case(2), &counting).expect("a truth");
        assert_eq!(counting.0.load(Ordering::Relaxed), 2 * runs_of_one_truth());
    }

    #[test]
    fn the_oldest_makes_room() {
        let counting = Counting(AtomicUsize::new(0));
        let size = Truth::of(&counting, counting.arithmetic()).expect("a truth").size();
        let truths = Truths::keeping(2 * size);
        let runs = |seed: u64| {
            let before = counting.0.load(Ordering::Relaxed);
            truths.of(&case(seed), &counting).expect("a truth");
            (counting.0.load(Ordering::Relaxed) - before) / runs_of_one_truth()
        };
        assert_eq!([1, 2, 1, 2, 3, 3, 2, 1].map(runs), [1, 1, 0, 0, 1, 0, 0, 1]);
    }
}
