//! Random weights of any size, for measurements: a matrix repeats the rows of a small one, and all
//! experts of a layer have the same, so that a model of the released sizes is made in seconds.

use std::borrow::Cow;
use std::collections::HashMap;

use dsv4_kernels::model::checkpoint::Source;
use dsv4_kernels::model::checkpoint::tensors::{self, Format, TensorSpec};
use dsv4_kernels::model::config::Config;
use rayon::prelude::*;

use super::random::{RandomError, made};

/// Values that are drawn of a matrix, about, if it has more.
const DRAWN: usize = 1 << 19;
/// Rows of a block that has one scale: a small matrix has a multiple of these.
const BLOCK: usize = 128;
/// What the names of routed experts have before their number.
const EXPERTS: &str = ".experts.";

/// The tensors of a model.
pub struct Repeated {
    config: Config,
    /// By name, of the first expert for all: the bytes of the small tensor, and how many bytes the
    /// tensor has.
    tensors: HashMap<String, (Vec<u8>, usize)>,
}

impl Repeated {
    /// Those of a configuration; the same seed gives the same.
    ///
    /// # Errors
    /// Sizes that a format does not take.
    pub fn new(config: &Config, seed: u64) -> Result<Self, RandomError> {
        let all = tensors::all(config);
        let first = |(_, spec): &(usize, &TensorSpec)| of_first_expert(&spec.name) == spec.name;
        let of = |(at, spec): (usize, &TensorSpec)| {
            let group = &all[at..(at + 1 + scales_of(spec.format)).min(all.len())];
            let small: Vec<TensorSpec> = group.iter().map(|part| shortened(part, spec)).collect();
            let made = made(config, &small, seed)?;
            let sizes = group.iter().map(TensorSpec::bytes);
            Ok(made.into_iter().zip(sizes).map(|((name, small), size)| (name, (small.bytes, size))))
        };
        let made: Result<Vec<_>, RandomError> =
            all.par_iter().enumerate().filter(first).map(of).collect();
        Ok(Self { config: config.clone(), tensors: made?.into_iter().flatten().collect() })
    }
}

impl Source for Repeated {
    fn config(&self) -> &Config {
        &self.config
    }

    fn bytes(&self, name: &str) -> Cow<'_, [u8]> {
        let found = self.tensors.get(&of_first_expert(name));
        let (small, size) = found.unwrap_or_else(|| panic!("no tensor `{name}`"));
        let mut bytes = Vec::with_capacity(*size);
        while bytes.len() < *size {
            bytes.extend_from_slice(&small[..small.len().min(size - bytes.len())]);
        }
        Cow::Owned(bytes)
    }
}

/// How many tensors of scales follow one of this format.
fn scales_of(format: Format) -> usize {
    match format {
        Format::E4m3 | Format::E2m1Pairs => 1,
        Format::Nvfp4Pairs => 3,
        _ => 0,
    }
}

/// The name with the first expert's number in the place of any.
fn of_first_expert(name: &str) -> String {
    let Some((layer, expert)) = name.split_once(EXPERTS) else { return name.to_owned() };
    let part = expert.split_once('.').map_or(expert, |(_, part)| part);
    format!("{layer}{EXPERTS}0.{part}")
}

/// A tensor with the first rows alone, if it is a large matrix, or the scales of one: `weight` is
/// the matrix, itself or that of the scales.
fn shortened(spec: &TensorSpec, weight: &TensorSpec) -> TensorSpec {
    let mut spec = spec.clone();
    let [rows, columns] = weight.shape[..] else { return spec };
    // A table of integers is not repeated: its rows are tokens.
    let most = (DRAWN / columns.max(1) / BLOCK).max(1) * BLOCK;
    if weight.format == Format::I64 || rows <= most || spec.is_global_scale() {
        return spec;
    }
    spec.shape[0] = if spec.shape[0] == rows { most } else { most / BLOCK };
    spec
}

#[cfg(test)]
mod tests {
    use super::*;
    use dsv4_kernels::cache::cache_layout::LayerKind::{Csa, Window};
    use dsv4_kernels::model::config::ExpertFormat;

    #[test]
    fn every_tensor_has_its_size_and_repeats_a_small_one() {
        for expert_format in [ExpertFormat::Mxfp4, ExpertFormat::Nvfp4] {
            let config = Config {
                num_experts: 3,
                topk: 2,
                vocab_size: 1000,
                expert_format,
                ..Config::flash(vec![Window, Csa])
            };
            let source = Repeated::new(&config, 1).expect("tensors");
            for spec in tensors::all(&config) {
                assert_eq!(source.bytes(&spec.name).len(), spec.bytes(), "{}", spec.name);
            }
            let part = |expert| source.bytes(&format!("layers.1.ffn.experts.{expert}.w1.weight"));
            assert_eq!(part(0), part(2));
            assert_ne!(part(0), source.bytes("layers.1.ffn.experts.0.w3.weight"));
            // 128 rows of 4096 values, then the same again, in codes and in their scales.
            let codes = source.bytes("layers.0.attn.wq_a.weight");
            assert_eq!(codes[..128 * 4096], codes[128 * 4096..256 * 4096]);
            assert_ne!(codes[..4096], codes[4096..8192]);
            let scales = source.bytes("layers.0.attn.wq_a.scale");
            assert_eq!(scales[..32], scales[32..64]);
        }
    }
}
