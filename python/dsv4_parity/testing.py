"""Judge a kernel in a test, with the cases, the oracles and the checks of `parity`.

    from dsv4_parity.testing import cases, check

    @cases("rms_norm", profile="quick", where="width = 512")
    def test_my_norm(case):
        check(case, forward=my_norm, backward=my_norm_backward)

Each case is an item of pytest, with the case's digest as its id. A callable takes the tensors and
the numbers of the case by the names of its parameters. It returns tensors by name, or in the order
of the operator's, or a single one. What it does not return is not checked.

Tensors are numpy's. numpy has no bfloat16: such tensors are float32 there, and what is returned is
rounded. `to=` makes others of them, such as `torch.from_numpy` or `jax.numpy.asarray`.
"""

import hashlib
import inspect
import json
import os
import secrets

from dsv4_parity import _native
from dsv4_parity._bf16 import from_bf16, to_bf16

__all__ = [
    "Case",
    "Judged",
    "Unsupported",
    "cases",
    "check",
    "check_batch_invariance",
    "check_graph_replay",
    "check_inputs_unchanged",
    "check_repeatable",
    "oracle",
]

_NUMPY = {"f32": "float32", "i32": "int32", "i64": "int64", "u8": "uint8"}

#: What the options of pytest set (`dsv4_parity.pytest_plugin`).
_options = {"profile": None, "seed": None}


class Unsupported(Exception):
    """What a callable raises for a case that it does not support: the test is then skipped."""


class Case:
    """One comparison: an operator, sizes, types and data. A line of JSON determines it."""

    def __init__(self, line):
        if not isinstance(line, str):
            line = json.dumps(line)
        self.id, self.line = _native.case_of(line)
        fields = json.loads(self.line)
        self.operator = fields.pop("operator")
        #: The fields of the case: sizes, types, numbers, words.
        self.fields = fields
        self._given = {}
        self._tensors = None

    def __repr__(self):
        return f"Case({self.line!r})"

    def __getitem__(self, name):
        return self.fields[name]

    @property
    def scalars(self):
        """The numbers, words and truth values of the case, by name."""
        return {name: value for name, value in self.fields.items() if not isinstance(value, dict)}

    def with_tensors(self, **tensors):
        """The case with these tensors in the place of drawn ones, such as a server's activations.

        Their sizes become the case's where a field is named like their axis; `inputs` has the names
        and the types. Upstream gradients may be given, too. What is not given is drawn.

        Raises:
            ValueError: a tensor that the case does not read, or sizes that it cannot have.
        """
        shapes = {name: list(_numpy(tensor).shape) for name, tensor in tensors.items()}
        line, forms = _native.case_of_sizes(self.line, shapes)
        case = Case(line)
        given = {name: _bytes(name, dtype, shape, tensors[name]) for name, dtype, shape in forms}
        case._given = {**self._given, **given}
        content = hashlib.blake2s(digest_size=4)
        for name, data in sorted(case._given.items()):
            content.update(name.encode() + b"=" + data)
        case.id = f"{case.id}-{content.hexdigest()}"
        return case

    def _read(self):
        if self._tensors is None:
            self._tensors = _native.tensors_of(self.line, self._given)
        return self._tensors

    @property
    def inputs(self):
        """New arrays with the tensors that a kernel reads, upstream gradients included."""
        return {name: _array(dtype, shape, data) for name, dtype, shape, data in self._read()[0]}

    @property
    def outputs(self):
        """Type and sizes of the tensors that kernels write, by name."""
        return {name: (dtype, tuple(shape)) for name, dtype, shape, _ in self._read()[1]}

    def tolerances(self):
        """The derived budgets as `atol` and `rtol` of each tensor, for tests with `assert_close`.

        Together they allow each element at least its budget. `sees` is the smallest uniform
        relative error that such a comparison is sure to see; `check` sees far smaller ones.
        """
        return json.loads(_native.tolerances(self.line, self._given))


