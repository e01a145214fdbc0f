"""Tensors of numpy, torch, and of whoever speaks DLPack and the array API.

A framework describes its tensors, makes new ones, and names the stream that work is enqueued on.
Everything else is the same for all of them.
"""

import sys
from dataclasses import dataclass
from functools import partial

from dsv4_parity import _native

#: Types of kernels by numpy's names. bfloat16 is that of `ml_dtypes`, or its bits in uint16. Codes
#: of FP8 and of block scales are bytes.
_NUMPY = {
    "float32": "f32",
    "int32": "i32",
    "int64": "i64",
    "uint8": "u8",
    "uint16": "bf16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "u8",
    "float8_e8m0fnu": "u8",
}


@dataclass
class Described:
    """A tensor: its address, type, sizes, and strides in elements."""

    address: int
    dtype: str
    shape: list
    strides: list
    #: The strides before a copy that is dense.
    true_strides: list


def _dtype_error(name, dtype):
    return TypeError(f"argument `{name}`: element type {dtype} is none of kernels")


def dense(shape):
    """The strides of a dense tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return strides[::-1]


class Numpy:
    """Arrays of numpy: kernels run on the emulator, on copies in its own memory."""

    def __init__(self, first):
        import numpy

        self._numpy = numpy
        self._bfloat16 = first.dtype if first.dtype.name == "bfloat16" else numpy.uint16
        self._kept = []
        self._copies = []

    place = "emulator"
    stream = 0

    @staticmethod
    def is_mine(tensor):
        numpy = sys.modules.get("numpy")
        return numpy is not None and isinstance(tensor, numpy.ndarray)

    def key(self, tensor):
        return tensor.shape, tensor.strides, tensor.dtype.name

    def describe(self, name, array, is_written=False):
        dtype = _NUMPY.get(array.dtype.name)
        if dtype is None:
            raise _dtype_error(name, array.dtype)
        if dtype == "bf16" and array.dtype.name == "bfloat16":
            self._bfloat16 = array.dtype
        if is_written and not array.flags["W"]:
            raise ValueError(f"argument `{name}`: the array is read-only, and the call writes it")
        copy = array
        if not array.flags.c_contiguous:
            copy = self._numpy.ascontiguousarray(array)
            if is_written:
                self._copies.append((array, copy))
        self._kept.append(copy)
        shape = list(copy.shape)
        strides = [stride // array.itemsize for stride in array.strides]
        return Described(copy.ctypes.data, dtype, shape, dense(shape), strides)

    def empty(self, dtype, shape):
        names = {"f32": "float32", "i32": "int32", "i64": "int64", "u8": "uint8"}
        return self._numpy.empty(shape, names.get(dtype, self._bfloat16))

    def finish(self):
        """Arrays that are not dense get what was written to their copies."""
        for array, dense in self._copies:
            array[...] = dense


def _current_stream(torch, number):
    """A function of the stream of this thread on a GPU."""
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    # What compiled functions of torch use: a tenth of the time of the public name.
    if raw is not None:
        return partial(raw, number)
    return lambda: torch.cuda.current_stream(number).cuda_stream


class Torch:
    """Tensors of torch. On a GPU work goes to the current stream; on the CPU to the emulator."""

    def __init__(self, first):
        torch = sys.modules["torch"]
        self._torch = torch
        self._device = first.device
        if first.is_cuda:
            number = first.get_device()
            self.place = f"cuda:{number}"
            self.stream = _current_stream(torch, number)()
        elif first.device.type == "cpu":
            self.place, self.stream = "emulator", 0
        else:
            raise ValueError(f"device {first.device} must be a GPU or the CPU")
        self._copies = []
        self._kept = []

    @staticmethod
    def is_mine(tensor):
        torch = sys.modules.get("torch")
        return torch is not None and isinstance(tensor, torch.Tensor)

    @staticmethod
    def _names(torch):
        names = {
            torch.float32: "f32",
            torch.bfloat16: "bf16",
            torch.int32: "i32",
            torch.int64: "i64",
            torch.uint8: "u8",
        }
        codes = ("float8_e4m3fn", "float8_e8m0fnu", "float4_e2m1fn_x2")
        names.update({getattr(torch, name): "u8" for name in codes if hasattr(torch, name)})
        return names

    @classmethod
    def dtype_of(cls, name, tensor):
        """The type of a tensor's elements, as kernels call it."""
        if cls._known is None:
            cls._known = cls._names(sys.modules["torch"])
        dtype = cls._known.get(tensor.dtype)
        if dtype is None:
            raise _dtype_error(name, tensor.dtype)
        return dtype

    _known = None

    @staticmethod
    def key(tensor):
        return tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device()

    def makers(self, described):
        """Functions that make tensors like these, without strides of their own."""
        empty, device = self._torch.empty, self._device
        kinds = [(shape, self._types(dtype)) for _, dtype, shape in described]
        return [partial(empty, shape, dtype=dtype, device=device) for shape, dtype in kinds]

    def streams(self):
        """A function of the stream that is this thread's when it is called."""
        return _current_stream(self._torch, self._device.index)

    def describe(self, name, tensor, is_written=False):
        if tensor.device != self._device:
            raise ValueError(f"argument `{name}`: device {tensor.device} must be {self._device}")
        dtype = self.dtype_of(name, tensor)
        copy = tensor
        if self.place == "emulator" and not tensor.is_contiguous():
            copy = tensor.contiguous()
            if is_written:
                self._copies.append((tensor, copy))
        self._kept.append(copy)
        strides, true_strides = list(copy.stride()), list(tensor.stride())
        return Described(copy.data_ptr(), dtype, list(copy.shape), strides, true_strides)

    def empty(self, dtype, shape):
        return self._torch.empty(shape, dtype=self._types(dtype), device=self._device)

    def _types(self, dtype):
        torch = self._torch
        types = {"f32": torch.float32, "bf16": torch.bfloat16, "i32": torch.int32}
        return types.get(dtype) or {"i64": torch.int64, "u8": torch.uint8}[dtype]

    def finish(self):
        for tensor, dense in self._copies:
            tensor.detach().copy_(dense)


