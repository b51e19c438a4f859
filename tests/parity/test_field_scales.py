"""Replays of public faults: leaking and ignored scales (A, B), offsets, runs, quantiser (F).

Sources and what the replays share: support/field.py.
"""

from __future__ import annotations

import numpy as np
import pytest
from field import FOLDED, OUTPUTS, assert_close_to_exact, assert_finite, normal
from mxattn_capi import Attention, attention, recipes
from reference import bf16, bits, cosine, exact, offsets, same_bits
from sparse import sparse

# ---- A: causality and scales that leak ----------------------------------------------------------


def ones_with_values(*values):
    """q = k = 1 and V zero but for channel 0 (token: value) or whole rows, S = 128, d = 128."""
    q, k, v = (bf16(np.full((128, 1, 128), fill)) for fill in (1, 1, 0))
    v[0, 0, 0] = bf16(2.0**-20)
    for token in values:
        v[token] = bf16(1)
    return q, k, v


@pytest.mark.parametrize("recipe", ["fp8", "mxfp8_token"])
def test_a1_a2_a_later_value_changes_no_earlier_output(recipe):
    # TE #3248: V[16] = 1 rounds V[0] = 2^-20 to 0 where 32 tokens share a scale.
    base = attention(*ones_with_values(), [0, 128], recipe=recipe)
    assert (base["o"][0, 0, 0] == bf16(2.0**-20)) and base["o"][15, 0, 0] > 0
    for token in (16, 32):
        got = attention(*ones_with_values(token), [0, 128], recipe=recipe)
        assert same_bits(base["o"][:token], got["o"][:token])
        assert not same_bits(base["o"][token:], got["o"][token:])


def test_a1_a2_the_replay_sees_the_leak_of_shared_scales():
    # TE #3248 itself: inside the 32 the prefix becomes 0, in the next 32 it does not.
    base, inside, beyond = (
        attention(*ones_with_values(*tokens), [0, 128], recipe="mxfp8")
        for tokens in ((), (16,), (32,))
    )
    assert (inside["o"][:16] == 0).all() and not same_bits(base["o"][:16], inside["o"][:16])
    assert same_bits(base["o"][:32], beyond["o"][:32])


@pytest.mark.parametrize("changed", [range(4), *([i] for i in range(4))])
@pytest.mark.parametrize("recipe", [*FOLDED, "fp8_tensor"])
def test_a4_blocks_do_not_span_documents(recipe, changed):
    # After TE #3248, packed: 32 tokens from the pack's start would span both documents.
    cu = [0, 20, 60]
    x = normal(1, *[(60, 2, 128)] * 4)
    base = attention(*x[:3], cu, dout=x[3], recipe=recipe)
    for i in changed:
        x[i][20:] *= bf16(1000)
    got = attention(*x[:3], cu, dout=x[3], recipe=recipe)
    same = {name: same_bits(base[name][:20], got[name][:20]) for name in ("o", "dq", "dk", "dv")}
    same["lse"] = same_bits(base["lse"][:, :20], got["lse"][:, :20])
    # One scale for a tensor spans both: the replay can fail.
    assert all(same.values()) != (recipe == "fp8_tensor"), same


@pytest.mark.parametrize("recipe", FOLDED)
def test_a6_padding_enters_no_scale(recipe):
    # TE #2892, PR 2911: large finite padding up to 128 raised amax and gradients 40 to 500 times.
    x = normal(2, *[(128, 1, 128)] * 4)
    want = attention(*(array[:100] for array in x[:3]), [0, 100], dout=x[3][:100], recipe=recipe)
    for padding in (0, 3e4):
        for array in x:
            array[100:] = bf16(padding)
        got = attention(*x[:3], [0, 100], dout=x[3], recipe=recipe)
        for name in ("o", "dq", "dk", "dv"):
            assert same_bits(got[name][:100], want[name]), name
            assert not bits(got[name][100:]).any(), name
        assert same_bits(got["lse"][:, :100], want["lse"])


# ---- B: P, accumulation, scales -----------------------------------------------------------------


