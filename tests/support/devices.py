"""The devices that tests of the torch front end run on, and what can run there.

A fixture with DEVICES as its parameters runs a test on the CPU and on a CUDA device; without one,
the second half is shown as skipped with the reason.
"""

from __future__ import annotations

import mxattn
import pytest
import torch


def _cuda_dim() -> tuple[int | None, str]:
    """The smallest head dimension that device 0 runs with recipe fp8, or why it runs none."""
    reason = "torch sees no CUDA device"
    if torch.cuda.is_available():
        for dim in (64, 128):
            verdict = mxattn.can_run((64, 4, dim), device=0)
            if verdict:
                return dim, ""
            reason = verdict.reason
    return None, reason


CUDA_DIM, CUDA_MISSING = _cuda_dim()
needs_cuda = pytest.mark.skipif(CUDA_DIM is None, reason=f"cuda: {CUDA_MISSING}")
DEVICES = ["cpu", pytest.param("cuda", marks=needs_cuda)]


def need(device, recipe="fp8", dim=64, **options) -> None:
    """Skips where the device cannot run the recipe."""
    index = 0 if str(device).startswith("cuda") else None
    verdict = mxattn.can_run((64, 4, dim), recipe=recipe, device=index, **options)
    if not verdict:
        pytest.skip(f"{device}: {verdict.reason}")


def usual_dim(device) -> int:
    """64, or the head dimension that the device takes."""
    return 64 if device == "cpu" else CUDA_DIM
