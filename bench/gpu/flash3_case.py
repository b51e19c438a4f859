"""FlashAttention 3 through JAX.

XLA runs on a stream of its own, so times are those of the wall over queued calls, without a flush.
The backward cannot be called alone: it is the call with gradients less the forward.
"""

from __future__ import annotations

import os
import time

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import torch  # noqa: E402
from case import NAMES, Case, Inputs, Timer  # noqa: E402
from flash_attn3_jax import flash_mha, flash_mha_varlen  # noqa: E402
from workloads import Workload  # noqa: E402

QUEUE_MS = 15.0  # enough that waiting for the end does not count
LONGEST_QUEUE = 12


class Flash3Case(Case):
    note = "wall clock over queued calls; backward = call - forward"

    def __init__(self, w: Workload, x: Inputs):
        self.w = w
        tensors = (x.q, x.k, x.v, x.dout)
        window = w.window_size if w.window else (-1, -1)
        if w.equal:
            tensors = [t.view(len(w.lengths), w.lengths[0], *t.shape[1:]) for t in tensors]
            options = {"is_causal": w.causal, "window_size": window}

            def attention(q, k, v):
                return flash_mha(q, k, v, **options)
        else:
            cu = jnp.cumsum(jnp.array((0, *w.lengths), jnp.int32)).astype(jnp.int32)
            longest = max(w.lengths)

            def attention(q, k, v):
                return flash_mha_varlen(q, k, v, cu, is_causal=w.causal,
                                        max_seqlen_q=longest, max_seqlen_k=longest,
                                        window_size=window)  # fmt: skip

        def with_gradients(q, k, v, dout):
            out, pull = jax.vjp(attention, q, k, v)
            return (out, *pull(dout))

        torch.cuda.synchronize()
        self.tensors = [jax.dlpack.from_dlpack(t) for t in tensors]
        self.forward, self.whole = jax.jit(attention), jax.jit(with_gradients)
        self.queue = {}
        for name, function, inputs in self._functions():
            jax.block_until_ready(function(*inputs))
            once = self._wall(function, inputs, 1)
            self.queue[name] = max(1, min(LONGEST_QUEUE, round(QUEUE_MS / once)))

    def _functions(self):
        return (("forward", self.forward, self.tensors[:3]), ("call", self.whole, self.tensors))

    def _wall(self, function, inputs, count: int) -> float:
        begin = time.perf_counter()
        for _ in range(count):
            self.results = function(*inputs)
        jax.block_until_ready(self.results)
        return 1e3 * (time.perf_counter() - begin) / count

    def measure(self, timer: Timer) -> dict[str, float]:
        times = {name: self._wall(f, x, self.queue[name]) for name, f, x in self._functions()}
        return {
            "forward": times["forward"],
            "backward": times["call"] - times["forward"],
            "call": times["call"],
        }

    # What the timer learns of the host is not used: nothing is enqueued between events.
    pieces = []

    def outputs(self):
        return {
            name: torch.from_dlpack(t).reshape(self.w.tokens, *t.shape[-2:])
            for name, t in zip(NAMES, self.results, strict=True)
        }
