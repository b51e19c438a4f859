"""Tables and ratios of a run."""

from __future__ import annotations

import json
import math
from pathlib import Path

from impls import ALL, BF16_PEERS, FP8_CASTS, PEERS, RECIPES
from rows import FLOPS_OF, PIECES
from workloads import BY_NAME, PACKS, Workload

# What the matrix units of an H200 give in FP8 without sparsity, by its data sheet, TFLOP/s.
PEAK_TFLOPS = 1979
# Below this a result has little to do with attention over the same inputs.
LEAST_COSINE = 0.95


def quoted_rows(source: Path, measured: set[tuple[str, str]]) -> list[dict]:
    """Rows of an earlier run for what this one lacks, marked as such."""
    rows = []
    for entry in json.loads(source.read_text())["rows"]:
        workload, impl = entry["workload"], entry["impl"]
        if workload not in BY_NAME or (workload, impl) in measured:
            continue
        work = BY_NAME[workload].forward_flops()
        for piece in ("forward", "backward", "call"):
            if "tflops" in entry and piece != "call":
                ms = work * FLOPS_OF[piece] / entry["tflops"][piece] / 1e9
            elif "tflops" in entry:
                ms = sum(work * FLOPS_OF[p] / t / 1e9 for p, t in entry["tflops"].items())
            elif piece in entry["ms"]:
                ms = entry["ms"][piece]
            else:
                continue
            rows.append({
                "workload": workload, "piece": piece, "impl": impl, "ms": round(ms, 4),
                "tflops": round(work * FLOPS_OF[piece] / ms / 1e9, 4), "bits_equal_runs": None,
                "another_run": True,
            })  # fmt: skip
    return rows


def mark_doubtful(row: dict, cosine: float | None) -> None:
    """Says in the row itself why it cannot be believed."""
    if row["tflops"] > PEAK_TFLOPS or row["ms"] <= 0:
        row["doubt"] = f"IMPOSSIBLE: above {PEAK_TFLOPS} TFLOP/s"
    elif cosine is not None and not cosine >= LEAST_COSINE:
        row["doubt"] = f"WRONG: cosine {cosine}"


class Table:
    def __init__(self, rows: list[dict]):
        self.at = {(r["workload"], r["impl"], r["piece"]): r for r in rows}

    def fastest(self, workload: str, impls, piece: str) -> dict | None:
        found = [self.at.get((workload, impl, piece)) for impl in impls]
        found = [r for r in found if r and "doubt" not in r]
        return min(found, key=lambda r: r["ms"], default=None)

    def workloads(self) -> list[str]:
        present = {workload for workload, _, _ in self.at}
        return [name for name in BY_NAME if name in present]

    def lines(self, workload: str) -> list[str]:
        """One line an implementation: ms of every piece, TFLOP/s, spread, cosine, bits."""
        result = []
        for impl in ALL:
            found = {piece: self.at.get((workload, impl, piece)) for piece in PIECES}
            call = found["call"]
            if call is None:
                continue
            text = f"  {impl:15}"
            text += "".join(f"{found[p]['ms']:8.3f}" if found[p] else f"{'-':>8}" for p in PIECES)
            text += "".join(f"{found[p]['tflops']:6.0f}" if found[p] else f"{'-':>6}"
                            for p in ("forward", "backward"))  # fmt: skip
            if call.get("another_run"):
                text += "  another run"
            else:
                spread = 100 * (call["ms_max"] - call["ms_min"]) / call["ms"]
                cosine = call.get("cosine")
                text += f"{spread:5.0f}%"
                text += f"{'-':>8}" if cosine is None else f"{cosine:8.4f}"
                text += "  same" if call["bits_equal_runs"] else "  differ"
            doubts = {r["doubt"] for r in found.values() if r and "doubt" in r}
            result.append(text + "".join(f"  {doubt}" for doubt in sorted(doubts)))
        return result

    def ratio(self, workload: str, recipe: str, impls, piece: str) -> tuple[float, str] | None:
        """How many times as fast as the fastest of impls, and which that is (* another run)."""
        ours, peer = self.at.get((workload, recipe, piece)), self.fastest(workload, impls, piece)
        if not ours or not peer or "doubt" in ours:
            return None
        return peer["ms"] / ours["ms"], peer["impl"] + ("*" if peer.get("another_run") else "")


def head() -> str:
    pieces = "".join(f"{p:>8}" for p in ("quant", "fwd", "bwd", "call"))
    return f"  {'ms':15}{pieces}{'TF fwd':>7}{'bwd':>5}{'span':>6}{'cosine':>8}  bits"


def ratios(table: Table) -> dict:
    """For every recipe: ratios of each workload, and the geometric mean over the nine packs."""
    result = {}
    groups = {
        "bf16": BF16_PEERS,
        "any_with_casts": (*BF16_PEERS, FP8_CASTS),
        "any": PEERS,
    }
    for recipe in RECIPES:
        per_workload = {}
        for workload in table.workloads():
            found = {}
            for piece in ("forward", "backward", "call"):
                for group, impls in groups.items():
                    ratio = table.ratio(workload, recipe, impls, piece)
                    if ratio:
                        found[f"{piece}_over_{group}"] = {"x": round(ratio[0], 3), "peer": ratio[1]}
            per_workload[workload] = found
        packs = [per_workload.get(w.name, {}).get("call_over_any_with_casts") for w in PACKS]
        known = [r["x"] for r in packs if r]
        result[recipe] = {
            "workloads": per_workload,
            "packs_known": len(known),
            "packs_geomean_call_over_any_with_casts": round(
                math.exp(sum(map(math.log, known)) / len(known)), 3
            )
            if known
            else None,
        }
    return result


def ratio_lines(result: dict) -> list[str]:
    lines = []
    for recipe, found in result.items():
        if not any(found["workloads"].values()):
            continue
        lines.append(f"{recipe}: times as fast as the best BF16 peer (fwd, bwd, call), and its call"
                     " as the fastest peer with and without FP8 casts; * another run")  # fmt: skip
        for workload, ratio in found["workloads"].items():
            if not any(key.startswith("call") for key in ratio):
                continue

            def cell(key, name=False, ratio=ratio):
                r = ratio.get(key)
                text = f"{r['x']:6.2f}" if r else f"{'-':>6}"
                return text + (f" {r['peer'] if r else '':16}" if name else "")

            lines.append(
                f"  {workload:20}{cell('forward_over_bf16')}{cell('backward_over_bf16')}"
                f"{cell('call_over_bf16', True)}{cell('call_over_any_with_casts', True)}"
                f"{cell('call_over_any', True)}".rstrip()
            )
        mean = found["packs_geomean_call_over_any_with_casts"]
        if mean is not None:
            lines.append(f"  call over the fastest peer (with casts), geometric mean of"
                         f" {found['packs_known']} of {len(PACKS)} packs: {mean:.2f}")  # fmt: skip
    return lines


def quantise_gbytes(facts: dict, row: dict) -> float:
    return round(facts["quantise_bytes"] / row["ms"] / 1e6, 1)


def workload_title(w: Workload) -> str:
    mask = f"window {w.window}" if w.window else "causal" if w.causal else "full"
    return f"{w.name} ({w.heads_q}/{w.heads_k} heads, d {w.dim}, {mask})"
