"""A norm of torch, eager and compiled, with its gradients by autograd, judged in a test.

    pytest python/examples/torch_rms_norm.py
"""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from dsv4_parity.testing import cases, check, check_repeatable  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SUITED = "dtype = 'bf16' and num_rows > 0 and width <= 1024"


def on_device(array):
    return torch.from_numpy(array).to(DEVICE)


def rms_norm(x, weight=None, eps=1e-6):
    return torch.nn.functional.rms_norm(x.float(), (x.shape[-1],), weight, eps)


def backward(x, dy, weight=None, eps=1e-6):
    leaves = [tensor.detach().requires_grad_() for tensor in (x, weight) if tensor is not None]
    gradients = torch.autograd.grad(rms_norm(*leaves, eps=eps), leaves, dy)
    return dict(zip(("dx", "dweight"), gradients))


@cases("rms_norm", where=SUITED, edge_cases=4, drawn=4)
def test_eager(case):
    judged = check(case, forward=rms_norm, backward=backward, to=on_device)
    assert judged.budget_use["y"] <= 1.0


@cases("rms_norm", where=SUITED, edge_cases=2, drawn=2)
def test_compiled(case):
    if DEVICE == "cpu":
        pytest.skip("torch.compile needs a compiler of the CPU's own")
    compiled = torch.compile(rms_norm, fullgraph=True)
    check(case, forward=compiled, to=on_device)


def test_the_same_call_gives_the_same_bits():
    x = torch.randn(33, 512, device=DEVICE)
    check_repeatable(rms_norm, x)
