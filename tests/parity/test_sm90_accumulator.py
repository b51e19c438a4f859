"""Our model of the H200's FP8 accumulator against an independent one, bit for bit.

The other model is `mmaemu` (preset "hopper"), which its authors validated on H100 hardware. Both
take E4M3 codes: c (m, n) = a (m, k) b^T, b (n, k), in steps of k = 32.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from mmaemu.model.chain import dot

NAN_CODE, MAX_CODE = 0x7F, 0x7E
FIRST_NORMAL = 8  # codes 1-7 are subnormal
MIN_OUTPUTS = 100_000


@pytest.fixture(scope="module")
def sm90():
    """The hook library: MXATTN_TEST_HOOKS, or the one of ./dev test."""
    default = Path(__file__).resolve().parents[2] / "build" / "lib" / "libmxattn_test_hooks.so"
    path = Path(os.environ.get("MXATTN_TEST_HOOKS", default))
    assert path.is_file(), f"{path}: build with MXATTN_BUILD_TESTS, or set MXATTN_TEST_HOOKS"
    hook = ctypes.CDLL(str(path)).mxattn_hook_sm90_mma
    hook.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_int] * 4
    hook.restype = None

    def run(a, b, c=None):
        a, b = np.ascontiguousarray(a), np.ascontiguousarray(b)
        out = np.zeros((len(a), len(b)), np.float32) if c is None else c.copy()
        hook(a.ctypes.data, b.ctypes.data, out.ctypes.data, *out.shape, a.shape[1], c is not None)
        return out

    return run


def other_model(a, b, c=None):
    """mmaemu, a few rows of a at a time: it works on (rows, n, k) in FP64."""
    rows = max(1, (1 << 21) // b.size)
    parts = []
    for i in range(0, len(a), rows):
        x = torch.from_numpy(a[i : i + rows]).view(torch.float8_e4m3fn)[:, None, :]
        y = torch.from_numpy(b).view(torch.float8_e4m3fn)[None]
        shape = (x.shape[0], y.shape[1], y.shape[2])
        start = None if c is None else torch.from_numpy(c[i : i + rows])
        parts.append(dot(x.expand(shape), y.expand(shape), start, preset="hopper").numpy())
    return np.concatenate(parts)


def assert_same_bits(got, want):
    different = got.view(np.uint32) != want.view(np.uint32)
    assert not different.any(), (
        f"{different.sum()} of {different.size} differ, first at {np.argwhere(different)[0]}: "
        f"{float(got[different][0]).hex()} instead of {float(want[different][0]).hex()}"
    )


def to_codes(x):
    return torch.from_numpy(x).to(torch.float8_e4m3fn).view(torch.uint8).numpy()


def normal(rng, shape):
    return to_codes(rng.standard_normal(shape).astype(np.float32))


def uniform(rng, shape):
    return (rng.integers(0, MAX_CODE + 1, shape) | rng.integers(0, 2, shape) << 7).astype(np.uint8)


def tiny(rng, shape):
    """Subnormals, zeros and a few values of every size."""
    codes = rng.integers(0, FIRST_NORMAL, shape) | rng.integers(0, 2, shape) << 7
    return np.where(rng.random(shape) < 0.05, uniform(rng, shape), codes).astype(np.uint8)


def cancelling(rng, shape):
    """Every product meets its negative within the step, but for a few small changes."""
    codes = uniform(rng, shape)
    half = codes.reshape(shape[0], -1, 2, 16)
    half[:, :, 1] = half[:, :, 0]
    return codes


DISTRIBUTIONS = {"normal": normal, "uniform": uniform, "tiny": tiny, "cancelling": cancelling}
SHAPES = [(128, 256, 32), (128, 128, 64), (64, 128, 128), (32, 64, 256), (16, 32, 1024)]


def operands(rng, kind, m, n, k):
    a, b = DISTRIBUTIONS[kind](rng, (m, k)), DISTRIBUTIONS[kind](rng, (n, k))
    if kind == "cancelling":
        a.reshape(m, -1, 2, 16)[:, :, 1] ^= 0x80
        a = np.where(rng.random(a.shape) < 0.03, a ^ 1, a).astype(np.uint8)
        a[(a & 0x7F) == NAN_CODE] ^= 1
    return a, b


@pytest.mark.parametrize("kind", DISTRIBUTIONS)
def test_bit_equal_from_zero(sm90, kind):
    rng = np.random.default_rng(1)
    for m, n, k in SHAPES:
        a, b = operands(rng, kind, m, n, k)
        assert_same_bits(sm90(a, b), other_model(a, b))
    assert len(DISTRIBUTIONS) * sum(m * n for m, n, _ in SHAPES) >= MIN_OUTPUTS


@pytest.mark.parametrize("kind", DISTRIBUTIONS)
@pytest.mark.parametrize("binades", [(-24, 16), (-149, 127)])
def test_bit_equal_with_a_foreign_accumulator(sm90, kind, binades):
    rng = np.random.default_rng(2)
    m, n, k = 128, 128, 64
    a, b = operands(rng, kind, m, n, k)
    c = np.ldexp(rng.uniform(-2, 2, (m, n)), rng.integers(*binades, (m, n))).astype(np.float32)
    c[0] = 0.0
    c[1] = -0.0
    b[:3] = 0  # no products at all
    assert_same_bits(sm90(a, b, c), other_model(a, b, c))


def test_bit_equal_nan_and_infinity(sm90):
    rng = np.random.default_rng(3)
    a, b = uniform(rng, (64, 64)), uniform(rng, (64, 64))
    a[3, 40], b[5, 2] = NAN_CODE, NAN_CODE | 0x80
    b[7:9] = 0
    c = rng.standard_normal((64, 64)).astype(np.float32)
    c[10, 1:4] = np.nan, np.inf, -np.inf
    got = sm90(a, b, c)
    assert_same_bits(got, other_model(a, b, c))
    assert np.isnan(got[3]).all() and np.isnan(got[:, 5]).all() and np.isinf(got[10, 2:4]).all()


def test_the_inputs_are_hard(sm90):
    """They tell the model from exact sums rounded to FP32, and short from long alignment."""
    rng = np.random.default_rng(1)
    for kind in ("normal", "uniform", "cancelling"):
        a, b = operands(rng, kind, 64, 64, 256)
        values = [torch.from_numpy(x).view(torch.float8_e4m3fn).double().numpy() for x in (a, b)]
        exact = (values[0] @ values[1].T).astype(np.float32)
        assert (sm90(a, b) != exact).mean() > 0.5, kind
