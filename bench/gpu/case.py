"""One implementation on one workload: its inputs, what it runs, how that is timed."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from workloads import Workload

NAMES = ("o", "dq", "dk", "dv")
FLUSH_BYTES = 256 << 20  # some times the L2 of any device here
CYCLES_PER_MS = 2_000_000  # of a device at most: waits are never too short


class Refused(Exception):
    """The implementation does not run this workload; the text says why."""


class Inputs:
    """q, k, v and the gradient of the output, (tokens, heads, dim): the same bits everywhere."""

    def __init__(self, w: Workload):
        generator = torch.Generator(device="cuda").manual_seed(0)

        def normal(heads):
            shape = (w.tokens, heads, w.dim)
            values = torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)
            return values.contiguous()

        self.q, self.k, self.v = normal(w.heads_q), normal(w.heads_k), normal(w.heads_k)
        self.dout = normal(w.heads_q)


class Case:
    """What an implementation offers.

    `pieces` are run in this order and timed one by one; `call`, if not empty, replaces their sum by
    a sequence of its own. After a run, outputs() gives o, dq, dk, dv as (tokens, heads, dim).
    """

    pieces: list[tuple[str, Callable[[], None]]]
    call: list[tuple[str, Callable[[], None]]] = []
    note = ""
    # Facts of the workload for the report, in milliseconds or bytes.
    facts: dict[str, float] = {}

    def outputs(self) -> dict[str, torch.Tensor]:
        raise NotImplementedError

    def measure(self, timer: Timer) -> dict[str, float]:
        """One repeat: milliseconds of each piece and of the call."""
        times = timer.run(self.pieces)
        if self.call:
            times["call"] = timer.run(self.call)["call"]
        return times


class Timer:
    """CUDA events around pieces, after a flush of the L2 and a wait that hides the host."""

    def __init__(self):
        self.flush = torch.zeros(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
        self.host_ms = 1.0

    def learn_host(self, case: Case) -> None:
        """How long the host takes to enqueue a call: the device waits a bit longer."""
        slowest = 0.0
        for sequence in filter(None, (case.pieces, case.call)):
            samples = []
            for _ in range(3):
                torch.cuda.synchronize()
                begin = time.perf_counter()
                for _, piece in sequence:
                    piece()
                samples.append(1e3 * (time.perf_counter() - begin))
            # The smallest: one that waited for the device while it allocated is none.
            slowest = max(slowest, min(samples))
        torch.cuda.synchronize()
        self.host_ms = min(5.0, 0.3 + 2 * slowest)

    def run(self, sequence) -> dict[str, float]:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(len(sequence) + 1)]
        torch.cuda.synchronize()
        self.flush.add_(1)
        torch.cuda._sleep(int(self.host_ms * CYCLES_PER_MS))
        events[0].record()
        for i, (_, piece) in enumerate(sequence):
            piece()
            events[i + 1].record()
        torch.cuda.synchronize()
        times = {
            name: events[i].elapsed_time(events[i + 1]) for i, (name, _) in enumerate(sequence)
        }
        return {**times, "call": events[0].elapsed_time(events[-1])}


# ---- right or wrong -----------------------------------------------------------------------------


def attend(w: Workload, q, k, v, backend: SDPBackend):
    """SDPA over (batch, tokens, heads, dim)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    options = {"enable_gqa": True} if w.heads_q != w.heads_k else {}
    if w.window:
        at = torch.arange(q.shape[2], device=q.device)
        ago = at[:, None] - at[None, :]
        options["attn_mask"] = (ago >= 0) & (ago < w.window)
    else:
        options["is_causal"] = w.causal
    with sdpa_kernel(backend):
        out = scaled_dot_product_attention(q, k, v, **options)
    return out.transpose(1, 2)


def reference(w: Workload, x: Inputs) -> dict[str, torch.Tensor]:
    """BF16 results of PyTorch, documents of equal length as one batch."""
    like = (x.q, x.q, x.k, x.v)
    results = {name: torch.empty_like(t) for name, t in zip(NAMES, like, strict=True)}
    begin = 0
    for length, group in itertools.groupby(w.lengths):
        count = len(list(group))
        rows = slice(begin, begin + count * length)
        begin = rows.stop
        q, k, v, dout = (t[rows].view(count, length, *t.shape[1:]) for t in (x.q, x.k, x.v, x.dout))
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        # Flash takes no mask of its own, which windows need here.
        backend = SDPBackend.EFFICIENT_ATTENTION if w.window else SDPBackend.FLASH_ATTENTION
        out = attend(w, *leaves, backend)
        for name, t in zip(NAMES, (out, *torch.autograd.grad(out, leaves, dout)), strict=True):
            results[name][rows] = t.detach().reshape(count * length, *t.shape[2:])
    return results


def worst_cosine(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The smallest cosine over heads and o, dq, dk, dv; NaN if anything is not finite."""
    cosines = []
    for name in NAMES:
        for head in range(expected[name].shape[1]):
            x, y = (t[name][:, head].double().flatten() for t in (found, expected))
            cosines.append(torch.dot(x, y) / (x.norm() * y.norm()))
    return float(torch.stack(cosines).min())  # min keeps NaN


class Measured:
    """A prepared case: warm, compared with the reference, its first bits kept."""

    def __init__(self, w: Workload, build: Callable[[Workload, Inputs], Case]):
        inputs = Inputs(w)
        self.case = build(w, inputs)
        self.timer = Timer()
        self.case.measure(self.timer)
        try:
            expected = reference(w, inputs)
            self.cosine = round(worst_cosine(self.case.outputs(), expected), 6)
            del expected
        except (RuntimeError, NotImplementedError) as error:
            self.cosine = None
            self.case.note = f"{self.case.note} not compared: {error}".strip()[:200]
        self.timer.learn_host(self.case)
        self.first = {name: t.clone() for name, t in self.case.outputs().items()}
        torch.cuda.synchronize()

    def repeat(self, count: int) -> tuple[dict[str, list[float]], bool]:
        samples: dict[str, list[float]] = {}
        equal = True
        self.case.measure(self.timer)  # the device was idle
        for _ in range(count):
            for piece, ms in self.case.measure(self.timer).items():
                samples.setdefault(piece, []).append(ms)
            for name, t in self.case.outputs().items():
                # Bits: NaN equals itself, and zeros have a sign.
                equal &= torch.equal(t.contiguous().view(torch.uint8),
                                     self.first[name].contiguous().view(torch.uint8))  # fmt: skip
        return samples, equal
