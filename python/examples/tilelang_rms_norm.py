"""A norm in TileLang, judged in a test; needs a GPU, torch and tilelang.

    pytest python/examples/tilelang_rms_norm.py
"""

import functools

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
tilelang = pytest.importorskip("tilelang", reason="tilelang is not installed")
if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)

import tilelang.language as T  # noqa: E402

from dsv4_parity.testing import cases, check  # noqa: E402


@functools.cache
def compiled(width, eps):
    rows = T.dynamic("rows")

    @T.prim_func
    def kernel(
        x: T.Tensor((rows, width), "float32"),
        y: T.Tensor((rows, width), "float32"),
        rstd: T.Tensor((rows,), "float32"),
    ):
        with T.Kernel(rows, threads=128) as row:
            values = T.alloc_fragment((1, width), "float32")
            squares = T.alloc_fragment((1, width), "float32")
            total = T.alloc_fragment((1,), "float32")
            for i in T.Parallel(width):
                values[0, i] = x[row, i]
                squares[0, i] = values[0, i] * values[0, i]
            T.reduce_sum(squares, total, dim=1)
            total[0] = T.rsqrt(total[0] / width + eps)
            for i in T.Parallel(width):
                y[row, i] = values[0, i] * total[0]
            rstd[row] = total[0]

    return tilelang.compile(kernel, out_idx=[1, 2])


def rms_norm(x, eps=1e-6):
    y, rstd = compiled(x.shape[1], eps)(x.contiguous())
    return {"y": y, "rstd": rstd}


SUITED = "dtype = 'f32' and weight = null and num_rows > 0 and width % 128 = 0 and width <= 1024"


@cases("rms_norm", where=SUITED, edge_cases=2, drawn=3)
def test_tilelang(case):
    check(case, forward=rms_norm, to=lambda array: torch.from_numpy(array).cuda())
