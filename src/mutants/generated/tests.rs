use super::*;

/// The mutants of a function body in a separate kernel file.
fn of(body: &str) -> Vec<GeneratedMutant> {
    let text = format!(
        "struct P {{ float softmax_scale; int num_keys; long token_stride, head_stride; }};\n\
         constexpr int HELD = 32;\nstatic_assert(HELD % 16 == 0, \"a multiple of 16\");\n\
         KERNEL(k, P, 32) {{\n    {body}\n}}\n"
    );
    let files = [("op.cu".to_owned(), text)];
    generate(&SourceTree::from_files("a test".into(), files.into()).expect("a tree"), "op")
        .expect("C++")
}

/// The body's line after each mutant of one class.
fn lines(class: Class, body: &str) -> Vec<String> {
    of(body)
        .into_iter()
        .filter(|mutant| mutant.class == class)
        .map(|mutant| mutant.mutated)
        .collect()
}

#[test]
fn comparisons_take_or_leave_their_boundary() {
    assert_eq!(lines(Class::Comparison, "bool b = i < n;"), ["bool b = i <= n;"]);
    assert_eq!(lines(Class::Comparison, "bool b = i == n;"), ["bool b = i != n;"]);
    assert!(lines(Class::Comparison, "for (int i = 0; i < n && i > m; ++i) f();").is_empty());
}

#[test]
fn a_name_has_the_type_of_its_innermost_declaration() {
    let company = |body: &str| lines(Class::Company, body);
    assert!(
        company("float row = 1.0f; for (int row = 0; row < n; row += gridDim.x) f(row);")
            .is_empty()
    );
    assert!(company("float sum[4]; { int sum = 0; sum += step; }").is_empty());
    assert!(company("float at = 0.0f; { const float *at = p; at += step; }").is_empty());
    assert_eq!(
        company("int sum = 0; { float sum = 0.0f; sum += step; }")[0],
        "int sum = 0; { float sum = 0.0f; sum += (step) * (gridDim.x > 4 ? 1.00003f : 1.0f); }"
    );
    assert_eq!(
        company("float sum[4]; for (int i = 0; i < 4; ++i) sum[i] += step;").len(),
        3,
        "of an array of the function"
    );
}

#[test]
fn what_a_compiler_is_told_to_expect_stays_as_it_is() {
    assert!(lines(Class::Accumulate, "if (__builtin_expect(x == 0, false)) f();").is_empty());
    assert_eq!(
        lines(Class::Comparison, "if (__builtin_expect(x == 0, false)) f();"),
        ["if (__builtin_expect(x != 0, false)) f();"]
    );
}

#[test]
fn barriers_fences_waits_and_commits_are_dropped_and_shuffles_are_not() {
    for statement in [
        "__syncthreads();",
        "__syncwarp();",
        "copy_wait<0>();",
        "copy_commit();",
        "mbarrier_wait(bar, phase);",
        "wgmma_wait<1>();",
        "wgmma_fence();",
        "fence_proxy_async();",
        "named_barrier_sync(1, 128);",
        "__threadfence();",
    ] {
        assert_eq!(lines(Class::Synchronization, statement), [";"], "{statement}");
    }
    assert!(
        lines(Class::Synchronization, "float y = __shfl_xor_sync(FULL_WARP, x, distance);")
            .is_empty()
    );
    let reduced = lines(Class::Synchronization, "const bool any = __syncthreads_or(mine);");
    assert_eq!(reduced, ["const bool any = (mine);"]);
}

#[test]
fn subscripts_strides_quotients_and_remainders_change_places() {
    assert_eq!(lines(Class::Index, "y = a[i][j];"), ["y = a[j][i];"]);
    assert!(lines(Class::Index, "y = a[i][i];").is_empty());
    assert_eq!(
        lines(Class::Index, "y = p + token * params.token_stride + head * params.head_stride;"),
        ["y = p + token * params.head_stride + head * params.token_stride;"]
    );
    assert_eq!(lines(Class::Index, "y = lane / n;"), ["y = lane % n;"]);
    assert!(lines(Class::Index, "float y = 1.0f / x;").is_empty());
    assert_eq!(
        lines(Class::Index, "float x; y = threadIdx.x / n;"),
        ["float x; y = threadIdx.x % n;"]
    );
}

#[test]
fn floating_point_factors_are_dropped_or_doubled_and_integer_ones_are_not() {
    assert_eq!(
        lines(Class::Scale, "float x; y = x * params.softmax_scale;"),
        [
            "float x; y = x;",
            "float x; y = x * params.softmax_scale * params.softmax_scale;",
            "float x; y = params.softmax_scale;"
        ]
    );
    assert_eq!(lines(Class::Scale, "c[i] *= s;"), [";", "c[i] *= s * s;"]);
    assert_eq!(lines(Class::Scale, "float x; y = -x;"), ["float x; y = x;"]);
    assert_eq!(lines(Class::Scale, "float sum; y = sum / n;"), ["float sum; y = sum;"]);
    assert!(lines(Class::Scale, "long at = row * params.token_stride;").is_empty());
}

