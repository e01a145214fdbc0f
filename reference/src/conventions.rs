//! What other kernels do otherwise than the specification does, where both are right. A kernel
//! declares its conventions, and the oracle follows them: by default it follows the specification.

/// Something that others do in another way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Convention {
    /// fp32 scales are `fp32(amax / largest)`, not `fp32(amax fp32(1 / largest))`.
    ScaleDivided,
    /// The floor is that of a scale, 1e-4, not that of amax.
    ScaleFloor,
    /// Codes are those of `fp32(x fp32(1 / s))`, not of `fp32(x / s)`.
    CodesByInverse,
    /// Codes are those of `fp32(x fp32(largest / amax))`, not of `fp32(x / s)`.
    CodesByAmax,
    /// Ties of e2m1 codes go toward zero, not to the even code, and zeros have no sign.
    TiesTowardZero,
    /// The floor of amax is 1e-4 in e2m1 as well.
    AmaxFloor,
    /// The divisor of a token's scores is `sum + 1e-20`, not `max(sum, 1e-20)`.
    SumPlusFloor,
    /// `top_p` is a share of the weights that `top_k` keeps, not of all.
    TopPOfKept,
    /// `top_k` also keeps all ids whose logit is that of the last one.
    TiesKept,
}

impl Convention {
    /// All of them.
    pub const ALL: [Self; 9] = [
        Self::ScaleDivided,
        Self::ScaleFloor,
        Self::CodesByInverse,
        Self::CodesByAmax,
        Self::TiesTowardZero,
        Self::AmaxFloor,
        Self::SumPlusFloor,
        Self::TopPOfKept,
        Self::TiesKept,
    ];

    /// Its name in an adapter.
    pub fn name(self) -> &'static str {
        match self {
            Self::ScaleDivided => "scale_divided",
            Self::ScaleFloor => "scale_floor",
            Self::CodesByInverse => "codes_by_inverse",
            Self::CodesByAmax => "codes_by_amax",
            Self::TiesTowardZero => "ties_toward_zero",
            Self::AmaxFloor => "amax_floor",
            Self::SumPlusFloor => "sum_plus_floor",
            Self::TopPOfKept => "top_p_of_kept",
            Self::TiesKept => "ties_kept",
        }
    }

    /// What a kernel does that has it.
    pub fn meaning(self) -> &'static str {
        match self {
            Self::ScaleDivided => "fp32 scales are amax / largest, not amax * fp32(1 / largest)",
            Self::ScaleFloor => "the floor 1e-4 is that of a scale, not of amax",
            Self::CodesByInverse => "codes are of x * fp32(1 / s), not of x / s",
            Self::CodesByAmax => "codes are of x * fp32(largest / amax), not of x / s",
            Self::TiesTowardZero => "ties of e2m1 go toward zero, and zeros have no sign",
            Self::AmaxFloor => "the floor of amax is 1e-4 in e2m1 as well",
            Self::SumPlusFloor => "scores are divided by sum + 1e-20, not by max(sum, 1e-20)",
            Self::TopPOfKept => "top_p is a share of what top_k keeps, not of all weights",
            Self::TiesKept => "top_k keeps all ids with the logit of its last one",
        }
    }
}

/// The conventions of a kernel; by default those of the specification.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Conventions(u16);

impl Conventions {
    /// These.
    pub fn of(conventions: impl IntoIterator<Item = Convention>) -> Self {
        Self(conventions.into_iter().fold(0, |all, one| all | 1 << one as u8))
    }

    /// Whether this is one of them.
    pub fn have(self, convention: Convention) -> bool {
        self.0 >> convention as u8 & 1 == 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_has_what_it_was_made_of_and_names_are_unlike() {
        for one in Convention::ALL {
            let others = Convention::ALL.into_iter().filter(|other| *other != one);
            let (only, without) = (Conventions::of([one]), Conventions::of(others.clone()));
            assert!(only.have(one) && !without.have(one) && !Conventions::default().have(one));
            assert!(others.clone().all(|other| !only.have(other) && without.have(other)));
            assert!(others.clone().all(|other| other.name() != one.name()));
        }
    }
}
