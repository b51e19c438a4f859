"""Attention in 8 bits, forward and backward, for training.

The functions take numpy arrays or torch tensors (see mxattn.torch). Shapes are (tokens, heads,
head_dim) for packed documents and (batch, tokens, heads, head_dim) for `attn`; query heads are a
multiple of key heads. Errors are InvalidArgument (a ValueError) and Unsupported (a
NotImplementedError); their messages name the argument, its value and what was expected.
"""

from __future__ import annotations

import importlib

from mxattn.capi import InvalidArgument, MxattnError, Plan, Unsupported, lib, recipes
from mxattn.frontend import (
    Quantized,
    Verdict,
    attn,
    attn_varlen,
    backward_,
    can_run,
    cu_seqlens_from_lengths,
    cu_seqlens_from_position_ids,
    dequantize,
    explain,
    forward_,
    make_plan,
    make_state,
    merge_lse,
    quantize,
)

__version__ = lib.mxattn_version().decode()

__all__ = [
    "InvalidArgument",
    "MxattnError",
    "Plan",
    "Quantized",
    "Unsupported",
    "Verdict",
    "attn",
    "attn_varlen",
    "backward_",
    "can_run",
    "cu_seqlens_from_lengths",
    "cu_seqlens_from_position_ids",
    "dequantize",
    "explain",
    "forward_",
    "make_plan",
    "make_state",
    "merge_lse",
    "quantize",
    "recipes",
]


def __getattr__(name: str):
    if name == "torch":  # only who names it needs PyTorch
        return importlib.import_module("mxattn.torch")
    raise AttributeError(f"module 'mxattn' has no attribute {name!r}")
