"""The functions of `dsv4_parity.ops`, made from the operators' declarations."""

import json
from collections import namedtuple

from dsv4_parity import _frameworks, _native

_nvtx = None
_invariant = False

DIRECTIONS = ("forward", "backward")


def nvtx(enabled=True):
    """Marks each call with an NVTX range `operator:direction`; off by default. Needs torch."""
    global _nvtx
    if enabled:
        from torch.cuda import nvtx as ranges

        _nvtx = ranges.range
    else:
        _nvtx = None


def invariant(enabled=True):
    """Runs kernels whose bits do not depend on the batch; off by default.

    A row then has the same bits alone, among others, in chunks, and as a draft token. The axes of
    each operator: `parity ops --invariance`. `decode_attention` is invariant with `num_blocks=1 << 24`.
    """
    global _invariant
    _invariant = bool(enabled)


def describe(operator):
    """The arguments and results of an operator."""
    return json.loads(_native.describe(operator))


class Function:
    """One direction of an operator: it plans each kind of call once, and launches it."""

    def __init__(self, description, direction):
        self.operator = description["name"]
        self.direction = direction
        self.name = self.operator + ("" if direction == 0 else "_backward")
        described = description["directions"][direction]
        # Required tensors come first, as Python wants it.
        self.given = sorted(described["given"], key=lambda tensor: not tensor["required"])
        self.written = described["written"]
        self.options = [one for one in description["options"] if one["concerns"][direction]]
        self.description = description
        self.results = [tensor["name"] for tensor in self.written]
        self._label = f"{self.operator}:{DIRECTIONS[direction]}"
        # A tensor may be called `out`.
        names = {argument["name"] for argument in self.given}
        self.out = "out_" if "out" in names else "out"
        self._states = {argument["name"] for argument in self.given if argument["state"]}
        self._plans = {}
        self._prepared = {}
        # Of these what is prepared for torch's tensors on a GPU, by what is fastest to ask them.
        self._known = {}
        if len(self.results) > 1:
            title = "".join(part.capitalize() for part in self.name.split("_"))
            self.result = namedtuple(f"{title}Result", self.results, module="dsv4_parity.ops")

    def plan(self, given, options, place):
        """The plan of a call: name, type, sizes and strides of its tensors, and its options."""
        options = tuple(tuple(one) if isinstance(one, list) else one for one in options)
        key = (place, _invariant, repr(given), options)
        plan = self._plans.get(key)
        if plan is None:
            names = [option["name"] for option in self.options]
            chosen = {name: one for name, one in zip(names, options) if one is not None}
            direction = self.direction
            chosen = json.dumps(chosen)
            plan = _native.plan(self.operator, direction, given, chosen, place, _invariant)
            self._plans[key] = plan
        return plan

    def __call__(self, tensors, options, out):
        """Runs it: tensors in the order of `given` (None where absent), options in theirs."""
        if out is None and _nvtx is None:
            try:
                known = self._known.get((_invariant, _torch_keys(tensors), options))
            except (AttributeError, TypeError):
                known = None  # Tensors of others, and lists among the options.
            if known is not None:
                return known.run_known(tensors)
        framework = self._framework(tensors)
        if _nvtx is None:
            return self._run(framework, tensors, options, out)
        with _nvtx(self._label):
            return self._run(framework, tensors, options, out)

    def _framework(self, tensors):
        first = next((tensor for tensor in tensors if tensor is not None), None)
        framework = _frameworks.of(first)
        if framework is None:
            name = self.given[0]["name"]
            what = type(first).__name__
            raise TypeError(f"{self.operator}: argument `{name}`: {what} is no tensor")
        for argument, tensor in zip(self.given, tensors):
            if tensor is not None and not framework.is_mine(tensor):
                self._refuse(argument["name"], tensor)
        return framework(first)

    def _refuse(self, name, tensor):
        what = type(tensor).__name__
        raise TypeError(f"{self.operator}: argument `{name}`: {what} is of another framework")

    def _run(self, framework, tensors, options, out):
        keys = tuple([None if one is None else framework.key(one) for one in tensors])
        try:
            prepared = self._prepared.get((framework.place, _invariant, keys, options))
        except TypeError:
            options = tuple(tuple(one) if isinstance(one, list) else one for one in options)
            prepared = self._prepared.get((framework.place, _invariant, keys, options))
        if prepared is None:
            prepared = _Prepared(self, framework, tensors, options)
            self._prepared[framework.place, _invariant, keys, options] = prepared
            if prepared.is_known:
                self._known[_invariant, _torch_keys(tensors), options] = prepared
        return prepared.run(framework, tensors, out)

    def returned(self, names, results):
        """Results as the function returns them."""
        if len(self.results) > 1:
            by_name = dict(zip(names, results))
            return self.result(*[by_name.get(name) for name in self.results])
        return results[0] if results else None


def _torch_keys(tensors):
    """All that a call of torch's tensors is prepared for."""
    key = _frameworks.Torch.key
    return tuple([None if one is None else key(one) for one in tensors])


