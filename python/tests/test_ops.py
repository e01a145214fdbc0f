"""The operators on numpy's arrays, by the emulator."""

import inspect
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy
import pytest

import dsv4_parity
from dsv4_parity import _native, _stubs, from_bf16, ops, to_bf16

PACKAGE = Path(dsv4_parity.__file__).parent


def drawn(*shape, seed=1):
    return numpy.random.default_rng(seed).normal(size=shape).astype(numpy.float32)


def norm(x, weight, eps=1e-6):
    x = x.astype(numpy.float64)
    rstd = 1.0 / numpy.sqrt((x * x).mean(axis=1) + eps)
    return x * rstd[:, None] * weight, rstd


def test_a_norm_of_float32_is_the_formula():
    x, weight = drawn(5, 96), drawn(96, seed=2)
    y, rstd = ops.rms_norm(x, weight)
    expected, scale = norm(x, weight)
    assert y.dtype == rstd.dtype == numpy.float32
    numpy.testing.assert_allclose(y, expected, rtol=2e-6)
    numpy.testing.assert_allclose(rstd, scale, rtol=2e-6)


def test_numbers_of_the_call_are_keywords_and_have_the_models_values():
    x = drawn(3, 64)
    plain, other = ops.rms_norm(x).y, ops.rms_norm(x, eps=0.5).y
    numpy.testing.assert_allclose(plain, norm(x, 1.0)[0], rtol=2e-6)
    numpy.testing.assert_allclose(other, norm(x, 1.0, 0.5)[0], rtol=2e-6)
    assert inspect.signature(ops.rms_norm).parameters["eps"].default == 1e-6


def test_rows_of_invariant_kernels_do_not_depend_on_the_batch():
    # A depth that the fastest kernels divide by the number of rows.
    x, w = to_bf16(drawn(20, 512)), to_bf16(drawn(72, 512, seed=2))
    both = lambda: [ops.linear(rows, w, output="f32") for rows in (x, x[:1])]
    fastest, alone = both()
    assert (fastest[:1] != alone).any()
    ops.invariant()
    try:
        several, alone = both()
    finally:
        ops.invariant(False)
    assert (several[:1] == alone).all()


def test_bfloat16_is_its_bits_in_uint16():
    x = drawn(4, 512)
    y = ops.rms_norm(to_bf16(x)).y
    assert y.dtype == numpy.uint16
    rounded = from_bf16(to_bf16(x))
    numpy.testing.assert_allclose(from_bf16(y), norm(rounded, 1.0)[0], rtol=2**-7)
    values = numpy.array([1.0, -0.0, numpy.inf, numpy.nan, 1.00390625, 1.01171875], numpy.float32)
    bits = to_bf16(values)
    assert bits[:3].tolist() == [0x3F80, 0x8000, 0x7F80] and numpy.isnan(from_bf16(bits[3:4]))[0]
    # Ties go to the even neighbour.
    assert bits[4:].tolist() == [0x3F80, 0x3F82]


def test_a_backward_takes_what_the_forward_saved():
    x, weight, dy = drawn(3, 64), drawn(64, seed=2), drawn(3, 64, seed=3)
    forward = ops.rms_norm(x, weight)
    dx, dweight = ops.rms_norm_backward(x, forward.rstd, dy, weight)
    step = 1e-3
    for at in [(0, 0), (2, 63)]:
        moved = x.astype(numpy.float64)
        moved[at] += step
        back = x.astype(numpy.float64)
        back[at] -= step
        slope = ((norm(moved, weight)[0] - norm(back, weight)[0]) * dy).sum() / (2 * step)
        assert dx[at] == pytest.approx(slope, rel=1e-3, abs=1e-4)
    numpy.testing.assert_allclose(dweight, (dy * x * norm(x, 1.0)[1][:, None]).sum(0), rtol=1e-4)


def test_results_are_written_where_out_says_so():
    x = drawn(3, 64)
    y, rstd = numpy.empty_like(x), numpy.empty(3, numpy.float32)
    result = ops.rms_norm(x, out=(y, rstd))
    assert result.y is y and result.rstd is rstd
    numpy.testing.assert_array_equal(y, ops.rms_norm(x).y)
    # Rows with gaps, and in place.
    wide = numpy.zeros((3, 128), numpy.float32)
    ops.rms_norm(x, out={"y": wide[:, ::2]})
    numpy.testing.assert_array_equal(wide[:, ::2], y)
    assert not wide[:, 1::2].any()
    ops.rms_norm(x, out=(x, None))
    numpy.testing.assert_array_equal(x, y)


def test_a_state_is_written_in_place():
    rows, slots = to_bf16(drawn(4, 512)), numpy.array([0, 5, -1, 3], numpy.int32)
    cache = numpy.zeros((2, 64 * 584), numpy.uint8)
    assert ops.kv_cache_write(rows, slots, cache, nope_dim=448, rope_dim=64) is None
    assert cache[0].any() and not cache[1].any()


def test_an_operator_with_optional_results_returns_none_for_the_absent_ones():
    scores = drawn(3, 70)
    alone = ops.topk(scores, topk=4)
    assert alone.values is None
    both = ops.topk(scores, topk=4, with_values=True)
    expected = numpy.sort(scores, axis=1)[:, ::-1][:, :4]
    numpy.testing.assert_array_equal(numpy.sort(both.values, axis=1)[:, ::-1], expected)
    numpy.testing.assert_array_equal(numpy.take_along_axis(scores, both.indices, 1), both.values)
    assert set(map(tuple, numpy.sort(alone.indices))) == set(map(tuple, numpy.sort(both.indices)))


def test_empty_tensors_are_a_call_like_any_other():
    y, rstd = ops.rms_norm(numpy.zeros((0, 64), numpy.float32))
    assert (y.shape, rstd.shape) == ((0, 64), (0,))


