use serde_json::{Value, json};

use super::{Config, ConfigError};
use crate::cache::cache_layout::LayerKind::{Csa, Hca, Window};
use crate::cache::kv_cache::RowFormat;

/// The configuration of the small released model.
fn flash() -> Config {
    let pairs = (0..20).flat_map(|_| [Csa, Hca]);
    Config::flash([Window; 2].into_iter().chain(pairs).chain([Csa]).collect())
}

/// The official file of [`flash`], as an object of JSON.
fn official() -> Value {
    serde_json::from_str(&flash().to_json()).expect("JSON")
}

/// The error of the official file with another value of a field, or without it.
fn refusal(field: &str, value: Option<Value>) -> String {
    let mut file = official();
    let mut at = &mut file;
    let mut names: Vec<&str> = field.split('.').collect();
    let last = names.pop().expect("a name");
    for name in names {
        at = &mut at[name];
    }
    let object = at.as_object_mut().expect("an object");
    match value {
        Some(value) => object.insert(last.to_owned(), value),
        None => object.remove(last),
    };
    Config::parse(&file.to_string()).expect_err(field).to_string()
}

#[test]
fn the_official_file_gives_the_configuration_of_the_specification() {
    let config = Config::parse(&flash().to_json()).expect("a configuration");
    assert_eq!(config, flash());
    assert_eq!(config.row(), RowFormat::MODEL);
    let count = |kind| config.layers.iter().filter(|&&layer| layer == kind).count();
    assert_eq!([count(Window), count(Csa), count(Hca)], [2, 21, 20]);
    assert_eq!((0..5).map(|layer| config.is_hashed(layer)).filter(|hashed| *hashed).count(), 3);
    assert_eq!(official()["compress_ratios"].as_array().expect("a list").len(), 44);
}

#[test]
fn fields_that_are_not_of_this_specification_are_no_problem() {
    let mut file = official();
    file["transformers_version"] = json!("5.23.0");
    file["torch_dtype"] = json!("bfloat16");
    assert_eq!(Config::parse(&file.to_string()).expect("a configuration"), flash());
}

#[test]
fn every_field_is_required_and_a_missing_one_is_named() {
    let optional = ["topk_method", "hidden_act", "expert_dtype"];
    let (mut seen, official) = (0, official());
    for (name, value) in official.as_object().expect("an object") {
        let parts: Vec<String> = match value {
            Value::Object(parts) => parts.keys().map(|part| format!("{name}.{part}")).collect(),
            _ => vec![name.clone()],
        };
        for field in parts.iter().filter(|field| !field.ends_with("activation_scheme")) {
            if optional.contains(&field.as_str()) {
                continue;
            }
            let error = refusal(field, None);
            assert!(error.contains(&format!("`{field}` is missing")), "{field}: {error}");
            seen += 1;
        }
    }
    assert_eq!(seen, 45);
}

#[test]
fn all_problems_of_a_file_are_reported_at_once() {
    let mut file = official();
    let object = file.as_object_mut().expect("an object");
    object.remove("o_groups");
    object.insert("hc_mult".into(), json!(2));
    object.insert("rms_norm_eps".into(), json!("small"));
    let error = Config::parse(&file.to_string()).expect_err("three problems");
    let ConfigError::Fields(problems) = &error else { panic!("{error}") };
    let fields: Vec<&str> = problems.iter().map(|problem| problem.field.as_str()).collect();
    assert_eq!(fields, ["hc_mult", "o_groups", "rms_norm_eps"]);
    assert!(error.to_string().contains("`hc_mult` is 2: only 4 is supported"), "{error}");
}

#[test]
fn another_architecture_is_named_before_its_fields_are_read() {
    let error = refusal("model_type", Some(json!("deepseek_v41")));
    assert!(error.contains("`model_type` is \"deepseek_v41\"; only deepseek_v4"), "{error}");
    let error = refusal("architectures", Some(json!(["DeepseekV3ForCausalLM"])));
    assert!(error.contains("`architectures` is [\"DeepseekV3ForCausalLM\"]"), "{error}");
    let error = refusal("architectures", None);
    assert!(error.contains("`architectures` is missing"), "{error}");
}

