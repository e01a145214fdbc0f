//! The same rows in other batches: variants of a case in which a logical row must keep its bits.
//!
//! Most operators declare nothing for it. Their tensors name the axis of rows, and a field of the
//! case has the same name. So this layer cuts and repeats the rows of the given tensors, sets the
//! field, and knows where each row lies in both results. An operator with lists between its tensors
//! mends them ([`Batches::rows_with`]). One with requests, pages or another form declares further
//! runs ([`Batches::run`], [`Batches::form`]).

use dsv4_runtime::{DType, HostTensor};
use serde_json::{Map, Value};

use super::any::{AnyCase, any};
use super::declaration::{Part, Specs, TensorSpec};
use super::declared::Operator;
use super::inputs::Inputs;
use super::laws::{AnyVariant, Variant};
use super::lines::{Choices, LAYOUTS, line, read, within};
use super::size;
use super::tensors::{Tensors, permuted_along};
use super::{BatchRun, Batched, Same, format_of};
use crate::case::Case;
use crate::record::BatchAxis;

/// The names of axes of rows, in the order in which they are looked for.
pub const ROWS: [&str; 3] = ["num_tokens", "num_rows", "batch"];

/// Elements that the tensors of a larger batch may have, if the case itself has fewer.
const MOST_ELEMENTS: u128 = 1 << 18;

/// The rows of a batch, each as the row of the case that it repeats. The last `padding` of them are
/// padding: nothing may depend on them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cut {
    /// For each row, the row of the case.
    pub order: Vec<usize>,
    /// How many rows at the end are padding.
    pub padding: usize,
}

impl Cut {
    /// Pairs of a row of the case and its row of the batch, without padding.
    pub fn pairs(&self) -> Vec<(usize, usize)> {
        let real = self.order.len() - self.padding;
        self.order[..real].iter().copied().zip(0..).collect()
    }

    /// Whether a row of the batch is padding.
    pub fn is_padding(&self, row: usize) -> bool {
        row >= self.order.len() - self.padding
    }

    /// Whether a row of the batch is the first of those that repeat its row of the case, and no
    /// padding.
    pub fn is_first(&self, row: usize) -> bool {
        !self.is_padding(row) && !self.order[..row].contains(&self.order[row])
    }
}

/// Other batches of a case's rows.
pub struct Batches<'i, K: Operator> {
    case: &'i K::Case,
    any: AnyBatches<'i>,
}

impl<'i, K: Operator> Batches<'i, K> {
    /// Those of `case`, to which `inputs` belongs.
    pub(super) fn new(case: &'i K::Case, inputs: &'i Inputs) -> Self {
        let invariant = K::invariant(case, inputs.choices.invariant);
        let (specs, batched) = (inputs.specs(), Batched::default());
        let (except, also) = (Vec::new(), Vec::new());
        Self { case, any: AnyBatches { inputs, specs, invariant, except, also, batched } }
    }

    pub(super) fn finish(self) -> Batched {
        self.any.batched
    }

