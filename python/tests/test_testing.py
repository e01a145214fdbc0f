"""The judge of callables, and what pytest makes of its cases."""

import importlib.util
import json
import os
from pathlib import Path

import numpy
import pytest

from dsv4_parity import _native, ops, testing
from dsv4_parity.testing import Case, Unsupported, check

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parent.parent
LINE = {
    "operator": "rms_norm",
    "num_rows": 5,
    "width": 512,
    "dtype": "f32",
    "weight": "f32",
    "eps": 1e-2,
    "aliasing": "out_of_place",
    "zero_rows": False,
    "saves_rstd": True,
    "distribution": "normal",
    "magnitude": 0.25,
    "seed": 1,
}


def example():
    path = ROOT / "examples" / "numpy_rms_norm.py"
    spec = importlib.util.spec_from_file_location("numpy_rms_norm", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def kernels():
    return example()


@pytest.fixture
def line():
    return Case(LINE)


def test_a_case_has_tensors_numbers_and_an_id(line):
    assert line.operator == "rms_norm" and line["eps"] == pytest.approx(1e-2)
    assert len(line.id) == 12 and Case(line.line).id == line.id
    assert line.inputs["x"].shape == (5, 512) and line.inputs["x"].dtype == numpy.float32
    assert line.outputs["y"] == ("f32", (5, 512))
    with pytest.raises(ValueError, match="unknown operator `rms_nrom`"):
        Case({**LINE, "operator": "rms_nrom"})
    with pytest.raises(ValueError, match="field `eps`: -1 must be finite"):
        Case({**LINE, "eps": -1.0})


def test_a_right_kernel_passes_with_its_budget_use_and_power(line, kernels):
    judged = check(line, forward=kernels.rms_norm, backward=kernels.backward)
    assert set(judged.budget_use) >= {"y", "rstd", "dx", "dweight"}
    assert 0.0 <= max(judged.budget_use.values()) < 1.0
    assert "forward" in judged.checks and "gradient" in judged.checks
    assert judged.power["y"]["powerless"] is False


def attention(q, k, indices, sink, softmax_scale, v_dim):
    found = (indices >= 0) & (indices < len(k))
    keys = k[numpy.where(found, indices, 0)].astype(numpy.float64)
    logits = softmax_scale * numpy.einsum("thd,tsd->ths", q, keys)
    logits[~numpy.broadcast_to(found[:, None], logits.shape)] = -numpy.inf
    largest = numpy.maximum(logits.max(2), sink)[..., None]
    weights = numpy.exp(logits - largest)
    total = weights.sum(2, keepdims=True) + numpy.exp(sink[:, None] - largest)
    return numpy.einsum("ths,tsv->thv", weights / total, keys[..., :v_dim])


def test_what_a_callable_keeps_to_itself_is_not_demanded():
    wanted = "num_tokens > 2 and num_keys > 8 and topk > 4 and values = 'shared'"
    wanted += " and lengths = 'absent' and sinks = 'normal'"
    (_, line), *_ = _native.cases("sparse_attention", "quick", wanted, 1, None, 1)
    case = Case(line)
    judged = check(case, forward=attention)
    assert set(judged.budget_use) == {"out"} and "gradient_of_saved" not in judged.checks
    gradients = {name: one for name, one in case.outputs.items() if name in ("dq", "dk", "dsink")}
    zeros = {name: numpy.zeros(shape) for name, (_, shape) in gradients.items()}
    with pytest.raises(AssertionError, match="dq"):
        check(case, forward=attention, backward=lambda q, dout: zeros)


def test_given_tensors_are_judged_in_the_place_of_drawn_ones(line, kernels):
    x = numpy.linspace(-3, 3, 7 * 24, dtype=numpy.float32).reshape(7, 24)
    weight = numpy.full(24, 0.5, numpy.float32)
    case = line.with_tensors(x=x, weight=weight)
    assert (case["num_rows"], case["width"], line["width"]) == (7, 24, 512)
    assert case.id != Case(case.line).id and case.id == line.with_tensors(x=x, weight=weight).id
    assert (case.inputs["x"] == x).all() and case.inputs["dy"].shape == (7, 24)
    seen = []

    def forward(x, weight, eps):
        seen.append(x.copy())
        return kernels.rms_norm(x, weight, eps)

    judged = check(case, forward=forward, backward=kernels.backward)
    assert any((one == x).all() for one in seen) and judged.budget_use["y"] < 1.0
    with pytest.raises(AssertionError, match="forward y"):
        check(case, forward=lambda x, weight, eps: 2 * kernels.rms_norm(x, weight, eps)["y"])
    assert case.tolerances()["y"]["atol"] > 0.0


def test_given_tensors_that_no_such_case_has_are_errors_by_name(line):
    with pytest.raises(ValueError, match="`y`.*reads no such tensor; it reads x"):
        line.with_tensors(y=numpy.zeros((5, 512)))
    with pytest.raises(ValueError, match=r"`x`.*\[5\].*num_rows"):
        line.with_tensors(x=numpy.zeros(5))
    with pytest.raises(ValueError, match="`weight`|`x`"):
        line.with_tensors(x=numpy.zeros((2, 8)), weight=numpy.zeros(9))


def test_without_a_backward_gradients_are_counted_skips(line, kernels):
    judged = check(line, forward=kernels.rms_norm)
    assert "dx" not in judged.budget_use
    assert any("does not return it" in why for _, why in judged.skips)


@pytest.mark.parametrize(
    ("name", "zero_rows", "causes"),
    [
        ("weight_applied_twice", False, ["law: weight scales once y", "forward y"]),
        ("without_eps", True, ["rstd: ", "kernel inf"]),
        ("mean_along_the_wrong_axis", False, ["independence y: ", "element(s) differ"]),
    ],
)
def test_a_wrong_kernel_fails_with_a_diagnosis_that_names_the_cause(
    kernels, name, zero_rows, causes
):
    case = Case({**LINE, "zero_rows": zero_rows})
    with pytest.raises(AssertionError) as raised:
        check(case, forward=getattr(kernels, name), replay="again")
    text = str(raised.value)
    assert text.startswith("\nrms_norm: the case fails: ")
    assert all(cause in text for cause in causes), text
    assert text.rstrip().endswith("replay: again") and len(text.splitlines()) <= 24, text


def test_a_wrong_gradient_fails_and_a_changed_input_too(line, kernels):
    def half(x, dy, rstd, weight=None):
        gradients = kernels.backward(x, dy, rstd, weight)
        return {**gradients, "dx": gradients["dx"] * 0.5}

    with pytest.raises(AssertionError, match="gradient dx"):
        check(line, forward=kernels.rms_norm, backward=half)

    def overwrites(x, weight=None, eps=1e-6):
        found = kernels.rms_norm(x, weight, eps)
        x[0, 0] += 1.0
        return found

    with pytest.raises(AssertionError, match="inputs_unchanged"):
        check(line, forward=overwrites)


def test_what_a_callable_raises_or_returns_wrongly_is_told(line):
    def broken(x):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        check(line, forward=broken)
    with pytest.raises(AssertionError, match="the forward returned `z`"):
        check(line, forward=lambda x: {"z": x})
    with pytest.raises(AssertionError, match=r"`y` has shape \[512\], and must have \[5, 512\]"):
        check(line, forward=lambda x: x[0])
    with pytest.raises(AssertionError):
        check(line, forward=lambda x: {})
    with pytest.raises(pytest.skip.Exception, match="only widths of 64"):

        def picky(x):
            raise Unsupported("only widths of 64")

        check(line, forward=picky)


def test_tolerances_allow_each_element_its_budget(line, kernels):
    tolerances = line.tolerances()
    y = kernels.rms_norm(line.inputs["x"], line.inputs["weight"], line["eps"])["y"]
    rounded = y.astype(numpy.float32)
    numpy.testing.assert_allclose(
        rounded, y, rtol=tolerances["y"]["rtol"], atol=tolerances["y"]["atol"]
    )
    assert 0.0 < tolerances["y"]["sees"] < 1e-3
    with pytest.raises(AssertionError):
        seen = 1.0 + 2.0 * tolerances["y"]["sees"]
        numpy.testing.assert_allclose(
            rounded * seen, y, rtol=tolerances["y"]["rtol"], atol=tolerances["y"]["atol"]
        )


def test_checks_without_an_oracle_pass_and_fail():
    x = numpy.arange(24.0).reshape(6, 4)
    calls = []

    def counts(x):
        calls.append(1)
        return x + len(calls)

    testing.check_repeatable(lambda x: x * 2, x)
    with pytest.raises(AssertionError, match="call 2 of the same arguments: 24 of 24 elements"):
        testing.check_repeatable(counts, x)
    testing.check_inputs_unchanged(lambda x: x + 1, x)
    with pytest.raises(AssertionError, match="argument 0 was changed"):
        testing.check_inputs_unchanged(lambda x: numpy.add(x, 1, out=x), x.copy())
    testing.check_batch_invariance(lambda x: x * x, x)
    with pytest.raises(AssertionError, match="1 of 6 rows"):
        testing.check_batch_invariance(lambda x: x - x.mean(), x)


TEST = '''
from dsv4_parity.testing import cases, check, Case
@cases("scale_swizzle", where="num_rows <= 200", edge_cases=2, drawn=2)
def test_it(case):
    assert isinstance(case, Case) and case["num_rows"] <= 200
'''


def test_each_case_is_an_item_with_its_digest_as_id(pytester):
    pytester.makepyfile(TEST)
    result = pytester.runpytest("--collect-only", "-q")
    ids = [line for line in result.outlines if "::test_it[" in line]
    assert len(ids) >= 3 and len(set(ids)) == len(ids), result.outlines
    again = pytester.runpytest("--collect-only", "-q")
    assert [line for line in again.outlines if "::test_it[" in line] == ids
    other = pytester.runpytest("--collect-only", "-q", "--parity-seed", "77")
    assert [line for line in other.outlines if "::test_it[" in line] != ids
    one = ids[0].split("[")[1].rstrip("]")
    chosen = pytester.runpytest("-k", one)
    chosen.assert_outcomes(passed=1, deselected=len(ids) - 1)


def test_a_bad_seed_and_a_condition_of_no_case_are_told(pytester):
    pytester.makepyfile(TEST)
    bad = pytester.runpytest("--parity-seed", "many")
    assert bad.ret == pytest.ExitCode.USAGE_ERROR
    pytester.makepyfile(TEST.replace("num_rows <= 200", "num_rwos <= 200"))
    unknown = pytester.runpytest()
    unknown.stdout.fnmatch_lines(["*names `num_rwos`, which no case of scale_swizzle has*"])


def test_the_example_passes(pytester):
    pytester.makepyfile(test_example=(ROOT / "examples" / "numpy_rms_norm.py").read_text())
    result = pytester.runpytest()
    outcomes = result.parseoutcomes()
    assert outcomes.get("passed", 0) >= 3 and "failed" not in outcomes, outcomes


NUMPY = {"f32": "f4", "bf16": "u2", "i32": "i4", "i64": "i8", "u8": "u1"}


def as_a_kernel(line, inputs, expected):
    """A case's tensors and numbers given to `dsv4_parity.ops`, for the judge."""
    fields = json.loads(line)
    arrays = {
        name: numpy.frombuffer(data, NUMPY[dtype]).reshape(shape).copy()
        for name, dtype, shape, data in inputs
    }
    found = dict(arrays)
    for direction in ("", "_backward"):
        function = getattr(ops, fields["operator"] + direction, None)
        if function is None:
            break
        # A forward takes an upstream gradient only where it computes gradients, too.
        unread = set() if direction or fields.get("together") else {"grad_loss"}
        tensors = {
            one["name"]: found.get(one["name"])
            for one in function.function.given
            if one["name"] not in unread
        }
        known = {**fields, **fields.get("attention", {})}
        options = {
            one["name"]: known[one["name"].rstrip("_")]
            for one in function.function.options
            if one["name"].rstrip("_") in known
        }
        present = {name: one for name, one in tensors.items() if one is not None}
        result = function(**present, **options)
        if len(function.function.results) > 1:
            found.update({name: one for name, one in result._asdict().items() if one is not None})
        elif function.function.results:
            found[function.function.results[0]] = result
    return {name: found[name].tobytes() for name, *_ in expected if name in found}, []


# One operator of each family; all of them where everything is tested.
SOME = ["mhc_post", "hadamard", "linear", "rope", "attention_combine", "topk", "swiglu"]
SOME += ["moe_map", "lm_head"]
OF_BYTES = {"kv_cache_write", "indexer_cache_write", "grouped_linear_swiglu"}
ALL = os.environ.get("PARITY_TESTS") == "all"


@pytest.mark.parametrize("operator", _native.operators() if ALL else SOME)
def test_our_operators_agree_by_the_judge_when_they_are_called_as_functions(operator):
    cases = _native.cases(operator, "smoke", None, 1, 0, 0)
    if operator in OF_BYTES:
        pytest.skip("what is compared is the meaning of its bytes, which only the operator tells")
    record, diagnosis = _native.judge(cases[0][1], as_a_kernel, "", {})
    assert not diagnosis, diagnosis
    assert any(check["compared"] for check in json.loads(record)["checks"])