class Dlpack:
    """Tensors of anybody else: DLPack tells where they are, the array API makes new ones."""

    _CPU, _CUDA = 1, 2

    def __init__(self, first):
        kind, number = first.__dlpack_device__()
        if kind not in (self._CPU, self._CUDA):
            raise ValueError(f"DLPack device type {int(kind)} must be 1 (CPU) or 2 (CUDA)")
        self._device = (int(kind), int(number))
        self.place = "emulator" if kind == self._CPU else f"cuda:{int(number)}"
        self.stream = self._current_stream(first)
        self._first = first
        self._capsules = []

    @staticmethod
    def is_mine(tensor):
        return hasattr(tensor, "__dlpack__") and hasattr(tensor, "__dlpack_device__")

    @staticmethod
    def _current_stream(first):
        cupy = sys.modules.get("cupy")
        if cupy is not None and isinstance(first, cupy.ndarray):
            return cupy.cuda.get_current_stream().ptr
        # The default stream, with which the producer synchronises.
        return 0

    def key(self, tensor):
        return tensor.shape, str(tensor.dtype)

    def describe(self, name, tensor, is_written=False):
        device = tuple(int(part) for part in tensor.__dlpack_device__())
        if device != self._device:
            raise ValueError(f"argument `{name}`: DLPack device {device} must be {self._device}")
        # 1 is the legacy default stream in DLPack; 0 is nothing there.
        stream = None if self._device[0] == self._CPU else (self.stream or 1)
        capsule = tensor.__dlpack__(stream=stream)
        self._capsules.append(capsule)
        address, dtype, shape, strides = _native.from_dlpack(name, capsule)
        strides = strides or dense(shape)
        # Along an axis of one entry the stride is never applied.
        is_dense = all(
            size <= 1 or one == other for size, one, other in zip(shape, strides, dense(shape))
        )
        if self.place == "emulator" and not is_dense:
            raise ValueError(f"argument `{name}`: strides {strides} of {shape} must be dense")
        return Described(address, dtype, shape, strides, strides)

    def empty(self, dtype, shape):
        if not hasattr(self._first, "__array_namespace__"):
            raise ValueError("argument `out`: this framework has no array API to make outputs with")
        namespace = self._first.__array_namespace__()
        names = {"f32": "float32", "i32": "int32", "i64": "int64", "u8": "uint8"}
        dtype = getattr(namespace, names.get(dtype, "bfloat16"), None) or namespace.uint16
        return namespace.empty(tuple(shape), dtype=dtype, device=self._first.device)

    def finish(self):
        pass


def of(tensor):
    """The framework of a tensor, or None."""
    for framework in (Torch, Numpy, Dlpack):
        if framework.is_mine(tensor):
            return framework
    return None
