"""dsv4-parity from Python: DeepSeek-V4's operators, and a judge for kernels in tests.

- `dsv4_parity.ops`: the operators' kernels, on tensors of numpy, torch and others;
- `dsv4_parity.torch`: the same as custom operators of torch, with gradients;
- `dsv4_parity.testing`: cases for pytest, and the judge of any callable.
"""

from importlib import metadata as _metadata

from dsv4_parity._bf16 import from_bf16, to_bf16
from dsv4_parity._native import DeviceError

try:
    __version__ = _metadata.version("dsv4-parity")
except _metadata.PackageNotFoundError:
    # Imported from a source tree.
    __version__ = "unknown"

__all__ = ["DeviceError", "from_bf16", "to_bf16"]
