"""What a call from Python costs the host beside the library's own work, CPU or CUDA.

usage: bench_overhead.py [--json FILE] [--device cpu|cuda] [--limit MICROSECONDS] [--python-only]

The microseconds of one call of mxattn.attn_varlen on one document of few tokens: without gradient,
with one, and with the backward, without and with a plan. `python` is the same call with a C library
that does nothing: PyTorch's operator and autograd, shapes, allocation, arguments. `all` is with the
true one; the difference passes inside the C ABI: checks, and kernels on the CPU or their launches
on a GPU. `autograd` is a torch.autograd.Function that does nothing with the same tensors, which
nobody goes below. On a GPU the times are those to enqueue, with nothing in the queue. On the CPU
they are those of the calling thread, so that a busy machine reads the same. Medians of rounds; with
--limit the exit status is 1 where `python` of a forward is longer.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

# Idle threads of one library must not spin while the other one is timed. Before any import.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "python")]

import mxattn  # noqa: E402
import mxattn.torch  # noqa: E402, F401
import torch  # noqa: E402
from mxattn import capi  # noqa: E402
from rows import write_json  # noqa: E402

ROUNDS = 9
TOKENS, HEADS = 4, 1


class Idle:
    """The library, whose attention does nothing."""

    def __init__(self, library):
        self.library = library
        self.mxattn_forward = self.mxattn_backward = lambda problem, args: capi.OK

    def __getattr__(self, name):
        return getattr(self.library, name)


class Nothing(torch.autograd.Function):
    """Saves and returns as many tensors as attention does."""

    @staticmethod
    def forward(ctx, q, k, v):
        ctx.save_for_backward(q, k, v, q, k, v)
        return q.detach()

    @staticmethod
    def backward(ctx, dout):
        q, k, v, *_ = ctx.saved_tensors
        return q, k, v


def cases(device: str, dim: int) -> dict:
    """Functions by name; all inputs stay the same."""
    q, k, v = (torch.randn(TOKENS, HEADS, dim, device=device).bfloat16() for _ in range(3))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    dout = torch.ones_like(q)
    cu = torch.tensor([0, TOKENS], dtype=torch.int32, device=device)
    plan = mxattn.make_plan(cu, heads_q=HEADS, head_dim=dim, causal=True, total_q=TOKENS,
                            total_k=TOKENS)  # fmt: skip

    def both(**options):
        out = mxattn.attn_varlen(*leaves, cu, causal=True, **options)
        torch.autograd.grad(out, leaves, dout)

    def nothing():
        torch.autograd.grad(Nothing.apply(*leaves), leaves, dout)

    return {
        "forward": lambda: mxattn.attn_varlen(q, k, v, cu, causal=True),
        "forward, gradient": lambda: mxattn.attn_varlen(*leaves, cu, causal=True),
        "forward, gradient, plan": lambda: mxattn.attn_varlen(*leaves, cu, causal=True, plan=plan),
        "forward + backward": both,
        "forward + backward, plan": lambda: both(plan=plan),
        "autograd": nothing,
    }


def measure(function, calls: int, now, wait) -> float:
    """Microseconds of a call: the median of rounds, of which each is the sum of its calls."""
    samples = []
    for _ in range(ROUNDS):
        function()
        wait()
        spent = 0.0
        for _ in range(calls):
            begin = now()
            function()
            spent += now() - begin
            wait()  # a device that lags behind would make the host wait for it
        samples.append(1e6 * spent / calls)
    return round(statistics.median(samples), 1)


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=["cpu", "cuda"], default=default)
    parser.add_argument("--json", metavar="FILE", help="write one JSON object (- for stdout)")
    parser.add_argument("--calls", type=int, default=30, help="a round, of 9")
    parser.add_argument("--limit", type=float, metavar="MICROSECONDS")
    parser.add_argument("--python-only", action="store_true", help="never call the true library")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    dim = 64
    index = 0 if options.device == "cuda" else None
    if not mxattn.can_run((TOKENS, HEADS, dim), causal=True, device=index):
        dim = 128
    on_gpu = options.device == "cuda"
    # A GPU's backward runs in a thread of autograd's.
    now = time.perf_counter if on_gpu else time.thread_time
    wait = torch.cuda.synchronize if on_gpu else lambda: None
    functions = cases(options.device, dim)
    rows = [{"case": name} for name in functions]
    library = capi.lib
    for key in ("us", "python_us"):
        if key == "us" and options.python_only:
            continue
        capi.lib = library if key == "us" else Idle(library)
        try:
            for row, function in zip(rows, functions.values(), strict=True):
                row[key] = measure(function, options.calls, now, wait)
        finally:
            capi.lib = library
    where = torch.cuda.get_device_name() if on_gpu else "cpu"
    print(f"{where}, d {dim}, torch {torch.__version__}, microseconds a call", file=sys.stderr)
    print(f"{'':28}{'all':>8}{'python':>8}", file=sys.stderr)
    for row in rows:
        everything = f"{row['us']:8.1f}" if "us" in row else f"{'':8}"
        print(f"{row['case']:28}{everything}{row['python_us']:8.1f}", file=sys.stderr)
    if options.json:
        machine = {"device": where, "torch": torch.__version__, "head_dim": dim}
        write_json(options.json, {"machine": machine, "rows": rows})
    late = [r for r in rows if options.limit and r["case"].startswith("forward, ")
            and r["python_us"] > options.limit]  # fmt: skip
    for row in late:
        print(f"{row['case']}: {row['python_us']} us in Python: expected at most {options.limit}",
              file=sys.stderr)  # fmt: skip
    return 1 if late else 0


if __name__ == "__main__":
    sys.exit(main())
