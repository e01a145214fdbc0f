"""Custom operators of torch on the CPU, by the emulator; counted skips without torch."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import dsv4_parity.torch as custom  # noqa: E402
from dsv4_parity import ops  # noqa: E402


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


def projection(tokens):
    """Arguments of `kv_projection`: no scales, cosines and sines of one rotation."""
    generator = torch.Generator().manual_seed(tokens)
    drawn = lambda *shape: torch.randn(*shape, generator=generator)
    h, wkv = drawn(tokens, 256).bfloat16(), drawn(512, 256).bfloat16()
    angles = drawn(tokens, 32)
    return {"h": h, "kv_norm": drawn(512), "cos": angles.cos(), "sin": angles.sin(), "wkv": wkv}


def test_where_a_tensor_of_the_caller_may_be_written_one_form_has_gradients_and_one_writes():
    given = projection(3)
    given["h"].requires_grad_()
    (dh,) = torch.autograd.grad(custom.kv_projection(**given)[3].float().sum(), [given["h"]])
    assert dh.shape == given["h"].shape and dh.abs().sum() > 0
    given["h"].requires_grad_(False)
    given["slots"] = torch.tensor([0, 70, 5], dtype=torch.int32)
    given |= {"page_size": 64, "nope_dim": 448, "rope_dim": 64}
    cache, other = torch.zeros(2, 2, 64 * 584, dtype=torch.uint8)
    kv = ops.kv_projection(**given, cache=cache).kv
    assert torch.equal(custom.kv_projection_(**given, cache=other)[3], kv)
    assert torch.equal(cache, other) and cache.any()
    torch.library.opcheck(custom.kv_projection_, (), {**given, "cache": other})
