"""Training call on the CPU, piece by piece, beside PyTorch's SDPA in the same run.

usage: ./dev bench cpu [--quick] [--json FILE] [--threads N] [--repeats N]

8 heads, d = 128, causal; 4096 tokens as one document and as four. A repeat runs every
implementation once, so that all see the same machine; shown are medians with the smallest and
largest time.
FLOPs: 4 S^2 d a head and document for the forward, halved by the mask, 2.5 times that for the
backward. The call of a recipe is quantise + forward + backward, from BF16 to BF16.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

# Idle threads of one library must not spin while the other one is timed. Before any import.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))

import mxattn_capi as m  # noqa: E402
import numpy as np  # noqa: E402
from rows import PIECES, make_row, write_json  # noqa: E402

HEADS, DIM = 8, 128
WORKLOADS = {"1x4096": [4096], "4x1024": [1024] * 4}
RECIPES = ("fp8", "mxfp8", "mxfp8_token", "bf16")
PEERS = ("torch_bf16", "torch_fp32")


def forward_flops(lengths: list[int]) -> float:
    return sum(4 * s * s * DIM * HEADS / 2 for s in lengths)


def timed(function) -> tuple[float, object]:
    begin = time.perf_counter()
    result = function()
    return 1e3 * (time.perf_counter() - begin), result


class Mxattn:
    """One recipe over a pack: (tokens, heads, dim)."""

    def __init__(self, recipe: str, lengths: list[int], threads: int):
        rng = np.random.default_rng(0)
        shape = (sum(lengths), HEADS, DIM)
        normal = (rng.standard_normal(shape, np.float32).astype(m.bfloat16) for _ in range(4))
        self.q, self.k, self.v, self.dout = normal
        cu = np.concatenate([[0], np.cumsum(lengths)])
        self.call = m.Attention(shape, shape, cu, recipe=recipe, threads=threads, backend="cpu")
        self.operands = "qkv" if m.recipes()[recipe]["quantized"] else ""
        self.out, self.dq, self.dk, self.dv = (m.poisoned(shape, m.bfloat16) for _ in range(4))
        self.lse = m.poisoned((HEADS, shape[0]), np.float32)

    def quantise(self):
        for name in self.operands:
            self.call.quantize(name, getattr(self, name))

    def forward(self):
        self.call.forward(
            self.q, self.k, self.v, out=self.out, lse=self.lse, quantized=self.operands
        )

    def backward(self):
        inputs = (self.q, self.k, self.v, self.out, self.lse, self.dout)
        self.call.backward(*inputs, dq=self.dq, dk=self.dk, dv=self.dv)

    def run(self) -> tuple[dict[str, float], bytes]:
        """Milliseconds of each piece, and the bits of all outputs."""
        times = {piece: timed(getattr(self, piece))[0] for piece in PIECES[:3]}
        times["call"] = sum(times.values())
        if not self.operands:
            del times["quantise"]
        return times, b"".join(x.tobytes() for x in (self.out, self.dq, self.dk, self.dv))


class Torch:
    """scaled_dot_product_attention over a batch of equal documents."""

    def __init__(self, dtype: str, lengths: list[int]):
        import torch

        assert len(set(lengths)) == 1, "SDPA takes a batch of equal documents"
        self.torch = torch
        generator = torch.Generator().manual_seed(0)
        shape = (len(lengths), HEADS, lengths[0], DIM)
        self.x = [
            torch.randn(shape, generator=generator).to(getattr(torch, dtype)) for _ in range(4)
        ]
        for x in self.x[:3]:
            x.requires_grad_()

    def run(self) -> tuple[dict[str, float], bytes]:
        q, k, v, dout = self.x
        for x in (q, k, v):
            x.grad = None
        sdpa = self.torch.nn.functional.scaled_dot_product_attention
        forward, out = timed(lambda: sdpa(q, k, v, is_causal=True))
        backward, _ = timed(lambda: out.backward(dout))
        results = (out.detach(), q.grad, k.grad, v.grad)
        data = b"".join(x.contiguous().view(self.torch.uint8).numpy().tobytes() for x in results)
        return {"forward": forward, "backward": backward, "call": forward + backward}, data


# ---- memory: each measurement in a process of its own -------------------------------------------


def resident(field: str) -> int:
    """Bytes of VmRSS or VmHWM of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"no {field} in /proc/self/status")


def measure_memory(tokens: int, threads: int) -> None:
    """Prints the bytes by which a call's peak exceeds inputs, outputs and saved state."""
    Mxattn("fp8", [256], threads).run()  # threads, code and allocator are there
    case = Mxattn("fp8", [tokens], threads)
    ctypes.CDLL(None).malloc_trim(0)  # what the small call left over counts again
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts afresh
    before = resident("VmRSS")
    case.quantise()
    case.forward()
    case.backward()
    print(resident("VmHWM") - before)


