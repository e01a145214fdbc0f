"""dsv4-parity from Python: DeepSeek-V4's operators, and a judge for kernels in tests."""

from importlib.metadata import version as _version

__version__ = _version("dsv4-parity")
