"""DeepSeek-V4's operators. Made by `python -m dsv4_parity._stubs`."""

from typing import Any, Literal, NamedTuple

# numpy.ndarray, torch.Tensor, or whatever speaks DLPack.
Tensor = Any

def invariant(enabled: bool = True) -> None: ...
def nvtx(enabled: bool = True) -> None: ...

def embed_streams(
    table: Tensor,
    token_ids: Tensor,
    *,
    num_streams: int = 4,
    vocab_size: int = 129280,
    out: Any = None,
) -> Tensor:
    """The embedding of each token, in each of its residual streams.

    Specification: inference 1.

    Args:
        table: [vocab_size, hidden_size] bf16 or f32.
        token_ids: [num_tokens] i32.
        num_streams: a number; the model's is 4.
        vocab_size: a number; the model's is 129280.
        out: Results to write, as this returns them.

    Returns:
        out: [num_tokens, num_streams, hidden_size] bf16 or f32, as the forward wrote it.
    """
    ...

def embed_streams_backward(
    token_ids: Tensor,
    dout: Tensor,
    *,
    num_streams: int = 4,
    vocab_size: int = 129280,
    out: Any = None,
) -> Tensor:
    """Gradients of `embed_streams`: The embedding of each token, in each of its residual streams.

    Specification: inference 1.

    Args:
        token_ids: [num_tokens] i32.
        dout: [num_tokens, num_streams, hidden_size] bf16 or f32, the gradient of `out`.
        num_streams: a number; the model's is 4.
        vocab_size: a number; the model's is 129280.
        out: Results to write, as this returns them.

    Returns:
        dtable: [vocab_size, hidden_size] f32, the gradient of `table`.
    """
    ...

class MhcMixResult(NamedTuple):
    pre: Tensor
    post: Tensor
    comb: Tensor
    mix: Tensor
    rstd: Tensor

def mhc_mix(
    streams: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    *,
    hc_eps: float = 1e-06,
    norm_eps: float = 1e-06,
    sinkhorn_iters: int = 20,
    out: Any = None,
) -> MhcMixResult:
    """Pre, post and comb of the residual streams: projection, sigmoids, Sinkhorn iteration.

    Specification: inference 2.1, inference 2.2, training 11.1.

    Args:
        streams: [num_tokens, num_streams, hidden_size] bf16.
        fn: [num_columns, num_streams, hidden_size] f32.
        scale: [num_groups] f32.
        base: [num_columns] f32.
        hc_eps: a number; the model's is 1e-06.
        norm_eps: a number; the model's is 1e-06.
        sinkhorn_iters: a number; the model's is 20.
        out: Results to write, as this returns them.

    Returns:
        pre: [num_tokens, num_streams] f32, as the forward wrote it.
        post: [num_tokens, num_streams] f32, as the forward wrote it.
        comb: [num_tokens, source, destination] f32, as the forward wrote it.
        mix: [num_tokens, num_columns] f32, as the forward wrote it.
        rstd: [num_tokens] f32, as the forward wrote it.
    """
    ...

class MhcMixBackwardResult(NamedTuple):
    dstreams: Tensor
    dfn: Tensor
    dscale: Tensor
    dbase: Tensor

def mhc_mix_backward(
    streams: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    mix: Tensor,
    rstd: Tensor,
    dpre: Tensor,
    dpost: Tensor,
    dcomb: Tensor,
    *,
    hc_eps: float = 1e-06,
    sinkhorn_iters: int = 20,
    out: Any = None,
) -> MhcMixBackwardResult:
    """Gradients of `mhc_mix`: Pre, post and comb of the residual streams: projection, sigmoids, Sinkhorn iteration.

    Specification: inference 2.1, inference 2.2, training 11.1.

    Args:
        streams: [num_tokens, num_streams, hidden_size] bf16.
        fn: [num_columns, num_streams, hidden_size] f32.
        scale: [num_groups] f32.
        base: [num_columns] f32.
        mix: [num_tokens, num_columns] f32, as the forward wrote it.
        rstd: [num_tokens] f32, as the forward wrote it.
        dpre: [num_tokens, num_streams] f32, the gradient of `pre`.
        dpost: [num_tokens, num_streams] f32, the gradient of `post`.
        dcomb: [num_tokens, source, destination] f32, the gradient of `comb`.
        hc_eps: a number; the model's is 1e-06.
        sinkhorn_iters: a number; the model's is 20.
        out: Results to write, as this returns them.

    Returns:
        dstreams: [num_tokens, num_streams, hidden_size] bf16, the gradient of `streams`.
        dfn: [num_columns, num_streams, hidden_size] f32, the gradient of `fn`.
        dscale: [num_groups] f32, the gradient of `scale`.
        dbase: [num_columns] f32, the gradient of `base`.
    """
    ...

class MhcPreResult(NamedTuple):
    h: Tensor | None
    y: Tensor | None
    rstd: Tensor | None

def mhc_pre(
    streams: Tensor,
    pre: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float = 1e-06,
    saves_rstd: bool = True,
    out: Any = None,
) -> MhcPreResult:
    """H = pre · streams: what a sublayer reads of the residual streams, with or without the RMSNorm of it.

    Specification: inference 2.3, inference 3, training 11.1, training 11.3.

    Args:
        streams: [num_tokens, num_streams, hidden_size] bf16 or f32.
        pre: [num_tokens, num_streams] f32.
        weight: [hidden_size] f32; may be absent.
        eps: a number; the model's is 1e-06.
        saves_rstd: one of True, False; the model's is True.
        out: Results to write, as this returns them.

    Returns:
        h: [num_tokens, hidden_size] bf16 or f32, as the forward wrote it; may be absent.
        y: [num_tokens, hidden_size] bf16 or f32, as the forward wrote it; may be absent.
        rstd: [num_tokens] f32, as the forward wrote it; may be absent.
    """
    ...

class MhcPreBackwardResult(NamedTuple):
    dstreams: Tensor
    dpre: Tensor
    dweight: Tensor | None

def mhc_pre_backward(
    streams: Tensor,
    pre: Tensor,
    dh: Tensor | None = None,
    weight: Tensor | None = None,
    rstd: Tensor | None = None,
    dy: Tensor | None = None,
    *,
    out: Any = None,
) -> MhcPreBackwardResult:
    """Gradients of `mhc_pre`: H = pre · streams: what a sublayer reads of the residual streams, with or without the RMSNorm of it.

    Specification: inference 2.3, inference 3, training 11.1, training 11.3.

    Args:
        streams: [num_tokens, num_streams, hidden_size] bf16 or f32.
        pre: [num_tokens, num_streams] f32.
        dh: [num_tokens, hidden_size] bf16 or f32, the gradient of `h`; may be absent.
        weight: [hidden_size] f32; may be absent.
        rstd: [num_tokens] f32, as the forward wrote it; may be absent.
        dy: [num_tokens, hidden_size] bf16 or f32, the gradient of `y`; may be absent.
        out: Results to write, as this returns them.

    Returns:
        dstreams: [num_tokens, num_streams, hidden_size] bf16 or f32, the gradient of `streams`.
        dpre: [num_tokens, num_streams] f32, the gradient of `pre`.
        dweight: [hidden_size] f32, the gradient of `weight`; may be absent.
    """
    ...

def mhc_post(
    streams: Tensor,
    y: Tensor,
    post: Tensor,
    comb: Tensor,
    *,
    out: Any = None,
) -> Tensor:
    """Out = comb^T · streams + post ⊗ y: the residual streams of each token behind a sublayer.

    Specification: inference 2.4, training 11.1.

    Args:
        streams: [num_tokens, source, hidden_size] bf16 or f32.
        y: [num_tokens, hidden_size] bf16 or f32.
        post: [num_tokens, destination] f32.
        comb: [num_tokens, source, destination] f32.
        out: Results to write, as this returns them.

    Returns:
        out: [num_tokens, destination, hidden_size] bf16 or f32, as the forward wrote it.
    """
    ...

class MhcPostBackwardResult(NamedTuple):
    dstreams: Tensor
    dy: Tensor
    dpost: Tensor
    dcomb: Tensor

def mhc_post_backward(
    streams: Tensor,
    y: Tensor,
    post: Tensor,
    comb: Tensor,
    dout: Tensor,
    *,
    out: Any = None,
) -> MhcPostBackwardResult:
    """Gradients of `mhc_post`: Out = comb^T · streams + post ⊗ y: the residual streams of each token behind a sublayer.

    Specification: inference 2.4, training 11.1.

    Args:
        streams: [num_tokens, source, hidden_size] bf16 or f32.
        y: [num_tokens, hidden_size] bf16 or f32.
        post: [num_tokens, destination] f32.
        comb: [num_tokens, source, destination] f32.
        dout: [num_tokens, destination, hidden_size] bf16 or f32, the gradient of `out`.
        out: Results to write, as this returns them.

    Returns:
        dstreams: [num_tokens, source, hidden_size] bf16 or f32, the gradient of `streams`.
        dy: [num_tokens, hidden_size] bf16 or f32, the gradient of `y`.
        dpost: [num_tokens, destination] f32, the gradient of `post`.
        dcomb: [num_tokens, source, destination] f32, the gradient of `comb`.
    """
    ...

class MhcPostMixPreResult(NamedTuple):
    out: Tensor
    next_pre: Tensor
    next_post: Tensor
    next_comb: Tensor
    mix: Tensor
    rstd: Tensor
    h: Tensor

def mhc_post_mix_pre(
    streams: Tensor,
    y: Tensor,
    post: Tensor,
    comb: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    *,
    hc_eps: float = 1e-06,
    norm_eps: float = 1e-06,
    separate: bool | None = None,
    sinkhorn_iters: int = 20,
    out: Any = None,
) -> MhcPostMixPreResult:
    """The residual streams behind a sublayer, and of them the next site's coefficients and h = pre · streams.

    Specification: inference 2.1, inference 2.2, inference 2.3, inference 2.4, training 11.1.

    Args:
        streams: [num_tokens, source, hidden_size] bf16.
        y: [num_tokens, hidden_size] bf16.
        post: [num_tokens, destination] f32.
        comb: [num_tokens, source, destination] f32.
        fn: [num_columns, destination, hidden_size] f32.
        scale: [num_groups] f32.
        base: [num_columns] f32.
        hc_eps: a number; the model's is 1e-06.
        norm_eps: a number; the model's is 1e-06.
        separate: one of False, True.
        sinkhorn_iters: a number; the model's is 20.
        out: Results to write, as this returns them.

    Returns:
        out: [num_tokens, destination, hidden_size] bf16, as the forward wrote it.
        next_pre: [num_tokens, destination] f32, as the forward wrote it.
        next_post: [num_tokens, destination] f32, as the forward wrote it.
        next_comb: [num_tokens, source, destination] f32, as the forward wrote it.
        mix: [num_tokens, num_columns] f32, as the forward wrote it.
        rstd: [num_tokens] f32, as the forward wrote it.
        h: [num_tokens, hidden_size] bf16, as the forward wrote it.
    """
    ...

class MhcPostMixPreBackwardResult(NamedTuple):
    dout_total: Tensor
    dstreams: Tensor
    dy: Tensor
    dpost: Tensor
    dcomb: Tensor
    dfn: Tensor
    dscale: Tensor
    dbase: Tensor

def mhc_post_mix_pre_backward(
    streams: Tensor,
    y: Tensor,
    post: Tensor,
    comb: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    out: Tensor,
    next_pre: Tensor,
    mix: Tensor,
    rstd: Tensor,
    dout: Tensor,
    dh: Tensor,
    dnext_post: Tensor,
    dnext_comb: Tensor,
    *,
    hc_eps: float = 1e-06,
    sinkhorn_iters: int = 20,
    out_: Any = None,
) -> MhcPostMixPreBackwardResult:
    """Gradients of `mhc_post_mix_pre`: The residual streams behind a sublayer, and of them the next site's coefficients and h = pre · streams.

    Specification: inference 2.1, inference 2.2, inference 2.3, inference 2.4, training 11.1.

    Args:
        streams: [num_tokens, source, hidden_size] bf16.
        y: [num_tokens, hidden_size] bf16.
        post: [num_tokens, destination] f32.
        comb: [num_tokens, source, destination] f32.
        fn: [num_columns, destination, hidden_size] f32.
        scale: [num_groups] f32.
        base: [num_columns] f32.
        out: [num_tokens, destination, hidden_size] bf16, as the forward wrote it.
        next_pre: [num_tokens, destination] f32, as the forward wrote it.
        mix: [num_tokens, num_columns] f32, as the forward wrote it.
        rstd: [num_tokens] f32, as the forward wrote it.
        dout: [num_tokens, destination, hidden_size] bf16, the gradient of `out`.
        dh: [num_tokens, hidden_size] bf16, the gradient of `h`.
        dnext_post: [num_tokens, destination] f32, the gradient of `next_post`.
        dnext_comb: [num_tokens, source, destination] f32, the gradient of `next_comb`.
        hc_eps: a number; the model's is 1e-06.
        sinkhorn_iters: a number; the model's is 20.
        out_: Results to write, as this returns them.

    Returns:
        dout_total: [num_tokens, destination, hidden_size] bf16, the gradient of `out`.
        dstreams: [num_tokens, source, hidden_size] bf16, the gradient of `streams`.
        dy: [num_tokens, hidden_size] bf16, the gradient of `y`.
        dpost: [num_tokens, destination] f32, the gradient of `post`.
        dcomb: [num_tokens, source, destination] f32, the gradient of `comb`.
        dfn: [num_columns, destination, hidden_size] f32, the gradient of `fn`.
        dscale: [num_groups] f32, the gradient of `scale`.
        dbase: [num_columns] f32, the gradient of `base`.
    """
    ...

class MhcBlockResult(NamedTuple):
    attn_pre: Tensor
    attn_post: Tensor
    attn_comb: Tensor
    attn_mix: Tensor
    attn_rstd: Tensor
    attn_h: Tensor
    attn_u: Tensor
    attn_norm_rstd: Tensor
    attn_y: Tensor
    between: Tensor
    ffn_pre: Tensor
    ffn_post: Tensor
    ffn_comb: Tensor
    ffn_mix: Tensor
    ffn_rstd: Tensor
    ffn_h: Tensor
    ffn_u: Tensor
    ffn_norm_rstd: Tensor
    ffn_y: Tensor
    out: Tensor

def mhc_block(
    streams: Tensor,
    token_topk_to_pos: Tensor,
    attn_fn: Tensor,
    attn_scale: Tensor,
    attn_base: Tensor,
    attn_weight: Tensor,
    attn_add: Tensor,
    ffn_fn: Tensor,
    ffn_scale: Tensor,
    ffn_base: Tensor,
    ffn_weight: Tensor,
    ffn_add: Tensor,
    *,
    hc_eps: float = 1e-06,
    norm_eps: float = 1e-06,
    sinkhorn_iters: int = 20,
    out: Any = None,
) -> MhcBlockResult:
    """A layer as its residual streams see it: two sites, their norms, and stand-ins for their sublayers.

    Specification: inference 2.1, inference 2.2, inference 2.3, inference 2.4, inference 3, training 11.1.

    Args:
        streams: [num_tokens, source, hidden_size] bf16.
        token_topk_to_pos: [num_tokens, topk] i32.
        attn_fn: [num_columns, destination, hidden_size] f32.
        attn_scale: [num_groups] f32.
        attn_base: [num_columns] f32.
        attn_weight: [hidden_size] f32.
        attn_add: [num_tokens, hidden_size] bf16.
        ffn_fn: [num_columns, destination, hidden_size] f32.
        ffn_scale: [num_groups] f32.
        ffn_base: [num_columns] f32.
        ffn_weight: [hidden_size] f32.
        ffn_add: [num_tokens, hidden_size] bf16.
        hc_eps: a number; the model's is 1e-06.
        norm_eps: a number; the model's is 1e-06.
        sinkhorn_iters: a number; the model's is 20.
        out: Results to write, as this returns them.

    Returns:
        attn_pre: [num_tokens, destination] f32, as the forward wrote it.
        attn_post: [num_tokens, destination] f32, as the forward wrote it.
        attn_comb: [num_tokens, source, destination] f32, as the forward wrote it.
        attn_mix: [num_tokens, num_columns] f32, as the forward wrote it.
        attn_rstd: [num_tokens] f32, as the forward wrote it.
        attn_h: [num_tokens, hidden_size] bf16, as the forward wrote it.
        attn_u: [num_tokens, hidden_size] bf16, as the forward wrote it.
        attn_norm_rstd: [num_tokens] f32, as the forward wrote it.
        attn_y: [num_tokens, hidden_size] bf16, as the forward wrote it.
        between: [num_tokens, destination, hidden_size] bf16, as the forward wrote it.
        ffn_pre: [num_tokens, destination] f32, as the forward wrote it.
        ffn_post: [num_tokens, destination] f32, as the forward wrote it.
        ffn_comb: [num_tokens, source, destination] f32, as the forward wrote it.
        ffn_mix: [num_tokens, num_columns] f32, as the forward wrote it.
        ffn_rstd: [num_tokens] f32, as the forward wrote it.
        ffn_h: [num_tokens, hidden_size] bf16, as the forward wrote it.
        ffn_u: [num_tokens, hidden_size] bf16, as the forward wrote it.
        ffn_norm_rstd: [num_tokens] f32, as the forward wrote it.
        ffn_y: [num_tokens, hidden_size] bf16, as the forward wrote it.
        out: [num_tokens, destination, hidden_size] bf16, as the forward wrote it.
    """
    ...