def memory_rows(threads: int) -> list[dict]:
    rows = []
    for tokens in (4096, 8192):
        for count in sorted({1, threads}):
            run = subprocess.run(
                [sys.executable, __file__, "--memory", str(tokens), "--threads", str(count)],
                capture_output=True,
                text=True,
            )
            if run.returncode != 0:
                sys.stderr.write(run.stderr)
                return []
            row = {"tokens": tokens, "threads": count, "extra_bytes": int(run.stdout)}
            row["n_by_n_bytes"] = 4 * tokens * tokens  # what one FP32 score matrix would take
            rows.append(row)
    return rows


# ---- the run ------------------------------------------------------------------------------------


def cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def measure(name: str, lengths: list[int], repeats: int, threads: int) -> list[dict]:
    impls = {recipe: Mxattn(recipe, lengths, threads) for recipe in RECIPES}
    impls |= {peer: Torch({"torch_bf16": "bfloat16", "torch_fp32": "float32"}[peer], lengths)
              for peer in PEERS}  # fmt: skip
    times: dict[tuple[str, str], list[float]] = {}
    first: dict[str, bytes] = {}
    equal = dict.fromkeys(impls, True)
    for repeat in range(repeats + 1):  # the first warms up
        print(f"\r{name}: repeat {repeat} of {repeats} ", end="", file=sys.stderr, flush=True)
        for impl, case in impls.items():
            pieces, data = case.run()
            equal[impl] &= first.setdefault(impl, data) == data
            if repeat > 0:
                for piece, ms in pieces.items():
                    times.setdefault((impl, piece), []).append(ms)
    print(file=sys.stderr)
    work = forward_flops(lengths)
    return [
        make_row(name, piece, impl, samples, work, equal[impl])
        for (impl, piece), samples in times.items()
    ]


def print_table(rows: list[dict], memory: list[dict]) -> None:
    out = sys.stderr
    at = {(row["workload"], row["impl"], row["piece"]): row for row in rows}
    for workload in WORKLOADS:
        print(f"\n{workload}, ms (smallest-largest of the call)", file=out)
        print(f"{'':14}" + "".join(f"{piece:>10}" for piece in PIECES)
              + f"{'spread':>18}{'GFLOP/s':>9}{'x bf16':>8}{'x fp32':>8}  bits",
              file=out)  # fmt: skip
        for impl in (*RECIPES, *PEERS):
            found = [at.get((workload, impl, piece)) for piece in PIECES]
            call = found[-1]
            text = "".join(f"{row['ms']:10.1f}" if row else f"{'-':>10}" for row in found)
            spread = f"{call['ms_min']:.1f}-{call['ms_max']:.1f}"
            ratios = (at[workload, peer, "call"]["ms"] / call["ms"] for peer in PEERS)
            text += f"{spread:>18}{1e3 * call['tflops']:9.1f}"
            text += "".join(f"{ratio:8.2f}" for ratio in ratios)
            print(f"{impl:14}{text}  {'same' if call['bits_equal_runs'] else 'differ'}", file=out)
    if memory:
        print("\nfp8, memory beyond inputs, outputs and saved state", file=out)
    for row in memory:
        extra, square = row["extra_bytes"] / 2**20, row["n_by_n_bytes"] / 2**20
        print(f"  N = {row['tokens']}, threads {row['threads']}: {extra:.1f} MiB"
              f" (one N x N matrix: {square:.0f} MiB)", file=out)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="./dev bench cpu", description=__doc__.split("\n")[0])
    parser.add_argument("--json", metavar="FILE", help="write one JSON object (- for stdout)")
    parser.add_argument("--quick", action="store_true", help="3 repeats, no memory measurement")
    parser.add_argument("--repeats", type=int, metavar="N", help="timed repeats (default 7)")
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="threads (default 2)")
    parser.add_argument("--memory", type=int, metavar="TOKENS", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory:
        measure_memory(options.memory, options.threads)
        return 0
    if options.threads < 1 or (options.repeats is not None and options.repeats < 1):
        parser.error("--threads and --repeats: expected at least 1")

    import torch

    torch.set_num_threads(options.threads)
    repeats = options.repeats or (3 if options.quick else 7)
    machine = {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": options.threads,
        "simd": m.lib.mxattn_simd_targets().decode().split(",")[0],
        "matrix_engine": m.lib.mxattn_matrix_engine().decode(),
        "mxattn": m.lib.mxattn_version().decode(),
        "torch": torch.__version__,
        "system": platform.platform(),
        "repeats": repeats,
        "heads": HEADS,
        "head_dim": DIM,
        "mask": "causal",
    }
    print(", ".join(f"{key} {value}" for key, value in machine.items()), file=sys.stderr)
    memory = [] if options.quick else memory_rows(options.threads)
    rows = []
    for name, lengths in WORKLOADS.items():
        rows += measure(name, lengths, repeats, options.threads)
    print_table(rows, memory)
    if options.json:
        write_json(options.json, {"machine": machine, "rows": rows, "memory": memory})
    return 0


if __name__ == "__main__":
    sys.exit(main())