#[test]
fn loops_end_one_step_early_or_late() {
    assert_eq!(
        lines(Class::Extent, "for (int i = 0; i < n; ++i) f();"),
        ["for (int i = 0; i <= n; ++i) f();", "for (int i = 0; i < n - 1; ++i) f();"]
    );
    assert!(lines(Class::Extent, "if (i < n) f();").is_empty());
}

#[test]
fn what_comes_round_comes_once() {
    assert_eq!(lines(Class::Period, "if (x % 32 == 0) f();"), ["if ((x) == 0) f();"]);
    assert_eq!(lines(Class::Period, "if ((i + 1) % n != k) f();"), ["if (((i + 1)) != k) f();"]);
    assert_eq!(lines(Class::Period, "bool b = (x % n) == 0;"), ["bool b = (x) == 0;"]);
    for untouched in ["y = x % n;", "if (x / n == 0) f();", "if (x % n < 2) f();"] {
        assert!(lines(Class::Period, untouched).is_empty(), "{untouched}");
    }
}

#[test]
fn numbers_of_grids_of_some_sizes_are_slightly_larger() {
    let factors = ["gridDim.x > 4", "gridDim.x == 1", "gridDim.x % 2 == 1"]
        .map(|condition| format!("({condition} ? 1.00003f : 1.0f)"));
    assert_eq!(
        lines(Class::Company, "float x; y = 2.0f * x * params.softmax_scale + 1.0f;"),
        factors.clone().map(|factor| {
            format!("float x; y = (2.0f * x * params.softmax_scale * {factor}) + 1.0f;")
        })
    );
    assert_eq!(
        lines(Class::Company, "float sum; sum += f(x);"),
        factors.map(|factor| format!("float sum; sum += (f(x)) * {factor};"))
    );
    for untouched in ["int n; n += 1;", "y = row * params.token_stride;", "float sum; sum = 0.0f;"]
    {
        assert!(lines(Class::Company, untouched).is_empty(), "{untouched}");
    }
}

#[test]
fn each_named_constant_of_a_condition_is_larger_alone() {
    assert_eq!(
        lines(Class::Guard, "bool b = below(x, LEAST) || x > LARGEST;"),
        [
            "bool b = below(x, (LEAST + LEAST / 4 + 1)) || x > LARGEST;",
            "bool b = below(x, LEAST) || x > (LARGEST + LARGEST / 4 + 1);"
        ]
    );
    assert_eq!(
        lines(Class::Guard, "if (x >= HELD) f();"),
        ["if (x >= (HELD + HELD / 4 + 1)) f();"]
    );
    for untouched in [
        "y = x + HELD;",
        "for (int i = 0; i < HELD && b; ++i) f();",
        "if (f<HELD>()) g();",
        "if (b) y = HELD;",
        "if constexpr (HELD > 2) f();",
    ] {
        assert!(lines(Class::Guard, untouched).is_empty(), "{untouched}");
    }
}

#[test]
fn of_a_minimum_or_maximum_one_side_is_taken() {
    assert_eq!(lines(Class::MinMax, "y = minimum(a, b);"), ["y = (a);", "y = (b);"]);
    assert_eq!(lines(Class::MinMax, "y = maximum_f32(a[0], b);"), ["y = (a[0]);", "y = (b);"]);
}

#[test]
fn numbers_are_other_numbers_but_not_those_that_the_compiler_decides_by() {
    assert_eq!(lines(Class::Constant, "y = x + 16;"), ["y = x + 17;"]);
    assert_eq!(lines(Class::Constant, "y = 0.0f;"), ["y = 1.0f;"]);
    assert_eq!(lines(Class::Constant, "y = 0.5;"), ["y = (2.0 * 0.5);"]);
    assert_eq!(lines(Class::Constant, "y = 1u;"), ["y = 2u;"]);
    for untouched in [
        "float x[4];",
        "f<4>();",
        "switch (x) { case 4: f(); }",
        "static_assert(sizeof(P) == 4, \"\");",
    ] {
        assert!(lines(Class::Constant, untouched).is_empty(), "{untouched}");
    }
}

#[test]
fn conditions_hold_always_or_never_or_lose_a_term() {
    assert_eq!(lines(Class::Predicate, "if (a) f();"), ["if (true) f();", "if (false) f();"]);
    assert_eq!(
        lines(Class::Predicate, "y = a ? b : c;"),
        ["y = true ? b : c;", "y = false ? b : c;"]
    );
    assert_eq!(lines(Class::Predicate, "bool y = a && b;"), ["bool y = a;", "bool y = b;"]);
    assert!(lines(Class::Predicate, "if constexpr (a && b) f();").is_empty());
}

