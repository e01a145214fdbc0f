"""As much of torch as the workers of FlashMLA use, on the CPU, in nothing but Python: strided views over lists of numbers."""

import ctypes
import math
import struct

DTYPES = {}


class DType:
    def __init__(self, name, size, code):
        self.name, self.size, self.code = name, size, code
        DTYPES[name] = self


float64, float32, float16 = DType("float64", 8, "d"), DType("float32", 4, "f"), DType("float16", 2, "e")
bfloat16, bool_ = DType("bfloat16", 2, None), DType("bool", 1, "?")
int64, int32, uint8 = DType("int64", 8, "q"), DType("int32", 4, "i"), DType("uint8", 1, "B")


class cuda:
    @staticmethod
    def is_available():
        return False


def dense(shape):
    strides = [1] * len(shape)
    for axis in range(len(shape) - 1, 0, -1):
        strides[axis - 1] = strides[axis] * shape[axis]
    return strides


def bf16(value):
    """Rounded to bf16, ties to even."""
    if value != value or math.isinf(value):
        return value
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return struct.unpack("<f", struct.pack("<I", bits))[0]


class Tensor:
    def __init__(self, values, shape, dtype, strides=None, offset=0):
        self.storage, self.shape, self.dtype = values, tuple(shape), dtype
        self.strides, self.offset, self.device = strides or dense(self.shape), offset, "cpu"

    def places(self):
        places = [self.offset]
        for extent, stride in zip(self.shape, self.strides):
            places = [place + i * stride for place in places for i in range(extent)]
        return places

    def values(self):
        return [self.storage[place] for place in self.places()]

    def stride(self, axis):
        return self.strides[axis]

    def numel(self):
        return math.prod(self.shape)

    def element_size(self):
        return self.dtype.size

    def is_contiguous(self):
        return self.strides == dense(self.shape)

    def long(self):
        return self.to("cpu", int64)

    def contiguous(self):
        return Tensor(self.values(), self.shape, self.dtype)

    def detach(self):
        return self

    def to(self, device, dtype=None):
        assert device == "cpu"
        if dtype is None or dtype is self.dtype:
            return self
        rounded = bf16 if dtype is bfloat16 else (lambda value: value)
        return Tensor([rounded(value) for value in self.values()], self.shape, dtype)

    def data_ptr(self):
        assert self.is_contiguous()
        values = self.values()
        if self.dtype is bfloat16:
            data = b"".join(struct.pack("<f", bf16(value))[2:] for value in values)
        else:
            data = struct.pack(f"<{len(values)}{self.dtype.code}", *values)
        self.kept = ctypes.create_string_buffer(data, len(data) + 1)
        return ctypes.addressof(self.kept)

    def reshape(self, shape):
        return Tensor(self.values(), shape, self.dtype)

    def view(self, *shape):
        # Each axis here is split alone: whole rows of the last one, as torch allows it of a slice.
        assert math.prod(shape) == self.numel() and shape[0] == self.shape[0] and len(self.shape) == 2
        assert self.strides[1] == 1
        return Tensor(self.storage, shape, self.dtype, [self.strides[0], *dense(shape)[1:]], self.offset)

    def transpose(self, a, b):
        shape, strides = list(self.shape), list(self.strides)
        shape[a], shape[b], strides[a], strides[b] = shape[b], shape[a], strides[b], strides[a]
        return Tensor(self.storage, shape, self.dtype, strides, self.offset)

    def __getitem__(self, key):
        if isinstance(key, Tensor):
            assert len(self.shape) == 1
            return Tensor([self.values()[i] for i in key.values()], key.shape, self.dtype)
        shape, strides, offset, axis = [], [], self.offset, 0
        for part in key if isinstance(key, tuple) else (key,):
            if part is None:
                shape.append(1)
                strides.append(0)
                continue
            begin, end, step = part.indices(self.shape[axis])
            assert step == 1
            shape.append(max(0, end - begin))
            strides.append(self.strides[axis])
            offset += begin * self.strides[axis]
            axis += 1
        shape += self.shape[axis:]
        strides += self.strides[axis:]
        return Tensor(self.storage, shape, self.dtype, strides, offset)

    def any(self, axis):
        assert axis == len(self.shape) - 1
        values, last = self.values(), self.shape[axis]
        rows = [any(values[i * last : (i + 1) * last]) for i in range(math.prod(self.shape[:axis]))]
        return Tensor(rows, self.shape[:axis], bool_)

    def clamp(self, low, high):
        return Tensor([min(max(value, low), high) for value in self.values()], self.shape, self.dtype)

    def with_each(self, other, of, dtype=None):
        if not isinstance(other, Tensor):
            other = Tensor([other], [1] * len(self.shape), self.dtype)
        assert len(self.shape) == len(other.shape)
        shape = [max(pair) if 0 not in pair else 0 for pair in zip(self.shape, other.shape)]
        a, b = (
            Tensor(t.storage, shape, t.dtype, [s if e > 1 else 0 for s, e in zip(t.strides, t.shape)], t.offset)
            for t in (self, other)
        )
        return Tensor([of(x, y) for x, y in zip(a.values(), b.values())], shape, dtype or bool_)

    def __ne__(self, other):
        return self.with_each(other, lambda a, b: a != b)

    def __ge__(self, other):
        return self.with_each(other, lambda a, b: a >= b)

    def __lt__(self, other):
        return self.with_each(other, lambda a, b: a < b)

    def __and__(self, other):
        return self.with_each(other, lambda a, b: a and b)

    def __invert__(self):
        return Tensor([not value for value in self.values()], self.shape, bool_)


def frombuffer(data, dtype):
    data = bytes(data)
    if dtype is bfloat16:
        words = struct.unpack(f"<{len(data) // 2}H", data)
        values = [struct.unpack("<f", struct.pack("<I", word << 16))[0] for word in words]
    else:
        values = list(struct.unpack(f"<{len(data) // dtype.size}{dtype.code}", data))
    return Tensor(values, [len(values)], dtype)


def empty(shape, dtype):
    return full(shape, 0, dtype)


def full(shape, value, dtype, device="cpu"):
    return Tensor([value] * math.prod(shape), shape, dtype)


def arange(count, device="cpu"):
    return Tensor(list(range(count)), [count], int64)


def where(mask, yes, no):
    assert mask.shape == yes.shape == no.shape and yes.dtype is no.dtype
    values = zip(mask.values(), yes.values(), no.values())
    return Tensor([a if chosen else b for chosen, a, b in values], yes.shape, yes.dtype)


def cat(tensors, axis):
    first = tensors[0]
    assert all(tensor.dtype is first.dtype for tensor in tensors)
    values = []
    rows = [tensor.values() for tensor in tensors]
    inner = [math.prod(tensor.shape[axis:]) for tensor in tensors]
    for outer in range(math.prod(first.shape[:axis])):
        for row, length in zip(rows, inner):
            values += row[outer * length : (outer + 1) * length]
    shape = list(first.shape)
    shape[axis] = sum(tensor.shape[axis] for tensor in tensors)
    return Tensor(values, shape, first.dtype)
