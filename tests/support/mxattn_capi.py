"""The package's binding with buffers full of NaN, for tests and benchmarks.

`Attention` holds a problem and the saved state; `attention` is the whole call in one function.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python"))

from mxattn.capi import *  # noqa: E402, F403
from mxattn.capi import Problem, bfloat16, make_config  # noqa: E402


def poisoned(shape, dtype) -> np.ndarray:
    """A buffer full of NaN or -1: what a call does not write shows."""
    array = np.empty(shape, dtype)
    array.view(np.uint8 if array.itemsize == 1 else np.dtype(f"u{array.itemsize}")).fill(
        np.iinfo(np.dtype(f"u{array.itemsize}")).max
    )
    return array


class Attention:
    """One problem with its lengths and its saved state.

    `options` are those of make_config, causal unless told. cu_seqlens_k defaults to that of the
    queries.
    """

    def __init__(self, q_shape, k_shape, cu_seqlens_q, cu_seqlens_k=None, **options):
        options = {"causal": True} | options
        self.problem = Problem(make_config(q_shape, k_shape, len(cu_seqlens_q) - 1, **options))
        self.q_shape, self.k_shape = tuple(q_shape), tuple(k_shape)
        self.cu_q = self._lengths(cu_seqlens_q)
        self.cu_k = None if cu_seqlens_k is None else self._lengths(cu_seqlens_k)
        self.state = {b.name: self._buffer(b.shape, b.dtype) for b in self.problem.state}
        self._call = self.problem.call(self.cu_q, self.cu_k, list(self.state.values()))

    @property
    def _problem(self):
        return self.problem._handle

    @staticmethod
    def _lengths(cu_seqlens) -> np.ndarray:
        return np.ascontiguousarray(cu_seqlens, np.int32)

    @staticmethod
    def _buffer(shape, dtype) -> np.ndarray:
        return poisoned(shape, dtype)

    @property
    def backend(self) -> str:
        return self.problem.backend

    @property
    def explanation(self) -> str:
        return self.problem.explanation

    def quantize(self, name: str, array: np.ndarray) -> None:
        self.problem.quantize(self._call, name, array)

    def dequantize(self, name: str) -> np.ndarray:
        out = poisoned(self.q_shape if name == "q" else self.k_shape, np.float32)
        self.problem.dequantize(self._call, name, out)
        return out

    def forward(self, q, k, v, *, out=None, lse=None, quantized=()):
        """(out, lse); `quantized` names operands that are in the state already."""
        out = poisoned(self.q_shape, bfloat16) if out is None else out
        lse = poisoned((self.q_shape[1], self.q_shape[0]), np.float32) if lse is None else lse
        self.problem.forward(self._call, q, k, v, out, lse, quantized)
        return out, lse

    def backward(self, q, k, v, out, lse, dout, *, dq=None, dk=None, dv=None):
        """(dq, dk, dv)"""
        dq = poisoned(self.q_shape, bfloat16) if dq is None else dq
        dk = poisoned(self.k_shape, bfloat16) if dk is None else dk
        dv = poisoned(self.k_shape, bfloat16) if dv is None else dv
        self.problem.backward(self._call, q, k, v, out, lse, dout, dq, dk, dv)
        return dq, dk, dv


def attention(q, k, v, cu_seqlens_q, cu_seqlens_k=None, dout=None, **options) -> dict:
    """{"o", "lse"} and, with dout, {"dq", "dk", "dv"}: the whole call."""
    call = Attention(q.shape, k.shape, cu_seqlens_q, cu_seqlens_k, **options)
    out, lse = call.forward(q, k, v)
    result = {"o": out, "lse": lse}
    if dout is not None:
        gradients = call.backward(q, k, v, out, lse, dout)
        result.update(zip(("dq", "dk", "dv"), gradients, strict=True))
    return result