class MhcBlockBackwardResult(NamedTuple):
    dffn_post: Tensor
    dffn_comb: Tensor
    dffn_add: Tensor
    dffn_h: Tensor
    dffn_weight: Tensor
    dffn_fn: Tensor
    dffn_scale: Tensor
    dffn_base: Tensor
    dbetween: Tensor
    dattn_post: Tensor
    dattn_comb: Tensor
    dattn_add: Tensor
    dattn_h: Tensor
    dattn_weight: Tensor
    dattn_fn: Tensor
    dattn_scale: Tensor
    dattn_base: Tensor
    dstreams: Tensor

def mhc_block_backward(
    streams: Tensor,
    attn_fn: Tensor,
    attn_scale: Tensor,
    attn_base: Tensor,
    attn_weight: Tensor,
    ffn_fn: Tensor,
    ffn_scale: Tensor,
    ffn_base: Tensor,
    ffn_weight: Tensor,
    attn_pre: Tensor,
    attn_post: Tensor,
    attn_comb: Tensor,
    attn_mix: Tensor,
    attn_rstd: Tensor,
    attn_h: Tensor,
    attn_norm_rstd: Tensor,
    attn_y: Tensor,
    between: Tensor,
    ffn_pre: Tensor,
    ffn_post: Tensor,
    ffn_comb: Tensor,
    ffn_mix: Tensor,
    ffn_rstd: Tensor,
    ffn_h: Tensor,
    ffn_norm_rstd: Tensor,
    ffn_y: Tensor,
    dout: Tensor,
    *,
    hc_eps: float = 1e-06,
    sinkhorn_iters: int = 20,
    out: Any = None,
) -> MhcBlockBackwardResult:
    """Gradients of `mhc_block`: A layer as its residual streams see it: two sites, their norms, and stand-ins for their sublayers.

    Specification: inference 2.1, inference 2.2, inference 2.3, inference 2.4, inference 3, training 11.1.

    Args:
        streams: [num_tokens, source, hidden_size] bf16.
        attn_fn: [num_columns, destination, hidden_size] f32.
        attn_scale: [num_groups] f32.
        attn_base: [num_columns] f32.
        attn_weight: [hidden_size] f32.
        ffn_fn: [num_columns, destination, hidden_size] f32.
        ffn_scale: [num_groups] f32.
        ffn_base: [num_columns] f32.
        ffn_weight: [hidden_size] f32.
        attn_pre: [num_tokens, destination] f32, as the forward wrote it.
        attn_post: [num_tokens, destination] f32, as the forward wrote it.
        attn_comb: [num_tokens, source, destination] f32, as the forward wrote it.
        attn_mix: [num_tokens, num_columns] f32, as the forward wrote it.
        attn_rstd: [num_tokens] f32, as the forward wrote it.
        attn_h: [num_tokens, hidden_size] bf16, as the forward wrote it.
        attn_norm_rstd: [num_tokens] f32, as the forward wrote it.
        attn_y: [num_tokens, hidden_size] bf16, as the forward wrote it.
        between: [num_tokens, destination, hidden_size] bf16, as the forward wrote it.
        ffn_pre: [num_tokens, destination] f32, as the forward wrote it.
        ffn_post: [num_tokens, destination] f32, as the forward wrote it.
        ffn_comb: [num_tokens, source, destination] f32, as the forward wrote it.
        ffn_mix: [num_tokens, num_columns] f32, as the forward wrote it.
        ffn_rstd: [num_tokens] f32, as the forward wrote it.
        ffn_h: [num_tokens, hidden_size] bf16, as the forward wrote it.
        ffn_norm_rstd: [num_tokens] f32, as the forward wrote it.
        ffn_y: [num_tokens, hidden_size] bf16, as the forward wrote it.
        dout: [num_tokens, destination, hidden_size] bf16, the gradient of `out`.
        hc_eps: a number; the model's is 1e-06.
        sinkhorn_iters: a number; the model's is 20.
        out: Results to write, as this returns them.

    Returns:
        dffn_post: [num_tokens, destination] f32, the gradient of `ffn_post`.
        dffn_comb: [num_tokens, source, destination] f32, the gradient of `ffn_comb`.
        dffn_add: [num_tokens, hidden_size] bf16, the gradient of `ffn_add`.
        dffn_h: [num_tokens, hidden_size] bf16, the gradient of `ffn_h`.
        dffn_weight: [hidden_size] f32, the gradient of `ffn_weight`.
        dffn_fn: [num_columns, destination, hidden_size] f32, the gradient of `ffn_fn`.
        dffn_scale: [num_groups] f32, the gradient of `ffn_scale`.
        dffn_base: [num_columns] f32, the gradient of `ffn_base`.
        dbetween: [num_tokens, destination, hidden_size] bf16, the gradient of `between`.
        dattn_post: [num_tokens, destination] f32, the gradient of `attn_post`.
        dattn_comb: [num_tokens, source, destination] f32, the gradient of `attn_comb`.
        dattn_add: [num_tokens, hidden_size] bf16, the gradient of `attn_add`.
        dattn_h: [num_tokens, hidden_size] bf16, the gradient of `attn_h`.
        dattn_weight: [hidden_size] f32, the gradient of `attn_weight`.
        dattn_fn: [num_columns, destination, hidden_size] f32, the gradient of `attn_fn`.
        dattn_scale: [num_groups] f32, the gradient of `attn_scale`.
        dattn_base: [num_columns] f32, the gradient of `attn_base`.
        dstreams: [num_tokens, source, hidden_size] bf16, the gradient of `streams`.
    """
    ...

class MhcHeadResult(NamedTuple):
    out: Tensor
    mix: Tensor
    rstd: Tensor

def mhc_head(
    streams: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    *,
    hc_eps: float = 1e-06,
    norm_eps: float = 1e-06,
    out: Any = None,
) -> MhcHeadResult:
    """Out = sigmoid(projection) · streams: the residual streams collapsed in front of the final norm.

    Specification: inference 2.5, training 11.1.

    Args:
        streams: [num_tokens, num_streams, hidden_size] bf16.
        fn: [num_columns, num_streams, hidden_size] f32.
        scale: [num_groups] f32.
        base: [num_columns] f32.
        hc_eps: a number; the model's is 1e-06.
        norm_eps: a number; the model's is 1e-06.
        out: Results to write, as this returns them.

    Returns:
        out: [num_tokens, hidden_size] bf16, as the forward wrote it.
        mix: [num_tokens, num_columns] f32, as the forward wrote it.
        rstd: [num_tokens] f32, as the forward wrote it.
    """
    ...

class MhcHeadBackwardResult(NamedTuple):
    dstreams: Tensor
    dfn: Tensor
    dscale: Tensor
    dbase: Tensor

def mhc_head_backward(
    streams: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    mix: Tensor,
    rstd: Tensor,
    dout: Tensor,
    *,
    hc_eps: float = 1e-06,
    out: Any = None,
) -> MhcHeadBackwardResult:
    """Gradients of `mhc_head`: Out = sigmoid(projection) · streams: the residual streams collapsed in front of the final norm.

    Specification: inference 2.5, training 11.1.

    Args:
        streams: [num_tokens, num_streams, hidden_size] bf16.
        fn: [num_columns, num_streams, hidden_size] f32.
        scale: [num_groups] f32.
        base: [num_columns] f32.
        mix: [num_tokens, num_columns] f32, as the forward wrote it.
        rstd: [num_tokens] f32, as the forward wrote it.
        dout: [num_tokens, hidden_size] bf16, the gradient of `out`.
        hc_eps: a number; the model's is 1e-06.
        out: Results to write, as this returns them.

    Returns:
        dstreams: [num_tokens, num_streams, hidden_size] bf16, the gradient of `streams`.
        dfn: [num_columns, num_streams, hidden_size] f32, the gradient of `fn`.
        dscale: [num_groups] f32, the gradient of `scale`.
        dbase: [num_columns] f32, the gradient of `base`.
    """
    ...

class RmsNormResult(NamedTuple):
    y: Tensor
    rstd: Tensor

def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float = 1e-06,
    saves_rstd: bool = True,
    out: Any = None,
) -> RmsNormResult:
    """Y = weight · x / sqrt(mean(x²) + eps), row by row, weighted or not.

    Specification: inference 3, training 11.3.

    Args:
        x: [num_rows, width] bf16 or f32.
        weight: [width] bf16 or f32; may be absent.
        eps: a number; the model's is 1e-06.
        saves_rstd: one of True, False; the model's is True.
        out: Results to write, as this returns them.

    Returns:
        y: [num_rows, width] bf16 or f32, as the forward wrote it.
        rstd: [num_rows] f32, as the forward wrote it.
    """
    ...

class RmsNormBackwardResult(NamedTuple):
    dx: Tensor
    dweight: Tensor | None

def rms_norm_backward(
    x: Tensor,
    rstd: Tensor,
    dy: Tensor,
    weight: Tensor | None = None,
    *,
    out: Any = None,
) -> RmsNormBackwardResult:
    """Gradients of `rms_norm`: Y = weight · x / sqrt(mean(x²) + eps), row by row, weighted or not.

    Specification: inference 3, training 11.3.

    Args:
        x: [num_rows, width] bf16 or f32.
        rstd: [num_rows] f32, as the forward wrote it.
        dy: [num_rows, width] bf16 or f32, the gradient of `y`.
        weight: [width] bf16 or f32; may be absent.
        out: Results to write, as this returns them.

    Returns:
        dx: [num_rows, width] bf16 or f32, the gradient of `x`.
        dweight: [width] f32, the gradient of `weight`; may be absent.
    """
    ...

class RopeResult(NamedTuple):
    y: Tensor
    table_cos: Tensor
    table_sin: Tensor

def rope(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    inv_freq: Tensor,
    table_positions: Tensor,
    positions: Tensor | None = None,
    *,
    inverse: bool | None = None,
    rope_dim: int = 64,
    out: Any = None,
) -> RopeResult:
    """Rotates the last channels of each head by position, in adjacent pairs; builds the tables.

    Specification: inference 4, training 8.

    Args:
        x: [num_tokens, num_heads, head_dim] bf16 or f32.
        cos: [num_tokens, half_rope_dim] f32.
        sin: [num_tokens, half_rope_dim] f32.
        inv_freq: [half_rope_dim] f32.
        table_positions: [num_positions] i32.
        positions: [num_tokens] i32; may be absent.
        inverse: one of False, True.
        rope_dim: a number; the model's is 64.
        out: Results to write, as this returns them.

    Returns:
        y: [num_tokens, num_heads, head_dim] bf16 or f32, as the forward wrote it.
        table_cos: [num_positions, half_rope_dim] f32, as the forward wrote it.
        table_sin: [num_positions, half_rope_dim] f32, as the forward wrote it.
    """
    ...

def rope_backward(
    cos: Tensor,
    sin: Tensor,
    dy: Tensor,
    positions: Tensor | None = None,
    *,
    inverse: bool | None = None,
    rope_dim: int = 64,
    out: Any = None,
) -> Tensor:
    """Gradients of `rope`: Rotates the last channels of each head by position, in adjacent pairs; builds the tables.

    Specification: inference 4, training 8.

    Args:
        cos: [num_tokens, half_rope_dim] f32.
        sin: [num_tokens, half_rope_dim] f32.
        dy: [num_tokens, num_heads, head_dim] bf16 or f32, the gradient of `y`.
        positions: [num_tokens] i32; may be absent.
        inverse: one of False, True.
        rope_dim: a number; the model's is 64.
        out: Results to write, as this returns them.

    Returns:
        dx: [num_tokens, num_heads, head_dim] bf16 or f32, the gradient of `x`.
    """
    ...

class QuantizeFp8Result(NamedTuple):
    codes: Tensor | None
    scales: Tensor | None
    y: Tensor | None

def quantize_fp8(
    x: Tensor | None = None,
    codes: Tensor | None = None,
    scales: Tensor | None = None,
    *,
    dtype: Literal['bf16', 'f32'] = 'bf16',
    group: Literal['row128', 'row64', 'square128'] | None = None,
    layout: Literal['plain', 'mn_major', 'blocked'] | None = None,
    scale: Literal['e8m0', 'fp32', 'power_of_two'] | None = None,
    out: Any = None,
) -> QuantizeFp8Result:
    """Rows and squares as e4m3 codes with scales of 64, 128 or 128 by 128 numbers, and back.

    Specification: inference 5.3, inference 5.4, inference 5.7.

    Args:
        x: [num_rows, width] bf16 or f32; may be absent.
        codes: [num_rows, width] u8; may be absent.
        scales: [num_words, aligned_rows] f32 or i32 or u8; may be absent.
        dtype: one of bf16, f32; the model's is bf16.
        group: one of row128, row64, square128.
        layout: one of plain, mn_major, blocked.
        scale: one of e8m0, fp32, power_of_two.
        out: Results to write, as this returns them.

    Returns:
        codes: [num_rows, width] u8, as the forward wrote it; may be absent.
        scales: [num_rows, num_groups] f32 or i32 or u8, as the forward wrote it; may be absent.
        y: [num_rows, width] bf16 or f32, as the forward wrote it; may be absent.
    """
    ...

class QuantizeMxfp4Result(NamedTuple):
    codes: Tensor | None
    scales: Tensor | None
    y: Tensor | None

def quantize_mxfp4(
    x: Tensor | None = None,
    codes: Tensor | None = None,
    scales: Tensor | None = None,
    *,
    dtype: Literal['bf16', 'f32'] = 'bf16',
    layout: Literal['blocked', 'mn_major', 'plain'] | None = None,
    width: int | None = None,
    out: Any = None,
) -> QuantizeMxfp4Result:
    """Rows as e2m1 codes with e8m0 scales of 32 numbers, and back.

    Specification: inference 5.3, inference 5.4, inference 5.7.

    Args:
        x: [num_rows, width] bf16 or f32; may be absent.
        codes: [num_rows, code_bytes] u8; may be absent.
        scales: [num_rows, num_groups] i32 or u8; may be absent.
        dtype: one of bf16, f32; the model's is bf16.
        layout: one of blocked, mn_major, plain.
        width: a number.
        out: Results to write, as this returns them.

    Returns:
        codes: [num_rows, code_bytes] u8, as the forward wrote it; may be absent.
        scales: [row_tiles, group_tiles, tile_bytes] i32 or u8, as the forward wrote it; may be absent.
        y: [num_rows, width] bf16 or f32, as the forward wrote it; may be absent.
    """
    ...

class QuantizeNvfp4Result(NamedTuple):
    codes: Tensor | None
    scales: Tensor | None
    y: Tensor | None
    global_scale: Tensor | None

def quantize_nvfp4(
    x: Tensor | None = None,
    global_scale: Tensor | None = None,
    codes: Tensor | None = None,
    scales: Tensor | None = None,
    *,
    dtype: Literal['bf16', 'f32'] = 'bf16',
    layout: Literal['blocked', 'mn_major', 'plain'] | None = None,
    width: int | None = None,
    out: Any = None,
) -> QuantizeNvfp4Result:
    """Rows as e2m1 codes with e4m3 scales of 16 numbers and one of the tensor, that one, and back.

    Specification: inference 5.3, inference 5.6, inference 5.7.

    Args:
        x: [num_rows, width] bf16 or f32; may be absent.
        global_scale: [one] f32; may be absent.
        codes: [num_rows, code_bytes] u8; may be absent.
        scales: [num_rows, num_groups] i32 or u8; may be absent.
        dtype: one of bf16, f32; the model's is bf16.
        layout: one of blocked, mn_major, plain.
        width: a number.
        out: Results to write, as this returns them.

    Returns:
        codes: [num_rows, code_bytes] u8, as the forward wrote it; may be absent.
        scales: [row_tiles, group_tiles, tile_bytes] i32 or u8, as the forward wrote it; may be absent.
        y: [num_rows, width] bf16 or f32, as the forward wrote it; may be absent.
        global_scale: [one] f32, as the forward wrote it; may be absent.
    """
    ...

class ScaleSwizzleResult(NamedTuple):
    tiles: Tensor | None
    scales: Tensor | None