class Anybody:
    """A tensor of a framework of which nothing is known."""

    def __init__(self, array):
        self.array, self.shape, self.dtype = array, array.shape, array.dtype
        self.device = "cpu"

    def __dlpack__(self, stream=None):
        return self.array.__dlpack__()

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __array_namespace__(self):
        return Namespace


class Namespace:
    float32, uint16 = "float32", "uint16"

    @staticmethod
    def empty(shape, dtype, device):
        return Anybody(numpy.empty(shape, dtype))


def test_whoever_speaks_dlpack_gets_tensors_of_its_own():
    x = drawn(3, 64)
    y, rstd = ops.rms_norm(Anybody(x))
    assert type(y) is Anybody
    numpy.testing.assert_array_equal(y.array, ops.rms_norm(x).y)
    with pytest.raises(ValueError, match="argument `x`: strides .* must be dense"):
        ops.rms_norm(Anybody(drawn(3, 128)[:, ::2]))
    with pytest.raises(TypeError, match="argument `x`: DLPack type .* is none of kernels"):
        ops.rms_norm(Anybody(drawn(3, 64).astype(numpy.float64)))


X = drawn(3, 64)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: ops.rms_norm(X, drawn(3)), ValueError, "`weight`: shape [3] must be [64] (width)"),
        (lambda: ops.rms_norm(X[0]), ValueError, "`x`: shape [64] has 1 axes, not 2"),
        (lambda: ops.rms_norm(X.astype("i4")), ValueError, "type i32 must be bf16 or f32"),
        (lambda: ops.rms_norm(X.astype("f8")), TypeError, "`x`: element type float64 is none"),
        (lambda: ops.rms_norm(X, eps=-1.0), ValueError, "`eps`: -1 must be finite and above 0"),
        (lambda: ops.rms_norm(X, eps="a"), ValueError, '`eps`: "a" must be a number'),
        (lambda: ops.rms_norm(X, saves_rstd="no"), ValueError, '`saves_rstd`: "no" must be one of'),
        (lambda: ops.rms_norm(drawn(1, 40000)), ValueError, "40000 must be 1 to 32768"),
        (lambda: ops.rms_norm(7), TypeError, "`x`: int is no tensor"),
        (lambda: ops.rms_norm(X, Anybody(X[0])), TypeError, "`weight`: Anybody is of another"),
        (lambda: ops.rms_norm(X, wieght=X), TypeError, "unexpected keyword argument 'wieght'"),
        (lambda: ops.rms_norm(X, out=(X,)), ValueError, "`out`: 1 tensors must be 2 (y, rstd)"),
        (lambda: ops.rms_norm(X, out={"z": X}), ValueError, "`out`: `z` is none of y, rstd"),
        (
            lambda: ops.rms_norm(X, out=(drawn(3, 63), None)),
            ValueError,
            "`y` is f32 [3, 63], and must be f32 [3, 64]",
        ),
        (lambda: ops.topk(X), ValueError, "`topk`: it must be given"),
        (lambda: ops.topk(X, topk=-1), ValueError, "`topk`: -1 must be a whole number"),
    ],
)
def test_bad_input_is_an_error_that_names_argument_and_value(call, error, message):
    with pytest.raises(error) as raised:
        call()
    assert message in str(raised.value)


def test_a_read_only_array_is_not_written():
    x = drawn(3, 64)
    y = numpy.empty_like(x)
    y.setflags(write=False)
    with pytest.raises(ValueError, match="argument `y`: the array is read-only"):
        ops.rms_norm(x, out={"y": y})


def test_there_is_a_function_for_every_operator_and_none_besides():
    assert set(_native.operators()) <= set(dir(ops))
    with pytest.raises(AttributeError, match="no operator 'rms_nrom'"):
        ops.rms_nrom
    with pytest.raises(AttributeError, match="`topk` has no backward"):
        ops.topk_backward


def test_threads_call_at_once():
    x = drawn(4, 64)
    expected, found = ops.rms_norm(x).y, []

    def call():
        found.append(numpy.array_equal(ops.rms_norm(x).y, expected))

    threads = [threading.Thread(target=call) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert found == [True] * 4


def test_an_interrupt_ends_a_call_and_later_calls_are_as_before():
    x, w = to_bf16(drawn(64, 2048)), to_bf16(drawn(2048, 2048))
    ops.linear(x[:1, :64].copy(), w[:8, :64].copy())
    timer = threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT))
    # A shell that starts this in the background has it ignore interrupts.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        timer.start()
        begun = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            ops.linear(x, w)
        assert time.monotonic() - begun < 5.0
    finally:
        signal.signal(signal.SIGINT, before)
    numpy.testing.assert_allclose(ops.rms_norm(X).y, norm(X, 1.0)[0], rtol=2e-6)


def test_a_docstring_has_sizes_types_and_the_section_of_the_specification():
    text = ops.rms_norm.__doc__
    assert "x: [num_rows, width] bf16 or f32" in text
    assert "Specification: inference 3, training 11.3." in text
    assert "eps: a number; the model's is 1e-06" in text


def test_the_import_takes_less_than_a_third_of_a_second():
    # Of the processor: other processes may have it meanwhile.
    code = "import time; begun = time.process_time(); import dsv4_parity.ops; "
    code += "print(time.process_time() - begun)"
    times = [
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout)
        for _ in range(3)
    ]
    assert min(times) < 0.3, times


def test_the_stub_is_that_of_the_declarations():
    kept = (PACKAGE / "ops.pyi").read_text()
    assert _stubs.text() == kept, "python -m dsv4_parity._stubs > python/dsv4_parity/ops.pyi"
