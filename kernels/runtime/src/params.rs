//! Parameter structs that are passed to a kernel as raw bytes.

use super::error::{Result, RuntimeError};
use super::layouts::{self, FieldText, KERNELS, Layouts};
use super::source::SourceTree;
use super::tensor::TensorView;
use super::tensor_map::MapWords;

/// FNV-1a's initial state.
const FNV_OFFSET: u64 = 0xcbf2_9ce4_8422_2325;

/// FNV-1a, 64 bits, over `text`, from `state`.
fn fnv1a(state: u64, text: &str) -> u64 {
    text.bytes()
        .fold(state, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3))
}

/// A device address in a parameter struct: `const T*` or `T*` in the kernel. Zero is `nullptr`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceAddress(pub u64);

impl From<&TensorView> for DeviceAddress {
    fn from(view: &TensorView) -> Self {
        Self(view.address)
    }
}

impl From<Option<&TensorView>> for DeviceAddress {
    fn from(view: Option<&TensorView>) -> Self {
        view.map_or(Self(0), Self::from)
    }
}

/// One field of the struct, as the layout hash sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Field {
    name: String,
    offset: usize,
    size: usize,
}

/// A kernel's parameter struct, written field by field in the order of the kernel's declaration and
/// with the layout of C. It records the text that `kernels/cuda/base/params.h` hashes of the
/// kernel's struct, one `name:offset:size;` for each field. So a launch can check
/// whether the kernel's struct is the same.
#[derive(Clone, Debug)]
pub struct Params {
    operator: &'static str,
    bytes: Vec<u8>,
    alignment: usize,
    fields: Vec<Field>,
}

impl Params {
    /// A struct without fields; errors for rejected values name `operator`.
    pub fn new(operator: &'static str) -> Self {
        Self { operator, bytes: Vec::new(), alignment: 1, fields: Vec::new() }
    }