def scale_swizzle(
    scales: Tensor | None = None,
    tiles: Tensor | None = None,
    *,
    num_groups: int | None = None,
    num_rows: int | None = None,
    out: Any = None,
) -> ScaleSwizzleResult:
    """Rows of byte scales to tiles of 128 rows by 4 groups, and back.

    Specification: inference 5.7.

    Args:
        scales: [num_rows, num_groups] u8; may be absent.
        tiles: [row_tiles, group_tiles, tile_bytes] u8; may be absent.
        num_groups: a number.
        num_rows: a number.
        out: Results to write, as this returns them.

    Returns:
        tiles: [row_tiles, group_tiles, tile_bytes] u8, as the forward wrote it; may be absent.
        scales: [num_rows, num_groups] u8, as the forward wrote it; may be absent.
    """
    ...

class GateUpInterleaveResult(NamedTuple):
    interleaved: Tensor | None
    logical: Tensor | None

def gate_up_interleave(
    logical: Tensor | None = None,
    interleaved: Tensor | None = None,
    *,
    out: Any = None,
) -> GateUpInterleaveResult:
    """Rows of gate and up of expert weights, or of their scales, interleaved by eight, and back.

    Specification: inference 5.8.

    Args:
        logical: [num_experts, num_rows, row_bytes] u8; may be absent.
        interleaved: [num_experts, num_rows, row_bytes] u8; may be absent.
        out: Results to write, as this returns them.

    Returns:
        interleaved: [num_experts, num_rows, row_bytes] u8, as the forward wrote it; may be absent.
        logical: [num_experts, num_rows, row_bytes] u8, as the forward wrote it; may be absent.
    """
    ...

def linear(
    x: Tensor,
    w: Tensor,
    y_before: Tensor | None = None,
    x_scales: Tensor | None = None,
    w_scales: Tensor | None = None,
    x_global_scale: Tensor | None = None,
    w_global_scale: Tensor | None = None,
    *,
    group: int | None = None,
    layout: Literal['plain', 'mn_major', 'blocked'] = 'plain',
    output: Literal['bf16', 'f32'] = 'bf16',
    weights: Literal['bf16', 'fp8', 'mxfp4', 'nvfp4'] | None = None,
    out: Any = None,
) -> Tensor:
    """Y = x wᵀ of bf16, FP8, MXFP4 and NVFP4 weights, added to what was there or not; of bf16 its gradients.

    Specification: inference 0, inference 5.2, inference 5.3, inference 5.5, inference 5.6, inference 5.7, inference 9.

    Args:
        x: [num_tokens, in_features] bf16 or u8.
        w: [out_features, in_features] bf16 or u8.
        y_before: [num_tokens, out_features] bf16 or f32; may be absent.
        x_scales: [num_tokens, x_groups] f32 or i32 or u8; may be absent.
        w_scales: [w_row_blocks, w_groups] f32 or i32 or u8; may be absent.
        x_global_scale: [one] f32; may be absent.
        w_global_scale: [one] f32; may be absent.
        group: a number.
        layout: one of plain, mn_major, blocked; the model's is plain.
        output: one of bf16, f32; the model's is bf16.
        weights: one of bf16, fp8, mxfp4, nvfp4.
        out: Results to write, as this returns them.

    Returns:
        y: [num_tokens, out_features] bf16 or f32, as the forward wrote it.
    """
    ...

class LinearBackwardResult(NamedTuple):
    dx: Tensor
    dw: Tensor

def linear_backward(
    x: Tensor,
    w: Tensor,
    dy: Tensor,
    dw_before: Tensor | None = None,
    *,
    weight_gradient: Literal['f32', 'bf16'] = 'f32',
    out: Any = None,
) -> LinearBackwardResult:
    """Gradients of `linear`: Y = x wᵀ of bf16, FP8, MXFP4 and NVFP4 weights, added to what was there or not; of bf16 its gradients.

    Specification: inference 0, inference 5.2, inference 5.3, inference 5.5, inference 5.6, inference 5.7, inference 9.

    Args:
        x: [num_tokens, in_features] bf16.
        w: [out_features, in_features] bf16.
        dy: [num_tokens, out_features] bf16, the gradient of `y`.
        dw_before: [out_features, in_features] bf16 or f32; may be absent.
        weight_gradient: one of f32, bf16; the model's is f32.
        out: Results to write, as this returns them.

    Returns:
        dx: [num_tokens, in_features] bf16, the gradient of `x`.
        dw: [out_features, in_features] bf16 or f32, the gradient of `w`.
    """
    ...

class QueryNormRopeResult(NamedTuple):
    y: Tensor
    rstd: Tensor

def query_norm_rope(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None = None,
    *,
    eps: float = 1e-06,
    rope_dim: int = 64,
    out: Any = None,
) -> QueryNormRopeResult:
    """The query heads over their root mean square, their last channels turned by position, in one pass.

    Specification: inference 3, inference 4, inference 5.1, training 8, training 11.3.

    Args:
        x: [num_tokens, num_heads, head_dim] bf16.
        cos: [num_tokens, half_rope_dim] f32.
        sin: [num_tokens, half_rope_dim] f32.
        positions: [num_tokens] i32; may be absent.
        eps: a number; the model's is 1e-06.
        rope_dim: a number; the model's is 64.
        out: Results to write, as this returns them.

    Returns:
        y: [num_tokens, num_heads, head_dim] bf16, as the forward wrote it.
        rstd: [num_tokens, num_heads] f32, as the forward wrote it.
    """
    ...

def query_norm_rope_backward(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    rstd: Tensor,
    dy: Tensor,
    positions: Tensor | None = None,
    *,
    rope_dim: int = 64,
    out: Any = None,
) -> Tensor:
    """Gradients of `query_norm_rope`: The query heads over their root mean square, their last channels turned by position, in one pass.

    Specification: inference 3, inference 4, inference 5.1, training 8, training 11.3.

    Args:
        x: [num_tokens, num_heads, head_dim] bf16.
        cos: [num_tokens, half_rope_dim] f32.
        sin: [num_tokens, half_rope_dim] f32.
        rstd: [num_tokens, num_heads] f32, as the forward wrote it.
        dy: [num_tokens, num_heads, head_dim] bf16, the gradient of `y`.
        positions: [num_tokens] i32; may be absent.
        rope_dim: a number; the model's is 64.
        out: Results to write, as this returns them.

    Returns:
        dx: [num_tokens, num_heads, head_dim] bf16, the gradient of `x`.
    """
    ...

class QueryProjectionResult(NamedTuple):
    q_a: Tensor
    qr: Tensor
    qr_rstd: Tensor
    q_b: Tensor
    q: Tensor
    q_rstd: Tensor
    h_codes: Tensor | None
    h_scales: Tensor | None

def query_projection(
    h: Tensor,
    q_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    wq_a: Tensor | None = None,
    wq_b: Tensor | None = None,
    positions: Tensor | None = None,
    wq_a_codes: Tensor | None = None,
    wq_a_scales: Tensor | None = None,
    wq_b_codes: Tensor | None = None,
    wq_b_scales: Tensor | None = None,
    *,
    eps: float = 1e-06,
    head_dim: int | None = None,
    num_heads: int | None = None,
    rope_dim: int | None = None,
    out: Any = None,
) -> QueryProjectionResult:
    """Wq_a, its norm, wq_b, the norm of every head and its rope, in bf16 with gradients or FP8.

    Specification: inference 3, inference 5.1, inference 5.2, training 14.

    Args:
        h: [num_tokens, hidden_size] bf16.
        q_norm: [q_lora_rank] f32.
        cos: [table_rows, half_rope_dim] f32.
        sin: [table_rows, half_rope_dim] f32.
        wq_a: [q_lora_rank, hidden_size] bf16; may be absent.
        wq_b: [all_channels, q_lora_rank] bf16; may be absent.
        positions: [num_tokens] i32; may be absent.
        wq_a_codes: [q_lora_rank, hidden_size] u8; may be absent.
        wq_a_scales: [rank_blocks, hidden_blocks] u8; may be absent.
        wq_b_codes: [all_channels, q_lora_rank] u8; may be absent.
        wq_b_scales: [width_blocks, rank_blocks] u8; may be absent.
        eps: a number; the model's is 1e-06.
        head_dim: a number.
        num_heads: a number.
        rope_dim: a number.
        out: Results to write, as this returns them.

    Returns:
        q_a: [num_tokens, q_lora_rank] bf16, as the forward wrote it.
        qr: [num_tokens, q_lora_rank] bf16, as the forward wrote it.
        qr_rstd: [num_tokens] f32, as the forward wrote it.
        q_b: [num_tokens, all_channels] bf16, as the forward wrote it.
        q: [num_tokens, all_channels] bf16, as the forward wrote it.
        q_rstd: [num_tokens, num_heads] f32, as the forward wrote it.
        h_codes: [num_tokens, hidden_size] u8, as the forward wrote it; may be absent.
        h_scales: [num_tokens, hidden_blocks] u8, as the forward wrote it; may be absent.
    """
    ...

class QueryProjectionBackwardResult(NamedTuple):
    dq_b: Tensor
    dwq_b: Tensor
    dqr: Tensor
    dq_norm: Tensor
    dq_a: Tensor
    dwq_a: Tensor
    dh: Tensor

def query_projection_backward(
    h: Tensor,
    wq_a: Tensor,
    q_norm: Tensor,
    wq_b: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_a: Tensor,
    qr: Tensor,
    qr_rstd: Tensor,
    q_b: Tensor,
    q_rstd: Tensor,
    dq: Tensor,
    positions: Tensor | None = None,
    *,
    head_dim: int | None = None,
    num_heads: int | None = None,
    rope_dim: int | None = None,
    out: Any = None,
) -> QueryProjectionBackwardResult:
    """Gradients of `query_projection`: Wq_a, its norm, wq_b, the norm of every head and its rope, in bf16 with gradients or FP8.

    Specification: inference 3, inference 5.1, inference 5.2, training 14.

    Args:
        h: [num_tokens, hidden_size] bf16.
        wq_a: [q_lora_rank, hidden_size] bf16.
        q_norm: [q_lora_rank] f32.
        wq_b: [all_channels, q_lora_rank] bf16.
        cos: [table_rows, half_rope_dim] f32.
        sin: [table_rows, half_rope_dim] f32.
        q_a: [num_tokens, q_lora_rank] bf16, as the forward wrote it.
        qr: [num_tokens, q_lora_rank] bf16, as the forward wrote it.
        qr_rstd: [num_tokens] f32, as the forward wrote it.
        q_b: [num_tokens, all_channels] bf16, as the forward wrote it.
        q_rstd: [num_tokens, num_heads] f32, as the forward wrote it.
        dq: [num_tokens, all_channels] bf16, the gradient of `q`.
        positions: [num_tokens] i32; may be absent.
        head_dim: a number.
        num_heads: a number.
        rope_dim: a number.
        out: Results to write, as this returns them.

    Returns:
        dq_b: [num_tokens, all_channels] bf16, the gradient of `q_b`.
        dwq_b: [all_channels, q_lora_rank] f32, the gradient of `wq_b`.
        dqr: [num_tokens, q_lora_rank] bf16, the gradient of `qr`.
        dq_norm: [q_lora_rank] f32, the gradient of `q_norm`.
        dq_a: [num_tokens, q_lora_rank] bf16, the gradient of `q_a`.
        dwq_a: [q_lora_rank, hidden_size] f32, the gradient of `wq_a`.
        dh: [num_tokens, hidden_size] bf16, the gradient of `h`.
    """
    ...

def kv_norm_rope_write(
    x: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    cache: Tensor,
    positions: Tensor | None = None,
    *,
    eps: float = 1e-06,
    nope_dim: int = 448,
    page_size: int = 64,
    rope_dim: int = 64,
    out: Any = None,
) -> Tensor:
    """Rows of K = V normed, turned by position, quantized and scattered to the paged cache, in one pass.

    Specification: inference 3, inference 4, inference 5.1, inference 5.4, inference 8.3, inference 13.2.

    Args:
        x: [num_tokens, head_dim] bf16.
        weight: [head_dim] f32.
        cos: [num_tokens, half_rope_dim] f32.
        sin: [num_tokens, half_rope_dim] f32.
        slots: [num_tokens] i32.
        cache: [num_pages, page_bytes] u8, overwritten in part.
        positions: [num_tokens] i32; may be absent.
        eps: a number; the model's is 1e-06.
        nope_dim: a number; the model's is 448.
        page_size: a number; the model's is 64.
        rope_dim: a number; the model's is 64.
        out: Results to write, as this returns them.

    Returns:
        y: [num_tokens, head_dim] bf16, as the forward wrote it.
    """
    ...

class KvProjectionResult(NamedTuple):
    kv_a: Tensor
    n: Tensor | None
    rstd: Tensor | None
    kv: Tensor
    h_codes: Tensor | None
    h_scales: Tensor | None

def kv_projection(
    h: Tensor,
    kv_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    wkv: Tensor | None = None,
    positions: Tensor | None = None,
    wkv_codes: Tensor | None = None,
    wkv_scales: Tensor | None = None,
    slots: Tensor | None = None,
    cache: Tensor | None = None,
    *,
    eps: float = 1e-06,
    nope_dim: int | None = None,
    num_pages: int | None = None,
    page_size: int | None = None,
    rope_dim: int | None = None,
    out: Any = None,
) -> KvProjectionResult:
    """Wkv, its norm and the rope of K = V: in bf16 with gradients, or into the cache, also of FP8 weights.

    Specification: inference 3, inference 5.1, inference 8.3, training 14.

    Args:
        h: [num_tokens, hidden_size] bf16.
        kv_norm: [head_dim] f32.
        cos: [table_rows, half_rope_dim] f32.
        sin: [table_rows, half_rope_dim] f32.
        wkv: [head_dim, hidden_size] bf16; may be absent.
        positions: [num_tokens] i32; may be absent.
        wkv_codes: [head_dim, hidden_size] u8; may be absent.
        wkv_scales: [channel_blocks, hidden_blocks] u8; may be absent.
        slots: [num_tokens] i32; may be absent.
        cache: [num_pages, page_bytes] u8, overwritten in part; may be absent.
        eps: a number; the model's is 1e-06.
        nope_dim: a number.
        num_pages: a number.
        page_size: a number.
        rope_dim: a number.
        out: Results to write, as this returns them.

    Returns:
        kv_a: [num_tokens, head_dim] bf16, as the forward wrote it.
        n: [num_tokens, head_dim] bf16, as the forward wrote it; may be absent.
        rstd: [num_tokens] f32, as the forward wrote it; may be absent.
        kv: [num_tokens, head_dim] bf16, as the forward wrote it.
        h_codes: [num_tokens, hidden_size] u8, as the forward wrote it; may be absent.
        h_scales: [num_tokens, hidden_blocks] u8, as the forward wrote it; may be absent.
    """
    ...

class KvProjectionBackwardResult(NamedTuple):
    dn: Tensor
    dkv_norm: Tensor
    dkv_a: Tensor
    dwkv: Tensor
    dh: Tensor

def kv_projection_backward(
    h: Tensor,
    wkv: Tensor,
    kv_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    kv_a: Tensor,
    rstd: Tensor,
    dkv: Tensor,
    positions: Tensor | None = None,
    *,
    nope_dim: int | None = None,
    rope_dim: int | None = None,
    out: Any = None,
) -> KvProjectionBackwardResult:
    """Gradients of `kv_projection`: Wkv, its norm and the rope of K = V: in bf16 with gradients, or into the cache, also of FP8 weights.

    Specification: inference 3, inference 5.1, inference 8.3, training 14.

    Args:
        h: [num_tokens, hidden_size] bf16.
        wkv: [head_dim, hidden_size] bf16.
        kv_norm: [head_dim] f32.
        cos: [table_rows, half_rope_dim] f32.
        sin: [table_rows, half_rope_dim] f32.
        kv_a: [num_tokens, head_dim] bf16, as the forward wrote it.
        rstd: [num_tokens] f32, as the forward wrote it.
        dkv: [num_tokens, head_dim] bf16, the gradient of `kv`.
        positions: [num_tokens] i32; may be absent.
        nope_dim: a number.
        rope_dim: a number.
        out: Results to write, as this returns them.

    Returns:
        dn: [num_tokens, head_dim] bf16, the gradient of `n`.
        dkv_norm: [head_dim] f32, the gradient of `kv_norm`.
        dkv_a: [num_tokens, head_dim] bf16, the gradient of `kv_a`.
        dwkv: [head_dim, hidden_size] f32, the gradient of `wkv`.
        dh: [num_tokens, hidden_size] bf16, the gradient of `h`.
    """
    ...

class CompressorResult(NamedTuple):
    entries: Tensor
    pooled: Tensor | None