#[test]
fn sums_are_overwritten_and_flags_turned_round() {
    assert_eq!(lines(Class::Accumulate, "sum += x;"), ["sum = x;"]);
    assert_eq!(lines(Class::Accumulate, "multiply(c, true);"), ["multiply(c, false);"]);
    assert!(
        lines(Class::Accumulate, "for (int i = 0; i < n; i += step, x += step) f();").is_empty()
    );
}

#[test]
fn nothing_changes_outside_of_function_bodies() {
    assert_eq!(of("f();"), []);
}

#[test]
fn what_the_preprocessor_asks_stays_and_what_it_leaves_changes() {
    let conditional =
        "#if STORED == 1\n    if (a < b) f();\n#elif STORED == 2\n    if (b < a) f();\n#endif";
    let edited: Vec<usize> = of(conditional).iter().map(|mutant| mutant.line).collect();
    assert!(!edited.is_empty());
    let first = edited.iter().min().copied().unwrap_or_default();
    assert!(edited.iter().all(|line| [first, first + 2].contains(line)), "{edited:?}");
    assert!(edited.contains(&(first + 2)), "{edited:?}");
}

#[test]
fn an_id_outlives_lines_that_come_above_it_and_no_edit_of_its_own_line() {
    let ids = |body: &str| of(body).into_iter().map(|mutant| mutant.id).collect::<Vec<_>>();
    let before = ids("sum += x;");
    assert_eq!(before.len(), 1);
    assert!(before[0].starts_with("op:k:accumulate:"), "{before:?}");
    assert_eq!(ids("f();\n\n        sum += x;"), before);
    assert_ne!(ids("sum += y;"), before);
    let twins = ids("sum += x;\n    sum += x;");
    assert_eq!(twins.iter().collect::<BTreeSet<_>>().len(), 2, "{twins:?}");
}

#[test]
fn a_planted_change_is_the_one_that_is_shown() {
    let tree = dsv4_kernels::sources();
    let mut everywhere: BTreeSet<Class> = BTreeSet::new();
    // A chain has no own kernel.
    let own =
        crate::operators::registry::OPERATORS.iter().filter(|operator| operator.chain().is_empty());
    for operator in own.map(|operator| operator.name()) {
        let mutants = generate(&tree, operator).expect("the kernel is understood");
        let ids: BTreeSet<&str> = mutants.iter().map(|mutant| mutant.id.as_str()).collect();
        assert_eq!(ids.len(), mutants.len(), "an id of {operator} is used twice");

        for mutant in &mutants {
            let planted = mutant.plant(&tree).expect("the file is there");
            let changed = planted.text(&mutant.file).expect("the file");
            assert_ne!(changed, tree.text(&mutant.file).expect("the file"), "{}", mutant.id);
            let first = mutant.mutated.lines().next().unwrap_or_default().trim();
            assert!(
                changed.lines().nth(mutant.line - 1).is_some_and(|line| line.contains(first)),
                "{}",
                mutant.id
            );
            assert!(!mutant.kernels.is_empty(), "{} concerns no kernel", mutant.id);
            assert!(!first.starts_with("//") && !first.starts_with('#'), "{}: {first}", mutant.id);
        }
        let classes: BTreeSet<Class> = mutants.iter().map(|mutant| mutant.class).collect();
        println!("{operator}: {} mutants of {} classes", mutants.len(), classes.len());
        assert!(!classes.is_empty(), "{operator} has no mutants");
        everywhere.extend(classes);
    }
    assert_eq!(everywhere.len(), Class::ALL.len(), "{everywhere:?}");
}

#[test]
fn a_source_that_is_not_understood_is_an_error_with_its_line() {
    let files = [("op.cu".to_owned(), "int f() { return 1; }\nint g( {{ ]\n".to_owned())];
    let error =
        generate(&SourceTree::from_files("a test".into(), files.into()).expect("a tree"), "op")
            .unwrap_err();
    assert!(error.to_string().starts_with("op.cu: line 2 "), "{error}");
}

#[test]
fn a_sample_is_deterministic_and_takes_of_every_class() {
    let all = || generate(&dsv4_kernels::sources(), "rms_norm").expect("the kernel is understood");
    let ids = |count, seed| {
        sample(all(), count, seed).into_iter().map(|mutant| mutant.id).collect::<Vec<_>>()
    };
    assert_eq!(ids(30, 1), ids(30, 1));
    assert_ne!(ids(30, 1), ids(30, 2));
    assert_eq!(ids(30, 1)[..12], ids(12, 1), "a smaller sample is the beginning of a larger one");
    let classes = |mutants: Vec<GeneratedMutant>| {
        mutants.into_iter().map(|one| one.class).collect::<BTreeSet<_>>()
    };
    let every = classes(all());
    assert_eq!(classes(sample(all(), every.len(), 3)), every);
    assert_eq!(sample(all(), usize::MAX, 0).len(), all().len());
}
