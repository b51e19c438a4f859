"""Tensors whose offsets pass 2^31 elements without that much memory."""

from __future__ import annotations

import mmap

import numpy as np
from mxattn_capi import bfloat16

_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


def sparse(shape, token_stride, head_stride) -> np.ndarray:
    """A BF16 tensor (tokens, heads, dim) of zeros; strides count elements. Pages appear on use."""
    tokens, heads, dim = shape
    elements = (tokens - 1) * token_stride + (heads - 1) * head_stride + dim
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
    memory = mmap.mmap(-1, elements * bfloat16.itemsize, flags=flags)
    size = bfloat16.itemsize
    return np.ndarray(
        shape, bfloat16, memory, strides=(token_stride * size, head_stride * size, size)
    )
