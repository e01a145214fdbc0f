"""The functions for vLLM, by the emulator, and in the place of those of a stand-in for it."""

import ast
import importlib.util
import inspect
import math
import pathlib
import sys
import types

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import dsv4_parity.vllm as bridge  # noqa: E402
from dsv4_parity import ops  # noqa: E402

ROWS, WIDTH = 4, 512


def drawn(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def insert(q, kv, cache, slots, positions=None, heads=1):
    """Rows at position 0 of a table whose other rows turn."""
    angles = torch.linspace(0, 3, 5 * 32).view(5, 32)
    positions = torch.zeros(len(kv), dtype=torch.int64) if positions is None else positions
    table = torch.cat([angles.cos(), angles.sin()], 1)
    table[0] = torch.tensor([1.0] * 32 + [0.0] * 32)
    return bridge.fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert(
        q, kv, cache, slots, positions, table, heads, 1e-6, ROWS
    ), table


def store(blocks, seed=1):
    """A padded store with every row written, and the values that it holds."""
    rows = drawn(blocks * ROWS, WIDTH, seed=seed).bfloat16()
    stride = -(-ROWS * bridge.ROW_BYTES // 576) * 576
    cache = torch.zeros(blocks, stride, dtype=torch.uint8)
    insert(torch.zeros(len(rows), 1, WIDTH).bfloat16(), rows, cache, torch.arange(len(rows)))
    view = cache[:, : ROWS * bridge.ROW_BYTES].view(blocks, ROWS, 1, bridge.ROW_BYTES)
    data = cache[:, : ROWS * 576].reshape(-1, 576)
    exponents = cache[:, ROWS * 576 : ROWS * 584].reshape(-1, 8)
    scales = torch.exp2(exponents[:, :7].float() - 127).repeat_interleave(64, 1)
    coded = data[:, :448].view(torch.float8_e4m3fn).float() * scales
    # Half of a step of three bits, of the largest code of a scale that is a power of two.
    steps = scales * 2.0**8 * 2.0**-4
    assert ((coded - rows[:, :448].float()).abs() <= steps).all()
    return view, torch.cat([coded, data[:, 448:].view(torch.bfloat16).float()], 1)


def attention(q, keys, listed, sink, scale):
    """In fp64: what a token sees of `keys`, those that its list names."""
    out, lse = torch.zeros(*q.shape[:-1], WIDTH), torch.full(q.shape[:-1], math.inf)
    for place in range(q.shape[0]):
        named = [i for i in listed[place].tolist() if 0 <= i < len(keys)]
        if named:
            seen = keys[named].double()
            logits = q[place].double() @ seen.T * scale
            lse[place] = torch.logsumexp(logits, 1)
            total = torch.logaddexp(lse[place].double(), sink.double())
            out[place] = torch.exp(logits - total[:, None]) @ seen
    return out, lse


def test_prefill_has_the_interface_of_flash_mla():
    q, kv = drawn(3, 4, WIDTH).bfloat16(), drawn(7, 1, WIDTH, seed=2).bfloat16()
    indices = torch.tensor([[[0, 6, -1]], [[3, 9, 2]], [[-1, -1, -1]]], dtype=torch.int32)
    sink, out = drawn(4, seed=3), torch.empty(3, 4, WIDTH, dtype=torch.bfloat16)
    found, max_logits, lse = bridge.flash_mla_sparse_fwd(
        q, kv, indices, 0.05, attn_sink=sink, out=out
    )
    assert found.data_ptr() == out.data_ptr() and max_logits.shape == lse.shape == (3, 4)
    expected, of_lse = attention(q, kv[:, 0], indices[:, 0], sink, 0.05)
    torch.testing.assert_close(found.float(), expected, rtol=2**-6, atol=2**-8)
    torch.testing.assert_close(lse, of_lse, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="kv: .* one head"):
        bridge.flash_mla_sparse_fwd(q, kv.expand(7, 2, WIDTH), indices, 0.05)


def test_decode_reads_two_padded_stores_and_returns_lse_by_head():
    (window, rows), (extra, more) = store(3), store(2, seed=5)
    q, sink = drawn(2, 1, 3, WIDTH).bfloat16(), drawn(3, seed=3)
    indices = torch.tensor([[[0, 11, -1]], [[7, 2, 3]]], dtype=torch.int32)
    of_extra = torch.tensor([[[7]], [[1]]], dtype=torch.int32)
    lengths = torch.tensor([1, 0], dtype=torch.int32)
    out, lse = bridge.flash_mla_with_kvcache(
        q, window, None, None, WIDTH, object(), None, softmax_scale=0.05, is_fp8_kvcache=True,
        indices=indices, attn_sink=sink, extra_k_cache=extra, extra_indices_in_kvcache=of_extra,
        extra_topk_length=lengths,
    )  # fmt: skip
    assert out.shape == q.shape and lse.shape == (2, 3, 1)
    keys = torch.cat([rows, more])
    # The second request sees nothing of its second list.
    listed = torch.tensor([[0, 11, -1, len(rows) + 7], [7, 2, 3, -1]])
    expected, of_lse = attention(q[:, 0], keys, listed, sink, 0.05)
    torch.testing.assert_close(out[:, 0].float(), expected, rtol=2**-6, atol=2**-6)
    torch.testing.assert_close(lse[..., 0], of_lse, rtol=1e-5, atol=1e-5)
    whole = lambda cache: cache.flatten(1)
    same = ops.decode_attention(
        q, whole(window), indices, sink=sink, compressed=whole(extra), compressed_indices=of_extra,
        compressed_length=lengths, softmax_scale=0.05, nope_dim=448, rope_dim=64,
        window_page_size=ROWS, compressed_page_size=ROWS,
    )  # fmt: skip
    assert torch.equal(same.out, out) and torch.equal(same.lse.transpose(1, 2), lse)
    alone = bridge.flash_mla_with_kvcache(
        q[:1], window, None, None, WIDTH, softmax_scale=0.05, is_fp8_kvcache=True,
        indices=indices[:1], attn_sink=sink, enable_batch_invariant=True,
    )  # fmt: skip
    both = bridge.flash_mla_with_kvcache(
        q, window, None, None, WIDTH, softmax_scale=0.05, is_fp8_kvcache=True,
        indices=indices, attn_sink=sink, enable_batch_invariant=True,
    )  # fmt: skip
    assert torch.equal(alone[0], both[0][:1])


@pytest.mark.parametrize(
    "change, named",
    [
        ({"indices": None}, "indices"),
        ({"is_fp8_kvcache": False}, "is_fp8_kvcache"),
        ({"causal": True}, "causal"),
        ({"head_dim_v": 256}, "head_dim_v"),
        ({"k_cache": torch.zeros(1, ROWS, 1, 656, dtype=torch.uint8)}, "k_cache"),
    ],
)
def test_a_call_that_is_none_of_these_is_an_error_that_names_the_argument(change, named):
    arguments = {
        "q": drawn(1, 1, 2, WIDTH).bfloat16(), "k_cache": store(1)[0], "block_table": None,
        "cache_seqlens": None, "head_dim_v": WIDTH, "is_fp8_kvcache": True,
        "indices": torch.zeros(1, 1, 1, dtype=torch.int32),
    }  # fmt: skip
    with pytest.raises(ValueError, match=f"^{named}: "):
        bridge.flash_mla_with_kvcache(**{**arguments, **change})


def e4m3(*shape, seed=1):
    return drawn(*shape, seed=seed).to(torch.float8_e4m3fn)


def logits_of(q, keys, weights):
    products = torch.einsum("thd,kd->thk", q.double(), keys.double()).relu()
    return torch.einsum("thk,th->tk", products, weights.double())


def test_logits_of_ranges_begin_with_the_first_key_of_the_range():
    q, keys, weights = e4m3(3, 64, 128), e4m3(9, 128, seed=2), drawn(3, 64, seed=4)
    scales = drawn(9, seed=3).abs()
    first, end = (torch.tensor(v, dtype=torch.int32) for v in ([0, 2, 5], [4, 9, 5]))
    expected = logits_of(q, keys.double() * scales[:, None].double(), weights)
    found = bridge.fp8_fp4_mqa_logits((q, None), (keys, scales), weights, first, end, 7)
    assert found.shape == (3, 7)
    for token in range(3):
        seen = expected[token, first[token] : end[token]]
        torch.testing.assert_close(found[token, : len(seen)].double(), seen, rtol=1e-3, atol=1e-2)
    with pytest.raises(ValueError, match="^q: "):
        bridge.fp8_fp4_mqa_logits((q, scales), (keys, scales), weights, first, end, 7)


@pytest.mark.parametrize("by_token", [False, True])
def test_logits_of_pages_are_those_of_each_token(by_token):
    q, weights = e4m3(2, 2, 64, 128), drawn(4, 64, seed=4)
    keys, scales = e4m3(3, 32, 128, seed=2), drawn(3, 32, seed=3).abs()
    block = torch.cat([keys.view(torch.uint8).flatten(1), scales.view(torch.uint8)], 1)
    pages = block.view(3, 32, 1, 132)
    table = torch.tensor([[2, 0], [1, 0]], dtype=torch.int32)
    lengths = torch.tensor([39, 3], dtype=torch.int32)
    of_tokens = torch.tensor([[38, 39], [2, 3]], dtype=torch.int32)
    found = bridge.fp8_fp4_paged_mqa_logits(
        (q, None), pages, weights, of_tokens if by_token else lengths, table, None, 64
    )
    for request in range(2):
        own = table[request].long()
        row = (keys[own].double() * scales[own][..., None].double()).reshape(-1, 128)
        for token in range(2):
            place, seen = 2 * request + token, of_tokens[request, token]
            expected = logits_of(q[request, token][None], row, weights[place][None])[0]
            own_logits = found[place, :seen].double()
            torch.testing.assert_close(own_logits, expected[:seen], rtol=1e-3, atol=1e-2)


def turned(x, angles):
    """Adjacent pairs of the last 64 channels, turned."""
    pairs = x[..., 448:].double().unflatten(-1, (32, 2))
    cos, sin = angles[..., :32].double(), angles[..., 32:].double()
    first, second = pairs[..., 0], pairs[..., 1]
    pairs = torch.stack([first * cos - second * sin, first * sin + second * cos], -1)
    return torch.cat([x[..., :448].double(), pairs.flatten(-2)], -1)


def test_queries_are_normed_and_turned_and_rows_of_padding_are_not_written():
    q, kv = drawn(4, 2, WIDTH).bfloat16(), drawn(4, WIDTH, seed=2).bfloat16()
    cache = torch.full((1, ROWS * bridge.ROW_BYTES + 16), 7, dtype=torch.uint8)
    positions = torch.tensor([3, 1, 0, 4])
    found, table = insert(q, kv, cache, torch.tensor([2, -1]), positions, heads=5)
    assert found.shape == (4, 5, WIDTH) and not found[:, 2:].any()
    normed = q.double() * torch.rsqrt(q.double().square().mean(-1, keepdim=True) + 1e-6)
    expected = turned(normed, table[positions][:, None])
    torch.testing.assert_close(found[:, :2].double(), expected, rtol=2**-7, atol=2**-9)
    data = cache[0, : ROWS * 576].view(ROWS, 576)
    assert (data[[0, 1, 3]] == 7).all() and not (data[2] == 7).all() and (cache[0, -16:] == 7).all()
    row = data[2, 448:].view(torch.bfloat16).double()
    torch.testing.assert_close(row, turned(kv[0], table[3])[448:], rtol=2**-7, atol=2**-9)
    with pytest.raises(ValueError, match="^k_cache: "):
        insert(q, kv, cache[:, :-40], torch.tensor([0]))
    with pytest.raises(ValueError, match="^q_head_padded: "):
        insert(q, kv, cache, torch.tensor([0]), positions)


INSERT = "fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert"


@pytest.fixture
def stand_in(monkeypatch):
    """Modules with the names of vLLM's, whose functions say that they were called."""

    def module(name, **functions):
        made = types.ModuleType(name)
        made.__dict__.update(functions, __path__=[])
        monkeypatch.setitem(sys.modules, name, made)
        return made

    def flash_mla_with_kvcache(*_, **__):
        return "vLLM's"

    for name in ("vllm", "vllm.v1", "vllm.utils", "vllm.v1.attention", "vllm.v1.attention.ops"):
        module(name)
    module("vllm.v1.attention.ops.flashmla", flash_mla_with_kvcache=flash_mla_with_kvcache)
    monkeypatch.setattr(torch.ops._C, INSERT, lambda *_: "vLLM's", raising=False)
    # A module that has taken the function by its name.
    backend = module("vllm.backend", flash_mla_with_kvcache=flash_mla_with_kvcache)
    yield backend
    bridge.uninstall()


def test_the_functions_take_the_place_of_vllms_in_every_module_and_give_it_back(stand_in):
    theirs = stand_in.flash_mla_with_kvcache
    inserts = getattr(torch.ops._C, INSERT)
    assert bridge.install() == ["flash_mla_with_kvcache", INSERT]
    assert stand_in.flash_mla_with_kvcache is bridge.flash_mla_with_kvcache
    assert getattr(torch.ops._C, INSERT) is getattr(bridge, INSERT)
    bridge.uninstall()
    assert stand_in.flash_mla_with_kvcache is theirs and getattr(torch.ops._C, INSERT) is inserts
    with pytest.raises(ValueError, match="only: fp8_fp4_mqa_logits: this vLLM has no such"):
        bridge.install(["fp8_fp4_mqa_logits"])
    with pytest.raises(ValueError, match="only: nothing: it must be one of"):
        bridge.install(["nothing"])
    assert stand_in.flash_mla_with_kvcache is theirs


def test_what_these_kernels_are_not_for_goes_to_vllm_only_where_that_is_asked_for(stand_in):
    dense = (drawn(1, 1, 2, WIDTH).bfloat16(), store(1)[0], None, None, WIDTH)
    bridge.install()
    with pytest.raises(ValueError, match="^indices: "):
        stand_in.flash_mla_with_kvcache(*dense)
    bridge.install(fallback=True)
    with pytest.warns(UserWarning, match="vLLM's own is used: indices: "):
        assert stand_in.flash_mla_with_kvcache(*dense) == "vLLM's"


def test_the_plugin_does_nothing_unless_its_variable_is_set(stand_in, monkeypatch):
    theirs = stand_in.flash_mla_with_kvcache
    for value in (None, "", "0"):
        monkeypatch.delenv(bridge.VARIABLE, raising=False)
        if value is not None:
            monkeypatch.setenv(bridge.VARIABLE, value)
        bridge.plugin()
        assert stand_in.flash_mla_with_kvcache is theirs
    monkeypatch.setenv(bridge.VARIABLE, "flash_mla_with_kvcache")
    bridge.plugin()
    assert stand_in.flash_mla_with_kvcache is bridge.flash_mla_with_kvcache


FLASH_MLA, DEEP_GEMM = "vllm.v1.attention.ops.flashmla", "vllm.utils.deep_gemm"
SOURCES = {
    "vllm.third_party.flashmla.flash_mla_interface": bridge.PLACES[FLASH_MLA],
    DEEP_GEMM: bridge.PLACES[DEEP_GEMM],
}


def parameters(module, name):
    """Of a function, read from the file: extensions in C that the module wants may be missing."""
    folder, *rest = module.split(".")
    root = pathlib.Path(importlib.util.find_spec(folder).origin).parent
    tree = ast.parse(root.joinpath(*rest).with_suffix(".py").read_text())
    found = [one for one in tree.body if isinstance(one, ast.FunctionDef) and one.name == name]
    return [argument.arg for argument in found[0].args.args]


def test_the_interface_is_that_of_the_vllm_that_is_installed():
    pytest.importorskip("vllm", reason="vllm is not installed")
    try:
        for module, names in SOURCES.items():
            for name in names:
                own = list(inspect.signature(getattr(bridge, name)).parameters)
                assert own == parameters(module, name), name
        functions = [name for names in SOURCES.values() for name in names]
        assert bridge.install(functions) == functions
    finally:
        bridge.uninstall()
