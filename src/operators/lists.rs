//! Lists of keys, and how many of their slots count. Attention operators gather by these lists.

use std::collections::BTreeSet;

use dsv4_runtime::HostTensor;
use proptest::sample::select;
use proptest::strategy::Strategy;
use rand::Rng;
use rand::seq::SliceRandom;
use serde::{Deserialize, Serialize};

use crate::case::Draw;
use crate::operator::tensors::{Tensors, permuted_along};

/// What the index lists look like.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum IndexClass {
    /// Distinct valid keys where there are enough.
    Valid,
    /// Valid keys with repetitions.
    Duplicates,
    /// Some -1, some out of range, some `i32::MIN` and `i32::MAX`.
    Hostile,
    /// The first half of each list is -1: whole leading tiles without a key.
    LeadingMasked,
    /// Every third token has no valid slot.
    EmptyRows,
}

/// How many slots count.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Lengths {
    /// No length is given.
    Absent,
    /// Between 0 and `topk`.
    Within,
    /// Negative, zero, beyond `topk`, and within.
    Hostile,
}

/// Values that no kernel may follow. Each is used before any is used again, and the seed decides
/// their order: a small case has some of them, and which is no matter of its size.
pub(crate) struct Hostile<T = i32> {
    /// With their places before the order was drawn.
    values: Vec<(usize, T)>,
    next: usize,
    #[cfg(test)]
    name: String,
}

#[cfg(test)]
thread_local! {
    /// Which values of which list were used: the places used, and how many the list has.
    static USED: std::cell::RefCell<std::collections::BTreeMap<String, (BTreeSet<usize>, usize)>> =
        const { std::cell::RefCell::new(std::collections::BTreeMap::new()) };
}

/// The lists of which [`Hostile`] values were used in this thread since the last call, each with
/// how many of its values were, and how many it has.
#[cfg(test)]
pub(crate) fn take_used() -> Vec<(String, usize, usize)> {
    let used = USED.take().into_iter();
    used.map(|(name, (places, all))| (name, places.len(), all)).collect()
}

impl<T: Copy> Hostile<T> {
    /// These values; `name` is that of the list.
    pub(crate) fn new(seed: u64, name: &str, values: &[T]) -> Self {
        let mut values: Vec<_> = values.iter().copied().enumerate().collect();
        values.shuffle(Draw::new(seed, &format!("hostile {name}")).rng());
        Self {
            values,
            next: 0,
            #[cfg(test)]
            name: name.to_owned(),
        }
    }

    /// The next of them.
    pub(crate) fn take(&mut self) -> T {
        let (_place, value) = self.values[self.next % self.values.len()];
        self.next += 1;
        #[cfg(test)]
        USED.with_borrow_mut(|used| {
            let (places, all) = used.entry(self.name.clone()).or_default();
            places.insert(_place);
            *all = self.values.len();
        });
        value
    }
}

impl IndexClass {
    /// Draws any of them.
    pub(crate) fn strategy() -> impl Strategy<Value = Self> {
        select(
            &[Self::Valid, Self::Duplicates, Self::Hostile, Self::LeadingMasked, Self::EmptyRows][..],
        )
    }

    /// `num_tokens` lists of `topk` slots, each with an index of one of `num_keys` rows or none.
    /// `name` is the random stream.
    pub(crate) fn draw(
        self,
        seed: u64,
        name: &str,
        num_tokens: usize,
        topk: usize,
        num_keys: usize,
    ) -> Vec<i32> {
        let mut draw = Draw::new(seed, name);
        let keys = num_keys as i32;
        let beyond = keys.saturating_add(3);
        let mut hostile = Hostile::new(seed, name, &[-1, keys, beyond, i32::MIN, i32::MAX, -7]);
        let mut all = Vec::with_capacity(num_tokens * topk);
        let mut order: Vec<i32> = (0..keys).collect();
        for token in 0..num_tokens {
            order.shuffle(draw.rng());
            for slot in 0..topk {
                let drawn = draw.rng().random_range(0..=i32::MAX);
                let repeated = if keys == 0 { -1 } else { drawn % keys };
                let distinct = order.get(slot).copied().unwrap_or(-1);
                let one_in_three = draw.rng().random_ratio(1, 3);
                all.push(match self {
                    Self::Valid => distinct,
                    Self::Duplicates => repeated,
                    Self::Hostile if one_in_three => hostile.take(),
                    Self::LeadingMasked if slot < topk / 2 => -1,
                    Self::EmptyRows if token % 3 == 0 => hostile.take(),
                    Self::Hostile | Self::LeadingMasked | Self::EmptyRows => repeated,
                });
            }
        }
        all
    }
}