    /// The case's own tensors.
    pub fn tensors(&self) -> &'i Tensors {
        &self.any.inputs.tensors
    }

    /// Leaves out results that depend on the whole batch by definition, such as positions among all
    /// rows.
    pub fn except(&mut self, names: &[&'static str]) {
        self.any.except.extend(names);
    }

    /// The field of this name has the number of rows, too.
    pub fn also(&mut self, field: &'static str) {
        self.any.also.push(field);
    }

    /// Company and buckets of the axis of rows: the first of `num_tokens`, `num_rows` and `batch`
    /// that a result has.
    pub fn of_rows(&mut self) {
        if let Some(axis) = self.any.axis_of_rows() {
            self.rows(axis);
        }
    }

    /// Company and buckets of the entries along `axis`. A field of the case has its name.
    pub fn rows(&mut self, axis: &'static str) {
        self.any.rows(axis, &|_, _| Vec::new());
    }

    /// As [`Self::rows`]. `mend` corrects what names rows by number, and returns what is compared
    /// in addition to the results along the axis.
    pub fn rows_with(
        &mut self,
        axis: &'static str,
        mend: impl Fn(&mut Tensors, &Cut) -> Vec<Same>,
    ) {
        self.any.rows(axis, &mend);
    }

    /// Another batch of any kind. `change` makes it from the case, and returns what must be equal.
    pub fn run(
        &mut self,
        axis: BatchAxis,
        extents: impl Into<String>,
        change: impl FnOnce(&mut Variant<K>) -> Vec<Same>,
    ) {
        let mut variant = Variant::of(self.case.clone(), Tensors::clone(self.tensors()));
        let same = change(&mut variant);
        self.any.push(axis, extents.into(), variant.into_any(), same);
    }

    /// The tokens along `axis` in chunks: the first half, and the last token. `mend` sets the
    /// number of tokens and the position of the first one, given the index of the first and the
    /// number.
    pub fn chunks(&mut self, axis: &'static str, mend: impl Fn(&mut Variant<K>, usize, usize)) {
        let Some(tokens) = self.any.specs.extent(axis).filter(|&tokens| tokens > 1) else { return };
        for range in [0..tokens.div_ceil(2), tokens - 1..tokens] {
            let order: Vec<usize> = range.clone().collect();
            let entries: Vec<(usize, usize)> = order.iter().copied().zip(0..).collect();
            let same = self.along(axis, &entries);
            let specs = self.any.specs.clone();
            let extents = format!("{axis} {tokens} against tokens {range:?}");
            self.run(BatchAxis::Chunks, extents, |v| {
                v.tensors.permute(&specs, axis, &order);
                mend(v, range.start, range.len());
                same
            });
        }
    }

    /// A case of another operator, or another form of this one, that computes some of the same rows.
    pub fn form<O: Operator>(
        &mut self,
        extents: impl Into<String>,
        case: O::Case,
        tensors: Tensors,
        same: Vec<Same>,
    ) {
        let variant = AnyVariant::of(any::<O>(case), tensors);
        self.any.push(BatchAxis::Forms, extents.into(), variant, same);
    }

    /// No other batch along `axis` can be made of this case.
    pub fn skip(&mut self, axis: BatchAxis, why: impl Into<String>) {
        self.any.batched.skips.push((axis, why.into()));
    }

    /// Pairs of every entry along `axis` with itself.
    pub fn every(&self, axis: &str) -> Vec<(usize, usize)> {
        (0..self.any.specs.extent(axis).unwrap_or(0)).map(|entry| (entry, entry)).collect()
    }

    /// Names of the tensors that hold the meaning of stored bytes.
    pub fn observed(&self) -> Vec<&'static str> {
        let observed = self.any.specs.present().filter(|spec| spec.part == Part::Observed);
        observed.map(|spec| spec.name).collect()
    }

    /// What is compared of each result that has the axis called `axis`: these pairs of entries, of
    /// the case and of the batch.
    pub fn along(&self, axis: &str, entries: &[(usize, usize)]) -> Vec<Same> {
        self.any.along(axis, entries)
    }
}

/// The part of [`Batches`] that does not need the case's type.
struct AnyBatches<'i> {
    inputs: &'i Inputs,
    specs: Specs,
    invariant: &'static [BatchAxis],
    except: Vec<&'static str>,
    also: Vec<&'static str>,
    batched: Batched,
}

/// Corrects what names rows by number; returns what is compared in addition.
type Mend<'m> = dyn Fn(&mut Tensors, &Cut) -> Vec<Same> + 'm;