#[test]
fn a_list_of_ratios_that_contradicts_the_layers_is_rejected() {
    let ratios = |change: fn(&mut Vec<Value>)| {
        let mut list = official()["compress_ratios"].as_array().expect("a list").clone();
        change(&mut list);
        refusal("compress_ratios", Some(Value::Array(list)))
    };
    let error = ratios(|list| drop(list.pop()));
    assert!(error.contains("`compress_ratios` has 43 entries"), "{error}");
    assert!(error.contains("43 layers") && error.contains("1 MTP modules"), "{error}");
    let error = ratios(|list| list[5] = json!(8));
    assert!(error.contains("`compress_ratios` is 8 for layer 5"), "{error}");
    let error = ratios(|list| list[43] = json!(4));
    assert!(error.contains("ends with 4"), "{error}");
    let error = refusal("compress_ratios", Some(json!([0, "4"])));
    assert!(error.contains("must be a list of 0, 4 and 128"), "{error}");
    let error = refusal("num_hidden_layers", Some(json!(42)));
    assert!(error.contains("44 entries") && error.contains("42 layers"), "{error}");
}

#[test]
fn values_that_no_kernel_supports_are_rejected_by_the_name_of_their_field() {
    for (field, value, said) in [
        ("hidden_size", json!(4100), "is 4100: it must be a multiple of 128"),
        ("hidden_size", json!(-1), "is -1: it must be a whole number"),
        ("hidden_size", json!(1u64 << 40), "must be a whole number below 2^31"),
        ("vocab_size", json!(0), "is 0"),
        ("num_experts_per_tok", json!(257), "is 257: it must be 1 to 32"),
        ("n_routed_experts", json!(1024), "is 1024"),
        ("o_groups", json!(7), "is 7: it must divide `num_attention_heads`, 64"),
        ("num_hash_layers", json!(44), "is 44: the model has 43 layers"),
        ("head_dim", json!(500), "is 500"),
        ("qk_rope_head_dim", json!(60), "is 60"),
        ("index_head_dim", json!(64), "is 64: only 128 is supported"),
        ("sliding_window", json!(64), "only 128"),
        ("num_key_value_heads", json!(8), "only 1"),
        ("scoring_func", json!("sigmoid"), "only \"sqrtsoftplus\""),
        ("expert_dtype", json!("nvfp4"), "only \"fp4\""),
        ("quantization_config.moe_quant_algo", json!("MXFP8"), "only \"NVFP4\""),
        ("quantization_config.weight_block_size", json!([1, 128]), "only [128,128]"),
        ("rope_scaling.factor", json!(0), "is 0: it must be a number above 0"),
        ("hc_sinkhorn_iters", json!(49), "is 49"),
        ("eos_token_id", json!(129_280), "is 129280: the vocabulary has 129280"),
    ] {
        let error = refusal(field, Some(value));
        assert!(error.contains(&format!("`{field}` ")) && error.contains(said), "{error}");
    }
    // The number of layers and of MTP modules must match the list, too.
    let mut file = official();
    file["num_nextn_predict_layers"] = json!(2);
    file["compress_ratios"].as_array_mut().expect("a list").push(json!(0));
    let error = Config::parse(&file.to_string()).expect_err("two modules").to_string();
    assert!(error.contains("`num_nextn_predict_layers` is 2: at most one"), "{error}");
}

#[test]
fn a_file_that_is_none_says_so() {
    for text in ["", "[]", "{", "nothing"] {
        let error = Config::parse(text).expect_err(text).to_string();
        assert!(error.starts_with("config.json is not a JSON object"), "{error}");
    }
    let folder = std::env::temp_dir().join("no such checkpoint");
    let error = Config::read(&folder).expect_err("no file").to_string();
    assert!(error.contains("no such checkpoint") && error.contains("cannot be read"), "{error}");
}
