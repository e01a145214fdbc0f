//! External kernels that do otherwise than the specification what their adapter declares.

use std::path::Path;

use dsv4_parity::external::wire::{self, WireTensors};
use dsv4_parity::external::{ExternalOptions, INPUTS, OUTPUTS};
use dsv4_reference::Format;

use crate::external::{
    Kernel, adapter, assert_agrees, changed, fails, failures, folder, honest, parity_about,
    reference, run,
};

/// A quantizer of rows of fp32 with fp32 scales: the scale of an amax, and the quotient of a number
/// by it.
#[derive(Clone, Copy)]
struct Quantizer {
    scale: fn(f32) -> f32,
    quotient: fn(f32, f32, f32) -> f32,
}

fn specified_scale(amax: f32) -> f32 {
    amax.max(1e-4) * (1.0 / 448.0)
}

const SPECIFIED: Quantizer = Quantizer { scale: specified_scale, quotient: |x, _, s| x / s };

impl Quantizer {
    /// Writes its codes and scales over those of an honest kernel.
    fn write(self, folder: &Path) {
        let read = |file| wire::read(&folder.join(file), u64::MAX).expect("it is there");
        let (inputs, mut outputs): (WireTensors, _) = (read(INPUTS), read(OUTPUTS));
        let x = &inputs["x"];
        let numbers = x.dtype.decode(&x.bytes);
        let (mut codes, mut scales) = (Vec::new(), Vec::new());
        for group in numbers.chunks(x.shape[1]).flat_map(|row| row.chunks(128)) {
            let amax = group.iter().fold(0f32, |amax, &x| amax.max(x.abs() as f32));
            let scale = (self.scale)(amax);
            scales.push(f64::from(scale));
            let code = |&x: &f64| f64::from((self.quotient)(x as f32, amax.max(1e-4), scale));
            codes.extend(group.iter().map(code).map(|x| Format::E4M3.code(x) as u8));
        }
        let written = outputs.get_mut("scales").expect("scales");
        written.bytes = written.dtype.encode(&scales).expect("fp32");
        outputs.get_mut("codes").expect("codes").bytes = codes;
        std::fs::write(folder.join(OUTPUTS), wire::to_bytes(&outputs).unwrap()).unwrap();
    }
}

fn quantized(contents: &str, magnitude: f64) -> String {
    format!(
        r#"{{"operator":"quantize_fp8","contents":"{contents}","distribution":"normal","dtype":"f32","group":"row128","layout":"plain","magnitude":{magnitude},"num_rows":40,"scale":"fp32","seed":1,"task":"quantize","width":512}}"#
    )
}