impl AnyBatches<'_> {
    fn axis_of_rows(&self) -> Option<&'static str> {
        let fields = self.inputs.case.line().fields;
        let is_of_rows = |axis: &&str| {
            let mut compared = self.specs.compared();
            compared.any(|spec| spec.axis(axis).is_some()) && holds(&fields, axis)
        };
        ROWS.into_iter().find(is_of_rows)
    }

    fn along(&self, axis: &str, entries: &[(usize, usize)]) -> Vec<Same> {
        let bound = self.specs.compared().filter(|spec| spec.deterministic);
        let bound = bound.filter(|spec| !self.except.contains(&spec.name));
        bound.filter_map(|spec| Some(Same::along(spec.name, spec.axis(axis)?, entries))).collect()
    }

    fn push(&mut self, axis: BatchAxis, extents: String, variant: AnyVariant, same: Vec<Same>) {
        let declared = self.invariant.contains(&axis);
        if same.iter().all(|same| same.entries.is_empty()) {
            return;
        }
        let specs = variant.case.tensors();
        if let Err(why) = fits(&specs, &variant.tensors) {
            return self.batched.skips.push((axis, why));
        }
        let of_case = Choices { special: None, ..self.inputs.choices.clone() };
        let reread = read(variant.case.operator(), &line(&*variant.case, &of_case));
        let choices = match reread {
            Ok(_) => of_case,
            // Another form has other tensors: they are dense.
            Err(_) if axis == BatchAxis::Forms => Choices::default(),
            Err(error) => return self.batched.skips.push((axis, error.to_string())),
        };
        if let Err(refused) = within(&*variant.case, &specs, &choices.layouts, size::limit()) {
            return self.batched.skips.push((axis, refused.reason));
        }
        let variant = Box::new(variant.into_inputs(choices));
        self.batched.runs.push(BatchRun { axis, declared, extents, variant, same });
    }

    fn rows(&mut self, axis: &'static str, mend: &Mend<'_>) {
        let Some(rows) = self.specs.extent(axis).filter(|&rows| rows > 0) else { return };
        let allowed = |rows: usize| {
            let case = self.resized(axis, rows).ok()?;
            let elements =
                |case: &AnyCase| size::elements_of(&case.tensors(), case.oracle_elements());
            (elements(&case) <= MOST_ELEMENTS.max(elements(&self.inputs.case))).then_some(())
        };
        let lot = lot(&self.inputs.case.line());
        for (of, cut) in cuts(rows, lot, &|rows| allowed(rows).is_some()) {
            let case = match self.resized(axis, cut.order.len()) {
                Ok(case) => case,
                Err(why) => return self.batched.skips.push((of, why)),
            };
            let mut tensors = self.cut(axis, &cut);
            let mut same = self.along(axis, &cut.pairs());
            same.extend(mend(&mut tensors, &cut));
            let extents = described(axis, rows, &cut);
            self.push(of, extents, AnyVariant::of(case, tensors), same);
        }
    }

    /// The case with another number of rows, if it takes the case's layouts.
    fn resized(&self, axis: &'static str, rows: usize) -> Result<AnyCase, String> {
        let choices = Choices { special: None, ..self.inputs.choices.clone() };
        let mut line = line(&*self.inputs.case, &choices);
        if !set(&mut line.fields, axis, rows) {
            return Err(format!("the case has no field `{axis}`"));
        }
        for field in &self.also {
            set(&mut line.fields, field, rows);
        }
        let (case, _) = read(self.inputs.case.operator(), &line).map_err(|e| e.to_string())?;
        Ok(case)
    }

    /// The given tensors with the rows of a cut. Padding rows are large, and marked where the
    /// operator has marks.
    fn cut(&self, axis: &str, cut: &Cut) -> Tensors {
        let mut tensors = Tensors::clone(&self.inputs.tensors);
        for spec in self.specs.present().filter(|spec| spec.is_given()) {
            let (Some(at), Some(tensor)) = (spec.axis(axis), tensors.get(spec.name)) else {
                continue;
            };
            let mut rows = permuted_along(tensor, at, &cut.order);
            if cut.padding > 0 {
                pad(spec, &mut rows, at, cut.order.len() - cut.padding);
            }
            tensors.put(spec.name, rows);
        }
        tensors
    }
}

