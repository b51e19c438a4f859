"""Fixtures of the Python tests."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import hypothesis_profile  # noqa: F401
import numpy as np
import pytest
from captures import read_safetensors


@dataclass
class Layer:
    """One captured layer: tensors (tokens, heads, dim) in BF16."""

    capture: str
    layer: str
    cu_seqlens: np.ndarray
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    dout: np.ndarray


@pytest.fixture(scope="session")
def captures() -> list[Layer]:
    """Every layer of every capture in the folder MXATTN_CAPTURES."""
    folder = os.environ.get("MXATTN_CAPTURES")
    if not folder:
        pytest.skip("MXATTN_CAPTURES names no folder of .safetensors captures")
    layers = []
    for path in sorted(Path(folder).glob("*.safetensors")):
        tensors = read_safetensors(path)
        for name in sorted({key.split(".")[0] for key in tensors if "." in key}):
            parts = (tensors[f"{name}.{part}"] for part in ("q", "k", "v", "do"))
            layers.append(Layer(path.stem, name, tensors["cu_seqlens"], *parts))
    if not layers:
        pytest.fail(f"MXATTN_CAPTURES = {folder}: expected a folder with .safetensors captures")
    return layers
