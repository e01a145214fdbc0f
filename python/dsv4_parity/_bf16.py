"""bfloat16 in numpy: its bits in uint16."""


def to_bf16(values):
    """Rounds numbers to the nearest bfloat16, ties to even, and returns its bits as uint16."""
    import numpy

    bits = numpy.ascontiguousarray(values, dtype=numpy.float32).view(numpy.uint32)
    rounded = bits + numpy.uint32(0x7FFF) + ((bits >> 16) & 1)
    # A NaN stays one, whatever its payload is.
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    rounded = numpy.where(is_nan, bits | 0x400000, rounded)
    return (rounded >> 16).astype(numpy.uint16)


def from_bf16(bits):
    """The numbers of bfloat16 whose bits are given as uint16, as float32."""
    import numpy

    return (numpy.asarray(bits).view(numpy.uint16).astype(numpy.uint32) << 16).view(numpy.float32)
