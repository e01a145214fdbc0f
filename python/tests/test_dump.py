"""Calls of another stack, written by numpy and judged by `parity blame --dump`."""

import json

import numpy
import pytest

from dsv4_parity import from_bf16, to_bf16
from dsv4_parity.dump import Dump
from test_command import parity

EPS = 1e-6


def norm(x, weight, factor=1.0):
    wide = from_bf16(x).astype(numpy.float64)
    rstd = 1.0 / numpy.sqrt((wide * wide).mean(axis=1, keepdims=True) + EPS)
    return to_bf16((factor * wide * rstd * weight).astype(numpy.float32))


def written(folder, factors):
    rng = numpy.random.default_rng(1)
    x = to_bf16(rng.normal(size=(5, 512)).astype(numpy.float32))
    with Dump(folder) as dump:
        for layer, factor in enumerate(factors):
            weight = rng.normal(size=512).astype(numpy.float32)
            y = norm(x, weight, factor)
            dump.call("rms_norm", "attn_norm", layer, {"x": x, "weight": weight, "y": y}, eps=EPS)
            x = y
    return str(folder)


def test_the_layer_that_is_wrong_is_named_and_not_those_after_it(tmp_path):
    right = parity("blame", "--dump", written(tmp_path / "right", [1.0] * 3), "--json")
    assert right.returncode == 0, right.stderr
    wrong = written(tmp_path / "wrong", [1.0, 1.01, 1.0])
    found = parity("blame", "--dump", wrong, "--json")
    assert found.returncode == 1, found.stderr
    calls = json.loads(found.stdout)["findings"]
    assert [bool(call["failures"]) for call in calls] == [False, True, False]
    apart = parity("blame", "--dump", str(tmp_path / "right"), "--against", wrong)
    assert apart.returncode == 1
    assert apart.stdout.startswith("the runs part at rms_norm attn_norm of layer 1, call 1"), apart.stdout


def test_a_hook_records_the_arguments_results_and_weights_of_a_module(tmp_path):
    class Module:
        weight = numpy.ones(8, numpy.float32)

        def register_forward_hook(self, record):
            self.record = record

    module, dump = Module(), Dump(tmp_path)
    dump.hook(module, "rms_norm", "q_norm", 2, weights={"weight": "weight"}, eps=EPS)
    x = to_bf16(numpy.ones((1, 8), numpy.float32))
    module.record(module, (x,), x)
    names = {name.rsplit("/", 1)[1] for name in dump.tensors}
    assert names == {"x", "y", "weight"} and dump.fields == {"000000/2/rms_norm/q_norm": {"eps": EPS}}
    with pytest.raises(TypeError, match="float64"):
        dump.call("rms_norm", "q_norm", 2, {"x": numpy.zeros(3)})
