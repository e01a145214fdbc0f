"""DeepSeek-V4's operators as custom operators of torch, with gradients.

    import dsv4_parity.torch as dsv4

    y, rstd = dsv4.rms_norm(x, weight)

Each function is `torch.ops.dsv4_parity.NAME`. It runs under `torch.compile(fullgraph=True)`, in
CUDA graphs after one call with the same sizes, and under autograd where the operator has a backward.
It returns all results of the operator; one that such a call does not have is an empty tensor.
Results without a gradient of their own, such as `rstd`, are not differentiable.

Without autograd and `torch.compile`, `dsv4_parity.ops` does the same at less cost on the host.
"""

try:
    import torch
except ImportError as error:
    raise ImportError("dsv4_parity.torch needs torch") from error

from dsv4_parity import _frameworks, _functions, _native

_OPERATORS = _native.operators()
_NAMESPACE = "dsv4_parity"
_TYPES = {
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "i32": torch.int32,
    "i64": torch.int64,
    "u8": torch.uint8,
}


def _option(option):
    """An option as a schema has it."""
    values, default = option["values"], option["default"]
    if values and all(isinstance(value, bool) for value in values):
        kind = "bool"
    elif values:
        kind = "str"
    elif isinstance(default, list):
        return f"int[]? {option['name']}=None"
    else:
        kind = "int" if option["whole"] else "float"
    if default is None:
        return f"{kind}? {option['name']}=None"
    shown = f'"{default}"' if kind == "str" else str(default)
    return f"{kind} {option['name']}={shown}"


def _options(function):
    """The options of a function; a forward also has those of its backward."""
    has_backward = function.direction == 0 and function.description["directions"][1] is not None
    described = function.description["options"]
    return [one for one in described if one["concerns"][function.direction] or has_backward]


def _schema(function):
    """The schema of a function: states are written, and there is one result for each output."""
    arguments, states = [], 0
    for argument in function.given:
        kind = "Tensor"
        if argument["state"]:
            kind, states = f"Tensor(a{states}!)", states + 1
        # The mark of an absent tensor comes behind that of a written one.
        optional, absent = ("", "") if argument["required"] else ("?", "=None")
        arguments.append(f"{kind}{optional} {argument['name']}{absent}")
    options = [_option(option) for option in _options(function)]
    listed = ", ".join([*arguments, *(["*", *options] if options else [])])
    results = ", ".join("Tensor" for _ in function.results)
    return f"({listed}) -> ({results})" if len(function.results) != 1 else f"({listed}) -> Tensor"


def _split(function, arguments, named):
    """Tensors and options of a call, each in the order of the declaration."""
    names = [argument["name"] for argument in function.given]
    given = dict(zip(names, arguments))
    given.update(named)
    tensors = tuple(given.get(name) for name in names)
    options = tuple(given.get(option["name"], option["default"]) for option in function.options)
    return tensors, options


def _define(function):
    """Registers a function as a custom operator."""

    def run(*arguments, **named):
        tensors, options = _split(function, arguments, named)
        results = function(tensors, options, None)
        first = next(tensor for tensor in tensors if tensor is not None)
        return _all(function, results, lambda: first.new_empty(0, dtype=torch.float32))

    def fake(*arguments, **named):
        tensors, options = _split(function, arguments, named)
        first = next(tensor for tensor in tensors if tensor is not None)
        made = {
            name: first.new_empty(shape, dtype=_TYPES[dtype])
            for name, dtype, shape in _planned(function, tensors, options)
        }
        results = [
            made[name] if name in made else first.new_empty(0, dtype=torch.float32)
            for name in function.results
        ]
        return _returned(results)

    states = tuple(argument["name"] for argument in function.given if argument["state"])
    operator = torch.library.custom_op(
        f"{_NAMESPACE}::{function.name}", run, mutates_args=states, schema=_schema(function)
    )
    operator.register_fake(fake)
    return operator


def _returned(results):
    if not results:
        return None
    return results[0] if len(results) == 1 else tuple(results)


def _all(function, results, empty):
    """All results of a function, with empty tensors for those that a call does not have."""
    if len(function.results) == 1:
        return empty() if results is None else results
    if not function.results:
        return None
    return tuple(empty() if one is None else one for one in results)