def compressor(
    kv: Tensor,
    gate: Tensor,
    ape: Tensor,
    norm_weight: Tensor,
    cu_seqlens: Tensor,
    cu_entries: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    dtype: Literal['bf16', 'f32'] = 'bf16',
    epilogue: Literal['none', 'fp8', 'hadamard_fp4'] | None = None,
    eps: float = 1e-06,
    num_entries: int | None = None,
    num_sequences: int | None = None,
    overlaps: bool | None = None,
    rope_dim: int = 64,
    saves_pooled: bool | None = None,
    out: Any = None,
) -> CompressorResult:
    """Tokens pooled into entries by a softmax of each channel, which are normed and turned by position.

    Specification: inference 5.4, inference 6, training 9.

    Args:
        kv: [num_tokens, width] f32.
        gate: [num_tokens, width] f32.
        ape: [ratio, width] f32.
        norm_weight: [head_dim] f32.
        cu_seqlens: [num_sequences_and_one] i32.
        cu_entries: [num_sequences_and_one] i32.
        cos: [table_rows, half_rope_dim] f32.
        sin: [table_rows, half_rope_dim] f32.
        dtype: one of bf16, f32; the model's is bf16.
        epilogue: one of none, fp8, hadamard_fp4.
        eps: a number; the model's is 1e-06.
        num_entries: a number.
        num_sequences: a number.
        overlaps: one of True, False.
        rope_dim: a number; the model's is 64.
        saves_pooled: one of True, False.
        out: Results to write, as this returns them.

    Returns:
        entries: [num_entries, head_dim] bf16 or f32, as the forward wrote it.
        pooled: [num_entries, head_dim] bf16 or f32, as the forward wrote it; may be absent.
    """
    ...

class CompressorBackwardResult(NamedTuple):
    dkv: Tensor
    dgate: Tensor
    dape: Tensor
    dnorm_weight: Tensor

def compressor_backward(
    kv: Tensor,
    gate: Tensor,
    ape: Tensor,
    norm_weight: Tensor,
    cu_seqlens: Tensor,
    cu_entries: Tensor,
    cos: Tensor,
    sin: Tensor,
    pooled: Tensor,
    dentries: Tensor,
    *,
    dtype: Literal['bf16', 'f32'] = 'bf16',
    epilogue: Literal['none', 'fp8', 'hadamard_fp4'] | None = None,
    eps: float = 1e-06,
    gradients: Literal['f32', 'bf16'] = 'f32',
    num_entries: int | None = None,
    num_sequences: int | None = None,
    overlaps: bool | None = None,
    rope_dim: int = 64,
    out: Any = None,
) -> CompressorBackwardResult:
    """Gradients of `compressor`: Tokens pooled into entries by a softmax of each channel, which are normed and turned by position.

    Specification: inference 5.4, inference 6, training 9.

    Args:
        kv: [num_tokens, width] f32.
        gate: [num_tokens, width] f32.
        ape: [ratio, width] f32.
        norm_weight: [head_dim] f32.
        cu_seqlens: [num_sequences_and_one] i32.
        cu_entries: [num_sequences_and_one] i32.
        cos: [table_rows, half_rope_dim] f32.
        sin: [table_rows, half_rope_dim] f32.
        pooled: [num_entries, head_dim] bf16 or f32, as the forward wrote it.
        dentries: [num_entries, head_dim] bf16 or f32, the gradient of `entries`.
        dtype: one of bf16, f32; the model's is bf16.
        epilogue: one of none, fp8, hadamard_fp4.
        eps: a number; the model's is 1e-06.
        gradients: one of f32, bf16; the model's is f32.
        num_entries: a number.
        num_sequences: a number.
        overlaps: one of True, False.
        rope_dim: a number; the model's is 64.
        out: Results to write, as this returns them.

    Returns:
        dkv: [num_tokens, width] bf16 or f32, the gradient of `kv`.
        dgate: [num_tokens, width] bf16 or f32, the gradient of `gate`.
        dape: [ratio, width] f32, the gradient of `ape`.
        dnorm_weight: [head_dim] f32, the gradient of `norm_weight`.
    """
    ...

def compressor_stream(
    kv: Tensor,
    gate: Tensor,
    ape: Tensor,
    norm_weight: Tensor,
    state: Tensor,
    cu_seqlens: Tensor,
    cu_entries: Tensor,
    first_positions: Tensor,
    slots: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    chunks: list[int] = [1],
    drafts: int = 0,
    dtype: Literal['bf16', 'f32'] = 'bf16',
    epilogue: Literal['none', 'hadamard_fp4', 'fp8'] | None = None,
    eps: float = 1e-06,
    hostile: bool = False,
    overlaps: bool | None = None,
    position: int | None = None,
    rope_dim: int = 64,
    spare_entries: int = 0,
    staggered: bool = True,
    out: Any = None,
) -> Tensor:
    """Entries of growing sequences from a state of their last tokens; rejected tokens are written again.

    Specification: inference 5.4, inference 6, inference 6.2.

    Args:
        kv: [num_tokens, width] f32.
        gate: [num_tokens, width] f32.
        ape: [ratio, width] f32.
        norm_weight: [head_dim] f32.
        state: [num_slots, num_rows, state_width] f32, overwritten in part.
        cu_seqlens: [num_sequences_and_one] i32.
        cu_entries: [num_sequences_and_one] i32.
        first_positions: [num_sequences] i32.
        slots: [num_sequences] i32.
        cos: [table_rows, half_rope_dim] f32.
        sin: [table_rows, half_rope_dim] f32.
        chunks: a number; the model's is [1].
        drafts: a number; the model's is 0.
        dtype: one of bf16, f32; the model's is bf16.
        epilogue: one of none, hadamard_fp4, fp8.
        eps: a number; the model's is 1e-06.
        hostile: one of False, True; the model's is False.
        overlaps: one of True, False.
        position: a number.
        rope_dim: a number; the model's is 64.
        spare_entries: a number; the model's is 0.
        staggered: one of True, False; the model's is True.
        out: Results to write, as this returns them.

    Returns:
        entries: [num_entries, head_dim] bf16 or f32, as the forward wrote it.
    """
    ...

class HadamardResult(NamedTuple):
    y: Tensor | None
    codes: Tensor | None
    scale_bytes: Tensor | None
    scales: Tensor | None

def hadamard(
    x: Tensor,
    *,
    stored: Literal['values', 'e2m1', 'e4m3'] | None = None,
    out: Any = None,
) -> HadamardResult:
    """The orthonormal Walsh-Hadamard transform of rows of 128, as numbers, e2m1 or e4m3.

    Specification: inference 5.4, inference 7, inference 7.1.

    Args:
        x: [num_rows, head_dim] bf16 or f32.
        stored: one of values, e2m1, e4m3.
        out: Results to write, as this returns them.

    Returns:
        y: [num_rows, head_dim] bf16 or f32, as the forward wrote it; may be absent.
        codes: [num_rows, code_bytes] u8, as the forward wrote it; may be absent.
        scale_bytes: [num_rows, num_groups] u8, as the forward wrote it; may be absent.
        scales: [num_rows] f32, as the forward wrote it; may be absent.
    """
    ...

def hadamard_backward(
    dy: Tensor,
    *,
    stored: Literal['values', 'e2m1', 'e4m3'] | None = None,
    out: Any = None,
) -> Tensor:
    """Gradients of `hadamard`: The orthonormal Walsh-Hadamard transform of rows of 128, as numbers, e2m1 or e4m3.

    Specification: inference 5.4, inference 7, inference 7.1.

    Args:
        dy: [num_rows, head_dim] bf16 or f32, the gradient of `y`.
        stored: one of values, e2m1, e4m3.
        out: Results to write, as this returns them.

    Returns:
        dx: [num_rows, head_dim] bf16 or f32, the gradient of `x`.
    """
    ...

class IndexerQueryResult(NamedTuple):
    y: Tensor | None
    w: Tensor
    codes: Tensor | None
    scale_bytes: Tensor | None

def indexer_query(
    q: Tensor,
    cos: Tensor,
    sin: Tensor,
    weights: Tensor,
    positions: Tensor | None = None,
    *,
    stored: Literal['values', 'e2m1', 'e4m3'] | None = None,
    weights_: Literal['bf16', 'f32'] = 'bf16',
    weights_scale: float = 0.011048543,
    out: Any = None,
) -> IndexerQueryResult:
    """The indexer's queries, turned by position, transformed and stored as numbers, e2m1 or e4m3, and its head weights.

    Specification: inference 7, inference 7.1.

    Args:
        q: [num_tokens, num_heads, head_dim] bf16.
        cos: [num_tokens, half_rope_dim] f32.
        sin: [num_tokens, half_rope_dim] f32.
        weights: [num_tokens, num_heads] bf16 or f32.
        positions: [num_tokens] i32; may be absent.
        stored: one of values, e2m1, e4m3.
        weights_: one of bf16, f32; the model's is bf16.
        weights_scale: a number; the model's is 0.011048543.
        out: Results to write, as this returns them.

    Returns:
        y: [num_tokens, num_heads, head_dim] bf16, as the forward wrote it; may be absent.
        w: [num_tokens, num_heads] f32, as the forward wrote it.
        codes: [num_tokens, num_heads, code_bytes] u8, as the forward wrote it; may be absent.
        scale_bytes: [num_tokens, num_heads, num_groups] u8, as the forward wrote it; may be absent.
    """
    ...

class IndexerQueryBackwardResult(NamedTuple):
    dq: Tensor
    dweights: Tensor

def indexer_query_backward(
    cos: Tensor,
    sin: Tensor,
    dy: Tensor,
    dw: Tensor,
    positions: Tensor | None = None,
    *,
    stored: Literal['values', 'e2m1', 'e4m3'] | None = None,
    weights_: Literal['bf16', 'f32'] = 'bf16',
    weights_scale: float = 0.011048543,
    out: Any = None,
) -> IndexerQueryBackwardResult:
    """Gradients of `indexer_query`: The indexer's queries, turned by position, transformed and stored as numbers, e2m1 or e4m3, and its head weights.

    Specification: inference 7, inference 7.1.

    Args:
        cos: [num_tokens, half_rope_dim] f32.
        sin: [num_tokens, half_rope_dim] f32.
        dy: [num_tokens, num_heads, head_dim] bf16, the gradient of `y`.
        dw: [num_tokens, num_heads] f32, the gradient of `w`.
        positions: [num_tokens] i32; may be absent.
        stored: one of values, e2m1, e4m3.
        weights_: one of bf16, f32; the model's is bf16.
        weights_scale: a number; the model's is 0.011048543.
        out: Results to write, as this returns them.

    Returns:
        dq: [num_tokens, num_heads, head_dim] bf16, the gradient of `q`.
        dweights: [num_tokens, num_heads] bf16 or f32, the gradient of `weights`.
    """
    ...

def indexer_logits(
    q: Tensor,
    w: Tensor,
    k: Tensor | None = None,
    k_scales: Tensor | None = None,
    ks: Tensor | None = None,
    ke: Tensor | None = None,
    cu_q: Tensor | None = None,
    cu_k: Tensor | None = None,
    q_off: Tensor | None = None,
    q_scale_bytes: Tensor | None = None,
    pages: Tensor | None = None,
    block_table: Tensor | None = None,
    context_lens: Tensor | None = None,
    k_scale_bytes: Tensor | None = None,
    *,
    clean_logits: bool = False,
    columns: int | None = None,
    page_size: int = 64,
    ratio: int | None = None,
    sm_scale: float = 1.0,
    num_sequences: int | None = None,
    num_sequences_and_one: int | None = None,
    out: Any = None,
) -> Tensor:
    """The indexer's logits: weighted sums over the heads of positive products, of ranges of keys, causal or paged.

    Specification: inference 7, inference 7.1, training 1.

    Args:
        q: [num_tokens, num_heads, row_elements] bf16 or u8.
        w: [num_tokens, num_heads] bf16 or f32.
        k: [num_keys, row_elements] bf16 or u8; may be absent.
        k_scales: [num_keys] f32; may be absent.
        ks: [num_tokens] i32; may be absent.
        ke: [num_tokens] i32; may be absent.
        cu_q: [num_sequences_and_one] i32; may be absent.
        cu_k: [num_sequences_and_one] i32; may be absent.
        q_off: [num_sequences] i32; may be absent.
        q_scale_bytes: [batch, next_n, num_heads, num_groups] u8; may be absent.
        pages: [num_pages, page_bytes] u8; may be absent.
        block_table: [batch, table_pages] i32; may be absent.
        context_lens: [batch, next_n] i32; may be absent.
        k_scale_bytes: [num_keys, num_groups] u8; may be absent.
        clean_logits: one of True, False; the model's is False.
        columns: a number.
        page_size: a number; the model's is 64.
        ratio: a number.
        sm_scale: a number; the model's is 1.0.
        num_sequences: a number.
        num_sequences_and_one: a number.
        out: Results to write, as this returns them.

    Returns:
        logits: [num_tokens, columns] f32, as the forward wrote it.
    """
    ...

class TopkResult(NamedTuple):
    indices: Tensor
    values: Tensor | None

def topk(
    scores: Tensor,
    lengths: Tensor | None = None,
    block_table: Tensor | None = None,
    offsets: Tensor | None = None,
    *,
    page_size: int = 64,
    topk: int | None = None,
    with_values: bool = False,
    out: Any = None,
) -> TopkResult:
    """The topk largest scores of each row, by index: columns, offset or mapped by pages.

    Specification: inference 7, inference 7.2.

    Args:
        scores: [num_rows, num_columns] f32.
        lengths: [num_rows] i32; may be absent.
        block_table: [num_rows, num_pages] i32; may be absent.
        offsets: [num_rows] i32; may be absent.
        page_size: a number; the model's is 64.
        topk: a number.
        with_values: one of True, False; the model's is False.
        out: Results to write, as this returns them.

    Returns:
        indices: [num_rows, topk] i32, as the forward wrote it.
        values: [num_rows, topk] f32, as the forward wrote it; may be absent.
    """
    ...

class SparseAttentionResult(NamedTuple):
    out: Tensor
    lse: Tensor
    max_logits: Tensor

def sparse_attention(
    q: Tensor,
    k: Tensor,
    indices: Tensor,
    sink: Tensor | None = None,
    topk_length: Tensor | None = None,
    v: Tensor | None = None,
    *,
    softmax_scale: float = 0.044194173,
    v_dim: int = 512,
    out: Any = None,
) -> SparseAttentionResult:
    """Attention of each query over a list of gathered keys, with a sink per head.

    Specification: inference 8, inference 8.1, training 3, training 4.

    Args:
        q: [num_tokens, num_heads, head_dim] bf16.
        k: [num_keys, head_dim] bf16.
        indices: [num_tokens, topk] i32.
        sink: [num_heads] f32; may be absent.
        topk_length: [num_tokens] i32; may be absent.
        v: [num_keys, v_dim] bf16; may be absent.
        softmax_scale: a number; the model's is 0.044194173.
        v_dim: a number; the model's is 512.
        out: Results to write, as this returns them.

    Returns:
        out: [num_tokens, num_heads, v_dim] bf16, as the forward wrote it.
        lse: [num_tokens, num_heads] f32, as the forward wrote it.
        max_logits: [num_tokens, num_heads] f32, as the forward wrote it.
    """
    ...

class SparseAttentionBackwardResult(NamedTuple):
    dq: Tensor
    dk: Tensor
    dsink: Tensor | None
    dv: Tensor | None

def sparse_attention_backward(
    q: Tensor,
    k: Tensor,
    indices: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    sink: Tensor | None = None,
    topk_length: Tensor | None = None,
    dlse: Tensor | None = None,
    v: Tensor | None = None,
    *,
    key_gradient: Literal['bf16', 'f32'] = 'bf16',
    key_gradients: Literal['atomic', 'deterministic'] | None = None,
    softmax_scale: float = 0.044194173,
    v_dim: int = 512,
    out_: Any = None,
) -> SparseAttentionBackwardResult:
    """Gradients of `sparse_attention`: Attention of each query over a list of gathered keys, with a sink per head.

    Specification: inference 8, inference 8.1, training 3, training 4.

    Args:
        q: [num_tokens, num_heads, head_dim] bf16.
        k: [num_keys, head_dim] bf16.
        indices: [num_tokens, topk] i32.
        out: [num_tokens, num_heads, v_dim] bf16, as the forward wrote it.
        lse: [num_tokens, num_heads] f32, as the forward wrote it.
        dout: [num_tokens, num_heads, v_dim] bf16, the gradient of `out`.
        sink: [num_heads] f32; may be absent.
        topk_length: [num_tokens] i32; may be absent.
        dlse: [num_tokens, num_heads] f32, the gradient of `lse`; may be absent.
        v: [num_keys, v_dim] bf16; may be absent.
        key_gradient: one of bf16, f32; the model's is bf16.
        key_gradients: one of atomic, deterministic.
        softmax_scale: a number; the model's is 0.044194173.
        v_dim: a number; the model's is 512.
        out_: Results to write, as this returns them.

    Returns:
        dq: [num_tokens, num_heads, head_dim] bf16, the gradient of `q`.
        dk: [num_keys, head_dim] bf16 or f32, the gradient of `k`.
        dsink: [num_heads] f32, the gradient of `sink`; may be absent.
        dv: [num_keys, v_dim] bf16 or f32, the gradient of `v`; may be absent.
    """
    ...

