"""RMSNorm in numpy, forward only, with the bug that the first argument names."""

import sys

import numpy

from dsv4_external import serve

BUG = sys.argv.pop()


def rows_of(x):
    """The rows of x, read with a stride that is rounded up to 8 elements where that is the bug."""
    rows, width = x.shape
    if BUG != "stride" or x.size == 0:
        return x
    stride = -(-width // 8) * 8
    at = numpy.arange(rows)[:, None] * stride + numpy.arange(width)
    return x.reshape(-1)[at % x.size]


def rms_norm(case, inputs):
    x = rows_of(inputs["x"].astype(numpy.float64))
    mean, eps = (x * x).mean(axis=1), case["eps"]
    rstd = 1.0 / (numpy.sqrt(mean) + eps) if BUG == "eps" else 1.0 / numpy.sqrt(mean + eps)
    weight = numpy.ones(1) if BUG == "weight" else inputs.get("weight", numpy.ones(1))
    return {"y": x * rstd[:, None] * weight, "rstd": rstd}


serve(rms_norm)
