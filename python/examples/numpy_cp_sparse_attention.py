"""Sparse attention of several ranks in numpy, forward and backward: a process for each rank.

    PYTHONPATH=fixtures/external parity external --op cp_sparse_attention --ranks 2 \\
        --worker 'python3 python/examples/numpy_cp_sparse_attention.py'
"""

import functools
import os
import time
from multiprocessing.connection import Client, Listener

import numpy
from dsv4_external import serve

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


@functools.cache
def world():
    """all_gather by torch.distributed where torch is installed, otherwise by sockets of rank 0."""
    try:
        import torch.distributed as distributed
    except ImportError:
        return sockets((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
    distributed.init_process_group("gloo", init_method="env://")
    found = [None] * SIZE
    return lambda own: distributed.all_gather_object(found, own) or found


def sockets(address):
    while RANK > 0:
        try:
            first = Client(address)
            return lambda own: first.send((RANK, own)) or first.recv()
        except ConnectionRefusedError:
            time.sleep(0.01)  # Rank 0 does not listen yet.
    listener = Listener(address, backlog=SIZE)
    others = [listener.accept() for _ in range(SIZE - 1)]

    def all_gather(own):
        found = [one for _, one in sorted([(0, own)] + [other.recv() for other in others])]
        for other in others:
            other.send(found)
        return found

    return all_gather


def cp_sparse_attention(case, inputs):
    q, lists, at, dout = (inputs[name] for name in ("q", "indices", "positions", "dout"))
    num_keys, v_dim, scale = (case[name] for name in ("num_tokens", "v_dim", "softmax_scale"))
    # Keys and values of all ranks by position, and zeros for slots without a key.
    own = numpy.concatenate([inputs["k"], inputs.get("v", inputs["k"][:, :v_dim])], 1)
    kv = numpy.zeros((num_keys + 1, own.shape[1]))
    for positions, rows in world()((at, own)):
        kv[positions[positions >= 0]] = rows[positions >= 0]
    length = inputs.get("topk_length", numpy.full(len(lists), lists.shape[1]))
    valid = (lists >= 0) & (lists < num_keys) & (numpy.arange(lists.shape[1]) < length[:, None])
    rows, some = numpy.where(valid, lists, num_keys), valid.any(1)[:, None]
    k, v = numpy.split(kv[rows], [-v_dim], 2)
    logits = numpy.where(valid[:, None], numpy.einsum("thd,tjd->thj", q, k) * scale, -numpy.inf)
    largest = logits.max(2, initial=-numpy.inf)
    shift = numpy.where(some, largest, 0.0)
    p = numpy.exp(logits - shift[..., None])
    lse = shift + numpy.log(numpy.where(some, p.sum(2), 1.0))
    p /= numpy.exp(lse - shift)[..., None]
    # The sink is a logit without a value: the keys share what it leaves.
    share = 1.0 / (1.0 + numpy.exp(inputs.get("sink", -numpy.inf) - lse))
    out = numpy.einsum("thj,tjd->thd", p, v) * share[..., None]

    delta = (dout * out).sum(2)
    dlogits = p * share[..., None] * (numpy.einsum("thd,tjd->thj", dout, v) - delta[..., None])
    dlogits += p * numpy.where(some, inputs.get("dlse", 0.0), 0.0)[..., None]
    dk = numpy.einsum("thj,thd->tjd", dlogits, q) * scale
    dv = numpy.einsum("thj,thd->tjd", p * share[..., None], dout)
    dkv = numpy.zeros_like(kv)
    numpy.add.at(dkv, rows, numpy.concatenate([dk, dv], 2))
    dsink = ((share - 1.0) * delta).sum(0)
    dkv, dsink = (sum(parts) for parts in zip(*world()((dkv, dsink))))
    dk, dv = numpy.split(dkv[at], [-v_dim], 1)  # Padding has position -1: zeros.
    if "v" not in inputs:
        dk[:, :v_dim] += dv
    dq = numpy.einsum("thj,tjd->thd", dlogits, k) * scale
    forward = {"out": out, "lse": numpy.where(some, lse, numpy.inf), "max_logits": largest}
    return {**forward, "dq": dq, "dk": dk, "dv": dv, "dsink": dsink}


serve(cp_sparse_attention)