def _planned(function, tensors, options):
    """Name, type and sizes of the results of a call, without its tensors' memory."""
    given = []
    first = next(tensor for tensor in tensors if tensor is not None)
    place = "emulator" if first.device.type == "cpu" else f"cuda:{first.device.index or 0}"
    for argument, tensor in zip(function.given, tensors):
        if tensor is not None:
            dtype = _frameworks.Torch.dtype_of(argument["name"], tensor)
            sizes = [int(size) for size in tensor.shape]
            strides = [int(stride) for stride in tensor.stride()]
            given.append((argument["name"], dtype, sizes, strides))
    return function.plan(given, options, place).written


def _differentiable(forward, backward, backward_operator):
    """The gradient of a forward by the operator's backward."""
    names = [argument["name"] for argument in forward.given]
    needed = {argument["name"]: argument["required"] for argument in backward.given}
    upstream = {one["of"]: one for one in backward.given if one["of"]}
    gradients = {one["of"]: number for number, one in enumerate(backward.written)}
    shared = {option["name"] for option in backward.options}

    def setup(ctx, inputs, output, keyword_only_inputs=None):
        ctx.set_materialize_grads(False)
        outputs = dict(zip(forward.results, output if isinstance(output, tuple) else (output,)))
        given = {name: one for name, one in zip(names, inputs) if one is not None}
        # A result that such a call does not have is empty.
        there = {
            name: one for name, one in outputs.items() if one.numel() or needed.get(name, False)
        }
        saved = {name: one for name, one in {**given, **there}.items() if name in needed}
        ctx.saved_names = list(saved)
        ctx.save_for_backward(*saved.values())
        ctx.types = {name: one.dtype for name, one in given.items()}
        ctx.results = {name: (one.shape, one.dtype, one.device) for name, one in outputs.items()}
        options = (keyword_only_inputs or {}).items()
        ctx.options = {name: value for name, value in options if name in shared}
        ctx.mark_non_differentiable(
            *[
                one
                for name, one in outputs.items()
                if name not in upstream and one.is_floating_point()
            ]
        )

    def backwards(ctx, *incoming):
        tensors = dict(zip(ctx.saved_names, ctx.saved_tensors))
        for name, gradient in zip(forward.results, incoming):
            argument = upstream.get(name)
            if argument is None:
                continue
            if gradient is None and argument["required"]:
                shape, dtype, device = ctx.results[name]
                gradient = torch.zeros(shape, dtype=dtype, device=device)
            if gradient is not None:
                tensors[argument["name"]] = gradient.contiguous()
        given = [tensors.get(argument["name"]) for argument in backward.given]
        found = backward_operator(*given, **ctx.options)
        found = found if isinstance(found, tuple) else (found,)

        def of(name):
            is_there = name in ctx.types and name in gradients
            return found[gradients[name]].to(ctx.types[name]) if is_there else None

        return tuple(of(name) for name in names)

    return setup, backwards


_known = {}


def _operator(name, direction):
    key = (name, direction)
    if key not in _known:
        description = _functions.describe(name)
        if description["directions"][direction] is None:
            raise AttributeError(f"operator `{name}` has no backward")
        function = _functions.Function(description, direction)
        operator = _define(function)
        if direction == 0 and description["directions"][1] is not None:
            gradient, gradient_operator = _operator(name, 1)
            setup, backwards = _differentiable(function, gradient, gradient_operator)
            operator.register_autograd(backwards, setup_context=setup)
        _known[key] = (function, operator)
    return _known[key]


def __getattr__(name):
    operator, direction = name, 0
    if name not in _OPERATORS:
        operator, direction = name.removesuffix("_backward"), 1
    if operator not in _OPERATORS:
        raise AttributeError(f"module {__name__!r} has no operator {name!r}")
    _, made = _operator(operator, direction)
    globals()[name] = made
    return made


def __dir__():
    return sorted(_OPERATORS)


def load():
    """Registers every operator, as `torch.ops.dsv4_parity`; otherwise each is at its first use."""
    for name in _OPERATORS:
        _operator(name, 0)