@pytest.mark.parametrize("backend", ["cpu", "cpu_exact", "cpu_h200"])
@pytest.mark.parametrize("hot", [0, 4095])
def test_b3_diffuse_mass_below_a_hot_key(hot, backend):
    # FI PR 5020: 4095 keys 7.5 nats below the top: the numerator lost their mass, the sum kept it.
    n, d = 4096, 64
    q = np.zeros((1, 1, d))
    k = np.zeros((n, 1, d))
    q[0, 0, 0] = 8
    k[hot, 0, 0] = 7.5
    assert q[0, 0] @ k[hot, 0] / np.sqrt(d) == 7.5
    v = np.ones((n, 1, d))
    got = attention(*map(bf16, (q, k, v)), [0, 1], [0, n], backend=backend, causal=False)
    assert (got["o"] == 1).all()
    # 256 exp(-7.5) = 0.1416 has the code 0.140625. Keys descend: the last key's tile comes first
    # and the others after it are coded so; before the first key's tile, they count in full.
    coded = n - 1 if hot == n - 1 else 127
    mass = coded * 0.140625 / 256 + (n - 1 - coded) * np.exp(-7.5)
    # The H200 cuts every product of the hot key's tile to 13 bits below the largest.
    cut = 128 * 2.0**-13 / (1 + mass) if backend == "cpu_h200" else 0
    assert got["lse"][0, 0] == pytest.approx(np.log(1 + mass) + 7.5, abs=2e-5 + cut)


@pytest.mark.parametrize("scale", [0.7, 1e6])
@pytest.mark.parametrize("backend", ["cpu", "cpu_h200"])
def test_b4_ones_give_ones_when_peaked(backend, scale):
    # ROCm/FlyDSL PR 1020: V = 1, thousands of keys, peaked rows: 0.637, most rows short.
    q, k = normal(3, (2048, 1, 128), (2048, 1, 128))
    scores = q[:, 0].astype(float) @ k[:, 0].astype(float).T * scale / np.log(2)
    top, second = np.sort(scores[1024:], 1)[:, :-3:-1].T
    assert np.median(top - second) > 1 and np.abs(scores).max() < 2.0**28
    ones = bf16(np.ones(k.shape))
    got = attention(q, k, ones, [0, 2048], backend=backend, softmax_scale=scale)
    assert (got["o"] == 1).all()


