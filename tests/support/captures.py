"""Captured activations from .safetensors files."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import mxattn_capi
import numpy as np


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """Tensors of a .safetensors file by name; BF16 as ml_dtypes.bfloat16."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    dtypes = {"BF16": mxattn_capi.bfloat16, "I32": np.int32, "F32": np.float32}
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            data = raw[8 + length + begin : 8 + length + end]
            tensors[name] = np.frombuffer(data, dtypes[entry["dtype"]]).reshape(entry["shape"])
    return tensors