class AttentionOutputRotationResult(NamedTuple):
    out: Tensor
    lse: Tensor
    max_logits: Tensor
    y: Tensor

def attention_output_rotation(
    q: Tensor,
    k: Tensor,
    indices: Tensor,
    cos: Tensor,
    sin: Tensor,
    sink: Tensor | None = None,
    topk_length: Tensor | None = None,
    v: Tensor | None = None,
    *,
    softmax_scale: float = 0.044194173,
    v_dim: int | None = None,
    rope_dim: int | None = None,
    out: Any = None,
) -> AttentionOutputRotationResult:
    """Sparse_attention, the inverse rope of its output, and the backward of both on what was saved.

    Specification: training 4, training 8.

    Args:
        q: [num_tokens, num_heads, head_dim] bf16.
        k: [num_keys, head_dim] bf16.
        indices: [num_tokens, topk] i32.
        cos: [num_tokens, half_rope_dim] f32.
        sin: [num_tokens, half_rope_dim] f32.
        sink: [num_heads] f32; may be absent.
        topk_length: [num_tokens] i32; may be absent.
        v: [num_keys, v_dim] bf16; may be absent.
        softmax_scale: a number; the model's is 0.044194173.
        v_dim: a number.
        rope_dim: a number.
        out: Results to write, as this returns them.

    Returns:
        out: [num_tokens, num_heads, v_dim] bf16, as the forward wrote it.
        lse: [num_tokens, num_heads] f32, as the forward wrote it.
        max_logits: [num_tokens, num_heads] f32, as the forward wrote it.
        y: [num_tokens, num_heads, v_dim] bf16, as the forward wrote it.
    """
    ...

class AttentionOutputRotationBackwardResult(NamedTuple):
    dq: Tensor
    dk: Tensor
    dsink: Tensor | None
    dout: Tensor
    dv: Tensor | None

def attention_output_rotation_backward(
    q: Tensor,
    k: Tensor,
    indices: Tensor,
    out: Tensor,
    lse: Tensor,
    cos: Tensor,
    sin: Tensor,
    dy: Tensor,
    sink: Tensor | None = None,
    topk_length: Tensor | None = None,
    dlse: Tensor | None = None,
    v: Tensor | None = None,
    *,
    key_gradient: Literal['bf16', 'f32'] | None = None,
    key_gradients: Literal['atomic', 'deterministic'] | None = None,
    softmax_scale: float = 0.044194173,
    v_dim: int | None = None,
    rope_dim: int | None = None,
    out_: Any = None,
) -> AttentionOutputRotationBackwardResult:
    """Gradients of `attention_output_rotation`: Sparse_attention, the inverse rope of its output, and the backward of both on what was saved.

    Specification: training 4, training 8.

    Args:
        q: [num_tokens, num_heads, head_dim] bf16.
        k: [num_keys, head_dim] bf16.
        indices: [num_tokens, topk] i32.
        out: [num_tokens, num_heads, v_dim] bf16, as the forward wrote it.
        lse: [num_tokens, num_heads] f32, as the forward wrote it.
        cos: [num_tokens, half_rope_dim] f32.
        sin: [num_tokens, half_rope_dim] f32.
        dy: [num_tokens, num_heads, v_dim] bf16, the gradient of `y`.
        sink: [num_heads] f32; may be absent.
        topk_length: [num_tokens] i32; may be absent.
        dlse: [num_tokens, num_heads] f32, the gradient of `lse`; may be absent.
        v: [num_keys, v_dim] bf16; may be absent.
        key_gradient: one of bf16, f32.
        key_gradients: one of atomic, deterministic.
        softmax_scale: a number; the model's is 0.044194173.
        v_dim: a number.
        rope_dim: a number.
        out_: Results to write, as this returns them.

    Returns:
        dq: [num_tokens, num_heads, head_dim] bf16, the gradient of `q`.
        dk: [num_keys, head_dim] bf16 or f32, the gradient of `k`.
        dsink: [num_heads] f32, the gradient of `sink`; may be absent.
        dout: [num_tokens, num_heads, v_dim] bf16, the gradient of `out`.
        dv: [num_keys, v_dim] bf16 or f32, the gradient of `v`; may be absent.
    """
    ...

class DecodeAttentionResult(NamedTuple):
    out: Tensor
    lse: Tensor

def decode_attention(
    q: Tensor,
    window: Tensor,
    window_indices: Tensor,
    sink: Tensor | None = None,
    window_length: Tensor | None = None,
    compressed: Tensor | None = None,
    compressed_indices: Tensor | None = None,
    compressed_length: Tensor | None = None,
    *,
    compressed_page_size: int | None = None,
    nope_dim: int | None = None,
    num_blocks: int = 132,
    rope_dim: int | None = None,
    softmax_scale: float = 0.044194173,
    window_page_size: int | None = None,
    out: Any = None,
) -> DecodeAttentionResult:
    """Attention of decoded tokens over two stores of a paged cache, with a sink per head.

    Specification: inference 8, inference 8.1, inference 8.2, inference 8.3, inference 8.4.

    Args:
        q: [batch, s_q, num_heads, head_dim] bf16.
        window: [window_num_pages, window_page_bytes] u8.
        window_indices: [batch, s_q, window_topk] i32.
        sink: [num_heads] f32; may be absent.
        window_length: [batch] i32; may be absent.
        compressed: [compressed_num_pages, compressed_page_bytes] u8; may be absent.
        compressed_indices: [batch, s_q, compressed_topk] i32; may be absent.
        compressed_length: [batch] i32; may be absent.
        compressed_page_size: a number.
        nope_dim: a number.
        num_blocks: a number; the model's is 132.
        rope_dim: a number.
        softmax_scale: a number; the model's is 0.044194173.
        window_page_size: a number.
        out: Results to write, as this returns them.

    Returns:
        out: [batch, s_q, num_heads, head_dim] bf16, as the forward wrote it.
        lse: [batch, s_q, num_heads] f32, as the forward wrote it.
    """
    ...

class AttentionCombineResult(NamedTuple):
    out: Tensor
    lse: Tensor

def attention_combine(
    partial_out: Tensor,
    partial_lse: Tensor,
    sink: Tensor | None = None,
    *,
    out: Any = None,
) -> AttentionCombineResult:
    """Merges partial attention results over disjoint keys and applies the sink once.

    Specification: inference 8.1, inference 8.2.

    Args:
        partial_out: [num_parts, num_tokens, num_heads, v_dim] f32.
        partial_lse: [num_parts, num_tokens, num_heads] f32.
        sink: [num_heads] f32; may be absent.
        out: Results to write, as this returns them.

    Returns:
        out: [num_tokens, num_heads, v_dim] bf16, as the forward wrote it.
        lse: [num_tokens, num_heads] f32, as the forward wrote it.
    """
    ...

class InverseRopeQuantizeResult(NamedTuple):
    codes: Tensor
    scales: Tensor

def inverse_rope_quantize(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None = None,
    *,
    layout: Literal['plain', 'mn_major', 'blocked'] = 'mn_major',
    o_groups: int | None = None,
    rope_dim: int = 64,
    scale: Literal['e8m0', 'fp32', 'power_of_two'] | None = None,
    out: Any = None,
) -> InverseRopeQuantizeResult:
    """The attention's output turned back by position, as e4m3 codes with scales of 128 channels, in one pass.

    Specification: inference 4, inference 5.4, inference 5.7, inference 9.

    Args:
        x: [num_tokens, num_heads, head_dim] bf16.
        cos: [num_tokens, half_rope_dim] f32.
        sin: [num_tokens, half_rope_dim] f32.
        positions: [num_tokens] i32; may be absent.
        layout: one of plain, mn_major, blocked; the model's is mn_major.
        o_groups: a number.
        rope_dim: a number; the model's is 64.
        scale: one of e8m0, fp32, power_of_two.
        out: Results to write, as this returns them.

    Returns:
        codes: [num_tokens, o_groups, group_width] u8, as the forward wrote it.
        scales: [o_groups, num_tokens, num_scales] f32 or i32 or u8, as the forward wrote it.
    """
    ...

class OutputProjectionResult(NamedTuple):
    rotated: Tensor | None
    z: Tensor
    y: Tensor
    codes: Tensor | None
    scales: Tensor | None

def output_projection(
    attn_out: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None = None,
    wo_a: Tensor | None = None,
    wo_b: Tensor | None = None,
    wo_a_codes: Tensor | None = None,
    wo_a_scales: Tensor | None = None,
    wo_b_codes: Tensor | None = None,
    wo_b_scales: Tensor | None = None,
    *,
    head_dim: int | None = None,
    layout: Literal['plain', 'mn_major', 'blocked'] | None = None,
    num_heads: int | None = None,
    rope_dim: int | None = None,
    out: Any = None,
) -> OutputProjectionResult:
    """The inverse rope of the attention's output, grouped wo_a and wo_b, in bf16 with gradients or FP8.

    Specification: inference 9, training 8, training 14.

    Args:
        attn_out: [num_tokens, num_heads, head_dim] bf16.
        cos: [table_rows, half_rope_dim] f32.
        sin: [table_rows, half_rope_dim] f32.
        positions: [num_tokens] i32; may be absent.
        wo_a: [o_groups, o_lora_rank, group_width] bf16; may be absent.
        wo_b: [hidden_size, latent] bf16; may be absent.
        wo_a_codes: [o_groups, o_lora_rank, group_width] u8; may be absent.
        wo_a_scales: [o_groups, rank_blocks, width_blocks] u8; may be absent.
        wo_b_codes: [hidden_size, latent] u8; may be absent.
        wo_b_scales: [hidden_blocks, z_blocks] u8; may be absent.
        head_dim: a number.
        layout: one of plain, mn_major, blocked.
        num_heads: a number.
        rope_dim: a number.
        out: Results to write, as this returns them.

    Returns:
        rotated: [num_tokens, all_channels] bf16, as the forward wrote it; may be absent.
        z: [num_tokens, latent] bf16, as the forward wrote it.
        y: [num_tokens, hidden_size] bf16, as the forward wrote it.
        codes: [num_tokens, o_groups, group_width] u8, as the forward wrote it; may be absent.
        scales: [o_groups, num_tokens, num_scales] i32 or u8, as the forward wrote it; may be absent.
    """
    ...

class OutputProjectionBackwardResult(NamedTuple):
    dz: Tensor
    dwo_b: Tensor
    drotated: Tensor
    dwo_a: Tensor
    dattn_out: Tensor

def output_projection_backward(
    cos: Tensor,
    sin: Tensor,
    wo_a: Tensor,
    wo_b: Tensor,
    rotated: Tensor,
    z: Tensor,
    dy: Tensor,
    positions: Tensor | None = None,
    *,
    head_dim: int | None = None,
    num_heads: int | None = None,
    rope_dim: int | None = None,
    out: Any = None,
) -> OutputProjectionBackwardResult:
    """Gradients of `output_projection`: The inverse rope of the attention's output, grouped wo_a and wo_b, in bf16 with gradients or FP8.

    Specification: inference 9, training 8, training 14.

    Args:
        cos: [table_rows, half_rope_dim] f32.
        sin: [table_rows, half_rope_dim] f32.
        wo_a: [o_groups, o_lora_rank, group_width] bf16.
        wo_b: [hidden_size, latent] bf16.
        rotated: [num_tokens, all_channels] bf16, as the forward wrote it.
        z: [num_tokens, latent] bf16, as the forward wrote it.
        dy: [num_tokens, hidden_size] bf16, the gradient of `y`.
        positions: [num_tokens] i32; may be absent.
        head_dim: a number.
        num_heads: a number.
        rope_dim: a number.
        out: Results to write, as this returns them.

    Returns:
        dz: [num_tokens, latent] bf16, the gradient of `z`.
        dwo_b: [hidden_size, latent] f32, the gradient of `wo_b`.
        drotated: [num_tokens, all_channels] bf16, the gradient of `rotated`.
        dwo_a: [o_groups, o_lora_rank, group_width] f32, the gradient of `wo_a`.
        dattn_out: [num_tokens, num_heads, head_dim] bf16, the gradient of `attn_out`.
    """
    ...

class AttentionLayerResult(NamedTuple):
    q_a: Tensor
    qr: Tensor
    qr_rstd: Tensor
    q_b: Tensor
    q: Tensor
    q_rstd: Tensor
    kv_a: Tensor
    n: Tensor
    kv_rstd: Tensor
    c_kv: Tensor | None
    c_gate: Tensor | None
    pooled: Tensor | None
    keys: Tensor
    attn_out: Tensor
    lse: Tensor
    max_logits: Tensor
    rotated: Tensor
    z: Tensor
    y: Tensor

def attention_layer(
    h: Tensor,
    wq_a: Tensor,
    q_norm: Tensor,
    wq_b: Tensor,
    wkv: Tensor,
    kv_norm: Tensor,
    sink: Tensor,
    cos: Tensor,
    sin: Tensor,
    indices: Tensor,
    wo_a: Tensor,
    wo_b: Tensor,
    wkv_c: Tensor | None = None,
    wgate_c: Tensor | None = None,
    ape: Tensor | None = None,
    c_norm: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    cu_entries: Tensor | None = None,
    entry_cos: Tensor | None = None,
    entry_sin: Tensor | None = None,
    *,
    eps: float = 1e-06,
    listed: int | None = None,
    rope_dim: int | None = None,
    sequence_length: int | None = None,
    window: int | None = None,
    out: Any = None,
) -> AttentionLayerResult:
    """An attention layer over a window and compressed entries: projections, compressor, attention, output projection, and the gradients of all.

    Specification: inference 5.1, inference 6, inference 8, inference 9, training 9, training 14.

    Args:
        h: [num_tokens, hidden_size] bf16.
        wq_a: [q_lora_rank, hidden_size] bf16.
        q_norm: [q_lora_rank] f32.
        wq_b: [all_channels, q_lora_rank] bf16.
        wkv: [head_dim, hidden_size] bf16.
        kv_norm: [head_dim] f32.
        sink: [num_heads] f32.
        cos: [num_tokens, half_rope_dim] f32.
        sin: [num_tokens, half_rope_dim] f32.
        indices: [num_tokens, slots] i32.
        wo_a: [o_groups, o_lora_rank, group_width] bf16.
        wo_b: [hidden_size, latent] bf16.
        wkv_c: [width, hidden_size] bf16; may be absent.
        wgate_c: [width, hidden_size] bf16; may be absent.
        ape: [ratio, width] f32; may be absent.
        c_norm: [head_dim] f32; may be absent.
        cu_seqlens: [num_sequences_and_one] i32; may be absent.
        cu_entries: [num_sequences_and_one] i32; may be absent.
        entry_cos: [positions, half_rope_dim] f32; may be absent.
        entry_sin: [positions, half_rope_dim] f32; may be absent.
        eps: a number; the model's is 1e-06.
        listed: a number.
        rope_dim: a number.
        sequence_length: a number.
        window: a number.
        out: Results to write, as this returns them.

    Returns:
        q_a: [num_tokens, q_lora_rank] bf16, as the forward wrote it.
        qr: [num_tokens, q_lora_rank] bf16, as the forward wrote it.
        qr_rstd: [num_tokens] f32, as the forward wrote it.
        q_b: [num_tokens, all_channels] bf16, as the forward wrote it.
        q: [num_tokens, all_channels] bf16, as the forward wrote it.
        q_rstd: [num_tokens, num_heads] f32, as the forward wrote it.
        kv_a: [num_tokens, head_dim] bf16, as the forward wrote it.
        n: [num_tokens, head_dim] bf16, as the forward wrote it.
        kv_rstd: [num_tokens] f32, as the forward wrote it.
        c_kv: [num_tokens, width] f32, as the forward wrote it; may be absent.
        c_gate: [num_tokens, width] f32, as the forward wrote it; may be absent.
        pooled: [num_entries, head_dim] bf16, as the forward wrote it; may be absent.
        keys: [num_keys, head_dim] bf16, as the forward wrote it.
        attn_out: [num_tokens, num_heads, head_dim] bf16, as the forward wrote it.
        lse: [num_tokens, num_heads] f32, as the forward wrote it.
        max_logits: [num_tokens, num_heads] f32, as the forward wrote it.
        rotated: [num_tokens, all_channels] bf16, as the forward wrote it.
        z: [num_tokens, latent] bf16, as the forward wrote it.
        y: [num_tokens, hidden_size] bf16, as the forward wrote it.
    """
    ...