def oracle(case, tensors, numbers=None):
    """The outputs of an operator's forward by its f64 oracle, in the order of the operator's.

    Args:
        case: A line of JSON, or a `Case`: types and options; sizes follow from the tensors.
        tensors: All tensors that the operator reads, by name.
        numbers: Values of other fields, by name, with dots for nested ones.

    Returns:
        One tensor, or a tuple: torch's if the first given tensor is, otherwise numpy's. numpy's
        are float32 where the operator's are bfloat16.

    Raises:
        ValueError: an output that the oracle does not make, such as codes of a narrow format.
    """
    fields = json.loads(case.line if isinstance(case, Case) else case)
    for path, value in (numbers or {}).items():
        *outer, name = path.split(".")
        within = fields
        for one in outer:
            within = within[one]
        within[name] = value.item() if hasattr(value, "item") else value
    given = Case(fields).with_tensors(**tensors)
    exact = {name: one for name, *one in _native.oracle(given.line, given._given)}
    forward = [name for name, _, _, side in given._read()[1] if side != "gradient"]
    missing = [name for name in forward if name not in exact]
    if missing:
        raise ValueError(f"{given.operator}: the oracle judges `{missing[0]}` and does not make it")
    like = next(iter(tensors.values()))
    results = tuple(_exact(like, *exact[name]) for name in forward)
    return results[0] if len(results) == 1 else results


def _exact(like, dtype, shape, data):
    """Values of the oracle in the type of the operator's output."""
    import numpy

    values = numpy.frombuffer(data, numpy.float64).reshape(shape)
    if not hasattr(like, "detach"):
        return values.astype(_NUMPY.get(dtype, "float32"))
    import torch

    kind = {"bf16": "bfloat16"}.get(dtype) or _NUMPY[dtype]
    return torch.from_numpy(values.copy()).to(like.device, getattr(torch, kind))


class Judged:
    """What a check of a case found."""

    def __init__(self, record):
        self.record = record
        compared = [one for one in record["checks"] if one.get("metrics")]
        #: The largest error over its budget, by tensor; 1 would be the whole budget.
        self.budget_use = {}
        #: What the verdict could have seen, by tensor.
        self.power = {}
        for one in compared:
            used = one["metrics"]["budget_used"]
            self.budget_use[one["tensor"]] = max(used, self.budget_use.get(one["tensor"], 0.0))
            if one["metrics"].get("power"):
                self.power[one["tensor"]] = one["metrics"]["power"]
        #: Checks that were made, and those that could not be, with the reason.
        self.checks = sorted({one["check"] for one in record["checks"]})
        self.skips = [(one["what"], one["why"]) for one in record["skips"]]

    def __repr__(self):
        use = ", ".join(f"{name} {used:.2f}" for name, used in self.budget_use.items())
        return f"Judged({len(self.record['checks'])} checks; budget use: {use})"


def cases(operator, *, profile=None, where=None, seed=None, edge_cases=None, drawn=None):
    """Parametrises a test by the cases of an operator's sweep, as `case`.

    Args:
        operator: Its name.
        profile: `smoke`, `quick`, `ci` or `full`: how many cases, and how large. `--parity-profile`
            sets it for all tests; otherwise it is `quick`.
        where: A condition on cases, such as `"width = 512 and num_rows % 2 = 0"`.
        seed: Seed of the drawn cases. `--parity-seed` sets it for all tests; otherwise it is 1.
        edge_cases: How many of the edge cases, chosen by the seed; otherwise all.
        drawn: How many drawn cases; otherwise the profile's number.
    """
    import pytest

    chosen = _options["seed"] if _options["seed"] is not None else (1 if seed is None else seed)
    profile = _options["profile"] or profile or "quick"
    found = _native.cases(operator, profile, where, chosen, edge_cases, drawn)
    parameters = []
    for digest, line in dict(found).items():
        parameters.append(pytest.param(_Lazy(line), id=digest))
    if not parameters:
        raise ValueError(f"no case of {operator} meets {where!r}")

    def decorate(function):
        marked = pytest.mark.parametrize("case", parameters, indirect=True)(function)
        return marked

    return decorate


class _Lazy:
    """A case that is made when its test runs."""

    def __init__(self, line):
        self.line = line

    def __repr__(self):
        return self.line


def fresh_seed():
    """A new seed, for `--parity-seed fresh`."""
    return secrets.randbelow(1 << 31)


def check(case, *, forward, backward=None, to=None, replay=None):
    """Judges callables on a case with every check of `parity`.

    Args:
        case: A `Case`.
        forward: Called with tensors and numbers of the case by the names of its parameters.
            Returns the outputs.
        backward: Called in the same way, also with the upstream gradients and with what the
            forward returned. Returns the gradients.
        to: Makes a tensor of a numpy array, for callables of other frameworks.
        replay: The command that runs the case again, for the diagnosis.

    Returns:
        A `Judged`, with budget use and power.

    Raises:
        AssertionError: the diagnosis, where a check fails. What a callable raises is raised here.
    """
    call = _Callables(forward, backward, to)
    try:
        record, diagnosis = _native.judge(case.line, call, replay or _replay(case), case._given)
    except Unsupported as why:
        import pytest

        pytest.skip(f"the callable does not support the case: {why}")
    if diagnosis:
        raise AssertionError("\n" + diagnosis.rstrip()) from None
    return Judged(json.loads(record))