#[test]
fn scales_and_codes_of_other_products_are_judged_by_what_is_declared() {
    let divided = |amax: f32| amax.max(1e-4) / 448.0;
    let floor = |amax: f32| (amax * (1.0 / 448.0)).max(1e-4);
    let ties = quantized("ties", 1.0);
    for (conventions, line, quantizer) in [
        ("", &ties, SPECIFIED),
        (r#""scale_divided""#, &quantized("drawn", 1.0), Quantizer { scale: divided, ..SPECIFIED }),
        (r#""scale_floor""#, &quantized("drawn", 1e-7), Quantizer { scale: floor, ..SPECIFIED }),
        (
            r#""codes_by_inverse""#,
            &ties,
            Quantizer { quotient: |x, _, s| x * (1.0 / s), ..SPECIFIED },
        ),
        (
            r#""scale_divided", "codes_by_amax""#,
            &ties,
            Quantizer { scale: divided, quotient: |x, amax, _| x * (448.0 / amax) },
        ),
    ] {
        let kernel = || {
            Kernel(move |folder: &Path| {
                honest(folder)?;
                quantizer.write(folder);
                Ok(())
            })
        };
        assert_agrees(&run(line, adapter(&format!("conventions = [{conventions}]")), kernel()));
        let undeclared = run(line, ExternalOptions::default(), kernel());
        assert_eq!(failures(&undeclared).is_empty(), conventions.is_empty(), "{conventions}");
    }
}

/// Our kernel as one that is declared to do otherwise: what is declared counts, not what is usual.
#[test]
fn a_kernel_of_the_specification_is_failed_by_conventions_that_it_does_not_have() {
    let line = |contents: &str, magnitude: f64| {
        format!(
            r#"{{"operator":"quantize_mxfp4","contents":"{contents}","distribution":"normal","dtype":"bf16","layout":"plain","magnitude":{magnitude},"num_rows":5,"seed":1,"task":"quantize","width":192}}"#
        )
    };
    for (convention, line) in
        [("ties_toward_zero", line("ties", 1.0)), ("amax_floor", line("drawn", 1e-20))]
    {
        let declared = || adapter(&format!("conventions = ['{convention}']"));
        assert_agrees(&run(&line, ExternalOptions::default(), Kernel(honest)));
        let record = run(&line, declared(), Kernel(honest));
        assert!(fails(&record, "forward", "codes"), "{convention}: {:?}", failures(&record));
    }
}

const SMALL_PRODUCTS: &str = r#"{"operator":"swiglu_quantize","distribution":"normal","dtype":"bf16","group":"row32","layout":"plain","limit":10.0,"magnitude":0.00006103515625,"num_rows":5,"padding_rows":true,"round_to_bf16":false,"scale":"e8m0","seed":1,"weighted":false,"width":64}"#;
const SMALL_ROWS: &str = r#"{"operator":"kv_norm_rope_write","aliasing":"out_of_place","distribution":"normal","eps":9.999999974752427e-7,"magnitude":1e-9,"nope_dim":64,"num_pages":3,"num_tokens":7,"page_padding":160,"page_size":4,"rope_dim":64,"seed":1,"slots":"hostile","table":"row_per_token","table_rows":0}"#;

#[test]
fn a_floor_of_the_scale_is_followed_where_rows_are_quantized_within_another_operator() {
    /// Of 2^-13, the least power of two that is not below 1e-4.
    const FLOOR: u8 = 127 - 13;
    let declared = || adapter("conventions = ['scale_floor']");
    for line in [SMALL_PRODUCTS, SMALL_ROWS] {
        assert_agrees(&run(line, ExternalOptions::default(), Kernel(honest)));
        let record = run(line, declared(), Kernel(honest));
        assert!(fails(&record, "forward", "scale_is_least"), "{line}: {:?}", failures(&record));
    }
    // Products far below the floor have the code 0.
    let floored = || {
        changed(|outputs, _| {
            outputs.get_mut("codes").expect("codes").bytes.fill(0);
            outputs.get_mut("scales").expect("scales").bytes.fill(FLOOR);
        })
    };
    assert_agrees(&run(SMALL_PRODUCTS, declared(), floored()));
    let record = run(SMALL_PRODUCTS, ExternalOptions::default(), floored());
    assert!(fails(&record, "forward", "scale_is_least"), "{:?}", failures(&record));
}

const ROUTER: &str = r#"{"operator":"router","bias":"drawn","distribution":"normal","logits":"drawn","magnitude":3.0,"num_experts":40,"num_tokens":7,"padding_tokens":true,"route_scale":2.5,"routing":"learned","seed":1,"topk":6,"vocab_size":0}"#;

/// Rows of these tensors from the last slot to the first.
fn reversed(names: &'static [&'static str]) -> impl FnMut(&mut WireTensors, usize) {
    move |outputs, _| {
        for name in names {
            let tensor = outputs.get_mut(*name).expect("it is written");
            let row = 4 * tensor.shape[1];
            let slots = tensor.bytes.chunks(row).flat_map(|row| row.chunks(4).rev());
            tensor.bytes = slots.flatten().copied().collect();
        }
    }
}

#[test]
fn tied_tensors_may_have_the_slots_of_a_row_in_any_order_but_not_in_two() {
    const BOTH: &[&str] = &["topk_indices", "topk_weights"];
    const ORDER: &str = "[[order]]\ntensors = [\"topk_indices\", \"topk_weights\"]";
    let forward = |options| ExternalOptions { forward_only: true, ..options };
    assert_agrees(&run(ROUTER, forward(adapter(ORDER)), changed(reversed(BOTH))));
    for (options, names) in [
        (ExternalOptions::default(), BOTH),
        (adapter(ORDER), &["topk_weights"]),
        (adapter(ORDER), &["topk_indices"]),
    ] {
        let record = run(ROUTER, forward(options), changed(reversed(names)));
        assert!(fails(&record, "forward", "topk_weights"), "{:?}", failures(&record));
    }
}

#[test]
fn what_an_operator_cannot_follow_is_one_error_before_any_case() {
    let dir = folder();
    let adapter = dir.path().join("adapter.toml");
    let path = adapter.display().to_string();
    let worker = reference();
    for (text, words) in [
        ("conventions = ['scale_divide']", "`scale_divide` is none of scale_divided, "),
        ("conventions = ['ties_kept']", "convention `ties_kept`: router has sum_plus_floor"),
        ("[[order]]\ntensors = []", "`tensors` is empty"),
        ("[[order]]\ntensors = ['topk']", "unknown tensor `topk`"),
        (
            "[[order]]\ntensors = ['topk_indices', 'topk_weights']",
            "its gradient `dtopk_weights` is given in our order; --forward-only",
        ),
    ] {
        std::fs::write(&adapter, text).unwrap();
        let arguments = ["--worker", &worker, "--adapter", &path, "--case", ROUTER];
        let output = parity_about("router", dir.path(), &arguments);
        output.assert_code(2);
        assert!(output.stderr.contains(words), "{}", output.stderr);
    }
}
