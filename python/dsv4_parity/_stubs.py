"""Writes `ops.pyi`: `python -m dsv4_parity._stubs > python/dsv4_parity/ops.pyi`."""

from concurrent.futures import ThreadPoolExecutor

from dsv4_parity import _functions, _native

_HEAD = '''"""DeepSeek-V4's operators. Made by `python -m dsv4_parity._stubs`."""

from typing import Any, Literal, NamedTuple

# numpy.ndarray, torch.Tensor, or whatever speaks DLPack.
Tensor = Any

def invariant(enabled: bool = True) -> None: ...
def nvtx(enabled: bool = True) -> None: ...
'''


def _kind(option):
    values = option["values"]
    if values and all(isinstance(value, bool) for value in values):
        return "bool"
    if values:
        return f"Literal[{', '.join(repr(value) for value in values)}]"
    if isinstance(option["default"], list):
        return "list[int]"
    return "int" if option["whole"] else "float"


def _option(option):
    default = option["default"]
    optional = " | None" if default is None else ""
    return f"    {option['name']}: {_kind(option)}{optional} = {default!r},"


def _function(function):
    """The stub of a function, and of the type that it returns."""
    lines, result = [], "None"
    if len(function.results) == 1:
        result = "Tensor"
    elif function.results:
        result = function.result.__name__
        lines += ["", f"class {result}(NamedTuple):"]
        required = {one["name"] for one in function.written if one["required"]}
        for name in function.results:
            lines.append(f"    {name}: Tensor" + ("" if name in required else " | None"))
    lines += ["", f"def {function.name}("]
    for argument in function.given:
        absent = "" if argument["required"] else " | None = None"
        lines.append(f"    {argument['name']}: Tensor{absent},")
    lines += ["    *,", *map(_option, function.options), f"    {function.out}: Any = None,"]
    lines.append(f") -> {result}:")
    text = _functions.documentation(function).replace("\n", "\n    ").replace("    \n", "\n")
    lines += [f'    """{text}\n    """', "    ..."]
    return "\n".join(lines)


def text():
    """The text of `ops.pyi`."""
    with ThreadPoolExecutor() as pool:
        described = list(pool.map(_functions.describe, _native.operators()))
    functions = [
        _function(_functions.Function(description, direction))
        for description in described
        for direction in range(2)
        if description["directions"][direction] is not None
    ]
    return _HEAD + "\n".join(functions) + "\n"


if __name__ == "__main__":
    print(text(), end="")