    /// The operator that launches.
    pub fn operator(&self) -> &'static str {
        self.operator
    }

    /// A scalar's alignment is its size.
    fn field<const N: usize>(mut self, name: impl Into<String>, value: [u8; N]) -> Self {
        let offset = self.bytes.len().next_multiple_of(N);
        self.bytes.resize(offset, 0);
        self.bytes.extend(value);
        self.alignment = self.alignment.max(N);
        self.fields.push(Field { name: name.into(), offset, size: N });
        self
    }

    /// A pointer: to a tensor's first element, `nullptr` for an absent one, or a [`DeviceAddress`].
    pub fn ptr(self, name: impl Into<String>, to: impl Into<DeviceAddress>) -> Self {
        self.field(name, to.into().0.to_ne_bytes())
    }

    /// An `int64_t`: the distance in elements from one entry along an axis to the next.
    pub fn stride(self, name: impl Into<String>, elements: i64) -> Self {
        self.field(name, elements.to_ne_bytes())
    }

    /// A pointer and, as `NAME_SUFFIX`, the strides of the tensor's first axes in elements, one
    /// for each suffix. An absent tensor is `nullptr` with strides of 0.
    pub fn strided<'a, const N: usize>(
        self,
        name: &str,
        view: impl Into<Option<&'a TensorView>>,
        suffixes: [&str; N],
    ) -> Self {
        let view = view.into();
        let stride =
            |axis: usize| view.and_then(|view| view.strides.get(axis)).copied().unwrap_or(0);
        let pointer = self.ptr(name, view);
        suffixes.iter().enumerate().fold(pointer, |params, (axis, suffix)| {
            params.stride(format!("{name}_{suffix}"), stride(axis))
        })
    }

    /// [`Self::strided`] for a tensor of rows: `NAME` and `NAME_stride`.
    pub fn rows<'a>(self, name: &str, view: impl Into<Option<&'a TensorView>>) -> Self {
        self.strided(name, view, ["stride"])
    }

    /// [`Self::strided`] for a tensor of tokens and heads: `NAME`, `NAME_token_stride` and
    /// `NAME_head_stride`.
    pub fn heads<'a>(self, name: &str, view: impl Into<Option<&'a TensorView>>) -> Self {
        self.strided(name, view, ["token_stride", "head_stride"])
    }

    /// An `int64_t`, for a value that is not negative.
    ///
    /// # Errors
    /// [`RuntimeError::Argument`] with name and value if it does not fit.
    pub fn i64(self, name: &'static str, value: usize) -> Result<Self> {
        let fitting = i64::try_from(value).map_err(|_| self.too_large(name, value, 64))?;
        Ok(self.field(name, fitting.to_ne_bytes()))
    }

    /// An `int32_t`, for a value that is not negative.
    ///
    /// # Errors
    /// [`RuntimeError::Argument`] with name and value if it does not fit.
    pub fn i32(self, name: &'static str, value: usize) -> Result<Self> {
        let fitting = i32::try_from(value).map_err(|_| self.too_large(name, value, 32))?;
        Ok(self.field(name, fitting.to_ne_bytes()))
    }

    /// An array of `N` `int32_t`: the numbers, then zeros.
    ///
    /// # Errors
    /// [`RuntimeError::Argument`] with the name if there are more numbers than `N`.
    pub fn i32s<const N: usize>(mut self, name: &'static str, numbers: &[i32]) -> Result<Self> {
        if numbers.len() > N {
            let reason = format!("{} numbers are more than {N}", numbers.len());
            return Err(RuntimeError::argument(self.operator, name, reason));
        }
        let offset = self.bytes.len().next_multiple_of(4);
        self.bytes.resize(offset, 0);
        self.bytes.extend(numbers.iter().flat_map(|number| number.to_ne_bytes()));
        self.bytes.resize(offset + 4 * N, 0);
        self.alignment = self.alignment.max(4);
        self.fields.push(Field { name: name.into(), offset, size: 4 * N });
        Ok(self)
    }

    /// An `int32_t` that is 0 or 1.
    pub fn flag(self, name: &str, value: bool) -> Self {
        self.field(name, i32::from(value).to_ne_bytes())
    }

    /// A `TensorMap`, aligned to 64 bytes: the result of
    /// [`Device::tensor_map`](super::Device::tensor_map), or zeros for a kernel that copies no TMA
    /// boxes of the tensor.
    pub fn tensor_map(mut self, name: &str, words: Option<MapWords>) -> Self {
        const ALIGNMENT: usize = 64;
        self.bytes.resize(self.bytes.len().next_multiple_of(ALIGNMENT), 0);
        self.alignment = self.alignment.max(ALIGNMENT);
        self.fields.push(Field {
            name: name.to_owned(),
            offset: self.bytes.len(),
            size: size_of::<MapWords>(),
        });
        self.bytes.extend(words.unwrap_or_default().iter().flat_map(|word| word.to_ne_bytes()));
        self
    }

    /// A `float`.
    pub fn f32(self, name: &str, value: f32) -> Self {
        self.field(name, value.to_ne_bytes())
    }

    fn too_large(&self, name: &'static str, value: usize, bits: u32) -> RuntimeError {
        RuntimeError::argument(self.operator, name, format!("{value} must fit {bits} bits"))
    }

    /// The struct's bytes, padding included as zeros.
    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = self.bytes.clone();
        // An empty struct takes a byte in C++.
        bytes.resize(bytes.len().max(1).next_multiple_of(self.alignment), 0);
        bytes
    }

    /// Size in bytes and layout hash, as a kernel's module exports them for its struct.
    pub fn layout(&self) -> (u64, u64) {
        let size = self.bytes.len().max(1).next_multiple_of(self.alignment);
        let hash = self.fields.iter().fold(FNV_OFFSET, |hash, field| {
            fnv1a(hash, &format!("{}:{}:{};", field.name, field.offset, field.size))
        });
        (size as u64, hash)
    }

    /// The first field, in the order of both structs, that differs in the struct that `tree`
    /// declares for a kernel of `file`, as text.
    pub(super) fn difference(&self, tree: &SourceTree, file: &str, kernel: &str) -> String {
        let Some(Declared { listed, unlisted }) = declared(tree, file, kernel) else {
            return "the sources do not say which field differs".into();
        };
        let own: Vec<_> = self.fields.iter().map(Declaration::of).collect();
        let differs = |at: &usize| match (own.get(*at), listed.get(*at)) {
            (Some(own), Some(listed)) => !listed.may_be(own),
            _ => true,
        };
        let Some(at) = (0..own.len().max(listed.len())).find(differs) else {
            return match unlisted.as_slice() {
                [] => "names, sizes and places of the fields agree".into(),
                names => {
                    format!(
                        "the kernel's struct has fields that PARAMS_LAYOUT does not list: {}",
                        names.join(", ")
                    )
                }
            };
        };
        // Offsets are reported only where the fields differ in nothing else.
        let alike = |a: &Declaration, b: &Declaration| {
            a.name == b.name && (a.size == b.size || a.size.is_none())
        };
        let placed =
            listed.get(at).zip(own.get(at)).is_some_and(|(listed, own)| alike(listed, own));
        let end = || "no further field".to_owned();
        let words = |fields: &[Declaration]| {
            fields.get(at).map_or_else(end, |field| field.in_words(placed))
        };
        format!("field {at} is {} in the kernel, {} in the launcher", words(&listed), words(&own))
    }
}