/// Makes the rows from `first` on padding.
fn pad(spec: &TensorSpec, tensor: &mut HostTensor, at: usize, first: usize) {
    /// Padding holds values of an earlier step, which may be of any size.
    const LOUD: f64 = 64.0;
    let inner: usize = tensor.shape[at + 1..].iter().product();
    let extent = tensor.shape[at];
    let is_padding = |element: usize| element / inner.max(1) % extent >= first;
    if spec.marks_padding && spec.dtype == DType::I32 {
        let mut values = tensor.to_i32();
        let padding = (0..values.len()).filter(|&element| is_padding(element));
        padding.for_each(|element| values[element] = -1);
        *tensor = HostTensor::from_i32(&tensor.shape, &values);
    } else if format_of(spec.dtype).is_some() {
        let mut values = tensor.to_f64();
        let padding = (0..values.len()).filter(|&element| is_padding(element));
        padding.for_each(|element| values[element] *= LOUD);
        *tensor = HostTensor::from_f64(tensor.dtype, &tensor.shape, &values);
    }
}

/// Whether the given tensors are those that the case declares.
fn fits(specs: &Specs, tensors: &Tensors) -> Result<(), String> {
    for spec in specs.present().filter(|spec| spec.is_given()) {
        let found = tensors.get(spec.name);
        if !found.is_some_and(|found| found.shape == spec.shape() && found.dtype == spec.dtype) {
            return Err(format!("`{}` does not follow from the case's by rows", spec.name));
        }
    }
    Ok(())
}

/// Whether a field of this name holds a number.
fn holds(fields: &Map<String, Value>, name: &str) -> bool {
    fields.iter().any(|(field, value)| match value {
        Value::Object(within) => field != LAYOUTS && holds(within, name),
        value => field == name && value.is_u64(),
    })
}

/// Sets the field of this name, also of a nested case. Gaps of layouts are named like axes, too, and
/// stay.
pub(super) fn set(fields: &mut Map<String, Value>, name: &str, number: usize) -> bool {
    let mut is_set = false;
    for (field, value) in fields.iter_mut() {
        match value {
            Value::Object(within) if field != LAYOUTS => is_set |= set(within, name, number),
            value if field == name && value.is_u64() => {
                (*value, is_set) = (number.into(), true);
            }
            _ => {}
        }
    }
    is_set
}

/// A number that chooses among the batches of a case: the same in every run.
pub(super) fn lot(case: &Case) -> usize {
    let digest = blake3::hash(case.line().as_bytes());
    digest.as_bytes()[..2].iter().fold(0, |number, &byte| number << 8 | usize::from(byte))
}

/// Other batches of so many rows: one alone, the first half, all at other places of a larger batch,
/// and all padded. `allowed` decides how large a batch may be.
fn cuts(rows: usize, lot: usize, allowed: &dyn Fn(usize) -> bool) -> Vec<(BatchAxis, Cut)> {
    /// Sizes at which paths, tiles and splits change: beyond a token, a tile, a few of them.
    const SIZES: [usize; 6] = [2, 18, 35, 66, 130, 300];
    let mut cuts = Vec::new();
    let company = |order: Vec<usize>| (BatchAxis::Company, Cut { order, padding: 0 });
    if rows > 1 {
        cuts.push(company(vec![lot % rows]));
    }
    if rows > 3 {
        cuts.push(company((0..rows.div_ceil(2)).collect()));
    }
    let larger: Vec<usize> =
        SIZES.into_iter().filter(|&size| size > rows && allowed(size)).collect();
    let size = larger.get(lot % larger.len().max(1)).copied().unwrap_or(rows);
    if size > 1 {
        let turned = 1 + lot % rows;
        cuts.push(company((0..size).map(|row| (row + turned) % rows).collect()));
    }
    let bucket = (rows + 1).next_power_of_two();
    if allowed(bucket) {
        let order = (0..bucket).map(|row| row % rows).collect();
        cuts.push((BatchAxis::Buckets, Cut { order, padding: bucket - rows }));
    }
    cuts
}

