//! Ranks in processes of others, such as a trainer's: what each is given and is to write, and what
//! they wrote, put together as what our own ranks write.

use std::cell::RefCell;
use std::collections::BTreeMap;

use dsv4_runtime::{DType, HostTensor, NamedTensors, RuntimeError};

/// A tensor of a rank in one direction.
pub(crate) enum Part {
    /// It is given.
    Given(HostTensor),
    /// The rank writes it.
    Written(DType, Vec<usize>),
}

impl Part {
    /// Whether the rank writes it.
    pub fn is_written(&self) -> bool {
        matches!(self, Self::Written(..))
    }
}

/// The tensors of a rank in one direction, by name.
pub(crate) type Parts = Vec<(&'static str, Part)>;

/// What a rank wrote, by name.
pub type WrittenByRank = BTreeMap<&'static str, HostTensor>;

/// What a rank is given and is to write, forward and backward together.
#[derive(Clone, Debug, Default)]
pub struct OfRank {
    /// What it reads, by name.
    pub given: NamedTensors,
    /// What it is to write, by name; the values are zeros.
    pub written: Vec<(&'static str, HostTensor)>,
}

impl OfRank {
    /// Adds the tensors of another direction. What the rank itself writes is not given to it.
    fn add(&mut self, parts: &Parts) -> Result<(), RuntimeError> {
        for (name, part) in parts {
            let is_written = self.written.iter().any(|(written, _)| written == name);
            let known = self.given.iter().find(|(given, _)| given == name);
            match (part, known) {
                (Part::Written(dtype, shape), _) => self.written.push((name, zeros(*dtype, shape))),
                (Part::Given(tensor), None) if !is_written => {
                    self.given.push(((*name).to_owned(), tensor.clone()));
                }
                (Part::Given(tensor), Some((_, before))) if before != tensor => {
                    let reason = "two unlike inputs of a rank have this name";
                    return Err(RuntimeError::argument("ranks", name, reason));
                }
                (Part::Given(_), _) => {}
            }
        }
        Ok(())
    }
}

fn zeros(dtype: DType, shape: &[usize]) -> HostTensor {
    let bytes = vec![0; shape.iter().product::<usize>() * dtype.size()];
    HostTensor { dtype, shape: shape.to_vec(), bytes }
}

/// Ranks that run elsewhere.
pub(crate) enum Elsewhere {
    /// They are about to run: each launch adds what they are given and write.
    Asked(RefCell<Vec<OfRank>>),
    /// They have run: what each wrote.
    Answered(Vec<WrittenByRank>),
}

impl Elsewhere {
    /// Ranks that are about to run.
    pub fn asked() -> Self {
        Self::Asked(RefCell::default())
    }

    /// What ranks that are about to run are given and write.
    pub fn into_asked(self) -> Option<Vec<OfRank>> {
        match self {
            Self::Asked(ranks) => Some(ranks.into_inner()),
            Self::Answered(_) => None,
        }
    }

    /// Stands for a launch on all ranks, which have these tensors. Returns what they wrote in it:
    /// nothing where they have not run.
    ///
    /// # Errors
    /// A tensor of another type or shape than the rank's; two unlike inputs of one name.
    pub fn launch(&self, parts: &[Parts]) -> Result<Vec<WrittenByRank>, RuntimeError> {
        match self {
            Self::Asked(ranks) => {
                let mut ranks = ranks.borrow_mut();
                ranks.resize_with(parts.len(), OfRank::default);
                ranks.iter_mut().zip(parts).try_for_each(|(rank, parts)| rank.add(parts))?;
                Ok(vec![BTreeMap::new(); parts.len()])
            }
            Self::Answered(written) if written.len() == parts.len() => written
                .iter()
                .zip(parts)
                .map(|(written, parts)| of_launch(written, parts))
                .collect(),
            Self::Answered(written) => {
                let reason = format!("{} where the case has {}", written.len(), parts.len());
                Err(RuntimeError::argument("ranks", "written", reason))
            }
        }
    }
}

/// What a rank wrote of the tensors that it writes in one launch.
fn of_launch(written: &WrittenByRank, parts: &Parts) -> Result<WrittenByRank, RuntimeError> {
    let mut of_launch = BTreeMap::new();
    for (name, part) in parts {
        let (Part::Written(dtype, shape), Some(tensor)) = (part, written.get(name)) else {
            continue;
        };
        if (tensor.dtype, &tensor.shape) != (*dtype, shape) {
            let reason = format!("{tensor:?} where the rank has {dtype} {shape:?}");
            return Err(RuntimeError::argument("ranks", name, reason));
        }
        of_launch.insert(*name, tensor.clone());
    }
    Ok(of_launch)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn given(name: &'static str, number: i32) -> (&'static str, Part) {
        (name, Part::Given(HostTensor::from_i32(&[1], &[number])))
    }

    #[test]
    fn a_rank_is_given_what_either_direction_reads_except_what_it_writes_itself() {
        let asked = Elsewhere::asked();
        let forward = vec![given("q", 1), ("lse", Part::Written(DType::F32, vec![2]))];
        let backward = vec![given("q", 1), given("lse", 7), given("dout", 2)];
        assert_eq!(asked.launch(&[forward]).unwrap(), [BTreeMap::new()]);
        asked.launch(&[backward]).unwrap();
        let unlike = asked.launch(&[vec![given("q", 3)]]).unwrap_err();
        assert!(unlike.to_string().contains("`q`"), "{unlike}");
        let ranks = asked.into_asked().expect("it was asked");
        let [rank] = &ranks[..] else { panic!("one rank") };
        let names: Vec<_> = rank.given.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["q", "dout"]);
        assert_eq!(rank.written, [("lse", zeros(DType::F32, &[2]))]);
    }

    #[test]
    fn what_ranks_wrote_is_found_by_launch_and_must_be_of_the_rank() {
        let [lse, dq] = [2, 3].map(|rows| zeros(DType::F32, &[rows]));
        let written = [("lse", lse.clone()), ("dq", dq)].into_iter().collect();
        let answered = Elsewhere::Answered(vec![written]);
        let of = |rows| vec![given("q", 1), ("lse", Part::Written(DType::F32, vec![rows]))];
        assert_eq!(answered.launch(&[of(2)]).unwrap(), [BTreeMap::from([("lse", lse)])]);
        for parts in [&[of(5)][..], &[of(2), of(2)]] {
            assert!(answered.launch(parts).is_err());
        }
    }
}