/// Elements that an oracle holds when it gathers the rows of `count` lists of `topk` slots. Each
/// slot has a row of `width` values, and one value for each of `heads` heads.
pub(crate) fn gathered(count: usize, topk: usize, width: usize, heads: usize) -> u128 {
    (count as u128 * topk as u128).saturating_mul(width as u128 + heads as u128)
}

/// `count` lists of `topk` distinct keys in random order. List `i` has some of the `own` keys from
/// `first(i)` on. `name` is the random stream.
pub(crate) fn distinct(
    (seed, name): (u64, &str),
    [count, topk, own]: [usize; 3],
    first: impl Fn(usize) -> usize,
) -> Vec<i32> {
    let mut draw = Draw::new(seed, name);
    let mut order: Vec<usize> = (0..own).collect();
    let mut lists = Vec::with_capacity(count * topk);
    for list in 0..count {
        // The start of a Fisher-Yates shuffle, applied to the order that the last list left.
        (0..topk).for_each(|slot| order.swap(slot, draw.rng().random_range(slot..own)));
        lists.extend(order[..topk].iter().map(|key| (first(list) + key) as i32));
    }
    lists
}

/// Keeps those entries of the first axis of `stores` (`page_size` keys each) that have a key in
/// some slot of `lists`. Renumbers the keys and returns the number of entries. Slots without a
/// valid key become -1.
pub(crate) fn compact(
    tensors: &mut Tensors,
    lists: &'static str,
    stores: &[&'static str],
    page_size: usize,
) -> usize {
    let pages = stores.first().map_or(0, |name| tensors.tensor(name).shape[0]);
    let key_of = |index: i32| usize::try_from(index).ok().filter(|key| key / page_size < pages);
    let indices = tensors.i32s(lists);
    let named: BTreeSet<usize> =
        indices.iter().filter_map(|&index| Some(key_of(index)? / page_size)).collect();
    let named: Vec<usize> = named.into_iter().collect();
    let renamed = |index: i32| {
        let key = key_of(index)?;
        let place = named.binary_search(&(key / page_size)).ok()?;
        i32::try_from(place * page_size + key % page_size).ok()
    };
    tensors.set_i32s(
        lists,
        &indices.iter().map(|&index| renamed(index).unwrap_or(-1)).collect::<Vec<_>>(),
    );
    for &name in stores {
        let kept = permuted_along(tensors.tensor(name), 0, &named);
        tensors.put(name, kept);
    }
    named.len()
}

/// How many slots of each of `count` lists of `topk` are within the list's length, if lengths are
/// given.
pub(crate) fn within_lengths(
    tensors: &Tensors,
    lengths: &str,
    [count, topk]: [usize; 2],
) -> Vec<usize> {
    let within = |length: i32| length.clamp(0, topk as i32) as usize;
    tensors
        .maybe_i32s(lengths)
        .map_or(vec![topk; count], |all| all.into_iter().map(within).collect())
}

/// Appends `extra` slots to each of `count` lists of `topk`, beyond all lengths. A length that
/// would now reach them is clamped to the old list.
pub(crate) fn append(
    tensors: &mut Tensors,
    (indices, lengths): (&'static str, &'static str),
    [count, topk]: [usize; 2],
    extra: &[i32],
) {
    let old = tensors.i32s(indices);
    let longer: Vec<i32> =
        old.chunks(topk).flat_map(|list| list.iter().chain(extra).copied()).collect();
    tensors.put(indices, HostTensor::from_i32(&[count, topk + extra.len()], &longer));
    tensors.edit_i32s(lengths, |all| {
        all.iter_mut().for_each(|length| *length = (*length).clamp(0, topk as i32))
    });
}

impl Lengths {
    /// Draws any of them.
    pub(crate) fn strategy() -> impl Strategy<Value = Self> {
        select(&[Self::Absent, Self::Within, Self::Hostile][..])
    }

    /// How many of `topk` slots count in each of `count` lists; `name` is the random stream.
    pub(crate) fn draw(self, seed: u64, name: &str, count: usize, topk: usize) -> Option<Vec<i32>> {
        let mut draw = Draw::new(seed, name);
        let topk = topk as i32;
        let values = [0, -1, topk.saturating_add(5), i32::MIN, i32::MAX, topk];
        let mut hostile = Hostile::new(seed, name, &values);
        let within = |draw: &mut Draw| draw.rng().random_range(0..=topk);
        match self {
            Self::Absent => None,
            Self::Within => Some((0..count).map(|_| within(&mut draw)).collect()),
            Self::Hostile => {
                let length = |token: usize| {
                    if token % 3 == 2 { within(&mut draw) } else { hostile.take() }
                };
                Some((0..count).map(length).collect())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use dsv4_runtime::{DType, HostTensor};

    use super::*;

    #[test]
    fn each_hostile_value_comes_before_any_comes_again_and_each_is_the_first_of_some_seed() {
        let values = [-1, 9, i32::MIN, i32::MAX];
        let mut first = BTreeSet::new();
        for seed in 0..40 {
            let mut hostile = Hostile::new(seed, "slots", &values);
            let taken: Vec<i32> = (0..8).map(|_| hostile.take()).collect();
            first.insert(taken[0]);
            for round in taken.chunks(4) {
                assert_eq!(BTreeSet::from_iter(round.iter().copied()), values.into());
            }
        }
        assert_eq!(first, values.into());
    }

    #[test]
    fn distinct_lists_name_every_key_of_their_own_at_most_once() {
        let lists = distinct((1, "lists"), [50, 7, 9], |list| 9 * list);
        let mut seen = BTreeSet::new();
        for (number, list) in lists.chunks(7).enumerate() {
            assert!(
                list.iter().all(|key| (9 * number as i32..9 * (number as i32 + 1)).contains(key)),
                "{list:?}"
            );
            assert_eq!(list.iter().collect::<BTreeSet<_>>().len(), 7);
            seen.insert(list.iter().map(|key| key % 9).collect::<Vec<_>>());
        }
        assert!(seen.len() > 45, "lists repeat one another");
    }

    #[test]
    fn slots_that_are_appended_lie_beyond_every_length() {
        let mut tensors = Tensors::default();
        tensors.put("indices", HostTensor::from_i32(&[4, 2], &[0, 1, 2, 3, 4, 5, 6, 7]));
        assert_eq!(within_lengths(&tensors, "topk_length", [4, 2]), [2; 4]);
        tensors.put("topk_length", HostTensor::from_i32(&[4], &[-3, 1, 2, i32::MAX]));
        let within = [0, 1, 2, 2];
        assert_eq!(within_lengths(&tensors, "topk_length", [4, 2]), within);
        append(&mut tensors, ("indices", "topk_length"), [4, 2], &[-1]);
        assert_eq!(tensors.i32s("indices"), [0, 1, -1, 2, 3, -1, 4, 5, -1, 6, 7, -1]);
        assert_eq!(
            (tensors.tensor("indices").shape.clone(), tensors.i32s("topk_length")),
            (vec![4, 3], vec![0, 1, 2, 2])
        );
        assert_eq!(within_lengths(&tensors, "topk_length", [4, 3]), within);
    }

    #[test]
    fn what_lists_name_keeps_its_content_and_what_they_do_not_is_left_out() {
        // Five pages of two keys; key 2 of page 1 is byte 2.
        let bytes = |shape: &[usize]| HostTensor {
            dtype: DType::U8,
            shape: shape.to_vec(),
            bytes: (0..10).collect(),
        };
        let indices = [9, 2, -1, 10, i32::MIN, 3, 8, i32::MAX];
        let mut tensors = Tensors::default();
        tensors.put("pages", bytes(&[5, 2]));
        tensors.put("indices", HostTensor::from_i32(&[2, 4], &indices));
        assert_eq!(compact(&mut tensors, "indices", &["pages"], 2), 2);
        let (kept, renamed) = (tensors.tensor("pages").clone(), tensors.i32s("indices"));
        assert_eq!((kept.shape, kept.bytes.clone()), (vec![2, 2], vec![2, 3, 8, 9]));
        for (before, after) in indices.iter().zip(renamed) {
            let named = usize::try_from(after).ok().map(|at| i32::from(kept.bytes[at]));
            assert_eq!(named, (0..10).contains(before).then_some(*before), "{before}");
        }
    }
}
