"""Exact attention in FP64 numpy, and what the Python tests compare with."""

from __future__ import annotations

import ml_dtypes
import numpy as np


def bf16(x) -> np.ndarray:
    """Rounded to the nearest BF16, ties to even."""
    return np.asarray(x, np.float32).astype(ml_dtypes.bfloat16)


def visible(q_len, k_len, causal=True, window=(-1, -1)) -> np.ndarray:
    """(q_len, k_len) booleans: which keys a query of one document sees; bottom-right aligned."""
    diagonal = np.arange(q_len)[:, None] + (k_len - q_len)
    key = np.arange(k_len)[None, :]
    mask = np.ones((q_len, k_len), bool)
    if causal:
        mask &= key <= diagonal
    if window[0] >= 0:
        mask &= key >= diagonal - window[0]
    if window[1] >= 0:
        mask &= key <= diagonal + window[1]
    return mask


def exact(q, k, v, cu_q, cu_k=None, dout=None, *, causal=True, window=(-1, -1),
          softmax_scale=None) -> dict:  # fmt: skip
    """{"o", "lse", "dq", "dk", "dv"} of a pack, FP64. q, dout: (tokens, heads, dim)."""
    cu_k = cu_q if cu_k is None else cu_k
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    dout = np.zeros(q.shape) if dout is None else np.asarray(dout, np.float64)
    group = q.shape[1] // k.shape[1]
    scale = q.shape[2] ** -0.5 if softmax_scale is None else softmax_scale
    result = {
        "o": np.zeros(q.shape),
        "lse": np.full((q.shape[1], q.shape[0]), -np.inf),
        "dq": np.zeros(q.shape),
        "dk": np.zeros(k.shape),
        "dv": np.zeros(v.shape),
    }
    for n in range(len(cu_q) - 1):
        rows, keys = slice(cu_q[n], cu_q[n + 1]), slice(cu_k[n], cu_k[n + 1])
        mask = visible(rows.stop - rows.start, keys.stop - keys.start, causal, window)
        if not mask.any():
            continue
        for h in range(q.shape[1]):
            kh, vh = k[keys, h // group], v[keys, h // group]
            s = np.where(mask, q[rows, h] @ kh.T * scale, -np.inf)
            top = s.max(1, keepdims=True)
            p = np.exp(s - np.where(np.isfinite(top), top, 0))
            total = p.sum(1, keepdims=True)
            with np.errstate(divide="ignore"):
                result["lse"][h, rows] = (top + np.log(total))[:, 0]
            p /= np.where(total > 0, total, 1)
            o = p @ vh
            g = dout[rows, h]
            ds = p * (g @ vh.T - (g * o).sum(1, keepdims=True)) * scale
            result["o"][rows, h] = o
            result["dq"][rows, h] = ds @ kh
            result["dk"][keys, h // group] += ds.T @ q[rows, h]
            result["dv"][keys, h // group] += p.T @ g
    return result


def cosine(a, b) -> float:
    a, b = (np.asarray(x, np.float64).ravel() for x in (a, b))
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


def cosines(got: dict, want: dict) -> tuple[float, ...]:
    """(o, dq, dk, dv)"""
    return tuple(cosine(got[name], want[name]) for name in ("o", "dq", "dk", "dv"))


def bits(array: np.ndarray) -> np.ndarray:
    """The array as unsigned integers, so that NaN compares and -0 differs from 0."""
    return np.ascontiguousarray(array).view(np.dtype(f"u{array.itemsize}"))


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and bool((bits(a) == bits(b)).all())


def first_difference(a: np.ndarray, b: np.ndarray) -> str:
    """Where two arrays first differ, for messages."""
    where = np.argwhere(bits(a) != bits(b))
    if not len(where):
        return "no difference"
    at = tuple(int(x) for x in where[0])
    return f"{len(where)} elements differ, first at {at}: {a[at]} and {b[at]}"


def offsets(lengths) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
