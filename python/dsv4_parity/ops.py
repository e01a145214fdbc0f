"""DeepSeek-V4's operators, on the tensors of numpy, torch, and of whoever speaks DLPack.

Each operator is a function of its name, and its gradients one more: `rms_norm` and
`rms_norm_backward`. They are made from the operators' declarations when they are first used.

On a GPU a call enqueues kernels on the caller's current stream and does not wait. Outputs are
allocated by the caller's framework, unless `out` gives them. Tensors in the memory of the host run
on an emulator, for tests.

Types are float32, int32, int64, uint8 and bfloat16. numpy has no bfloat16: give arrays of
`ml_dtypes.bfloat16`, or their bits as uint16 (`dsv4_parity.to_bf16`, `dsv4_parity.from_bf16`).
Codes of FP8, MXFP4 and NVFP4, and their scales, are bytes.

Results are not part of autograd: `dsv4_parity.torch` is.
"""

from dsv4_parity import _functions, _native
from dsv4_parity._functions import invariant, nvtx

_OPERATORS = _native.operators()


def __getattr__(name):
    operator, direction = name, 0
    if name not in _OPERATORS:
        operator, direction = name.removesuffix("_backward"), 1
    if operator not in _OPERATORS or operator == "":
        raise AttributeError(f"module {__name__!r} has no operator {name!r}")
    if direction == 1 and _functions.describe(operator)["directions"][1] is None:
        raise AttributeError(f"operator `{operator}` has no backward")
    made = _functions.make(operator, direction)
    globals()[name] = made
    return made


def __dir__():
    return sorted([*_OPERATORS, "invariant", "nvtx"])