class AttentionLayerBackwardResult(NamedTuple):
    dz: Tensor
    dwo_b: Tensor
    drotated: Tensor
    dwo_a: Tensor
    dattn_out: Tensor
    dq: Tensor
    dkeys: Tensor
    dsink: Tensor
    dq_b: Tensor
    dwq_b: Tensor
    dqr: Tensor
    dq_norm: Tensor
    dq_a: Tensor
    dwq_a: Tensor
    dn: Tensor
    dkv_norm: Tensor
    dkv_a: Tensor
    dwkv: Tensor
    dape: Tensor | None
    dc_norm: Tensor | None
    dc_kv: Tensor | None
    dwkv_c: Tensor | None
    dc_gate: Tensor | None
    dwgate_c: Tensor | None
    dh: Tensor

def attention_layer_backward(
    h: Tensor,
    wq_a: Tensor,
    q_norm: Tensor,
    wq_b: Tensor,
    wkv: Tensor,
    kv_norm: Tensor,
    sink: Tensor,
    cos: Tensor,
    sin: Tensor,
    indices: Tensor,
    wo_a: Tensor,
    wo_b: Tensor,
    token_topk_to_pos: Tensor,
    q_a: Tensor,
    qr: Tensor,
    qr_rstd: Tensor,
    q_b: Tensor,
    q: Tensor,
    q_rstd: Tensor,
    kv_a: Tensor,
    kv_rstd: Tensor,
    keys: Tensor,
    attn_out: Tensor,
    lse: Tensor,
    rotated: Tensor,
    z: Tensor,
    dy: Tensor,
    wkv_c: Tensor | None = None,
    wgate_c: Tensor | None = None,
    ape: Tensor | None = None,
    c_norm: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    cu_entries: Tensor | None = None,
    entry_cos: Tensor | None = None,
    entry_sin: Tensor | None = None,
    c_kv: Tensor | None = None,
    c_gate: Tensor | None = None,
    pooled: Tensor | None = None,
    *,
    eps: float = 1e-06,
    listed: int | None = None,
    rope_dim: int | None = None,
    sequence_length: int | None = None,
    window: int | None = None,
    out: Any = None,
) -> AttentionLayerBackwardResult:
    """Gradients of `attention_layer`: An attention layer over a window and compressed entries: projections, compressor, attention, output projection, and the gradients of all.

    Specification: inference 5.1, inference 6, inference 8, inference 9, training 9, training 14.

    Args:
        h: [num_tokens, hidden_size] bf16.
        wq_a: [q_lora_rank, hidden_size] bf16.
        q_norm: [q_lora_rank] f32.
        wq_b: [all_channels, q_lora_rank] bf16.
        wkv: [head_dim, hidden_size] bf16.
        kv_norm: [head_dim] f32.
        sink: [num_heads] f32.
        cos: [num_tokens, half_rope_dim] f32.
        sin: [num_tokens, half_rope_dim] f32.
        indices: [num_tokens, slots] i32.
        wo_a: [o_groups, o_lora_rank, group_width] bf16.
        wo_b: [hidden_size, latent] bf16.
        token_topk_to_pos: [num_tokens, terms] i32.
        q_a: [num_tokens, q_lora_rank] bf16, as the forward wrote it.
        qr: [num_tokens, q_lora_rank] bf16, as the forward wrote it.
        qr_rstd: [num_tokens] f32, as the forward wrote it.
        q_b: [num_tokens, all_channels] bf16, as the forward wrote it.
        q: [num_tokens, all_channels] bf16, as the forward wrote it.
        q_rstd: [num_tokens, num_heads] f32, as the forward wrote it.
        kv_a: [num_tokens, head_dim] bf16, as the forward wrote it.
        kv_rstd: [num_tokens] f32, as the forward wrote it.
        keys: [num_keys, head_dim] bf16, as the forward wrote it.
        attn_out: [num_tokens, num_heads, head_dim] bf16, as the forward wrote it.
        lse: [num_tokens, num_heads] f32, as the forward wrote it.
        rotated: [num_tokens, all_channels] bf16, as the forward wrote it.
        z: [num_tokens, latent] bf16, as the forward wrote it.
        dy: [num_tokens, hidden_size] bf16, the gradient of `y`.
        wkv_c: [width, hidden_size] bf16; may be absent.
        wgate_c: [width, hidden_size] bf16; may be absent.
        ape: [ratio, width] f32; may be absent.
        c_norm: [head_dim] f32; may be absent.
        cu_seqlens: [num_sequences_and_one] i32; may be absent.
        cu_entries: [num_sequences_and_one] i32; may be absent.
        entry_cos: [positions, half_rope_dim] f32; may be absent.
        entry_sin: [positions, half_rope_dim] f32; may be absent.
        c_kv: [num_tokens, width] f32, as the forward wrote it; may be absent.
        c_gate: [num_tokens, width] f32, as the forward wrote it; may be absent.
        pooled: [num_entries, head_dim] bf16, as the forward wrote it; may be absent.
        eps: a number; the model's is 1e-06.
        listed: a number.
        rope_dim: a number.
        sequence_length: a number.
        window: a number.
        out: Results to write, as this returns them.

    Returns:
        dz: [num_tokens, latent] bf16, the gradient of `z`.
        dwo_b: [hidden_size, latent] f32, the gradient of `wo_b`.
        drotated: [num_tokens, all_channels] bf16, the gradient of `rotated`.
        dwo_a: [o_groups, o_lora_rank, group_width] f32, the gradient of `wo_a`.
        dattn_out: [num_tokens, num_heads, head_dim] bf16, the gradient of `attn_out`.
        dq: [num_tokens, all_channels] bf16, the gradient of `q`.
        dkeys: [num_keys, head_dim] bf16, the gradient of `keys`.
        dsink: [num_heads] f32, the gradient of `sink`.
        dq_b: [num_tokens, all_channels] bf16, the gradient of `q_b`.
        dwq_b: [all_channels, q_lora_rank] f32, the gradient of `wq_b`.
        dqr: [num_tokens, q_lora_rank] bf16, the gradient of `qr`.
        dq_norm: [q_lora_rank] f32, the gradient of `q_norm`.
        dq_a: [num_tokens, q_lora_rank] bf16, the gradient of `q_a`.
        dwq_a: [q_lora_rank, hidden_size] f32, the gradient of `wq_a`.
        dn: [num_tokens, head_dim] bf16, the gradient of `n`.
        dkv_norm: [head_dim] f32, the gradient of `kv_norm`.
        dkv_a: [num_tokens, head_dim] bf16, the gradient of `kv_a`.
        dwkv: [head_dim, hidden_size] f32, the gradient of `wkv`.
        dape: [ratio, width] f32, the gradient of `ape`; may be absent.
        dc_norm: [head_dim] f32, the gradient of `c_norm`; may be absent.
        dc_kv: [num_tokens, width] bf16, the gradient of `c_kv`; may be absent.
        dwkv_c: [width, hidden_size] f32, the gradient of `wkv_c`; may be absent.
        dc_gate: [num_tokens, width] bf16, the gradient of `c_gate`; may be absent.
        dwgate_c: [width, hidden_size] f32, the gradient of `wgate_c`; may be absent.
        dh: [num_tokens, hidden_size] bf16, the gradient of `h`.
    """
    ...

def kv_cache_write(
    kv: Tensor,
    slots: Tensor,
    cache: Tensor,
    *,
    nope_dim: int | None = None,
    page_size: int = 64,
    rope_dim: int | None = None,
    out: Any = None,
) -> None:
    """Quantizes rows of K = V and scatters them to slots of the paged cache.

    Specification: inference 5.4, inference 8.3, inference 13.2.

    Args:
        kv: [num_tokens, head_dim] bf16.
        slots: [num_tokens] i32.
        cache: [num_pages, page_bytes] u8, overwritten in part.
        nope_dim: a number.
        page_size: a number; the model's is 64.
        rope_dim: a number.
        out: Results to write, as this returns them.

    Returns:
    """
    ...

def indexer_cache_write(
    k: Tensor,
    slots: Tensor,
    pages: Tensor,
    *,
    page_size: int = 32,
    stored: Literal['e2m1', 'e4m3'] | None = None,
    out: Any = None,
) -> None:
    """Transforms and quantizes the indexer's keys and scatters them to slots of their paged store.

    Specification: inference 5.4, inference 7, inference 7.1, inference 13.2.

    Args:
        k: [num_tokens, head_dim] bf16.
        slots: [num_tokens] i32.
        pages: [num_pages, page_bytes] u8, overwritten in part.
        page_size: a number; the model's is 32.
        stored: one of e2m1, e4m3.
        out: Results to write, as this returns them.

    Returns:
    """
    ...

class RouterResult(NamedTuple):
    topk_indices: Tensor
    topk_weights: Tensor

def router(
    logits: Tensor,
    bias: Tensor | None = None,
    token_ids: Tensor | None = None,
    tid2eid: Tensor | None = None,
    *,
    route_scale: float = 2.5,
    topk: int = 6,
    vocab_size: int | None = None,
    out: Any = None,
) -> RouterResult:
    """The experts of each token, by biased scores or by a table, and their weights.

    Specification: inference 10, training 11.4.

    Args:
        logits: [num_tokens, num_experts] f32.
        bias: [num_experts] f32; may be absent.
        token_ids: [num_tokens] i32; may be absent.
        tid2eid: [vocab_size, topk] i32; may be absent.
        route_scale: a number; the model's is 2.5.
        topk: a number; the model's is 6.
        vocab_size: a number.
        out: Results to write, as this returns them.

    Returns:
        topk_indices: [num_tokens, topk] i32, as the forward wrote it.
        topk_weights: [num_tokens, topk] f32, as the forward wrote it.
    """
    ...

def router_backward(
    logits: Tensor,
    topk_indices: Tensor,
    dtopk_weights: Tensor,
    *,
    route_scale: float = 2.5,
    topk: int = 6,
    out: Any = None,
) -> Tensor:
    """Gradients of `router`: The experts of each token, by biased scores or by a table, and their weights.

    Specification: inference 10, training 11.4.

    Args:
        logits: [num_tokens, num_experts] f32.
        topk_indices: [num_tokens, topk] i32, as the forward wrote it.
        dtopk_weights: [num_tokens, topk] f32, the gradient of `topk_weights`.
        route_scale: a number; the model's is 2.5.
        topk: a number; the model's is 6.
        out: Results to write, as this returns them.

    Returns:
        dlogits: [num_tokens, num_experts] f32, the gradient of `logits`.
    """
    ...

class MoeMapResult(NamedTuple):
    counts: Tensor
    expert_offsets: Tensor
    token_topk_to_pos: Tensor
    pos_to_expert: Tensor
    pos_to_token: Tensor
    pos_to_token_topk: Tensor

def moe_map(
    topk_indices: Tensor,
    *,
    alignment: int = 128,
    num_experts: int | None = None,
    spare_positions: int = 0,
    out: Any = None,
) -> MoeMapResult:
    """Where each slot of the router goes when rows are sorted by expert, and back.

    Specification: inference 11.3.

    Args:
        topk_indices: [num_tokens, topk] i32.
        alignment: a number; the model's is 128.
        num_experts: a number.
        spare_positions: a number; the model's is 0.
        out: Results to write, as this returns them.

    Returns:
        counts: [num_experts] i32, as the forward wrote it.
        expert_offsets: [num_experts_and_one] i32, as the forward wrote it.
        token_topk_to_pos: [num_tokens, topk] i32, as the forward wrote it.
        pos_to_expert: [num_positions] i32, as the forward wrote it.
        pos_to_token: [num_positions] i32, as the forward wrote it.
        pos_to_token_topk: [num_positions] i32, as the forward wrote it.
    """
    ...

def moe_expand(
    x: Tensor,
    token_topk_to_pos: Tensor,
    pos_to_token: Tensor,
    *,
    alignment: int = 128,
    num_experts: int | None = None,
    spare_positions: int = 0,
    out: Any = None,
) -> Tensor:
    """Rows of tokens copied to the rows of their experts; backward, added up again.

    Specification: inference 11.3.

    Args:
        x: [num_tokens, hidden_size] bf16 or f32.
        token_topk_to_pos: [num_tokens, topk] i32.
        pos_to_token: [num_positions] i32.
        alignment: a number; the model's is 128.
        num_experts: a number.
        spare_positions: a number; the model's is 0.
        out: Results to write, as this returns them.

    Returns:
        y: [num_positions, hidden_size] bf16 or f32, as the forward wrote it.
    """
    ...

def moe_expand_backward(
    token_topk_to_pos: Tensor,
    dy: Tensor,
    *,
    alignment: int = 128,
    num_experts: int | None = None,
    spare_positions: int = 0,
    out: Any = None,
) -> Tensor:
    """Gradients of `moe_expand`: Rows of tokens copied to the rows of their experts; backward, added up again.

    Specification: inference 11.3.

    Args:
        token_topk_to_pos: [num_tokens, topk] i32.
        dy: [num_positions, hidden_size] bf16 or f32, the gradient of `y`.
        alignment: a number; the model's is 128.
        num_experts: a number.
        spare_positions: a number; the model's is 0.
        out: Results to write, as this returns them.

    Returns:
        dx: [num_tokens, hidden_size] bf16 or f32, the gradient of `x`.
    """
    ...

def grouped_linear(
    x: Tensor,
    w: Tensor,
    x_scales: Tensor,
    w_scales: Tensor,
    counts: Tensor,
    expert_offsets: Tensor | None = None,
    y: Tensor | None = None,
    x_global_scale: Tensor | None = None,
    w_global_scale: Tensor | None = None,
    *,
    expected_rows: int | None = None,
    group: int = 128,
    layout: Literal['plain', 'mn_major', 'blocked'] = 'plain',
    output: Literal['bf16', 'f32'] = 'bf16',
    weights: Literal['fp8', 'mxfp4', 'nvfp4'] | None = None,
    out: Any = None,
) -> Tensor:
    """Rows of experts times their FP8, MXFP4 or NVFP4 weights, sorted by expert or apart with counts.

    Specification: inference 5.5, inference 5.7, inference 11.1, inference 11.3.

    Args:
        x: [num_rows, in_features] u8.
        w: [num_experts, out_features, in_features] u8.
        x_scales: [num_rows, x_groups] f32 or i32 or u8.
        w_scales: [num_experts, w_row_blocks, w_groups] f32 or i32 or u8.
        counts: [num_experts] i32.
        expert_offsets: [num_experts_and_one] i32; may be absent.
        y: [num_experts, num_rows, out_features] bf16 or f32, overwritten in part; may be absent.
        x_global_scale: [one] f32; may be absent.
        w_global_scale: [num_experts] f32; may be absent.
        expected_rows: a number.
        group: a number; the model's is 128.
        layout: one of plain, mn_major, blocked; the model's is plain.
        output: one of bf16, f32; the model's is bf16.
        weights: one of fp8, mxfp4, nvfp4.
        out: Results to write, as this returns them.

    Returns:
        y: [num_rows, out_features] bf16 or f32, as the forward wrote it; may be absent.
    """
    ...

def swiglu(
    gate: Tensor,
    up: Tensor,
    weight: Tensor | None = None,
    pos_to_token_topk: Tensor | None = None,
    *,
    limit: float = 10.0,
    out: Any = None,
) -> Tensor:
    """Y = weight · silu(min(gate, limit)) · clamp(up, ±limit), row by row, weighted or not.

    Specification: inference 11.1, training 11.2.

    Args:
        gate: [num_rows, width] bf16 or f32.
        up: [num_rows, width] bf16 or f32.
        weight: [num_rows] f32; may be absent.
        pos_to_token_topk: [num_rows] i32; may be absent.
        limit: a number; the model's is 10.0.
        out: Results to write, as this returns them.

    Returns:
        y: [num_rows, width] bf16 or f32, as the forward wrote it.
    """
    ...

class SwigluBackwardResult(NamedTuple):
    dgate: Tensor
    dup: Tensor
    dweight: Tensor | None

def swiglu_backward(
    gate: Tensor,
    up: Tensor,
    dy: Tensor,
    weight: Tensor | None = None,
    pos_to_token_topk: Tensor | None = None,
    *,
    limit: float = 10.0,
    out: Any = None,
) -> SwigluBackwardResult:
    """Gradients of `swiglu`: Y = weight · silu(min(gate, limit)) · clamp(up, ±limit), row by row, weighted or not.

    Specification: inference 11.1, training 11.2.

    Args:
        gate: [num_rows, width] bf16 or f32.
        up: [num_rows, width] bf16 or f32.
        dy: [num_rows, width] bf16 or f32, the gradient of `y`.
        weight: [num_rows] f32; may be absent.
        pos_to_token_topk: [num_rows] i32; may be absent.
        limit: a number; the model's is 10.0.
        out: Results to write, as this returns them.

    Returns:
        dgate: [num_rows, width] bf16 or f32, the gradient of `gate`.
        dup: [num_rows, width] bf16 or f32, the gradient of `up`.
        dweight: [num_rows] f32, the gradient of `weight`; may be absent.
    """
    ...