/// The known properties of a field.
struct Declaration {
    name: String,
    offset: Option<usize>,
    size: Option<usize>,
}

impl Declaration {
    fn of(field: &Field) -> Self {
        Self { name: field.name.clone(), offset: Some(field.offset), size: Some(field.size) }
    }

    /// Whether no known property shows that it is a different field.
    fn may_be(&self, own: &Self) -> bool {
        let agrees = |a: Option<usize>, b: Option<usize>| a.is_none() || a == b;
        self.name == own.name && agrees(self.size, own.size) && agrees(self.offset, own.offset)
    }

    fn in_words(&self, placed: bool) -> String {
        let size = self.size.map_or_else(String::new, |size| format!(" of {size} bytes"));
        let place = self
            .offset
            .filter(|_| placed)
            .map_or_else(String::new, |offset| format!(" at byte {offset}"));
        format!("`{}`{size}{place}", self.name)
    }
}

/// A kernel's parameter struct as its sources declare it.
struct Declared {
    /// The fields that its PARAMS_LAYOUT lists, in that order.
    listed: Vec<Declaration>,
    /// Names of the others.
    unlisted: Vec<String>,
}

fn declared(tree: &SourceTree, file: &str, kernel: &str) -> Option<Declared> {
    let layouts = Layouts::of(tree, file).ok()?;
    let headers = tree.headers_of(file).ok()?;
    let files = [file].into_iter().chain(headers).filter_map(|file| tree.text(file).ok());
    let texts: Vec<_> = files.map(|text| layouts.complete(text)).collect();
    let after = |needle: &str| {
        texts.iter().find_map(|text| text.split_once(needle)).map(|(_, after)| after)
    };
    let begins = KERNELS.map(|word| format!("{word}({kernel},"));
    let (name, _) = begins.iter().find_map(|begin| after(begin))?.split_once(',')?;
    let name = name.trim();
    let (names, _) = after(&format!("PARAMS_LAYOUT({name},"))?.split_once(')')?;
    let mut fields = placed(texts.iter().find_map(|text| layouts::declared(text, name))?.fields);
    let of_list = |name: &str| {
        let at = fields.iter().position(|field| field.name == name);
        at.map_or(Declaration { name: name.to_owned(), offset: None, size: None }, |at| {
            fields.remove(at)
        })
    };
    let listed = names.split(',').map(str::trim).map(of_list).collect();
    Some(Declared { listed, unlisted: fields.into_iter().map(|field| field.name).collect() })
}