@pytest.mark.parametrize("recipe", ["fp8", "bf16"])
def test_b6_scales_are_honoured(recipe):
    # CFE #520: scales other than 1 were dropped. 16 softmax_scale is the same as 16 Q.
    q, k, v, dout = normal(4, *[(300, 2, 128)] * 4)
    scale = 0.05
    a = attention(q, k, v, [0, 300], dout=dout, recipe=recipe, softmax_scale=16 * scale)
    b = attention(q * bf16(16), k, v, [0, 300], dout=dout, recipe=recipe, softmax_scale=scale)
    for name in ("o", "lse", "dk", "dv"):
        assert same_bits(a[name], b[name]), name
    assert same_bits(a["dq"], b["dq"] * bf16(16))
    want = exact(q, k, v, [0, 300], dout=dout, softmax_scale=16 * scale)
    assert cosine(a["o"], want["o"]) > 0.99
    default = attention(q, k, v, [0, 300], recipe=recipe)
    assert not same_bits(a["o"], default["o"])


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("recipe", FOLDED)
def test_b6_descales_are_honoured(recipe, name):
    # CFE #520 again: the scales that come with codes. 16 times the scale is 16 times the tensor.
    cu = [0, 130, 300]
    x = dict(zip(("q", "k", "v", "dout"), normal(31, *[(300, 2, 128)] * 4), strict=True))
    call = Attention(x["q"].shape, x["k"].shape, cu, recipe=recipe)
    for operand in "qkv":
        call.quantize(operand, x[operand])
    call.state[f"{name}_exponents"] += 4
    if name == "v":
        call.state["v_norms"] += 4  # the bound of dS goes with V
    out, lse = call.forward(None, None, None, quantized="qkv")
    dq, dk, dv = call.backward(None, None, None, out, lse, x["dout"])
    got = {"o": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
    base = attention(x["q"], x["k"], x["v"], cu, dout=x["dout"], recipe=recipe)
    x[name] = x[name] * bf16(16)
    want = attention(x["q"], x["k"], x["v"], cu, dout=x["dout"], recipe=recipe)
    for output in OUTPUTS:
        assert same_bits(got[output], want[output]), output
    assert not same_bits(got["dq"], base["dq"])


@pytest.mark.parametrize("recipe", FOLDED)
def test_b6_the_scale_of_gradients_is_honoured(recipe):
    # The same for dO, whose scale is the library's: 16 dO gives 16 times every gradient.
    q, k, v, dout = normal(32, *[(300, 2, 128)] * 4)
    a = attention(q, k, v, [0, 300], dout=dout, recipe=recipe)
    b = attention(q, k, v, [0, 300], dout=dout * bf16(16), recipe=recipe)
    for name in ("dq", "dk", "dv"):
        assert (a[name] != 0).any() and same_bits(a[name] * bf16(16), b[name]), name


# ---- F: offsets, determinism, quantiser ---------------------------------------------------------


@pytest.mark.parametrize(
    ("heads", "dim", "token_stride", "head_stride"),
    [
        # FA #2611: row 225304 of stride 9728 lies beyond 2^31. Row 200 does, with a larger stride.
        (16, 96, 9728 * 1104, 96),
        # sglang #20389: 512 x 512 tokens of 32 heads of 256 are 2^31 elements; here head by head.
        (2, 256, 256, 2**31),
    ],
)
def test_f1_f4_offsets_beyond_2_to_the_31(heads, dim, token_stride, head_stride):
    n, cu = 210, [0, 90, 210]
    last = (n - 1) * token_stride + (heads - 1) * head_stride
    assert last > 2**31
    names = ("q", "k", "v", "dout")
    x = dict(zip(names, normal(26, *[(n, heads, dim)] * 4), strict=True))
    far = {}
    for name in (*names, "o", "dq", "dk", "dv"):
        far[name] = sparse((n, heads, dim), token_stride, head_stride)
        if name in x:
            far[name][...] = x[name]
    want = attention(x["q"], x["k"], x["v"], cu, dout=x["dout"])
    call = Attention((n, heads, dim), (n, heads, dim), cu)
    _, lse = call.forward(far["q"], far["k"], far["v"], out=far["o"])
    call.backward(
        far["q"], far["k"], far["v"], far["o"], lse, far["dout"], dq=far["dq"], dk=far["dk"],
        dv=far["dv"],
    )  # fmt: skip
    for name in ("o", "dq", "dk", "dv"):
        assert same_bits(far[name], want[name]), name


def test_f7_thirty_runs_give_the_same_bits():
    # FA #2244: deterministic=True, 30 runs: dQ differed in 29.
    cu = offsets([300, 17, 195])
    q, dout = normal(27, (512, 4, 64), (512, 4, 64))
    k, v = normal(28, (512, 1, 64), (512, 1, 64))
    first = attention(q, k, v, cu, dout=dout)
    for _ in range(29):
        again = attention(q, k, v, cu, dout=dout)
        assert all(same_bits(first[name], again[name]) for name in OUTPUTS)


@pytest.mark.parametrize("recipe", FOLDED)
def test_f11_f14_zero_tokens_have_a_finite_scale(recipe):
    # NVIDIA/Model-Optimizer PR 1397: the scale byte of a zero block was NaN; pytorch/ao #3356: rows
    # of zeros made the loss NaN.
    q, k, v, dout = normal(29, *[(200, 1, 128)] * 4)
    for array in (q, k, v, dout):
        array[:64] = 0
        array[150] = 0
    call = Attention(q.shape, k.shape, [0, 200], recipe=recipe)
    out, lse = call.forward(q, k, v)
    for name in "qkv":
        assert (call.state[f"{name}_exponents"] != 127).all()
        assert (call.dequantize(name)[:64] == 0).all()
    got = dict(zip(("dq", "dk", "dv"), call.backward(q, k, v, out, lse, dout), strict=True))
    assert_finite({"o": out, **got})
    assert_close_to_exact({"o": out, **got}, exact(q, k, v, [0, 200], dout=dout))


ZERO_CASES = [
    ("q",), ("k",), ("v",), ("dout",), ("q", "k"), ("v", "dout"), ("q", "k", "v", "dout"),
]  # fmt: skip


@pytest.mark.parametrize("tiny", [0, 2.0**-133])
@pytest.mark.parametrize("recipe", [r for r in recipes() if r != "exact"])
def test_f11_f14_whole_tensors_of_zeros_or_next_to(recipe, tiny):
    # The same two: pytorch/ao #3356 had every row zero, PR 1397 the smallest maximum there is.
    for zeros in ZERO_CASES:
        x = dict(zip(("q", "k", "v", "dout"), normal(35, *[(70, 1, 64)] * 4), strict=True))
        for name in zeros:
            x[name] = np.full_like(x[name], bf16(tiny))
        got = attention(x["q"], x["k"], x["v"], [0, 70], dout=x["dout"], recipe=recipe)
        assert_finite(got, *OUTPUTS)
        small = bf16(2.0**-100)  # in every case: tiny times what is normal here
        if "v" in zeros:
            assert (np.abs(got["o"]) <= small).all()
        for name, causes in (("dq", "vk"), ("dk", "vq"), ("dv", ())):
            if "dout" in zeros or any(cause in zeros for cause in causes):
                assert (np.abs(got[name]) <= small).all(), (zeros, name)
            else:
                assert (got[name] != 0).any(), (zeros, name)
        if not {"q", "k"}.isdisjoint(zeros):  # every key has the same weight
            want = np.log(np.arange(1, 71))
            assert np.abs(got["lse"][0] - want).max() < 1e-4, zeros


def quantised(recipe, v):
    """Restored values of V and its exponents by token."""
    call = Attention(v.shape, v.shape, [0, len(v)], recipe=recipe)
    call.quantize("v", v)
    exponents = call.state["v_exponents"][0, : len(v)].astype(int)  # one document: slots are tokens
    return call.dequantize("v").astype(float)[:, 0], exponents


@pytest.mark.parametrize("recipe", FOLDED)
def test_f12_scales_round_up_and_clip_nothing(recipe):
    # ml-explore/mlx PR 4353: rounding exponents of 512 blocks of 32 to nearest clipped the largest
    # element by up to 29.3 %. Rounded up, every element is within half a step, 2^-4, of its
    # restored value (normal codes; subnormal ones within 2^-10 of the scale). For mxfp8_token the
    # blocks are those of the report.
    n = 512
    rng = np.random.default_rng(30)
    largest = bf16(2.0 ** rng.uniform(-20, 20, n)).astype(float)
    largest[:8] = [448, 450, 460, 480, 500, 512, 896, 900]
    v = bf16(largest[:, None] * rng.uniform(-1, 1, (n, 32)))[:, None, :]
    v[:, 0, 0] = bf16(largest)
    # Nearest would clip, by nearly the 29.3 %.
    nearest = 448 * 2.0 ** np.rint(np.log2(largest / 448))
    assert 0.28 < (1 - nearest / largest).max() < 0.293
    restored, exponents = quantised(recipe, v)
    size = np.abs(v.astype(float))[:, 0]
    error = np.abs(restored - v.astype(float)[:, 0])
    bound = np.maximum(2.0**-4 * size, 2.0 ** (exponents - 10)[:, None])
    assert (error <= bound).all()
    if recipe == "mxfp8":  # the floor rule of the control clips the same input
        clipped, floors = quantised("mxfp8_floor", v)
        floor_bound = np.maximum(2.0**-4 * size, 2.0 ** (floors - 10)[:, None])
        assert (np.abs(clipped - v.astype(float)[:, 0]) > floor_bound).any()

    # The exponents of the definition: least e with largest 2^-e <= 448, then the group's rule.
    top = np.abs(v.astype(float)).max((1, 2))
    e = np.ceil(np.log2(top / 448)).astype(int)
    if recipe == "fp8":
        e = 4 * -(-np.maximum.accumulate(e) // 4)
    elif recipe == "mxfp8":
        e = np.repeat([e[t : t + 32].max() for t in range(0, n, 32)], 32)
    assert (exponents == e).all()
