"""A norm as a Triton kernel, judged in a test; needs a GPU, torch and triton.

    pytest python/examples/triton_rms_norm.py
"""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
triton = pytest.importorskip("triton", reason="triton is not installed")
if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)

import triton.language as tl  # noqa: E402

from dsv4_parity.testing import cases, check, check_batch_invariance  # noqa: E402


@triton.jit
def kernel(x, weight, y, rstd, width, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    values = tl.load(x + row * width + columns, inside, 0.0).to(tl.float32)
    r = 1.0 / tl.sqrt(tl.sum(values * values, 0) / width + eps)
    scaled = values * r * tl.load(weight + columns, inside, 0.0)
    tl.store(y + row * width + columns, scaled, inside)
    tl.store(rstd + row, r)


def rms_norm(x, weight=None, eps=1e-6):
    # numpy has no bf16: its values come in fp32, which holds them exactly.
    x = x.bfloat16().contiguous()
    rows, width = x.shape
    weight = torch.ones(width, device=x.device) if weight is None else weight.float()
    y, rstd = torch.empty_like(x), torch.empty(rows, device=x.device)
    kernel[(rows,)](x, weight, y, rstd, width, eps, BLOCK=triton.next_power_of_2(width))
    return {"y": y, "rstd": rstd}


@cases("rms_norm", where="dtype = 'bf16' and num_rows > 0 and width <= 4096", edge_cases=6, drawn=4)
def test_triton(case):
    check(case, forward=rms_norm, to=lambda array: torch.from_numpy(array).cuda())


def test_a_row_keeps_its_bits_in_another_batch():
    check_batch_invariance(lambda x: rms_norm(x)["y"], torch.randn(65, 512, device="cuda"))
