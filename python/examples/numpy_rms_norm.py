"""A kernel in numpy, judged in a test: a right one, and three that are wrong.

    pytest python/examples/numpy_rms_norm.py
"""

import numpy

from dsv4_parity.testing import cases, check


def rms_norm(x, weight=None, eps=1e-6):
    x = x.astype(numpy.float64)
    rstd = 1.0 / numpy.sqrt((x * x).mean(axis=1) + eps)
    y = x * rstd[:, None]
    return {"y": y if weight is None else y * weight, "rstd": rstd}


def weight_applied_twice(x, weight, eps=1e-6):
    found = rms_norm(x, weight, eps)
    return {**found, "y": found["y"] * weight}


def without_eps(x, weight=None):
    return rms_norm(x, weight, eps=0.0)


def mean_along_the_wrong_axis(x, weight=None, eps=1e-6):
    x = x.astype(numpy.float64)
    rstd = 1.0 / numpy.sqrt((x * x).mean() + eps) * numpy.ones(len(x))
    y = x * rstd[:, None]
    return {"y": y if weight is None else y * weight, "rstd": rstd}


def backward(x, dy, rstd, weight=None):
    x, dy = x.astype(numpy.float64), dy.astype(numpy.float64)
    scaled = dy if weight is None else dy * weight
    rstd = rstd[:, None]
    dot = (scaled * x).mean(axis=1, keepdims=True)
    gradients = {"dx": rstd * (scaled - x * rstd**2 * dot)}
    return gradients if weight is None else {**gradients, "dweight": (dy * x * rstd).sum(axis=0)}


@cases("rms_norm", where="num_rows > 2 and width >= 512 and width <= 1024", edge_cases=4, drawn=2)
def test_rms_norm(case):
    judged = check(case, forward=rms_norm, backward=backward)
    assert max(judged.budget_use.values()) < 1.0