/// Fields in their order, each with its C offset as long as all sizes before it are known.
fn placed(fields: Vec<FieldText>) -> Vec<Declaration> {
    let mut end = Some(0usize);
    let place = |FieldText { name, kind }| {
        let size = match kind.as_str() {
            pointer if pointer.ends_with('*') => Some(8),
            "int64_t" | "uint64_t" | "double" => Some(8),
            "int32_t" | "uint32_t" | "float" => Some(4),
            _ => None,
        };
        let offset = end.zip(size).map(|(end, size)| end.next_multiple_of(size));
        end = offset.zip(size).map(|(offset, size)| offset + size);
        Declaration { name, offset, size }
    };
    fields.into_iter().map(place).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[derive(Clone, Copy)]
    #[repr(C)]
    struct Mixed {
        count: i32,
        x: u64,
        x_token_stride: i64,
        x_head_stride: i64,
        eps: f32,
        inverse: i32,
        num_rows: i64,
        width: i32,
    }

    fn view(address: u64, strides: [i64; 3]) -> TensorView {
        use super::super::tensor::DType;
        TensorView {
            name: "x".into(),
            address,
            dtype: DType::F32,
            shape: vec![2, 3, 4],
            strides: strides.to_vec(),
        }
    }

    fn mixed() -> Params {
        let params = Params::new("test")
            .i32("count", 7)
            .unwrap()
            .heads("x", &view(0x1234_5678_9abc, [64, 16, 1]));
        let params = params.f32("eps", 0.5).flag("inverse", true).i64("num_rows", 1 << 40).unwrap();
        params.i32("width", 96).unwrap()
    }

    #[test]
    fn fields_lie_where_c_puts_them_and_the_end_is_padded() {
        let layout: Vec<_> = mixed()
            .fields
            .into_iter()
            .map(|field| (field.name, field.offset, field.size))
            .collect();
        let expected = [
            ("count", std::mem::offset_of!(Mixed, count), 4),
            ("x", std::mem::offset_of!(Mixed, x), 8),
            ("x_token_stride", std::mem::offset_of!(Mixed, x_token_stride), 8),
            ("x_head_stride", std::mem::offset_of!(Mixed, x_head_stride), 8),
            ("eps", std::mem::offset_of!(Mixed, eps), 4),
            ("inverse", std::mem::offset_of!(Mixed, inverse), 4),
            ("num_rows", std::mem::offset_of!(Mixed, num_rows), 8),
            ("width", std::mem::offset_of!(Mixed, width), 4),
        ];
        assert_eq!(layout, expected.map(|(name, offset, size)| (name.to_owned(), offset, size)));
        assert_eq!(mixed().layout().0, size_of::<Mixed>() as u64);
        assert_eq!(mixed().bytes().len(), size_of::<Mixed>());
    }

    #[test]
    fn bytes_are_those_of_the_values_and_zeros_between_them() {
        let mut expected = Vec::new();
        expected.extend(7i32.to_ne_bytes());
        expected.extend([0; 4]);
        expected.extend(0x1234_5678_9abcu64.to_ne_bytes());
        expected.extend(64i64.to_ne_bytes());
        expected.extend(16i64.to_ne_bytes());
        expected.extend(0.5f32.to_ne_bytes());
        expected.extend(1i32.to_ne_bytes());
        expected.extend((1i64 << 40).to_ne_bytes());
        expected.extend(96i32.to_ne_bytes());
        expected.extend([0; 4]);
        assert_eq!(mixed().bytes(), expected);
    }

    #[test]
    fn an_absent_tensor_is_a_null_pointer_with_strides_of_zero() {
        let params = Params::new("test").rows("v", None).ptr("sink", None::<&TensorView>);
        assert_eq!(params.bytes(), [0; 24]);
        assert_eq!(
            params.layout(),
            Params::new("test").rows("v", &view(9, [1, 2, 3])).ptr("sink", None).layout()
        );
    }

    #[test]
    fn a_number_that_does_not_fit_is_refused_by_name_and_value() {
        let error = Params::new("test").i32("width", 1 << 31).unwrap_err();
        assert_eq!(error.to_string(), "test: argument `width`: 2147483648 must fit 32 bits");
        let error = Params::new("test").i64("num_rows", 1 << 63).unwrap_err();
        assert_eq!(
            error.to_string(),
            "test: argument `num_rows`: 9223372036854775808 must fit 64 bits"
        );
        assert!(Params::new("test").i32("width", (1 << 31) - 1).is_ok());
    }

    #[test]
    fn the_first_field_that_differs_is_named() {
        let header = "struct P {\n    const bf16* x;  // [n], rows; of bf16\n    int64_t x_stride;\n    int32_t n;\n};\n\
                      PARAMS_LAYOUT(P, x, x_stride,\n              n)\n";
        let source = "#include \"p.h\"\nKERNEL(probe, P, 32) {}\n";
        let files =
            [("p.h", header), ("probe.cu", source)].map(|(name, text)| (name.into(), text.into()));
        let tree = SourceTree::from_files("a test".into(), BTreeMap::from(files)).unwrap();
        let none = None::<&TensorView>;
        let difference = |params: Params| params.difference(&tree, "probe.cu", "probe");
        let x = || Params::new("test").rows("x", none);
        assert_eq!(
            difference(x().i32("n", 1).unwrap()),
            "names, sizes and places of the fields agree"
        );
        let renamed = Params::new("test").rows("y", none).i32("n", 1).unwrap();
        assert_eq!(
            difference(renamed),
            "field 0 is `x` of 8 bytes in the kernel, `y` of 8 bytes in the launcher"
        );
        let wider = difference(x().i64("n", 1).unwrap());
        assert_eq!(
            wider,
            "field 2 is `n` of 4 bytes in the kernel, `n` of 8 bytes in the launcher"
        );
        assert_eq!(
            difference(x()),
            "field 2 is `n` of 4 bytes in the kernel, no further field in the launcher"
        );
        let longer = difference(x().i32("n", 1).unwrap().f32("eps", 1.0));
        assert_eq!(
            longer,
            "field 3 is no further field in the kernel, `eps` of 4 bytes in the launcher"
        );
        assert!(x().difference(&tree, "probe.cu", "absent").contains("do not say"));
        // A struct whose list is derived.
        let derived = header.split_once("PARAMS_LAYOUT").expect("a list").0;
        let files =
            [("p.h", derived), ("probe.cu", source)].map(|(name, text)| (name.into(), text.into()));
        let tree = SourceTree::from_files("a test".into(), BTreeMap::from(files)).unwrap();
        assert_eq!(x().difference(&tree, "probe.cu", "probe"), difference(x()));
        // A list in a different order than the struct's, and one without one of the fields.
        let of = |header: &str| {
            let files = [("p.h", header), ("probe.cu", source)]
                .map(|(name, text)| (name.into(), text.into()));
            let tree = SourceTree::from_files("a test".into(), BTreeMap::from(files)).unwrap();
            x().i32("n", 1).unwrap().difference(&tree, "probe.cu", "probe")
        };
        let turned = of(
            "struct P {\n int32_t n;\n const float* x;\n int64_t x_stride;\n};\nPARAMS_LAYOUT(P, x, x_stride, n)\n",
        );
        let places = "field 0 is `x` of 8 bytes at byte 8 in the kernel, `x` of 8 bytes at byte 0 in the launcher";
        assert_eq!(turned, places);
        let more = of(
            "struct P {\n float *x; int64_t x_stride; int32_t n; int32_t z;\n};\nPARAMS_LAYOUT(P, x, x_stride, n)\n",
        );
        assert_eq!(more, "the kernel's struct has fields that PARAMS_LAYOUT does not list: z");
    }
}
