//! The attention output, rotated back by the position of the query and quantized (inference 4, 5.4,
//! 9):
//!
//! ```text
//! r[t,h,:]      = x[t,h,:] with its last channels rotated backwards by the position of token t      [`crate::projections::rope`]
//! codes, scales = quantize(r), in groups of 128 channels of a head                             [`crate::formats::quantize_fp8`]
//! ```
//!
//! A group of the output projection is a run of neighbouring heads. Its codes are one row of its
//! GEMM, and its scales are a separate matrix.
//!
//! # Rounding points
//!
//! r is bf16. Every operation before it is part of the definition
//! ([`crate::projections::rope::turned`]), so codes and scales have one value: that of the two
//! operators one after the other.

use candle_core::Tensor;

use crate::error::{Result, require_that};
use crate::formats::quantize_fp8::{self, Group};
use crate::formats::scale_layout::{ScaleLayout, Scales};
use crate::named::Named;
use crate::projections::rope;
use crate::quantize::ScaleType;
use crate::select::entry;

/// Channels that share a scale.
pub const GROUP: usize = 128;

/// Options of the quantization.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    /// Groups of the output projection, each with the same number of heads.
    pub o_groups: usize,
    /// The type of a scale.
    pub scale: ScaleType,
    /// Layout of the scales of one group of the projection.
    pub layout: ScaleLayout,
}

impl Options {
    fn of_rows(self) -> quantize_fp8::Options {
        quantize_fp8::Options { group: Group::Row(GROUP), scale: self.scale, layout: self.layout }
    }

    /// The scales of one group of the projection.
    pub fn scales(self, num_tokens: usize, group_width: usize) -> Scales {
        self.of_rows().scales(num_tokens, group_width)
    }
}

/// The outputs for `x` `[num_tokens, num_heads, head_dim]`, stored in bf16, rotated inversely:
///
/// - `codes` `[num_tokens, o_groups, group_width]`, bytes, with `group_width = num_heads /
///   o_groups * head_dim`;
/// - `scales` `[o_groups, ..]`: for each group of the projection the layout of [`Options::scales`].
///
/// # Errors
/// Tensors whose shapes do not match; heads that groups do not divide; a `head_dim` that is not a
/// multiple of [`GROUP`].
pub fn forward(inputs: &rope::Inputs, options: Options) -> Result<Named> {
    let turned = rope::turned(inputs)?;
    let (num_tokens, num_heads, head_dim) = inputs.x.dims3()?;
    let Options { o_groups, .. } = options;
    let divides = o_groups > 0 && num_heads > 0 && num_heads.is_multiple_of(o_groups);
    require_that("o_groups", o_groups, divides, "groups have as many heads each")?;
    let whole = head_dim > 0 && head_dim.is_multiple_of(GROUP);
    require_that("head_dim", head_dim, whole, "a head has whole groups of 128 channels")?;
    require_that(
        "inverse",
        inputs.inverse,
        inputs.inverse,
        "the attention's output is turned back",
    )?;
    let turned = Tensor::from_vec(
        turned,
        (num_tokens, o_groups, num_heads / o_groups * head_dim),
        inputs.x.device(),
    )?;
    let quantized = (0..o_groups).map(|group| {
        let rows = entry(&turned, 1, group)?;
        quantize_fp8::quantize(&Named::new().with("x", rows), options.of_rows())
    });
    let quantized = quantized.collect::<Result<Vec<_>>>()?;
    let of = |name: &'static str, axis: usize| -> Result<Tensor> {
        let all = quantized
            .iter()
            .map(|group| Ok(group.tensor(name)?.clone()))
            .collect::<Result<Vec<_>>>()?;
        Ok(Tensor::stack(&all, axis)?)
    };
    Ok(Named::new().with("codes", of("codes", 1)?).with("scales", of("scales", 0)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::Format;
    use crate::precision::{Precision, Rounding, values};
    use crate::projections::rope::{YarnParameters, inv_freq_f32, table};
    use crate::testing::{Draw, f64_tensor};

    fn inputs(num_tokens: usize, num_heads: usize, head_dim: usize) -> rope::Inputs {
        let frequencies = inv_freq_f32(&YarnParameters::compress()).expect("the model's own");
        let (cos, sin) = table(&frequencies, &[9, 4096, 77_000]).expect("positions that there are");
        let stored = |table: &Tensor| {
            let numbers =
                values(table).expect("numbers").into_iter().map(|x| Format::F32.nearest(x));
            f64_tensor(&numbers.collect::<Vec<_>>(), table.dims())
        };
        let positions = (0..num_tokens as i64).map(|token| token * 2 % 3).collect();
        let x = Draw::new(5).bf16(&[num_tokens, num_heads, head_dim], 1.0);
        rope::Inputs {
            x,
            cos: stored(&cos),
            sin: stored(&sin),
            positions: Some(positions),
            inverse: true,
        }
    }

    fn options(o_groups: usize, scale: ScaleType, layout: ScaleLayout) -> Options {
        Options { o_groups, scale, layout }
    }

    #[test]
    fn codes_are_the_nearest_to_the_turned_numbers_over_the_scale_of_their_head() -> Result<()> {
        let (inputs, options) =
            (inputs(5, 4, 256), options(2, ScaleType::Fp32, ScaleLayout::MnMajor));
        let found = forward(&inputs, options)?;
        let y = rope::forward(&inputs, &mut Rounding::new(Precision::Nearest { seed: 0 }))?.y;
        let y: Vec<f64> = values(&y)?.into_iter().map(|y| Format::BF16.nearest(y)).collect();
        let (codes, scales) = (values(found.tensor("codes")?)?, values(found.tensor("scales")?)?);
        assert_eq!(found.tensor("codes")?.dims(), [5, 2, 512]);
        assert_eq!(found.tensor("scales")?.dims(), [2, 4, 8]);
        for (at, y) in y.into_iter().enumerate() {
            let (token, group, place) = (at / 1024, at / 512 % 2, at % 512 / 128);
            let scale = scales[(group * 4 + place) * 8 + token];
            let expected = Format::E4M3.nearest(Format::F32.nearest(y / scale));
            assert_eq!(Format::E4M3.value(codes[at] as u64), expected, "{at}");
        }
        Ok(())
    }

    #[test]
    fn no_token_is_none_and_what_does_not_divide_is_refused() -> Result<()> {
        let plain = options(2, ScaleType::E8m0, ScaleLayout::Plain);
        assert_eq!(forward(&inputs(0, 4, 128), plain)?.tensor("codes")?.dims(), [0, 2, 256]);
        assert!(forward(&inputs(2, 3, 128), plain).is_err());
        assert!(forward(&inputs(2, 4, 192), plain).is_err());
        assert!(forward(&rope::Inputs { inverse: false, ..inputs(2, 4, 128) }, plain).is_err());
        Ok(())
    }
}
