"""These kernels under vLLM: its sparse attention, its indexer's logits and its cache writes.

    DSV4_PARITY_VLLM=1 vllm serve deepseek-ai/DeepSeek-V4-Flash

With this variable the plugin replaces what vLLM calls for DeepSeek-V4, in every process. A list
such as `DSV4_PARITY_VLLM=flash_mla_with_kvcache` replaces some of it. From Python, before a model
is loaded or after:

    import dsv4_parity.vllm
    dsv4_parity.vllm.install()

The functions have the interface of vLLM 0.33 on an NVIDIA GPU of Hopper's kind:

- `flash_mla_sparse_fwd`, `flash_mla_with_kvcache`: sparse prefill, and decode over FP8 stores with
  rows of 584 bytes (448 e4m3, 64 bf16, 8 bytes of scales behind the rows of a page);
- `fp8_fp4_mqa_logits`, `fp8_fp4_paged_mqa_logits`, with FP8 operands;
- `fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert`: norm and rotation of queries, and rows of
  K = V turned, quantized and written to such stores. Here these are three kernels.

A call that these kernels are not for, such as dense decode or operands in FP4, is a ValueError that
names the argument. With `install(fallback=True)` vLLM's own function does it, and a warning says so
once. Results differ from vLLM's in the last bits: sums have other orders.
"""

import functools
import importlib
import os
import sys
import warnings

try:
    import torch
except ImportError as error:
    raise ImportError("dsv4_parity.vllm needs torch") from error

from dsv4_parity import ops

__all__ = [
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "fp8_fp4_mqa_logits",
    "fp8_fp4_paged_mqa_logits",
    "fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert",
    "install",
    "uninstall",
]

#: Channels of a row in e4m3 and in bf16, and bytes of a row with its scales.
NOPE_DIM, ROPE_DIM, ROW_BYTES = 448, 64, 584

#: Blocks of a decode: so many that its parts do not follow the batch.
INVARIANT_BLOCKS = 1 << 24

#: Which functions vLLM has where. Operators of its C extension are attributes, too.
PLACES = {
    "vllm.v1.attention.ops.flashmla": ("flash_mla_sparse_fwd", "flash_mla_with_kvcache"),
    "vllm.utils.deep_gemm": ("fp8_fp4_mqa_logits", "fp8_fp4_paged_mqa_logits"),
    "torch.ops._C": ("fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert",),
}

VARIABLE = "DSV4_PARITY_VLLM"


def _demand(holds, argument, value, why):
    if not holds:
        raise ValueError(f"{argument}: {value}: {why}")


def _bytes(tensor):
    return tensor if tensor.dtype == torch.uint8 else tensor.view(torch.uint8)


def _pages(cache, argument, row_bytes):
    """Pages `[num_blocks, rows, 1, bytes of a row]` as `[num_blocks, bytes]`; rows of a page."""
    pages, shape = _bytes(cache), tuple(cache.shape)
    pages = pages.flatten(2) if pages.dim() == 4 else pages
    _demand(pages.dim() == 3, argument, shape, "it must be [num_blocks, rows, 1, bytes]")
    _demand(pages.shape[2] == row_bytes, argument, shape, f"a row must have {row_bytes} bytes")
    return pages.flatten(1), pages.shape[1]


def flash_mla_sparse_fwd(
    q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None, out=None
):
    """Attention of each token over its list of keys: `out`, `max_logits`, `lse`.

    Args:
        q: [num_tokens, num_heads, head_dim] bf16.
        kv: [num_keys, 1, head_dim] bf16; the first `d_v` channels are the values.
        indices: [num_tokens, 1, topk] i32; what names no key is skipped.
        attn_sink: [num_heads] f32, or None.
        topk_length: [num_tokens] i32, or None.
        out: Where `out` goes: [num_tokens, num_heads, d_v] bf16, or None.
    """
    for name, tensor in (("kv", kv), ("indices", indices)):
        shape = tuple(tensor.shape)
        _demand(len(shape) == 3 and shape[1] == 1, name, shape, "there is one head of keys")
    result = ops.sparse_attention(
        q, kv[:, 0], indices[:, 0], sink=attn_sink, topk_length=topk_length,
        softmax_scale=sm_scale, v_dim=d_v, out=None if out is None else {"out": out},
    )  # fmt: skip
    return result.out, result.max_logits, result.lse


