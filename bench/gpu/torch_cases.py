"""Peers that torch's autograd drives: SDPA, varlen_attn, FlashAttention 4."""

from __future__ import annotations

import inspect

import torch
from case import NAMES, Case, Inputs, Refused, attend
from torch.nn.attention import SDPBackend
from workloads import Workload


class AutogradCase(Case):
    """`function` takes q, k, v with gradients and returns the output in the shape of dout."""

    def __init__(self, function, q, k, v, dout, w: Workload):
        self.function, self.dout, self.w = function, dout, w
        self.leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        self.out, self.gradients = None, ()
        self.pieces = [("forward", self.forward), ("backward", self.backward)]

    def forward(self):
        self.out = self.function(*self.leaves)

    def backward(self):
        self.gradients = torch.autograd.grad(self.out, self.leaves, self.dout)

    def outputs(self):
        results = (self.out.detach(), *self.gradients)
        return {
            name: t.reshape(self.w.tokens, *t.shape[-2:])
            for name, t in zip(NAMES, results, strict=True)
        }


def as_batch(w: Workload, x: Inputs) -> list[torch.Tensor]:
    """q, k, v, dout as (batch, tokens, heads, dim)."""
    if not w.equal:
        raise Refused("takes a batch of equal documents")
    return [t.view(len(w.lengths), w.lengths[0], *t.shape[1:]) for t in (x.q, x.k, x.v, x.dout)]


def cu_seqlens(w: Workload) -> torch.Tensor:
    lengths = torch.tensor((0, *w.lengths), dtype=torch.int32)
    return lengths.cumsum(0, dtype=torch.int32).cuda()


def sdpa(backend: SDPBackend):
    def build(w: Workload, x: Inputs) -> Case:
        if w.window:
            raise Refused("SDPA has no sliding window")
        return AutogradCase(lambda q, k, v: attend(w, q, k, v, backend), *as_batch(w, x), w)

    return build


def varlen(w: Workload, x: Inputs) -> Case:
    from torch.nn.attention.varlen import varlen_attn

    takes = inspect.signature(varlen_attn).parameters
    options = {}
    if "window_size" in takes:
        options["window_size"] = w.window_size
    elif w.window:
        raise Refused("this version of varlen_attn has no sliding window")
    else:
        options["is_causal"] = w.causal
    # Versions without the option take fewer heads of keys as they are.
    if w.heads_q != w.heads_k and "enable_gqa" in takes:
        options["enable_gqa"] = True
    cu, longest = cu_seqlens(w), max(w.lengths)

    def function(q, k, v):
        return varlen_attn(q, k, v, cu, cu, longest, longest, **options)

    return AutogradCase(function, x.q, x.k, x.v, x.dout, w)


def flash4(w: Workload, x: Inputs) -> Case:
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    options = {"causal": w.causal}
    if w.window:
        options["window_size"] = w.window_size

    def only_output(result):
        return result[0] if isinstance(result, tuple) else result

    if w.equal:
        return AutogradCase(
            lambda q, k, v: only_output(flash_attn_func(q, k, v, **options)), *as_batch(w, x), w
        )
    cu, longest = cu_seqlens(w), max(w.lengths)
    options |= {"cu_seqlens_q": cu, "cu_seqlens_k": cu}
    options |= {"max_seqlen_q": longest, "max_seqlen_k": longest}
    return AutogradCase(
        lambda q, k, v: only_output(flash_attn_varlen_func(q, k, v, **options)),
        x.q, x.k, x.v, x.dout, w,
    )  # fmt: skip