class SwigluQuantizeResult(NamedTuple):
    codes: Tensor
    scales: Tensor

def swiglu_quantize(
    gate: Tensor,
    up: Tensor,
    weight: Tensor | None = None,
    pos_to_token_topk: Tensor | None = None,
    *,
    group: Literal['row32', 'row128'] | None = None,
    layout: Literal['plain', 'mn_major', 'blocked'] = 'mn_major',
    limit: float = 10.0,
    round_to_bf16: bool | None = None,
    scale: Literal['e8m0', 'fp32', 'power_of_two'] | None = None,
    out: Any = None,
) -> SwigluQuantizeResult:
    """Weight · silu(min(gate, limit)) · clamp(up, ±limit) as e4m3 codes with scales of 32 or 128 channels.

    Specification: inference 5.4, inference 5.7, inference 11.1, training 11.2.

    Args:
        gate: [num_rows, width] bf16 or f32.
        up: [num_rows, width] bf16 or f32.
        weight: [num_rows] f32; may be absent.
        pos_to_token_topk: [num_rows] i32; may be absent.
        group: one of row32, row128.
        layout: one of plain, mn_major, blocked; the model's is mn_major.
        limit: a number; the model's is 10.0.
        round_to_bf16: one of False, True.
        scale: one of e8m0, fp32, power_of_two.
        out: Results to write, as this returns them.

    Returns:
        codes: [num_rows, width] u8, as the forward wrote it.
        scales: [num_rows, num_groups] f32 or i32 or u8, as the forward wrote it.
    """
    ...

class SwigluQuantizeBackwardResult(NamedTuple):
    dgate: Tensor
    dup: Tensor
    dweight: Tensor | None

def swiglu_quantize_backward(
    gate: Tensor,
    up: Tensor,
    dy: Tensor,
    weight: Tensor | None = None,
    pos_to_token_topk: Tensor | None = None,
    *,
    limit: float = 10.0,
    scale: Literal['e8m0', 'fp32', 'power_of_two'] | None = None,
    out: Any = None,
) -> SwigluQuantizeBackwardResult:
    """Gradients of `swiglu_quantize`: Weight · silu(min(gate, limit)) · clamp(up, ±limit) as e4m3 codes with scales of 32 or 128 channels.

    Specification: inference 5.4, inference 5.7, inference 11.1, training 11.2.

    Args:
        gate: [num_rows, width] bf16 or f32.
        up: [num_rows, width] bf16 or f32.
        dy: [num_rows, width] bf16 or f32, the gradient of `decoded`.
        weight: [num_rows] f32; may be absent.
        pos_to_token_topk: [num_rows] i32; may be absent.
        limit: a number; the model's is 10.0.
        scale: one of e8m0, fp32, power_of_two.
        out: Results to write, as this returns them.

    Returns:
        dgate: [num_rows, width] bf16 or f32, the gradient of `gate`.
        dup: [num_rows, width] bf16 or f32, the gradient of `up`.
        dweight: [num_rows] f32, the gradient of `weight`; may be absent.
    """
    ...

class GroupedLinearSwigluResult(NamedTuple):
    codes: Tensor | None
    scales: Tensor | None

def grouped_linear_swiglu(
    x: Tensor,
    w: Tensor,
    x_scales: Tensor,
    w_scales: Tensor,
    counts: Tensor,
    expert_offsets: Tensor | None = None,
    weight: Tensor | None = None,
    codes: Tensor | None = None,
    scales: Tensor | None = None,
    *,
    expected_rows: int | None = None,
    group: int = 128,
    interleaved: bool | None = None,
    layout: Literal['plain', 'mn_major', 'blocked'] = 'plain',
    limit: float = 10.0,
    product_group: Literal['row128', 'row32'] | None = None,
    product_layout: Literal['plain', 'mn_major', 'blocked'] = 'plain',
    product_scale: Literal['e8m0', 'fp32', 'power_of_two'] | None = None,
    round_to_bf16: bool | None = None,
    weights: Literal['fp8', 'mxfp4'] | None = None,
    out: Any = None,
) -> GroupedLinearSwigluResult:
    """Gate and up of experts' rows, SwiGLU with the routing weight, as e4m3 codes with scales of 32 or 128, at once.

    Specification: inference 5.4, inference 5.5, inference 5.7, inference 5.8, inference 11.1, inference 11.3.

    Args:
        x: [num_rows, in_features] u8.
        w: [num_experts, out_features, in_features] u8.
        x_scales: [num_rows, x_groups] f32 or i32 or u8.
        w_scales: [num_experts, w_row_blocks, w_groups] f32 or i32 or u8.
        counts: [num_experts] i32.
        expert_offsets: [num_experts_and_one] i32; may be absent.
        weight: [num_rows] f32; may be absent.
        codes: [num_experts, num_rows, intermediate_size] u8, overwritten in part; may be absent.
        scales: [num_experts, num_groups, aligned_rows] f32 or i32 or u8, overwritten in part; may be absent.
        expected_rows: a number.
        group: a number; the model's is 128.
        interleaved: one of False, True.
        layout: one of plain, mn_major, blocked; the model's is plain.
        limit: a number; the model's is 10.0.
        product_group: one of row128, row32.
        product_layout: one of plain, mn_major, blocked; the model's is plain.
        product_scale: one of e8m0, fp32, power_of_two.
        round_to_bf16: one of False, True.
        weights: one of fp8, mxfp4.
        out: Results to write, as this returns them.

    Returns:
        codes: [num_rows, intermediate_size] u8, as the forward wrote it; may be absent.
        scales: [num_rows, num_groups] f32 or i32 or u8, as the forward wrote it; may be absent.
    """
    ...

def moe_reduce(
    y: Tensor,
    token_topk_to_pos: Tensor,
    topk_weights: Tensor | None = None,
    shared: Tensor | None = None,
    *,
    alignment: int = 128,
    num_experts: int | None = None,
    spare_positions: int = 0,
    out: Any = None,
) -> Tensor:
    """Rows of experts, weighted or not, added to rows of tokens, with the shared expert's.

    Specification: inference 11.2, inference 11.3.

    Args:
        y: [num_positions, hidden_size] bf16 or f32.
        token_topk_to_pos: [num_tokens, topk] i32.
        topk_weights: [num_tokens, topk] f32; may be absent.
        shared: [num_tokens, hidden_size] bf16 or f32; may be absent.
        alignment: a number; the model's is 128.
        num_experts: a number.
        spare_positions: a number; the model's is 0.
        out: Results to write, as this returns them.

    Returns:
        out: [num_tokens, hidden_size] bf16 or f32, as the forward wrote it.
    """
    ...

class MoeReduceBackwardResult(NamedTuple):
    dy: Tensor
    dtopk_weights: Tensor | None

def moe_reduce_backward(
    y: Tensor,
    token_topk_to_pos: Tensor,
    pos_to_token: Tensor,
    dout: Tensor,
    topk_weights: Tensor | None = None,
    *,
    alignment: int = 128,
    num_experts: int | None = None,
    spare_positions: int = 0,
    out: Any = None,
) -> MoeReduceBackwardResult:
    """Gradients of `moe_reduce`: Rows of experts, weighted or not, added to rows of tokens, with the shared expert's.

    Specification: inference 11.2, inference 11.3.

    Args:
        y: [num_positions, hidden_size] bf16 or f32.
        token_topk_to_pos: [num_tokens, topk] i32.
        pos_to_token: [num_positions] i32.
        dout: [num_tokens, hidden_size] bf16 or f32, the gradient of `out`.
        topk_weights: [num_tokens, topk] f32; may be absent.
        alignment: a number; the model's is 128.
        num_experts: a number.
        spare_positions: a number; the model's is 0.
        out: Results to write, as this returns them.

    Returns:
        dy: [num_positions, hidden_size] bf16 or f32, the gradient of `y`.
        dtopk_weights: [num_tokens, topk] f32, the gradient of `topk_weights`; may be absent.
    """
    ...

class MoeResult(NamedTuple):
    logits: Tensor
    topk_indices: Tensor
    topk_weights: Tensor
    counts: Tensor
    expert_offsets: Tensor
    token_topk_to_pos: Tensor
    pos_to_expert: Tensor
    pos_to_token: Tensor
    pos_to_token_topk: Tensor
    rows: Tensor
    row_weights: Tensor
    row_codes: Tensor
    row_scales: Tensor
    gate_up: Tensor
    y: Tensor
    hidden_codes: Tensor
    hidden_scales: Tensor
    shared_gate_up: Tensor
    shared: Tensor
    out: Tensor

def moe(
    hidden: Tensor,
    gate_weight: Tensor,
    w13: Tensor,
    w13_scales: Tensor,
    w2: Tensor,
    w2_scales: Tensor,
    shared_w13: Tensor,
    shared_w13_scales: Tensor,
    shared_w2: Tensor,
    shared_w2_scales: Tensor,
    bias: Tensor | None = None,
    tid2eid: Tensor | None = None,
    token_ids: Tensor | None = None,
    *,
    alignment: int | None = None,
    limit: float = 10.0,
    route_scale: float = 2.5,
    spare_positions: int = 0,
    topk: int | None = None,
    weights: Literal['mxfp4', 'fp8'] | None = None,
    out: Any = None,
) -> MoeResult:
    """A layer of experts: router, map, both products with SwiGLU between them, shared expert and sum.

    Specification: inference 10, inference 11.1, inference 11.2, inference 11.3.

    Args:
        hidden: [num_tokens, hidden_size] bf16.
        gate_weight: [num_experts, hidden_size] bf16.
        w13: [num_experts, gate_and_up, hidden_bytes] u8.
        w13_scales: [num_experts, w13_scale_rows, w13_scales] u8.
        w2: [num_experts, hidden_size, intermediate_bytes] u8.
        w2_scales: [num_experts, w2_scale_rows, w2_scales] u8.
        shared_w13: [gate_and_up, hidden_size] u8.
        shared_w13_scales: [shared_w13_scale_rows, shared_w13_scales] u8.
        shared_w2: [hidden_size, intermediate_size] u8.
        shared_w2_scales: [shared_w2_scale_rows, shared_w2_scales] u8.
        bias: [num_experts] f32; may be absent.
        tid2eid: [vocab_size, topk] i32; may be absent.
        token_ids: [num_tokens] i32; may be absent.
        alignment: a number.
        limit: a number; the model's is 10.0.
        route_scale: a number; the model's is 2.5.
        spare_positions: a number; the model's is 0.
        topk: a number.
        weights: one of mxfp4, fp8.
        out: Results to write, as this returns them.

    Returns:
        logits: [num_tokens, num_experts] f32, as the forward wrote it.
        topk_indices: [num_tokens, topk] i32, as the forward wrote it.
        topk_weights: [num_tokens, topk] f32, as the forward wrote it.
        counts: [num_experts] i32, as the forward wrote it.
        expert_offsets: [num_experts_and_one] i32, as the forward wrote it.
        token_topk_to_pos: [num_tokens, topk] i32, as the forward wrote it.
        pos_to_expert: [num_positions] i32, as the forward wrote it.
        pos_to_token: [num_positions] i32, as the forward wrote it.
        pos_to_token_topk: [num_positions] i32, as the forward wrote it.
        rows: [num_positions, hidden_size] bf16, as the forward wrote it.
        row_weights: [num_positions] f32, as the forward wrote it.
        row_codes: [num_positions, hidden_size] u8, as the forward wrote it.
        row_scales: [num_positions, groups] u8, as the forward wrote it.
        gate_up: [num_positions, gate_and_up] bf16, as the forward wrote it.
        y: [num_positions, hidden_size] bf16, as the forward wrote it.
        hidden_codes: [num_tokens, hidden_size] u8, as the forward wrote it.
        hidden_scales: [num_tokens, groups] u8, as the forward wrote it.
        shared_gate_up: [num_tokens, gate_and_up] bf16, as the forward wrote it.
        shared: [num_tokens, hidden_size] bf16, as the forward wrote it.
        out: [num_tokens, hidden_size] bf16, as the forward wrote it.
    """
    ...

def lm_head(
    hidden: Tensor,
    weight: Tensor,
    rows: Tensor | None = None,
    *,
    num_rows: int | None = None,
    out: Any = None,
) -> Tensor:
    """Logits of the sampled rows: hidden states times the head's weights.

    Specification: inference 12.1.

    Args:
        hidden: [num_tokens, hidden_size] bf16.
        weight: [vocab_size, hidden_size] bf16.
        rows: [num_rows] i32; may be absent.
        num_rows: a number.
        out: Results to write, as this returns them.

    Returns:
        logits: [num_rows, vocab_size] f32, as the forward wrote it.
    """
    ...

class MtpInputResult(NamedTuple):
    e: Tensor
    e_rstd: Tensor
    e_y: Tensor
    hh: Tensor
    h_rstd: Tensor
    h_y: Tensor
    out: Tensor

def mtp_input(
    embedding: Tensor,
    streams: Tensor,
    enorm: Tensor,
    hnorm: Tensor,
    tokens_of_streams: Tensor,
    e_proj: Tensor | None = None,
    h_proj: Tensor | None = None,
    e_proj_codes: Tensor | None = None,
    e_proj_scales: Tensor | None = None,
    h_proj_codes: Tensor | None = None,
    h_proj_scales: Tensor | None = None,
    *,
    eps: float = 1e-06,
    out: Any = None,
) -> MtpInputResult:
    """The streams of the MTP module: norms and projections of the streams and of the next token's embedding.

    Specification: inference 3, inference 5.2, inference 12.2.

    Args:
        embedding: [num_tokens, hidden_size] bf16.
        streams: [num_tokens, stream, hidden_size] bf16.
        enorm: [hidden_size] f32.
        hnorm: [hidden_size] f32.
        tokens_of_streams: [num_slots, of_stream] i32.
        e_proj: [out_features, hidden_size] bf16; may be absent.
        h_proj: [out_features, hidden_size] bf16; may be absent.
        e_proj_codes: [out_features, hidden_size] u8; may be absent.
        e_proj_scales: [out_blocks, hidden_blocks] u8; may be absent.
        h_proj_codes: [out_features, hidden_size] u8; may be absent.
        h_proj_scales: [out_blocks, hidden_blocks] u8; may be absent.
        eps: a number; the model's is 1e-06.
        out: Results to write, as this returns them.

    Returns:
        e: [num_tokens, hidden_size] bf16, as the forward wrote it.
        e_rstd: [num_tokens] f32, as the forward wrote it.
        e_y: [num_tokens, out_features] bf16, as the forward wrote it.
        hh: [num_tokens, stream, hidden_size] bf16, as the forward wrote it.
        h_rstd: [num_tokens, stream] f32, as the forward wrote it.
        h_y: [num_tokens, stream, out_features] bf16, as the forward wrote it.
        out: [num_tokens, stream, out_features] bf16, as the forward wrote it.
    """
    ...

class MtpInputBackwardResult(NamedTuple):
    de_y: Tensor
    de_proj: Tensor
    de: Tensor
    denorm: Tensor
    dembedding: Tensor
    dh_proj: Tensor
    dhh: Tensor
    dhnorm: Tensor
    dstreams: Tensor

def mtp_input_backward(
    embedding: Tensor,
    streams: Tensor,
    enorm: Tensor,
    hnorm: Tensor,
    e_proj: Tensor,
    h_proj: Tensor,
    streams_of_tokens: Tensor,
    e: Tensor,
    e_rstd: Tensor,
    hh: Tensor,
    h_rstd: Tensor,
    dout: Tensor,
    *,
    out: Any = None,
) -> MtpInputBackwardResult:
    """Gradients of `mtp_input`: The streams of the MTP module: norms and projections of the streams and of the next token's embedding.

    Specification: inference 3, inference 5.2, inference 12.2.

    Args:
        embedding: [num_tokens, hidden_size] bf16.
        streams: [num_tokens, stream, hidden_size] bf16.
        enorm: [hidden_size] f32.
        hnorm: [hidden_size] f32.
        e_proj: [out_features, hidden_size] bf16.
        h_proj: [out_features, hidden_size] bf16.
        streams_of_tokens: [num_sums, stream] i32.
        e: [num_tokens, hidden_size] bf16, as the forward wrote it.
        e_rstd: [num_tokens] f32, as the forward wrote it.
        hh: [num_tokens, stream, hidden_size] bf16, as the forward wrote it.
        h_rstd: [num_tokens, stream] f32, as the forward wrote it.
        dout: [num_tokens, stream, out_features] bf16, the gradient of `out`.
        out: Results to write, as this returns them.

    Returns:
        de_y: [num_tokens, out_features] bf16, the gradient of `e_y`.
        de_proj: [out_features, hidden_size] f32, the gradient of `e_proj`.
        de: [num_tokens, hidden_size] bf16, the gradient of `e`.
        denorm: [hidden_size] f32, the gradient of `enorm`.
        dembedding: [num_tokens, hidden_size] bf16, the gradient of `embedding`.
        dh_proj: [out_features, hidden_size] f32, the gradient of `h_proj`.
        dhh: [num_tokens, stream, hidden_size] bf16, the gradient of `hh`.
        dhnorm: [hidden_size] f32, the gradient of `hnorm`.
        dstreams: [num_tokens, stream, hidden_size] bf16, the gradient of `streams`.
    """
    ...