def flash_mla_with_kvcache(
    q,
    k_cache,
    block_table,
    cache_seqlens,
    head_dim_v,
    tile_scheduler_metadata=None,
    num_splits=None,
    softmax_scale=None,
    causal=False,
    is_fp8_kvcache=False,
    indices=None,
    attn_sink=None,
    extra_k_cache=None,
    extra_indices_in_kvcache=None,
    topk_length=None,
    extra_topk_length=None,
    out=None,
    enable_batch_invariant=False,
):
    """Attention of decoded tokens over one or two FP8 stores: `out`, `lse` [batch, num_heads, s_q].

    Args:
        q: [batch, s_q, num_heads, 512] bf16.
        k_cache, extra_k_cache: [num_blocks, rows, 1, 584] bytes; blocks may be padded.
        indices, extra_indices_in_kvcache: [batch, s_q, topk] i32: block * rows + row.
        topk_length, extra_topk_length: [batch] i32, or None.
        attn_sink: [num_heads] f32, or None.
        enable_batch_invariant: whether a token's bits must not depend on the batch.
        block_table, cache_seqlens, tile_scheduler_metadata, num_splits: not read.
    """
    _demand(indices is not None, "indices", indices, "these kernels attend to lists")
    _demand(is_fp8_kvcache, "is_fp8_kvcache", is_fp8_kvcache, "the stores are FP8")
    _demand(not causal, "causal", causal, "lists say what is seen")
    width = NOPE_DIM + ROPE_DIM
    _demand(q.shape[-1] == width, "q", tuple(q.shape), f"heads have {width} channels")
    _demand(head_dim_v == width, "head_dim_v", head_dim_v, f"values are keys: {width}")
    window, rows = _pages(k_cache, "k_cache", ROW_BYTES)
    extra = {}
    if extra_k_cache is not None:
        pages, extra_rows = _pages(extra_k_cache, "extra_k_cache", ROW_BYTES)
        extra = {
            "compressed": pages,
            "compressed_indices": extra_indices_in_kvcache,
            "compressed_length": extra_topk_length,
            "compressed_page_size": extra_rows,
        }
    if enable_batch_invariant:
        extra["num_blocks"] = INVARIANT_BLOCKS
    result = ops.decode_attention(
        q, window, indices, sink=attn_sink, window_length=topk_length, window_page_size=rows,
        nope_dim=NOPE_DIM, rope_dim=ROPE_DIM, **extra,
        softmax_scale=q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale,
        out=None if out is None else {"out": out},
    )  # fmt: skip
    return result.out, result.lse.transpose(1, 2)


def _of_fp8(q):
    values, scales = q
    _demand(scales is None, "q", "with scales", "operands are FP8")
    return _bytes(values)


def fp8_fp4_mqa_logits(q, kv, weights, cu_seqlen_ks, cu_seqlen_ke, max_seqlen_k):
    """The indexer's logits of a range of keys for each token: [num_tokens, max_seqlen_k] f32.

    Column 0 is the first key of the range; columns behind its last hold anything.

    Args:
        q: [num_tokens, num_heads, 128] e4m3, and None.
        kv: keys [num_keys, 128] e4m3, and their scales [num_keys] f32.
        weights: [num_tokens, num_heads] f32.
        cu_seqlen_ks, cu_seqlen_ke: [num_tokens] i32: the first key, and the one behind the last.
    """
    keys, scales = kv
    return ops.indexer_logits(
        _of_fp8(q), weights, k=_bytes(keys), k_scales=scales.flatten(), ks=cu_seqlen_ks,
        ke=cu_seqlen_ke, columns=max_seqlen_k,
    )  # fmt: skip


def fp8_fp4_paged_mqa_logits(
    q,
    kv_cache,
    weights,
    context_lens,
    block_tables,
    schedule_metadata,
    max_model_len,
    indices=None,
):
    """The indexer's logits of all keys of each request: [batch * next_n, max_model_len] f32.

    Columns behind the last key of a token hold anything.

    Args:
        q: [batch, next_n, num_heads, 128] e4m3, and None.
        kv_cache: [num_blocks, rows, 1, 132] bytes: 128 e4m3 each, and the scales behind all rows.
        weights: [batch * next_n, num_heads] f32.
        context_lens: [batch] i32, keys of the last token, or [batch, next_n], of each.
        block_tables: [batch, blocks] i32.
        schedule_metadata: not read.
    """
    _demand(indices is None, "indices", "given", "all requests of the table are computed")
    values = _of_fp8(q)
    batch, next_n, heads, width = values.shape
    pages, rows = _pages(kv_cache, "kv_cache", width + 4)
    lengths = context_lens
    if lengths.dim() == 1:
        before_last = torch.arange(1 - next_n, 1, dtype=lengths.dtype, device=lengths.device)
        lengths = (lengths[:, None] + before_last).clamp(min=0)
    logits = ops.indexer_logits(
        values, weights.view(batch, next_n, heads), pages=pages, block_table=block_tables,
        context_lens=lengths.contiguous(), page_size=rows, columns=max_model_len,
    )  # fmt: skip
    return logits.view(batch * next_n, max_model_len)


def fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert(
    q, kv, k_cache, slot_mapping, position_ids, cos_sin_cache, q_head_padded, eps, block_size
):
    """Queries over their root mean square and turned; rows of K = V turned, quantized and written.

    Args:
        q: [num_tokens, num_heads, 512] bf16.
        kv: [num_tokens, 512] bf16, normed; rows behind those of `slot_mapping` are padding.
        k_cache: [num_blocks, bytes] u8; blocks may be padded.
        slot_mapping: [num_tokens] i64; -1 for none.
        position_ids: [num_tokens] i64: rows of `cos_sin_cache`.
        cos_sin_cache: [positions, 64] f32: cosines and then sines.
        q_head_padded: Heads of the result: those that q does not have are zero.

    Returns:
        [num_tokens, q_head_padded, 512] bf16.
    """
    shape, why = tuple(k_cache.shape), f"a block must have {block_size} rows of {ROW_BYTES} bytes"
    _demand(len(shape) == 2 and shape[1] >= block_size * ROW_BYTES, "k_cache", shape, why)
    heads = q.shape[1]
    _demand(q_head_padded >= heads, "q_head_padded", q_head_padded, f"q has {heads} heads")
    half, written = ROPE_DIM // 2, slot_mapping.shape[0]
    rows = cos_sin_cache[position_ids]
    cos, sin = rows[:, :half], rows[:, half:]
    result = q.new_zeros(q.shape[0], q_head_padded, q.shape[2])
    ops.query_norm_rope(q, cos, sin, eps=eps, out={"y": result[:, :heads]})
    # The operator also builds a table, of as many positions as the one that it reads.
    table = {
        "inv_freq": rows.new_zeros(half),
        "table_positions": torch.zeros(written, dtype=torch.int32, device=q.device),
    }
    turned = ops.rope(kv[:written, None], cos[:written], sin[:written], **table, inverse=False).y
    ops.kv_cache_write(
        turned[:, 0], slot_mapping.to(torch.int32), _bytes(k_cache)[:, : block_size * ROW_BYTES],
        nope_dim=NOPE_DIM, rope_dim=ROPE_DIM, page_size=block_size,
    )  # fmt: skip
    return result


#: What was replaced: its name, vLLM's own function, and what took its place.
_replaced = []


def _with_fallback(ours, theirs):
    """Ours, and theirs for the calls that ours are not for."""
    told = set()

    @functools.wraps(ours)
    def either(*arguments, **named):
        try:
            return ours(*arguments, **named)
        except (TypeError, ValueError) as error:
            if str(error) not in told:
                told.add(str(error))
                warnings.warn(f"{ours.__name__}: vLLM's own is used: {error}", stacklevel=2)
            return theirs(*arguments, **named)

    return either


def _place(name):
    """The module, or the operators of a C extension, of this name; None if it is not there."""
    if name == "torch.ops._C":
        return torch.ops._C
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _put(theirs, ours):
    """Puts a function in the place of another in every module of vLLM that has it."""
    modules = [m for name, m in list(sys.modules.items()) if name.split(".")[0] == "vllm"]
    for module in [*modules, torch.ops._C]:
        for name, value in list(vars(module).items()):
            if value is theirs:
                setattr(module, name, ours)


def install(only=None, fallback=False):
    """Puts these functions in the place of vLLM's; returns their names.

    Args:
        only: Names of those to replace; all that this vLLM has if None.
        fallback: Whether vLLM's own function does what these kernels are not for.

    Raises:
        ValueError: for a name that is none of these, or that this vLLM lacks.
    """
    known = [name for names in PLACES.values() for name in names]
    wanted = known if only is None else list(only)
    for name in wanted:
        _demand(name in known, "only", name, f"it must be one of {', '.join(known)}")
    uninstall()
    for place, names in PLACES.items():
        module = _place(place)
        for name in names:
            theirs = getattr(module, name, None)
            if name in wanted and theirs is not None:
                ours = globals()[name]
                ours = _with_fallback(ours, theirs) if fallback else ours
                _replaced.append((name, theirs, ours))
                _put(theirs, ours)
    done = [name for name, *_ in _replaced]
    missing = [name for name in wanted if name not in done]
    if missing and (only is not None or not done):
        uninstall()
        raise ValueError(f"only: {', '.join(missing)}: this vLLM has no such function")
    return done


def uninstall():
    """Puts vLLM's own functions back."""
    while _replaced:
        _, theirs, ours = _replaced.pop()
        _put(ours, theirs)


def plugin():
    """vLLM calls this in each of its processes; it does nothing unless DSV4_PARITY_VLLM is set."""
    wanted = os.environ.get(VARIABLE, "")
    if wanted not in ("", "0"):
        install(None if wanted == "1" else wanted.split(","))
