"""The functions of `dsv4_parity.ops`, made from the operators' declarations."""

import json
import threading
from collections import namedtuple
from contextlib import nullcontext

from dsv4_parity import _frameworks, _native

_lock = threading.Lock()
_nvtx = None

DIRECTIONS = ("forward", "backward")


def nvtx(enabled=True):
    """Marks each call with an NVTX range `operator:direction`; off by default. Needs torch."""
    global _nvtx
    if enabled:
        from torch.cuda import nvtx as ranges

        _nvtx = ranges.range
    else:
        _nvtx = None


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
        self.given, self.written = described["given"], described["written"]
        # Required tensors come first, as Python wants it.
        self.given = sorted(self.given, key=lambda tensor: not tensor["required"])
        self.options = description["options"]
        self.description = description
        self.results = [tensor["name"] for tensor in self.written]
        self._bound = {}
        if len(self.results) > 1:
            title = "".join(part.capitalize() for part in self.name.split("_"))
            self.result = namedtuple(f"{title}Result", self.results, module="dsv4_parity.ops")

    def __call__(self, tensors, options, out):
        """Runs it: tensors in the order of `given` (None where absent), options in theirs."""
        first = next((tensor for tensor in tensors if tensor is not None), None)
        framework = _frameworks.of(first)
        if framework is None:
            name = self.given[0]["name"]
            raise TypeError(f"{self.operator}: argument `{name}`: {type(first)} is no tensor")
        framework = framework(first)
        plan, names = self._plan(framework, tensors, options)
        with _nvtx(f"{self.operator}:{DIRECTIONS[self.direction]}") if _nvtx else nullcontext():
            return self._launch(framework, plan, names, tensors, out)

    def _plan(self, framework, tensors, options):
        keys = tuple(None if tensor is None else framework.key(tensor) for tensor in tensors)
        options = tuple(tuple(one) if isinstance(one, list) else one for one in options)
        key = (framework.place, keys, options)
        try:
            return self._bound[key]
        except KeyError:
            pass
        given = []
        for argument, tensor in zip(self.given, tensors):
            if tensor is None:
                continue
            self._require_mine(framework, argument["name"], tensor)
            seen = framework.describe(argument["name"], tensor)
            given.append((argument["name"], seen.dtype, list(seen.shape), seen.true_strides))
        chosen = {
            option["name"]: value
            for option, value in zip(self.options, options)
            if value is not None
        }
        plan = _native.plan(
            self.operator, self.direction, given, json.dumps(chosen), framework.place
        )
        order = [argument["name"] for argument in self.given]
        names = [order.index(name) for name, _, _ in plan.given]
        bound = (plan, (names, plan.given, plan.written, plan.scratch))
        with _lock:
            self._bound[key] = bound
        return bound

    def _require_mine(self, framework, name, tensor):
        if not framework.is_mine(tensor):
            raise TypeError(f"{self.operator}: argument `{name}`: {type(tensor)} is another framework's")

    def _launch(self, framework, plan, parts, tensors, out):
        order, given, written, scratch = parts
        states = {argument["name"] for argument in self.given if argument["state"]}
        described = []
        for number, (name, _, _) in zip(order, given):
            tensor = tensors[number]
            self._require_mine(framework, name, tensor)
            described.append(framework.describe(name, tensor, is_written=name in states))
        results = self._outputs(framework, written, out)
        for (name, dtype, shape), tensor in zip(written, results):
            seen = framework.describe(name, tensor, is_written=True)
            if (seen.dtype, seen.shape) != (dtype, shape):
                raise ValueError(
                    f"{self.operator}: argument `out`: `{name}` is {seen.dtype} {seen.shape}, "
                    f"and must be {dtype} {shape}"
                )
            described.append(seen)
        kept = [framework.empty(dtype, shape) for _, dtype, shape in scratch]
        described += [framework.describe(name, one) for (name, _, _), one in zip(scratch, kept)]
        addresses = [one.address for one in described]
        plan.run(framework.place, framework.stream, addresses, [one.strides for one in described])
        framework.finish()
        return self._returned(written, results)

    def _outputs(self, framework, written, out):
        if out is None:
            return [framework.empty(dtype, shape) for _, dtype, shape in written]
        if len(written) == 1 and not isinstance(out, (tuple, list, dict)):
            return [out]
        names = [name for name, _, _ in written]
        if isinstance(out, dict):
            unknown = sorted(set(out) - set(names))
            if unknown:
                raise ValueError(
                    f"{self.operator}: argument `out`: `{unknown[0]}` is none of {', '.join(names)}"
                )
            given = [out.get(name) for name in names]
        else:
            given = [one for one in out if one is not None or len(out) == len(names)]
            if len(given) != len(names):
                raise ValueError(
                    f"{self.operator}: argument `out`: {len(given)} tensors must be {len(names)} "
                    f"({', '.join(names)})"
                )
        return [
            framework.empty(dtype, shape) if one is None else one
            for (_, dtype, shape), one in zip(written, given)
        ]

    def _returned(self, written, results):
        if not self.results:
            return None
        if len(self.results) == 1:
            return results[0] if results else None
        by_name = {name: tensor for (name, _, _), tensor in zip(written, results)}
        return self.result(*[by_name.get(name) for name in self.results])


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
        f"def {function.name}({', '.join([*tensors, '*', *options, 'out=None'])}):\n"
        f"    return _function({listed(names)}, {listed(values)}, out)\n"
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
    lines += ["    out: Results to write, as this returns them.", "", "Returns:"]
    lines += [_described(result) for result in function.written]
    return "\n".join(lines)
