#!/usr/bin/env python3
"""Makes examples/data/gpt_layer0_head6.safetensors, the capture that `mxattn demo` shows.

usage: make_demo_capture.py SOURCE.safetensors [OUTPUT.safetensors]

SOURCE is a capture of a small trained GPT: `cu_seqlens` (int32) and `layer0.q/.k/.v/.do`, BF16,
(tokens, heads, channels). The output holds the second stored head of layer 0, uncut, with all
documents: the head on which gradients from an integer row reference fail. Needs numpy only: BF16
is copied as bytes.
"""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path

import numpy as np

LAYER = "layer0"
HEAD = 1
PARTS = ("q", "k", "v", "do")
ITEM = {"BF16": np.uint16, "I32": np.int32}


def read(path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Tensors (BF16 as uint16) and metadata of a safetensors file."""
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    metadata = header.pop("__metadata__", {})
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        flat = np.frombuffer(data[8 + length + begin : 8 + length + end], ITEM[entry["dtype"]])
        tensors[name] = flat.reshape(entry["shape"])
    return tensors, metadata


def write(path: Path, tensors: dict[str, np.ndarray], metadata: dict[str, str]) -> None:
    header: dict[str, object] = {"__metadata__": metadata}
    names = {np.dtype(item): dtype for dtype, item in ITEM.items()}
    offset = 0
    for name, tensor in tensors.items():
        header[name] = {
            "dtype": names[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the data starts at a multiple of 8 bytes
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            file.write(np.ascontiguousarray(tensor).tobytes())


def main(arguments: list[str]) -> int:
    if len(arguments) not in (1, 2):
        print(__doc__, file=sys.stderr)
        return 2
    default = Path(__file__).parent.parent / "examples/data/gpt_layer0_head6.safetensors"
    output = Path(arguments[1]) if len(arguments) == 2 else default
    source, metadata = read(Path(arguments[0]))
    heads = json.loads(metadata[f"{LAYER}.heads"])
    tensors = {f"{LAYER}.{part}": source[f"{LAYER}.{part}"][:, HEAD : HEAD + 1] for part in PARTS}
    tensors["cu_seqlens"] = source["cu_seqlens"]
    write(output, tensors, {f"{LAYER}.heads": json.dumps(heads[HEAD : HEAD + 1])})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
