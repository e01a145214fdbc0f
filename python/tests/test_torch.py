"""Custom operators of torch on the CPU, by the emulator; counted skips without torch."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import dsv4_parity.torch as custom  # noqa: E402


def norm(x, weight):
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, 1e-6)


def test_a_custom_operator_has_gradients_and_passes_opcheck():
    x, weight = torch.randn(3, 64, requires_grad=True), torch.randn(64, requires_grad=True)
    y, rstd = custom.rms_norm(x, weight)
    torch.testing.assert_close(y, norm(x, weight))
    assert not rstd.requires_grad
    dy = torch.randn(3, 64)
    found = torch.autograd.grad(y, [x, weight], dy)
    for one, other in zip(found, torch.autograd.grad(norm(x, weight), [x, weight], dy)):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    torch.library.opcheck(custom.rms_norm, (x, weight))


def test_every_operator_has_a_schema():
    custom.load()
    assert hasattr(torch.ops.dsv4_parity, "sparse_attention")
