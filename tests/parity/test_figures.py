"""The figures of docs/numerics.md, sections 1 and 6: cosines of O, dQ, dK, dV."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from mxattn_capi import attention
from reference import bf16, cosines, exact

BACKENDS = ["cpu", "cpu_exact"]
NAMES = ("o", "dq", "dk", "dv")


def draw(seed, n):
    rng = np.random.default_rng(seed)
    x = {name: bf16(rng.standard_normal((n, 128)))[:, None, :] for name in ("q", "k", "v", "dout")}
    return x, rng


@cache
def expected(make, *arguments):
    """Inputs and exact attention of a case, once for all backends."""
    x = make(*arguments)
    return x, exact(x["q"], x["k"], x["v"], [0, len(x["q"])], dout=x["dout"])


def measure(x, want, backend, recipe="fp8"):
    cu = [0, len(x["q"])]
    got = attention(x["q"], x["k"], x["v"], cu, dout=x["dout"], backend=backend, recipe=recipe)
    return cosines(got, want)


# ---- random -------------------------------------------------------------------------------------

RANDOM = {
    1024: (0.9990, 0.9979, 0.9979, 0.9988),
    2048: (0.9989, 0.9980, 0.9980, 0.9987),
    4096: (0.9989, 0.9979, 0.9980, 0.9987),
}


def random_case(n):
    return draw(0, n)[0]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("n", RANDOM)
def test_random(n, backend):
    got = measure(*expected(random_case, n), backend)
    assert got == pytest.approx(RANDOM[n], abs=0.0003)


# ---- hard cases ---------------------------------------------------------------------------------

HARD = {
    "K[3] x16": (0.9979, 0.9797, 0.9905, 0.9979),
    "V[3] x100": (0.9995, 0.9983, 0.9979, 0.9987),
    "V[500] x100": (0.9988, 0.9981, 0.9981, 0.9987),
    "V[0] = 0": (0.9988, 0.9978, 0.9979, 0.9987),
    "K x2^-30, Q x2^30": (0.9989, 0.9979, 0.9979, 0.9987),
    "dO x2^-(0..11)": (0.9989, 0.9979, 0.9981, 0.9986),
    "dO[5] x1e4": (0.9989, 0.9991, 0.9995, 0.9995),
    "dO[900] x1e4": (0.9989, 0.9986, 0.9980, 0.9987),
    "Q x8": (0.9942, 0.9791, 0.9790, 0.9940),
    "K[:, 7] x30": (0.9940, 0.9843, 0.9919, 0.9937),
}


def hard_case(name):
    x, rng = draw(5, 1024)
    if name == "K[3] x16":
        x["k"][3] *= bf16(16)
    elif name == "V[3] x100":
        x["v"][3] *= bf16(100)
    elif name == "V[500] x100":
        x["v"][500] *= bf16(100)
    elif name == "V[0] = 0":
        x["v"][0] = 0
    elif name == "K x2^-30, Q x2^30":
        x["k"] *= bf16(2.0**-30)
        x["q"] *= bf16(2.0**30)
    elif name == "dO x2^-(0..11)":
        x["dout"] *= bf16(2.0 ** -rng.integers(0, 12, 1024))[:, None, None]
    elif name == "dO[5] x1e4":
        x["dout"][5] *= bf16(1e4)
    elif name == "dO[900] x1e4":
        x["dout"][900] *= bf16(1e4)
    elif name == "Q x8":
        x["q"] *= bf16(8)
    elif name == "K[:, 7] x30":
        x["k"][:, :, 7] *= bf16(30)
    return x


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", HARD)
def test_hard(name, backend):
    got = measure(*expected(hard_case, name), backend)
    assert got == pytest.approx(HARD[name], abs=0.002)


def test_an_outlier_of_the_gradient_drowns_only_keys_of_its_tile():
    x, want = expected(hard_case, "dO[900] x1e4")
    got = attention(x["q"], x["k"], x["v"], [0, 1024], dout=x["dout"], backend="cpu")
    late = {name: got[name][901:] for name in NAMES}
    _, _, dk, dv = cosines(late, {name: want[name][901:] for name in NAMES})
    assert dk == pytest.approx(0.70, abs=0.05) and dv == pytest.approx(0.95, abs=0.02)


def sink_case():
    x, rng = draw(7, 4096)
    u = rng.standard_normal(128)
    u /= np.linalg.norm(u)
    x["q"] = bf16(x["q"].astype(float) + 6 * u)
    x["k"][0] = bf16(24 * u)
    return x


@pytest.mark.parametrize("backend", BACKENDS)
def test_sink(backend):
    got = measure(*expected(sink_case), backend)
    assert got == pytest.approx((0.9995, 0.9969, 0.9969, 0.9991), abs=0.002)


# ---- captured activations -----------------------------------------------------------------------


@pytest.fixture(scope="session")
def exact_captures(captures):
    return [
        exact(layer.q, layer.k, layer.v, layer.cu_seqlens, dout=layer.dout) for layer in captures
    ]


def measure_captures(captures, wants, recipe, backend) -> dict[tuple, tuple[float, ...]]:
    """(capture, layer, head): cosines."""
    found = {}
    for layer, want in zip(captures, wants, strict=True):
        got = attention(
            layer.q, layer.k, layer.v, layer.cu_seqlens, dout=layer.dout, recipe=recipe,
            backend=backend,
        )  # fmt: skip
        for h in range(layer.q.shape[1]):
            found[layer.capture, layer.layer, h] = cosines(
                {name: got[name][:, h] for name in NAMES},
                {name: want[name][:, h] for name in NAMES},
            )
    return found


@pytest.mark.parametrize("backend", BACKENDS)
def test_captures(captures, exact_captures, backend):
    found = measure_captures(captures, exact_captures, "fp8", backend)
    table = np.array(list(found.values()))
    assert len(table) == 10
    assert table.min(0) == pytest.approx((0.9993, 0.9946, 0.9959, 0.9985), abs=0.001)
    assert table.mean(0) == pytest.approx((0.9994, 0.9974, 0.9980, 0.9990), abs=0.001)
    assert table[:, 1:].min() >= 0.99


@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8_token", "fp8_ds_row"])
def test_sister_recipes_agree_on_captures(captures, exact_captures, recipe):
    a, b = (
        np.array(list(measure_captures(captures, exact_captures, name, "cpu").values()))
        for name in ("fp8", recipe)
    )
    assert a.mean(0) == pytest.approx(b.mean(0), abs=0.0005)
    assert b[:, 1:].min() >= 0.99


# cuDNN 9.19 FP8 on an H200 with exact amax scales, all E4M3, head by head.
CUDNN = {
    ("gpt_packed_2048", "layer0"): [(0.9993, 0.9951, 0.9915, 0.9985),
                                    (0.9995, 0.9961, 0.9961, 0.9990)],
    ("gpt_packed_2048", "layer3"): [(0.9990, 0.9949, 0.9972, 0.9986),
                                    (0.9991, 0.9960, 0.9981, 0.9983)],
    ("gpt_packed_2048", "layer5"): [(0.9985, 0.9956, 0.9959, 0.9972),
                                    (0.9985, 0.9956, 0.9959, 0.9972)],
    ("gpt_single_2048", "layer3"): [(0.9990, 0.9941, 0.9972, 0.9988),
                                    (0.9989, 0.9859, 0.9950, 0.9985),
                                    (0.9991, 0.9958, 0.9978, 0.9986),
                                    (0.9992, 0.9958, 0.9974, 0.9986)],
}  # fmt: skip


def test_the_control_fp8_tensor_is_fair_to_cudnn(captures, exact_captures):
    found = measure_captures(captures, exact_captures, "fp8_tensor", "cpu_exact")
    for (capture, layer, head), got in found.items():
        assert got == pytest.approx(CUDNN[capture, layer][head], abs=0.001), (capture, layer, head)


def test_gaussian_inputs_hide_what_captures_show(captures, exact_captures):
    # The integer reference with the row sum of unrounded p: fine on normal data, not on captures.
    x, want = expected(random_case, 1024)
    assert min(measure(x, want, "cpu_exact", "fp8_integer_ref")) > 0.997
    found = measure_captures(captures, exact_captures, "fp8_integer_ref", "cpu_exact")
    worst = np.array(list(found.values())).min(0)
    assert worst[1:3] == pytest.approx((0.903, 0.838), abs=0.002)
    assert found["gpt_packed_2048", "layer0", 1][1:3] == pytest.approx((0.903, 0.838), abs=0.002)