def _replay(case):
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rsplit(" (", 1)[0]
    return f"pytest '{test}'" if test else f"check(Case('{case.line}'), …)"


def _array(dtype, shape, data):
    import numpy

    if dtype == "bf16":
        return from_bf16(numpy.frombuffer(data, numpy.uint16)).reshape(shape)
    return numpy.frombuffer(data, _NUMPY[dtype]).reshape(shape).copy()


def _numpy(tensor):
    """A tensor of any framework as numpy's, without a copy where that is possible."""
    import numpy

    if isinstance(tensor, numpy.ndarray) or numpy.isscalar(tensor):
        return numpy.asarray(tensor)
    if hasattr(tensor, "detach"):
        tensor = tensor.detach().cpu()
        if str(tensor.dtype) == "torch.bfloat16":
            tensor = tensor.float()
        return tensor.numpy()
    if hasattr(tensor, "get") and hasattr(tensor, "__cuda_array_interface__"):
        return tensor.get()
    if hasattr(tensor, "__dlpack__"):
        return numpy.from_dlpack(tensor)
    return numpy.asarray(tensor)


def _bytes(name, dtype, shape, tensor):
    import numpy

    array = _numpy(tensor)
    if list(array.shape) != list(shape):
        raise AssertionError(f"`{name}` has shape {list(array.shape)}, and must have {list(shape)}")
    if dtype == "bf16":
        is_bits = array.dtype == numpy.uint16
        array = array if is_bits else to_bf16(array.astype(numpy.float32))
    elif dtype == "f32":
        array = array.astype(numpy.float32)
    elif array.dtype.kind in "iub":
        array = array.astype(_NUMPY[dtype])
    else:
        raise AssertionError(f"`{name}` has type {array.dtype}, and must have integers")
    return numpy.ascontiguousarray(array).tobytes()


class _Callables:
    """A forward and a backward as one kernel of the judge."""

    def __init__(self, forward, backward, to):
        self.forward, self.backward, self.to = forward, backward, to or (lambda array: array)

    def __call__(self, line, inputs, expected):
        tensors = {
            name: self.to(_array(dtype, shape, data)) for name, dtype, shape, data in inputs
        }
        scalars = {
            name: value
            for name, value in json.loads(line).items()
            if name != "operator" and name not in tensors
        }
        of_side = {"forward": [], "gradient": []}
        for name, dtype, shape, side in expected:
            of_side[side].append((name, dtype, shape))
        written = _named(_called(self.forward, tensors, scalars), of_side["forward"], "forward")
        found = dict(written)
        if self.backward is not None and of_side["gradient"]:
            gradients = _called(self.backward, {**tensors, **written}, scalars)
            found.update(_named(gradients, of_side["gradient"], "backward"))
        forms = {name: (dtype, shape) for name, dtype, shape, _ in expected}
        returned = {name: _bytes(name, *forms[name], tensor) for name, tensor in found.items()}
        changed = [
            name
            for name, dtype, shape, data in inputs
            if name not in returned and _bytes(name, dtype, shape, tensors[name]) != bytes(data)
        ]
        return returned, changed


def _called(function, tensors, scalars):
    """Calls a function with what its parameters name."""
    parameters = inspect.signature(function).parameters.values()
    known = {**scalars, **tensors}
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters):
        named = {one.name for one in parameters}
        known = {name: value for name, value in known.items() if name in named or name in tensors}
        return function(**known)
    positional = (inspect.Parameter.POSITIONAL_ONLY,)
    arguments = [known[one.name] for one in parameters if one.kind in positional]
    named = {
        one.name: known[one.name]
        for one in parameters
        if one.kind not in positional and one.name in known
    }
    missing = [
        one.name
        for one in parameters
        if one.name not in known and one.default is inspect.Parameter.empty
    ]
    if missing:
        raise Unsupported(f"the case has no `{missing[0]}`")
    return function(*arguments, **named)


