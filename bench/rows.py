"""What every benchmark reports: medians with spread as rows, and one JSON object of them."""

from __future__ import annotations

import json
import os
import statistics
from pathlib import Path

PIECES = ("quantise", "forward", "backward", "call")
# FLOPs of a piece over those of the forward: 4 d for every query and key that see each other.
FLOPS_OF = {"quantise": 0.0, "forward": 1.0, "backward": 2.5, "call": 3.5}


def make_row(workload: str, piece: str, impl: str, samples: list[float], forward_flops: float,
             bits_equal: bool | None) -> dict:  # fmt: skip
    """One row of the JSON: the median of samples in milliseconds, with the extremes."""
    ms = statistics.median(samples)
    return {
        "workload": workload,
        "piece": piece,
        "impl": impl,
        "ms": round(ms, 4),
        "ms_min": round(min(samples), 4),
        "ms_max": round(max(samples), 4),
        "repeats": len(samples),
        "tflops": round(forward_flops * FLOPS_OF[piece] / ms / 1e9, 4),
        "bits_equal_runs": bits_equal,
    }


def write_json(target: str, report: dict) -> None:
    """Writes to a file, whole or not at all, or to stdout if target is "-"."""
    text = json.dumps(report, indent=1)
    if target == "-":
        print(text)
        return
    path = Path(target)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text + "\n")
    os.replace(partial, path)