def sampler(
    logits: Tensor,
    temperature: Tensor,
    seed: Tensor,
    step: Tensor,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    *,
    out: Any = None,
) -> Tensor:
    """One token of each row of logits: temperature, top-k, top-p and min-p by the exponential race.

    Specification: inference 12.3.

    Args:
        logits: [num_rows, vocab_size] f32.
        temperature: [num_rows] f32.
        seed: [num_rows] i64.
        step: [num_rows] i64.
        top_k: [num_rows] i32; may be absent.
        top_p: [num_rows] f32; may be absent.
        min_p: [num_rows] f32; may be absent.
        out: Results to write, as this returns them.

    Returns:
        tokens: [num_rows] i32, as the forward wrote it.
    """
    ...

class ScoreRecomputeResult(NamedTuple):
    lse: Tensor | None
    target: Tensor | None
    scores: Tensor | None
    l1: Tensor | None
    shift: Tensor | None

def score_recompute(
    q: Tensor,
    k: Tensor,
    indices: Tensor | None = None,
    topk_length: Tensor | None = None,
    sink: Tensor | None = None,
    lse_beside: Tensor | None = None,
    q_off: Tensor | None = None,
    cu_q: Tensor | None = None,
    cu_k: Tensor | None = None,
    lse: Tensor | None = None,
    *,
    global_: bool = True,
    left_out: int = 0,
    ratio: int | None = None,
    softmax_scale: float = 0.044194173,
    columns: int | None = None,
    num_sequences: int | None = None,
    num_sequences_and_one: int | None = None,
    out: Any = None,
) -> ScoreRecomputeResult:
    """The indexer's distillation target: attention scores summed over the heads, sparse or dense.

    Specification: training 5.

    Args:
        q: [num_tokens, num_heads, head_dim] bf16.
        k: [num_keys, head_dim] bf16.
        indices: [num_tokens, topk] i32; may be absent.
        topk_length: [num_tokens] i32; may be absent.
        sink: [num_heads] f32; may be absent.
        lse_beside: [num_tokens, num_heads] f32; may be absent.
        q_off: [num_sequences] i32; may be absent.
        cu_q: [num_sequences_and_one] i32; may be absent.
        cu_k: [num_sequences_and_one] i32; may be absent.
        lse: [num_tokens, num_heads] f32; may be absent.
        global_: one of False, True; the model's is True.
        left_out: a number; the model's is 0.
        ratio: a number.
        softmax_scale: a number; the model's is 0.044194173.
        columns: a number.
        num_sequences: a number.
        num_sequences_and_one: a number.
        out: Results to write, as this returns them.

    Returns:
        lse: [num_tokens, num_heads] f32, as the forward wrote it; may be absent.
        target: [num_tokens, topk] f32, as the forward wrote it; may be absent.
        scores: [num_tokens, columns] f32, as the forward wrote it; may be absent.
        l1: [num_tokens] f32, as the forward wrote it; may be absent.
        shift: [num_tokens] f32, as the forward wrote it; may be absent.
    """
    ...

def indexer_recompute(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    indices: Tensor,
    topk_length: Tensor | None = None,
    cu_q: Tensor | None = None,
    cu_k: Tensor | None = None,
    *,
    global_: bool = True,
    sm_scale: float = 0.08838835,
    num_sequences_and_one: int | None = None,
    out: Any = None,
) -> Tensor:
    """The indexer's logits of the keys that each token's list names, computed again for its loss.

    Specification: training 1, training 6.

    Args:
        q: [num_tokens, num_heads, head_dim] bf16.
        k: [num_keys, head_dim] bf16.
        w: [num_tokens, num_heads] bf16 or f32.
        indices: [num_tokens, topk] i32.
        topk_length: [num_tokens] i32; may be absent.
        cu_q: [num_sequences_and_one] i32; may be absent.
        cu_k: [num_sequences_and_one] i32; may be absent.
        global_: one of False, True; the model's is True.
        sm_scale: a number; the model's is 0.08838835.
        num_sequences_and_one: a number.
        out: Results to write, as this returns them.

    Returns:
        logits: [num_tokens, topk] f32, as the forward wrote it.
    """
    ...

class IndexerLossResult(NamedTuple):
    idx_lse: Tensor | None
    real_rows: Tensor | None
    loss: Tensor
    kl: Tensor | None
    dlogits: Tensor | None

def indexer_loss(
    logits: Tensor,
    target: Tensor | None = None,
    row_mask: Tensor | None = None,
    indices: Tensor | None = None,
    topk_length: Tensor | None = None,
    cu_q: Tensor | None = None,
    cu_k: Tensor | None = None,
    scores: Tensor | None = None,
    l1: Tensor | None = None,
    q_off: Tensor | None = None,
    idx_lse: Tensor | None = None,
    grad_loss: Tensor | None = None,
    *,
    form: Literal['clipped_log', 'exact'] = 'clipped_log',
    global_: bool = True,
    left_out: int = 0,
    loss_coeff: float = 0.3,
    num_keys: int | None = None,
    ratio: int = 1,
    reduction: Literal['mean_of_real_rows', 'mean_of_rows', 'sum'] = 'sum',
    together: bool | None = None,
    with_kl: bool = True,
    columns: int | None = None,
    num_sequences: int | None = None,
    num_sequences_and_one: int | None = None,
    out: Any = None,
) -> IndexerLossResult:
    """The indexer's distillation loss, KL(target || prediction), sparse or dense, and its score gradient.

    Specification: training 6, training 7.

    Args:
        logits: [num_tokens, topk] f32.
        target: [num_tokens, topk] f32; may be absent.
        row_mask: [num_tokens] u8; may be absent.
        indices: [num_tokens, topk] i32; may be absent.
        topk_length: [num_tokens] i32; may be absent.
        cu_q: [num_sequences_and_one] i32; may be absent.
        cu_k: [num_sequences_and_one] i32; may be absent.
        scores: [num_tokens, columns] f32; may be absent.
        l1: [num_tokens] f32; may be absent.
        q_off: [num_sequences] i32; may be absent.
        idx_lse: [num_tokens] f32; may be absent.
        grad_loss: [one] f32; may be absent.
        form: one of clipped_log, exact; the model's is clipped_log.
        global_: one of False, True; the model's is True.
        left_out: a number; the model's is 0.
        loss_coeff: a number; the model's is 0.3.
        num_keys: a number.
        ratio: a number; the model's is 1.
        reduction: one of mean_of_real_rows, mean_of_rows, sum; the model's is sum.
        together: one of False, True.
        with_kl: one of True, False; the model's is True.
        columns: a number.
        num_sequences: a number.
        num_sequences_and_one: a number.
        out: Results to write, as this returns them.

    Returns:
        idx_lse: [num_tokens] f32, as the forward wrote it; may be absent.
        real_rows: [one] i32, as the forward wrote it; may be absent.
        loss: [one] f32, as the forward wrote it.
        kl: [num_tokens] f32, as the forward wrote it; may be absent.
        dlogits: [num_tokens, columns] f32, as the forward wrote it; may be absent.
    """
    ...

def indexer_loss_backward(
    logits: Tensor,
    idx_lse: Tensor,
    grad_loss: Tensor,
    target: Tensor | None = None,
    row_mask: Tensor | None = None,
    indices: Tensor | None = None,
    topk_length: Tensor | None = None,
    cu_q: Tensor | None = None,
    cu_k: Tensor | None = None,
    real_rows: Tensor | None = None,
    scores: Tensor | None = None,
    l1: Tensor | None = None,
    q_off: Tensor | None = None,
    *,
    form: Literal['clipped_log', 'exact'] = 'clipped_log',
    global_: bool = True,
    left_out: int = 0,
    loss_coeff: float = 0.3,
    num_keys: int | None = None,
    ratio: int = 1,
    reduction: Literal['mean_of_real_rows', 'mean_of_rows', 'sum'] = 'sum',
    together: bool | None = None,
    columns: int | None = None,
    num_sequences: int | None = None,
    num_sequences_and_one: int | None = None,
    out: Any = None,
) -> Tensor:
    """Gradients of `indexer_loss`: The indexer's distillation loss, KL(target || prediction), sparse or dense, and its score gradient.

    Specification: training 6, training 7.

    Args:
        logits: [num_tokens, topk] f32.
        idx_lse: [num_tokens] f32, as the forward wrote it.
        grad_loss: [one] f32, the gradient of `loss`.
        target: [num_tokens, topk] f32; may be absent.
        row_mask: [num_tokens] u8; may be absent.
        indices: [num_tokens, topk] i32; may be absent.
        topk_length: [num_tokens] i32; may be absent.
        cu_q: [num_sequences_and_one] i32; may be absent.
        cu_k: [num_sequences_and_one] i32; may be absent.
        real_rows: [one] i32, as the forward wrote it; may be absent.
        scores: [num_tokens, columns] f32; may be absent.
        l1: [num_tokens] f32; may be absent.
        q_off: [num_sequences] i32; may be absent.
        form: one of clipped_log, exact; the model's is clipped_log.
        global_: one of False, True; the model's is True.
        left_out: a number; the model's is 0.
        loss_coeff: a number; the model's is 0.3.
        num_keys: a number.
        ratio: a number; the model's is 1.
        reduction: one of mean_of_real_rows, mean_of_rows, sum; the model's is sum.
        together: one of False, True.
        columns: a number.
        num_sequences: a number.
        num_sequences_and_one: a number.
        out: Results to write, as this returns them.

    Returns:
        dlogits: [num_tokens, topk] f32, the gradient of `logits`.
    """
    ...

class IndexerBackwardResult(NamedTuple):
    dq: Tensor
    dk: Tensor
    dw: Tensor

def indexer_backward(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    dlogits: Tensor,
    indices: Tensor | None = None,
    topk_length: Tensor | None = None,
    cu_q: Tensor | None = None,
    cu_k: Tensor | None = None,
    q_off: Tensor | None = None,
    *,
    global_: bool = True,
    key_gradients: Literal['atomic', 'deterministic'] | None = None,
    left_out: int = 0,
    ratio: int | None = None,
    sm_scale: float = 0.08838835,
    columns: int | None = None,
    num_sequences: int | None = None,
    num_sequences_and_one: int | None = None,
    out: Any = None,
) -> IndexerBackwardResult:
    """Gradients of the indexer's queries, keys and head weights from that of its logits, sparse or dense.

    Specification: training 1, training 7.

    Args:
        q: [num_tokens, num_heads, head_dim] bf16.
        k: [num_keys, head_dim] bf16.
        w: [num_tokens, num_heads] bf16 or f32.
        dlogits: [num_tokens, topk] f32.
        indices: [num_tokens, topk] i32; may be absent.
        topk_length: [num_tokens] i32; may be absent.
        cu_q: [num_sequences_and_one] i32; may be absent.
        cu_k: [num_sequences_and_one] i32; may be absent.
        q_off: [num_sequences] i32; may be absent.
        global_: one of False, True; the model's is True.
        key_gradients: one of atomic, deterministic.
        left_out: a number; the model's is 0.
        ratio: a number.
        sm_scale: a number; the model's is 0.08838835.
        columns: a number.
        num_sequences: a number.
        num_sequences_and_one: a number.
        out: Results to write, as this returns them.

    Returns:
        dq: [num_tokens, num_heads, head_dim] bf16, as the forward wrote it.
        dk: [num_keys, head_dim] f32, as the forward wrote it.
        dw: [num_tokens, num_heads] bf16 or f32, as the forward wrote it.
    """
    ...

class IndexerDistillationResult(NamedTuple):
    logits: Tensor
    indices: Tensor
    values: Tensor
    target: Tensor
    idx_lse: Tensor
    loss: Tensor
    kl: Tensor

def indexer_distillation(
    index_q: Tensor,
    index_k: Tensor,
    index_w: Tensor,
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    limits: Tensor | None = None,
    q_off: Tensor | None = None,
    cu_q: Tensor | None = None,
    cu_k: Tensor | None = None,
    *,
    form: Literal['clipped_log', 'exact'] | None = None,
    head_dim: int | None = None,
    left_out: int = 0,
    listed: int | None = None,
    loss_coeff: float = 0.3,
    num_heads: int | None = None,
    ratio: int | None = None,
    reduction: Literal['mean_of_rows', 'sum'] | None = None,
    sm_scale: float | None = None,
    columns: int | None = None,
    num_sequences: int | None = None,
    num_sequences_and_one: int | None = None,
    out: Any = None,
) -> IndexerDistillationResult:
    """A step of the indexer's training: logits, lists, target, loss, and the gradients of its queries, keys and weights.

    Specification: training 1, training 2, training 5, training 6, training 7.

    Args:
        index_q: [num_tokens, index_heads, index_head_dim] bf16.
        index_k: [num_keys, index_head_dim] bf16.
        index_w: [num_tokens, index_heads] f32.
        q: [num_tokens, num_heads, head_dim] bf16.
        k: [num_keys, head_dim] bf16.
        lse: [num_tokens, num_heads] f32.
        limits: [num_tokens] i32; may be absent.
        q_off: [num_sequences] i32; may be absent.
        cu_q: [num_sequences_and_one] i32; may be absent.
        cu_k: [num_sequences_and_one] i32; may be absent.
        form: one of clipped_log, exact.
        head_dim: a number.
        left_out: a number; the model's is 0.
        listed: a number.
        loss_coeff: a number; the model's is 0.3.
        num_heads: a number.
        ratio: a number.
        reduction: one of mean_of_rows, sum.
        sm_scale: a number.
        columns: a number.
        num_sequences: a number.
        num_sequences_and_one: a number.
        out: Results to write, as this returns them.

    Returns:
        logits: [num_tokens, columns] f32, as the forward wrote it.
        indices: [num_tokens, topk] i32, as the forward wrote it.
        values: [num_tokens, topk] f32, as the forward wrote it.
        target: [num_tokens, topk] f32, as the forward wrote it.
        idx_lse: [num_tokens] f32, as the forward wrote it.
        loss: [one] f32, as the forward wrote it.
        kl: [num_tokens] f32, as the forward wrote it.
    """
    ...

class IndexerDistillationBackwardResult(NamedTuple):
    dvalues: Tensor
    dindex_q: Tensor
    dindex_k: Tensor
    dindex_w: Tensor

def indexer_distillation_backward(
    index_q: Tensor,
    index_k: Tensor,
    index_w: Tensor,
    indices: Tensor,
    values: Tensor,
    target: Tensor,
    idx_lse: Tensor,
    grad_loss: Tensor,
    cu_q: Tensor | None = None,
    cu_k: Tensor | None = None,
    *,
    form: Literal['clipped_log', 'exact'] | None = None,
    listed: int | None = None,
    loss_coeff: float = 0.3,
    ratio: int | None = None,
    reduction: Literal['mean_of_rows', 'sum'] | None = None,
    sm_scale: float | None = None,
    columns: int | None = None,
    num_sequences: int | None = None,
    num_sequences_and_one: int | None = None,
    out: Any = None,
) -> IndexerDistillationBackwardResult:
    """Gradients of `indexer_distillation`: A step of the indexer's training: logits, lists, target, loss, and the gradients of its queries, keys and weights.

    Specification: training 1, training 2, training 5, training 6, training 7.

    Args:
        index_q: [num_tokens, index_heads, index_head_dim] bf16.
        index_k: [num_keys, index_head_dim] bf16.
        index_w: [num_tokens, index_heads] f32.
        indices: [num_tokens, topk] i32, as the forward wrote it.
        values: [num_tokens, topk] f32, as the forward wrote it.
        target: [num_tokens, topk] f32, as the forward wrote it.
        idx_lse: [num_tokens] f32, as the forward wrote it.
        grad_loss: [one] f32, the gradient of `loss`.
        cu_q: [num_sequences_and_one] i32; may be absent.
        cu_k: [num_sequences_and_one] i32; may be absent.
        form: one of clipped_log, exact.
        listed: a number.
        loss_coeff: a number; the model's is 0.3.
        ratio: a number.
        reduction: one of mean_of_rows, sum.
        sm_scale: a number.
        columns: a number.
        num_sequences: a number.
        num_sequences_and_one: a number.
        out: Results to write, as this returns them.

    Returns:
        dvalues: [num_tokens, topk] f32, the gradient of `values`.
        dindex_q: [num_tokens, index_heads, index_head_dim] bf16, the gradient of `index_q`.
        dindex_k: [num_keys, index_head_dim] f32, the gradient of `index_k`.
        dindex_w: [num_tokens, index_heads] f32, the gradient of `index_w`.
    """
    ...