class _Prepared:
    """A call for tensors of certain sizes, strides and types."""

    def __init__(self, function, framework, tensors, options):
        self.function = function
        names = [argument["name"] for argument in function.given]
        given = []
        for name, tensor in zip(names, tensors):
            if tensor is not None:
                seen = framework.describe(name, tensor)
                given.append((name, seen.dtype, list(seen.shape), seen.true_strides))
        self.plan = function.plan(given, options, framework.place)
        self.given = [(name, names.index(name)) for name, _, _ in self.plan.given]
        self.written, self.scratch = self.plan.written, self.plan.scratch
        self.names = [name for name, _, _ in self.written]
        self._bound = {}
        # Tensors of torch on a GPU, and new ones for results: all strides are known.
        self.is_known = framework.place != "emulator" and isinstance(framework, _frameworks.Torch)
        if self.is_known:
            made = [_frameworks.dense(shape) for _, _, shape in self.written + self.scratch]
            given = [list(tensors[number].stride()) for _, number in self.given]
            self._launch = self.plan.bind(framework.place, given + made).launch
            self._numbers = [number for _, number in self.given]
            self._makers = framework.makers(self.written + self.scratch)
            self._stream = framework.streams()
            self._is_single = len(function.results) == len(self.written) == 1

    def run(self, framework, tensors, out):
        if out is None and self.is_known:
            return self.run_known(tensors)
        function = self.function
        states = function._states
        seen = [
            framework.describe(name, tensors[number], name in states)
            for name, number in self.given
        ]
        empty = framework.empty
        if out is None:
            results = [empty(dtype, shape) for _, dtype, shape in self.written]
        else:
            results = self._outputs(framework, out)
        for (name, dtype, shape), tensor in zip(self.written, results):
            if not framework.is_mine(tensor):
                function._refuse(name, tensor)
            one = framework.describe(name, tensor, True)
            if out is not None and (one.dtype, one.shape) != (dtype, shape):
                raise ValueError(
                    f"{function.operator}: argument `{function.out}`: "
                    f"`{name}` is {one.dtype} {one.shape}, and must be {dtype} {shape}"
                )
            seen.append(one)
        kept = [empty(dtype, shape) for _, dtype, shape in self.scratch]
        seen += [framework.describe(name, one) for (name, _, _), one in zip(self.scratch, kept)]
        strides = [one.strides for one in seen]
        bound = self._bind(framework.place, strides)
        bound.launch(framework.stream, [one.address for one in seen])
        framework.finish()
        return function.returned(self.names, results)

    def run_known(self, tensors):
        """On torch's tensors on a GPU, with new ones for the results."""
        made = [make() for make in self._makers]
        addresses = [tensors[number].data_ptr() for number in self._numbers]
        addresses += [one.data_ptr() for one in made]
        self._launch(self._stream(), addresses)
        if self._is_single:
            return made[0]
        return self.function.returned(self.names, made[: len(self.names)])

    def _bind(self, place, strides):
        key = tuple(map(tuple, strides))
        bound = self._bound.get(key)
        if bound is None:
            bound = self._bound[key] = self.plan.bind(place, strides)
        return bound

    def _outputs(self, framework, out):
        function, names = self.function, self.names
        refuse = f"{function.operator}: argument `{function.out}`: "
        if len(names) == 1 and not isinstance(out, (tuple, list, dict)):
            return [out]
        if isinstance(out, dict):
            unknown = sorted(set(out) - set(names))
            if unknown:
                raise ValueError(f"{refuse}`{unknown[0]}` is none of {', '.join(names)}")
            given = [out.get(name) for name in names]
        elif hasattr(out, "_asdict"):
            present = {name: one for name, one in out._asdict().items() if one is not None}
            return self._outputs(framework, present)
        else:
            given = list(out)
            if len(given) != len(names):
                wanted = f"{len(names)} ({', '.join(names)})"
                raise ValueError(f"{refuse}{len(given)} tensors must be {wanted}")
        return [
            framework.empty(dtype, shape) if one is None else one
            for (_, dtype, shape), one in zip(self.written, given)
        ]


def parameters(function):
    """The parameters of a function as text, and those of its tensors and options."""
    tensors = [
        argument["name"] + ("" if argument["required"] else "=None") for argument in function.given
    ]
    options = []
    for option in function.options:
        options.append(f"{option['name']}={option['default']!r}")
    return tensors, options


def make(operator, direction):
    """The Python function of a direction, with its own signature and documentation."""
    function = Function(describe(operator), direction)
    tensors, options = parameters(function)
    names = [argument["name"] for argument in function.given]
    values = [option["name"] for option in function.options]
    listed = lambda all: "(" + "".join(f"{name}, " for name in all) + ")"
    source = (
        f"def {function.name}({', '.join([*tensors, '*', *options, f'{function.out}=None'])}):\n"
        f"    return _function({listed(names)}, {listed(values)}, {function.out})\n"
    )
    space = {"_function": function, "__name__": "dsv4_parity.ops"}
    exec(source, space)
    made = space[function.name]
    made.__doc__ = documentation(function)
    made.function = function
    return made


def _described(argument):
    types = " or ".join(argument["dtypes"])
    role = ", overwritten in part" if argument["state"] else ""
    if argument["of"]:
        role = f", the gradient of `{argument['of']}`"
    if argument["saved"]:
        role = ", as the forward wrote it"
    absent = "" if argument["required"] else "; may be absent"
    return f"    {argument['name']}: [{', '.join(argument['axes'])}] {types}{role}{absent}."


def documentation(function):
    """The docstring of a function."""
    described = function.description
    summary = described["summary"][0].upper() + described["summary"][1:]
    head = summary if function.direction == 0 else f"Gradients of `{function.operator}`: {summary}"
    sections = ", ".join(described["specification"])
    lines = [f"{head}.", "", f"Specification: {sections}.", "", "Args:"]
    lines += [_described(argument) for argument in function.given]
    for option in function.options:
        values = ", ".join(str(value) for value in option["values"])
        values = f"one of {values}" if values else "a number"
        default = option["default"]
        of_model = "" if default is None else f"; the model's is {default}"
        lines.append(f"    {option['name']}: {values}{of_model}.")
    lines += [f"    {function.out}: Results to write, as this returns them.", "", "Returns:"]
    lines += [_described(result) for result in function.written]
    return "\n".join(lines)
