"""DeepSeek-V4's operators as custom operators of torch, with gradients.

    import dsv4_parity.torch as dsv4

    y, rstd = dsv4.rms_norm(x, weight)

Each function is `torch.ops.dsv4_parity.NAME`. It runs under `torch.compile(fullgraph=True)`, in
CUDA graphs after one call with the same sizes, and under autograd where the operator has a backward.
It returns all results of the operator; one that such a call does not have is an empty tensor.
Results without a gradient of their own, such as `rstd`, are not differentiable.

Where an operator may write into a tensor of the caller, `NAME_` does: `dsv4.kv_projection_(…,
cache=cache)`. It returns the other results, and has no gradients; `NAME` writes into none.

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


class _Form:
    """A function as a custom operator: with the caller's tensors that it may write into, or without.

    torch gives gradients only to operators that write into no argument, and no result may be one.
    """

    def __init__(self, function, in_place):
        states = [one["name"] for one in function.given if one["state"]]
        self.function = function
        self.states = [one for one in states if in_place or one in _always(function)]
        left_out = set(states) - set(self.states)
        self.name = function.name + ("_" if in_place else "")
        self.given = [
            {**one, "required": one["required"] or one["name"] in self.states}
            for one in function.given
            if one["name"] not in left_out
        ]
        self.given.sort(key=lambda tensor: not tensor["required"])
        self.results = [name for name in function.results if name not in self.states]

    def schema(self):
        """States are written, and there is one result for each other output."""
        arguments = []
        for argument in self.given:
            kind = "Tensor"
            if argument["name"] in self.states:
                kind = f"Tensor(a{self.states.index(argument['name'])}!)"
            optional, absent = ("", "") if argument["required"] else ("?", "=None")
            arguments.append(f"{kind}{optional} {argument['name']}{absent}")
        options = [_option(option) for option in _options(self.function)]
        listed = ", ".join([*arguments, *(["*", *options] if options else [])])
        results = ", ".join("Tensor" for _ in self.results)
        return f"({listed}) -> ({results})" if len(self.results) != 1 else f"({listed}) -> Tensor"

    def split(self, arguments, named):
        """Tensors and options of a call, each in the order of the declaration."""
        given = dict(zip((argument["name"] for argument in self.given), arguments))
        given.update(named)
        tensors = tuple(given.get(argument["name"]) for argument in self.function.given)
        options = tuple(
            given.get(option["name"], option["default"]) for option in self.function.options
        )
        return tensors, options

    def returned(self, found, first):
        """The form's results, with empty tensors next to `first` for those that were not found."""
        results = [found.get(name) for name in self.results]
        results = [first.new_empty(0, dtype=torch.float32) if one is None else one for one in results]
        if not results:
            return None
        return results[0] if len(results) == 1 else tuple(results)


def _first(tensors):
    return next(tensor for tensor in tensors if tensor is not None)


def _always(function):
    """The states that every call of a function writes."""
    return {one["name"] for one in function.given if one["state"] and one["required"]}


def _has_two_forms(function):
    return any(one["state"] and not one["required"] for one in function.given)


def _define(form):
    """Registers a form of a function as a custom operator."""
    function = form.function

    def run(*arguments, **named):
        tensors, options = form.split(arguments, named)
        found = function(tensors, options, None)
        found = (found,) if len(function.results) == 1 else found or ()
        return form.returned(dict(zip(function.results, found)), _first(tensors))

    def fake(*arguments, **named):
        tensors, options = form.split(arguments, named)
        first = _first(tensors)
        planned = _planned(function, tensors, options)
        made = {name: first.new_empty(shape, dtype=_TYPES[dtype]) for name, dtype, shape in planned}
        return form.returned(made, first)

    operator = torch.library.custom_op(
        f"{_NAMESPACE}::{form.name}", run, mutates_args=tuple(form.states), schema=form.schema()
    )
    operator.register_fake(fake)
    return operator


def _planned(function, tensors, options):
    """Name, type and sizes of the results of a call, without its tensors' memory."""
    given = []
    first = _first(tensors)
    place = "emulator" if first.device.type == "cpu" else f"cuda:{first.device.index or 0}"
    for argument, tensor in zip(function.given, tensors):
        if tensor is not None:
            dtype = _frameworks.Torch.dtype_of(argument["name"], tensor)
            sizes = [int(size) for size in tensor.shape]
            strides = [int(stride) for stride in tensor.stride()]
            given.append((argument["name"], dtype, sizes, strides))
    return function.plan(given, options, place).written


def _differentiable(forward, backward, backward_operator):
    """The gradient of a form of a forward by the operator's backward."""
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


def _operator(name, direction, in_place=False):
    key = (name, direction, in_place)
    if key not in _known:
        description = _functions.describe(name)
        if description["directions"][direction] is None:
            raise AttributeError(f"operator `{name}` has no backward")
        function = _functions.Function(description, direction)
        if in_place and not _has_two_forms(function):
            raise AttributeError(f"`{function.name}` has no form that writes into more tensors")
        form = _Form(function, in_place)
        operator = _define(form)
        if direction == 0 and not in_place and description["directions"][1] is not None:
            gradient, gradient_operator = _operator(name, 1)
            setup, backwards = _differentiable(form, gradient, gradient_operator)
            operator.register_autograd(backwards, setup_context=setup)
        _known[key] = (function, operator)
    return _known[key]


def _named(name):
    """The operator, direction and form that a name means."""
    in_place, plain = name.endswith("_"), name.removesuffix("_")
    if plain in _OPERATORS:
        return plain, 0, in_place
    return plain.removesuffix("_backward"), 1, in_place


def __getattr__(name):
    operator, direction, in_place = _named(name)
    if operator not in _OPERATORS:
        raise AttributeError(f"module {__name__!r} has no operator {name!r}")
    _, made = _operator(operator, direction, in_place)
    globals()[name] = made
    return made


def __dir__():
    return sorted(_OPERATORS)


def load():
    """Registers every operator, as `torch.ops.dsv4_parity`; otherwise each is at its first use."""
    for name in _OPERATORS:
        function, _ = _operator(name, 0)
        if _has_two_forms(function):
            _operator(name, 0, in_place=True)
