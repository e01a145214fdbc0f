"""The sparse kernels of `flash_mla` by their formula, which ask of their arguments what the real ones ask."""

import math
import struct

import torch


def attend(q, rows, sink, scale):
    """Output, largest logit and lse of one query over rows."""
    logits = [scale * sum(a * b for a, b in zip(q, row)) for row in rows]
    if not logits:
        return [0.0] * 512, -math.inf, math.inf
    largest = max(logits)
    weights = [math.exp(logit - largest) for logit in logits]
    total = sum(weights)
    share = 1.0 / (1.0 + math.exp(min(sink - largest - math.log(total), 700.0))) if sink < math.inf else 0.0
    out = [sum(w * row[i] for w, row in zip(weights, rows)) * share / total for i in range(512)]
    return out, largest, largest + math.log(total)


def checked(q, heads, sink, indices, slots, lengths, limit):
    assert q.dtype is torch.bfloat16 and heads in (64, 128), heads
    assert sink is None or (sink.shape == (heads,) and sink.dtype is torch.float32)
    assert indices.dtype is torch.int32 and slots > 0 and slots % 128 == 0, slots
    assert all(-1 <= index < limit for index in indices.values()), "an index that is neither a row nor -1"
    assert lengths is None or all(0 <= length <= slots for length in lengths.values()), "a length beyond the list"


def named(indices, slots, at, length):
    return [index for index in indices[at * slots : at * slots + length] if index >= 0]


def flash_mla_sparse_fwd(q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None):
    (tokens, heads, width), (keys, kv_heads, kv_width) = q.shape, kv.shape
    slots = indices.shape[2]
    checked(q, heads, attn_sink, indices, slots, topk_length, keys)
    assert width in (512, 576) and (kv_heads, kv_width) == (1, width) and d_v == 512
    assert indices.shape[:2] == (tokens, 1) and (topk_length is None or topk_length.shape == (tokens,))
    queries, rows, lists = q.values(), kv.values(), indices.values()
    keys = [rows[i * width : (i + 1) * width] for i in range(keys)]
    sinks = attn_sink.values() if attn_sink is not None else [-math.inf] * heads
    out, largest, lse = [], [], []
    for token in range(tokens):
        length = slots if topk_length is None else topk_length.values()[token]
        for index in lists[token * slots + length : (token + 1) * slots]:
            assert index < 0 or not any(x != x for x in keys[index]), "NaN in a row that is named behind the length"
        chosen = [keys[index] for index in named(lists, slots, token, length)]
        for head in range(heads):
            at = (token * heads + head) * width
            o, m, e = attend(queries[at : at + width], chosen, sinks[head], sm_scale)
            out += o
            largest.append(m)
            lse.append(e)
    shape = (tokens, heads)
    result = lambda values: torch.Tensor(values, shape, torch.float32)
    return torch.Tensor(out, (*shape, 512), torch.bfloat16), result(largest), result(lse)


class Metadata:
    used = None


def get_mla_metadata():
    return Metadata(), None


def e4m3(code):
    sign, exponent, fraction = code >> 7, code >> 3 & 15, code & 7
    if exponent == 15 and fraction == 7:
        return math.nan
    value = math.ldexp(8 + fraction, exponent - 10) if exponent else math.ldexp(fraction, -9)
    return -value if sign else value


def row(cache, page_size, index):
    """A row of a cache, by the places that its format gives it."""
    page, at = divmod(index, page_size)
    base = cache.offset + page * cache.stride(0)
    byte = lambda place: cache.storage[base + place]
    scales = [byte(page_size * 576 + at * 8 + group) for group in range(7)]
    channels = []
    for i in range(448):
        scale = math.nan if scales[i // 64] == 255 else math.ldexp(1.0, scales[i // 64] - 127)
        channels.append(torch.bf16(e4m3(byte(at * 576 + i)) * scale))
    pairs = bytes(byte(at * 576 + 448 + i) for i in range(128))
    return channels + [struct.unpack("<f", b"\0\0" + pairs[i : i + 2])[0] for i in range(0, 128, 2)]


def flash_mla_with_kvcache(
    q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits=None, softmax_scale=None,
    causal=False, is_fp8_kvcache=False, indices=None, attn_sink=None, extra_k_cache=None, extra_indices_in_kvcache=None,
    topk_length=None, extra_topk_length=None,
):  # fmt: skip
    batch, queries, heads, width = q.shape
    assert (width, head_dim_v, block_table, cache_seqlens, num_splits) == (512, 512, None, None, None)
    assert is_fp8_kvcache and not causal and isinstance(tile_scheduler_metadata, Metadata)
    stores = [(k_cache, indices, topk_length)]
    if extra_k_cache is not None:
        stores.append((extra_k_cache, extra_indices_in_kvcache, extra_topk_length))
    # The metadata are of one set of shapes.
    shapes = [(cache.shape, lists.shape) for cache, lists, _ in stores]
    assert tile_scheduler_metadata.used in (None, shapes)
    tile_scheduler_metadata.used = shapes
    known, out, lse = {}, [], []
    for number, (cache, lists, lengths) in enumerate(stores):
        pages, page_size, kv_heads, row_bytes = cache.shape
        assert pages > 0 and (kv_heads, row_bytes) == (1, 584) and cache.stride(1) == 584 and cache.stride(0) % 576 == 0
        assert lists.shape[:2] == (batch, queries) and (lengths is None or lengths.shape == (batch,))
        checked(q, heads, attn_sink, lists, lists.shape[2], lengths, pages * page_size)
        for index in {index for index in lists.values() if index >= 0}:
            known[number, index] = row(cache, page_size, index)
    values, sinks = q.values(), attn_sink.values() if attn_sink is not None else [-math.inf] * heads
    for token in range(batch * queries):
        chosen = []
        for number, (_, lists, lengths) in enumerate(stores):
            slots = lists.shape[2]
            length = slots if lengths is None else lengths.values()[token // queries]
            chosen += [known[number, index] for index in named(lists.values(), slots, token, length)]
        for head in range(heads):
            at = (token * heads + head) * 512
            o, _, e = attend(values[at : at + 512], chosen, sinks[head], softmax_scale)
            out += o
            lse.append(e)
    shape = (batch, queries, heads)
    return torch.Tensor(out, (*shape, 512), torch.bfloat16), torch.Tensor(lse, shape, torch.float32).transpose(1, 2)