def _named(returned, expected, what):
    """What a callable returned, by name."""
    names = [name for name, _, _ in expected]
    if isinstance(returned, dict) or hasattr(returned, "_asdict"):
        returned = returned if isinstance(returned, dict) else returned._asdict()
        unknown = sorted(set(returned) - set(names))
        if unknown:
            raise AssertionError(
                f"the {what} returned `{unknown[0]}`; the case has {', '.join(names)}"
            )
        return {name: tensor for name, tensor in returned.items() if tensor is not None}
    if not isinstance(returned, (tuple, list)):
        returned = (returned,)
    if len(returned) > len(names):
        raise AssertionError(
            f"the {what} returned {len(returned)} tensors; the case has {', '.join(names)}"
        )
    return {name: one for name, one in zip(names, returned) if one is not None}


# Checks without an oracle, of any callable.


def _flat(returned):
    if isinstance(returned, dict):
        return list(returned.items())
    if not isinstance(returned, (tuple, list)):
        returned = (returned,)
    return [(f"result {number}", one) for number, one in enumerate(returned) if one is not None]


def _bits(tensor):
    import numpy

    array = numpy.ascontiguousarray(_numpy(tensor))
    return array.shape, array.dtype.str, array.tobytes()


def _assert_same(what, before, after):
    import numpy

    before, after = _flat(before), _flat(after)
    assert len(before) == len(after), f"{what}: {len(before)} results, then {len(after)}"
    for (name, one), (_, other) in zip(before, after):
        if _bits(one) != _bits(other):
            one, other = _numpy(one), _numpy(other)
            count = int((one != other).sum()) if one.shape == other.shape else one.size
            raise AssertionError(f"{what}: {count} of {one.size} elements of {name} differ")
    assert before, f"{what}: nothing was returned"


def check_repeatable(function, *arguments, times=3, **named):
    """Asserts that calls with the same arguments return the same bits."""
    first = function(*arguments, **named)
    kept = [(name, _numpy(one).copy()) for name, one in _flat(first)]
    for number in range(1, times):
        again = function(*arguments, **named)
        _assert_same(f"call {number + 1} of the same arguments", dict(kept), dict(_flat(again)))


def check_inputs_unchanged(function, *arguments, **named):
    """Asserts that a call leaves its arguments' bits as they are."""
    tensors = [(f"argument {number}", one) for number, one in enumerate(arguments)]
    tensors = [(name, one) for name, one in [*tensors, *named.items()] if hasattr(one, "shape")]
    before = [_bits(one) for _, one in tensors]
    function(*arguments, **named)
    assert tensors, "no argument is a tensor"
    for (name, one), bits in zip(tensors, before):
        assert _bits(one) == bits, f"{name} was changed by the call"


def check_batch_invariance(function, *arguments, batched=(0,), sizes=None, **named):
    """Asserts that the first rows of results do not depend on how many rows there are.

    Args:
        function: Its results have the batch as their first axis.
        arguments: Those of the whole batch.
        batched: Numbers and names of the arguments that have the batch as their first axis.
        sizes: How many rows of the batch are tried; otherwise 1, half and all but one.
    """
    get = lambda key: named[key] if isinstance(key, str) else arguments[key]
    whole = get(batched[0]).shape[0]
    sizes = sizes or sorted({1, whole // 2, whole - 1} - {0, whole})
    assert sizes, f"a batch of {whole} has no part"
    reference = _flat(function(*arguments, **named))
    for size in sizes:
        part = [one[:size] if key in batched else one for key, one in enumerate(arguments)]
        words = {name: one[:size] if name in batched else one for name, one in named.items()}
        rows = [(name, one[:size]) for name, one in reference]
        _assert_same(f"{size} of {whole} rows", dict(rows), dict(_flat(function(*part, **words))))


def check_graph_replay(function, *arguments, changed, **named):
    """Asserts that a captured CUDA graph of a call, replayed with other inputs, returns what a call
    with them returns.

    Args:
        function: A callable on tensors of torch on a GPU.
        arguments: The arguments that are captured; tensors keep their memory.
        changed: Arguments of the same sizes, which are copied into those before the replay.
    """
    import torch

    expected = _flat(function(*changed, **named))
    kept = [(name, _numpy(one).copy()) for name, one in expected]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        function(*arguments, **named)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = function(*arguments, **named)
    for one, other in zip(arguments, changed):
        if isinstance(one, torch.Tensor):
            one.copy_(other)
    graph.replay()
    torch.cuda.synchronize()
    _assert_same("a replayed graph with other inputs", dict(kept), dict(_flat(captured)))