/// The extents of case and batch, and where its rows come from.
fn described(axis: &str, rows: usize, cut: &Cut) -> String {
    let (size, real) = (cut.order.len(), cut.order.len() - cut.padding);
    let of = match &cut.order[..] {
        [row] => format!("row {row} alone"),
        _ if cut.padding > 0 => format!("padded from {real}"),
        order if order.iter().copied().eq(0..size) => format!("the first {size} rows"),
        order => format!("from row {}", order[0]),
    };
    format!("{axis} {rows} against {size}, {of}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_come_alone_first_elsewhere_and_padded() {
        let cuts = cuts(5, 3, &|size| size < 40);
        let of = |axis| cuts.iter().filter(move |(of, _)| *of == axis).map(|(_, cut)| cut);
        let company: Vec<&Cut> = of(BatchAxis::Company).collect();
        assert_eq!(company.iter().map(|cut| cut.order.len()).take(2).collect::<Vec<_>>(), [1, 3]);
        let larger = company[2];
        assert!([18, 35].contains(&larger.order.len()) && larger.order[0] != 0, "{larger:?}");
        let padded = of(BatchAxis::Buckets).next().expect("a bucket");
        assert_eq!((padded.order.len(), padded.padding), (8, 3));
        assert_eq!(padded.pairs(), [(0, 0), (1, 1), (2, 2), (3, 3), (4, 4)]);
    }

    #[test]
    fn one_row_comes_among_others_and_none_makes_no_batch_too_large() {
        let alone = cuts(1, 1, &|_| true);
        assert!(alone.iter().all(|(_, cut)| cut.order.len() > 1), "{alone:?}");
        assert!(cuts(1, 1, &|size| size < 2).is_empty());
    }

    #[test]
    fn a_field_is_set_in_nested_cases_and_no_gap_of_a_layout() {
        let line = r#"{"layouts":{"x":{"gaps":{"num_rows":3}}},"product":{"num_rows":1}}"#;
        let Value::Object(mut fields) = serde_json::from_str(line).expect("an object") else {
            panic!("no object")
        };
        assert!(holds(&fields, "num_rows") && set(&mut fields, "num_rows", 7));
        let set = line.replace(r#""product":{"num_rows":1}"#, r#""product":{"num_rows":7}"#);
        assert_eq!(Value::Object(fields).to_string(), set);
        assert!(!holds(&Map::new(), "num_rows"));
    }

    #[test]
    fn padding_is_large_or_marked() {
        let rows = [super::super::declaration::axis("num_rows", 3)];
        let x = super::super::declaration::input("x", DType::F32, &rows);
        let mut tensor = HostTensor::from_f64(DType::F32, &[3], &[1.0, 2.0, 3.0]);
        pad(&x, &mut tensor, 0, 1);
        assert_eq!(tensor.to_f64(), [1.0, 128.0, 192.0]);
        let marks = super::super::declaration::input("p", DType::I32, &rows).marks_padding();
        let mut tensor = HostTensor::from_i32(&[3], &[4, 5, 6]);
        pad(&marks, &mut tensor, 0, 2);
        assert_eq!(tensor.to_i32(), [4, 5, -1]);
    }

    #[test]
    fn a_cut_names_its_extents_and_its_rows() {
        let cut = |order: &[usize], padding| Cut { order: order.to_vec(), padding };
        let of = |cut: &Cut| described("num_tokens", 4, cut);
        assert_eq!(of(&cut(&[2], 0)), "num_tokens 4 against 1, row 2 alone");
        assert_eq!(of(&cut(&[0, 1], 0)), "num_tokens 4 against 2, the first 2 rows");
        assert_eq!(of(&cut(&[3, 0, 1], 0)), "num_tokens 4 against 3, from row 3");
        assert_eq!(of(&cut(&[0, 1, 2, 3, 0], 1)), "num_tokens 4 against 5, padded from 4");
    }
}
