"""Replays of public faults: the backward and its masks (E).

Sources and what the replays share: support/field.py.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from captures import read_safetensors
from field import FOLDED, assert_close_to_exact, assert_finite, normal
from mxattn_capi import INVALID_ARGUMENT, Attention, MxattnError, attention, recipes
from reference import bf16, bits, cosine, exact, offsets, same_bits

EXAMPLE = Path(__file__).parents[2] / "examples" / "data" / "gpt_layer0_head6.safetensors"


# ---- E: backward and masks ----------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [*FOLDED, "bf16"])
def test_e1_very_negative_lse(recipe):
    # PT #196678: L = 704 (64 mod 128), all keys visible, LSE below -88.7: dQ was NaN.
    q, k, v, dout = normal(17, *[(704, 1, 64)] * 4)
    q[..., 0] = bf16(32)
    k[..., 0] = bf16(-32)
    got = attention(q, k, v, [0, 704], dout=dout, causal=False, recipe=recipe)
    assert got["lse"].max() < -88.7
    assert_finite(got)
    want = exact(q, k, v, [0, 704], dout=dout, causal=False)
    assert_close_to_exact(got, want, 0.98)


@pytest.mark.parametrize("recipe", [*FOLDED, "bf16"])
def test_e2_one_query_with_very_negative_scores(recipe):
    # CFE #1072: one query, 128 keys, strongly negative scores: all dK, dV NaN.
    q, dout, k, v = normal(18, (1, 2, 64), (1, 2, 64), (128, 2, 64), (128, 2, 64))
    q[..., 0] = bf16(64)
    k[..., 0] = bf16(-64)
    got = attention(q, k, v, [0, 1], [0, 128], dout, recipe=recipe)
    assert got["lse"].max() < -300
    assert_finite(got)
    want = exact(q, k, v, [0, 1], [0, 128], dout)
    assert cosine(got["o"], want["o"]) > 0.98 and cosine(got["dv"], want["dv"]) > 0.98


@pytest.mark.parametrize("recipe", [*FOLDED, "bf16"])
def test_e4_one_token(recipe):
    # FA #334: one token, d = 16: dQ was NaN. dQ = dK = 0, dV = dO.
    q, k, v, dout = normal(19, *[(1, 1, 16)] * 4)
    got = attention(q, k, v, [0, 1], dout=dout, recipe=recipe)
    # O is the restored value, so dP = D but for the rounding of two FP32 sums of 16 products and,
    # for dK, that of D' to FP16; the rest is dS times q or k.
    named = {"q": q, "k": k, "v": v, "g": dout}
    size = {name: np.linalg.norm(x.astype(float)) for name, x in named.items()}
    unit = 1.2 * size["v"] * size["g"] / np.sqrt(16)
    assert np.abs(got["dq"].astype(float)).max() <= 16 * 2.0**-23 * unit * size["k"]
    assert np.abs(got["dk"].astype(float)).max() <= 2.0**-11 * unit * size["q"]
    error = np.abs(got["dv"].astype(float) - dout.astype(float))
    assert (error <= ((1 + 2.0**-4) ** 2 - 1) * np.abs(dout.astype(float)) + 2.0**-9).all()


def test_e7_lse_is_head_major_and_gradients_are_not_zero():
    # CFE PR 462: packed backward with LSE as (heads, total): all gradients 0, no error.
    # The capacity is larger than the total, and dO is far from normal in one head.
    cu = offsets([70, 130, 5])
    q, k, v, dout = normal(20, *[(240, 3, 64)] * 4)
    dout[:, 1] *= bf16(2.0**-12)
    got = attention(q, k, v, cu, dout=dout)
    want = exact(q, k, v, cu, dout=dout)
    assert got["lse"].shape == (3, 240) and (got["lse"][:, 205:] == -np.inf).all()
    for h in range(3):
        assert np.abs(got["lse"][h, :205] - want["lse"][h, :205]).max() < 0.1
        for begin, end in zip(cu[:-1], cu[1:], strict=True):
            at = (slice(begin, end), slice(h, h + 1))
            part = {name: got[name][at] for name in ("o", "dq", "dk", "dv")}
            assert_close_to_exact(part, {name: want[name][at] for name in part})
    # Heads by tokens is another layout: refused, as no data would show it.
    call = Attention(q.shape, k.shape, cu)
    out, lse = call.forward(q, k, v)
    with pytest.raises(MxattnError, match=r"lse.*\(240, 3\).*\(3, 240\)") as raised:
        call.backward(q, k, v, out, np.ascontiguousarray(lse.T), dout)
    assert raised.value.status == INVALID_ARGUMENT


def assert_wide_heads_are_right(cu, q, k, v, dout):
    """Two captured heads side by side make a head of 256; swapped, a second one of its group."""
    q, dout = (
        np.stack([x[:, :2].reshape(-1, 256), x[:, 1::-1].reshape(-1, 256)], 1) for x in (q, dout)
    )
    k, v = (x[:, :2].reshape(-1, 1, 256) for x in (k, v))
    got = attention(q, k, v, cu, dout=dout)
    want = exact(q, k, v, cu, dout=dout)
    assert_close_to_exact(got, want, 0.985)
    for name in ("dq", "dk", "dv"):
        size = np.linalg.norm(got[name].astype(float)) / np.linalg.norm(want[name])
        assert size == pytest.approx(1, abs=0.02), name


def test_e8_wide_heads_in_groups_on_real_activations():
    # TE #3216: d = 256, grouped heads, real activations: dQ 5 times too large, cosine -0.11;
    # Gaussian inputs hide it. The example holds one head; its channels reversed are the other.
    example = read_safetensors(EXAMPLE)
    cu = example["cu_seqlens"]
    x = (example[f"layer0.{name}"] for name in ("q", "k", "v", "do"))
    assert_wide_heads_are_right(cu, *(np.concatenate([a, a[..., ::-1]], 1) for a in x))


def test_e8_wide_heads_in_groups_on_every_capture(captures):
    for layer in captures:
        assert_wide_heads_are_right(layer.cu_seqlens, layer.q, layer.k, layer.v, layer.dout)


@pytest.mark.parametrize("backend", ["cpu", "cpu_exact"])
def test_e9_no_element_of_a_wide_head_is_off(backend):
    # CFE #981: FP8 forward, d = 256, 32 query heads on 2: 0.1 to 0.3 % of elements up to 1.9 off.
    cu = offsets([90, 40])
    q, k, v = normal(33, (130, 32, 256), (130, 2, 256), (130, 2, 256))
    call = Attention(q.shape, k.shape, cu, backend=backend)
    out, _ = call.forward(q, k, v)
    q, k, v = (call.dequantize(name).astype(float) for name in "qkv")
    # What is left are the codes of P, within 2^-4 or, subnormal, 2^-18 of the largest weight that
    # the row had met: numerator and sum of a mean err so. Then BF16.
    for begin, end in zip(cu[:-1], cu[1:], strict=True):
        rows = slice(begin, end)
        seen = np.tri(end - begin, dtype=bool)
        for h in range(32):
            kh, vh = k[rows, h // 16], v[rows, h // 16]
            p = np.exp(np.where(seen, q[rows, h] @ kh.T / 16, -np.inf))
            p /= p.sum(1, keepdims=True)
            o = p @ vh
            weight = (2.0**-4 * p + 2.0**-18 * p.max(1, keepdims=True)) * seen / (1 - 2.0**-4)
            bound = np.einsum("ij,ijc->ic", weight, np.abs(vh[None] - o[:, None]))
            bound += 2.0**-8 * np.abs(o) + 2.0**-12
            assert bound.max() < 0.25  # an error of 1.9 is seen
            assert (np.abs(out[rows, h].astype(float) - o) <= bound).all()


@pytest.mark.parametrize("recipe", [*FOLDED, "bf16"])
def test_e11_rows_without_keys(recipe):
    # PT #103749, #41508: one fully masked row made NaN of all weights.
    q, dout, k, v = normal(21, (5, 1, 64), (5, 1, 64), (3, 1, 64), (3, 1, 64))
    got = attention(q, k, v, [0, 5], [0, 3], dout, recipe=recipe)
    assert_finite(got)
    assert not bits(got["o"][:2]).any() and not bits(got["dq"][:2]).any()
    assert (got["lse"][0, :2] == -np.inf).all()
    assert_close_to_exact(got, exact(q, k, v, [0, 5], [0, 3], dout))


@pytest.mark.parametrize("recipe", [*FOLDED, "bf16"])
def test_e12_a_masked_key_that_holds_nan(recipe):
    # PT #101967: L = 2, d = 4: the masked key's NaN reached the output.
    q, k, v = normal(22, *[(2, 1, 4)] * 3)
    base = attention(q, k, v, [0, 2], recipe=recipe)
    k[1] = v[1] = np.nan
    got = attention(q, k, v, [0, 2], recipe=recipe)
    if recipe != "mxfp8":  # whose two tokens share a scale, which is NaN
        assert same_bits(base["o"][:1], got["o"][:1])
        assert same_bits(base["lse"][:, :1], got["lse"][:, :1])
    assert np.isnan(got["o"][1].astype(float)).all()


T, BLOCK, TILE, FIRST, END = 320, 296, 296, 40, 440  # a document [40, 440); 32 and 128 around T
POISONED = {  # rows of O and dQ that NaN in Q, K, V at T reaches, of dQ that NaN in dO does
    **dict.fromkeys(["fp8", "fp8_ds_row", "fp8_integer_ref"], ((T, END),) * 3 + ((T, T + 1),)),
    **dict.fromkeys(
        ["mxfp8_token", "bf16", "exact", "fp8_tensor"],
        ((T, T + 1), (T, END), (T, END), (T, T + 1)),
    ),
    **dict.fromkeys(
        ["mxfp8", "mxfp8_floor"],
        ((BLOCK, BLOCK + 32), (BLOCK, END), (BLOCK, END), (T, T + 1)),
    ),
    "mxfp8_paper": ((BLOCK, BLOCK + 32), (BLOCK, END), (TILE, END), (BLOCK, BLOCK + 32)),
}


@pytest.mark.parametrize("recipe", POISONED)
def test_e12_what_nan_inside_a_document_reaches(recipe):
    # The table of docs/numerics.md, section 5, for every recipe.
    assert sorted(POISONED) == sorted(recipes())
    cu, names = [0, FIRST, END, 460], ("q", "k", "v", "dout")
    x = dict(zip(names, normal(34, *[(460, 1, 64)] * 4), strict=True))

    def run(x):
        return attention(x["q"], x["k"], x["v"], cu, dout=x["dout"], recipe=recipe)

    def nan_rows(array):
        return np.isnan(array.astype(float)).any((1, 2))

    base = run(x)
    for name, (begin, end) in zip(names, POISONED[recipe], strict=True):
        y = {key: array.copy() for key, array in x.items()}
        y[name][T, :, 3] = np.nan
        got = run(y)
        reached = np.zeros(460, bool)
        reached[begin:end] = True
        assert (nan_rows(got["dq"]) == reached).all(), name
        assert (nan_rows(got["o"]) == (reached & (name != "dout"))).all(), name
        assert (np.isnan(got["lse"][0]) == (reached & (name in "qk"))).all(), name
        if recipe != "fp8_tensor":
            for output in ("o", "dq"):
                assert same_bits(got[output][~reached], base[output][~reached]), (name, output)
        for output in ("dk", "dv"):
            assert not nan_rows(got[output])[np.r_[:FIRST, END:460]].any(), (name, output)


@pytest.mark.parametrize(("n", "gradients"), [(16384, False), (1500, True)])
def test_e14_equal_masks_give_equal_bits(n, gradients):
    # FA #1133: causal and the windows (-1, 0), (S, 0), (S - 1, 0) are one mask. One head of the
    # report's eight, and a shorter run with gradients.
    q, k, v, dout = normal(23, *[(n, 1, 128)] * 4)
    dout = dout if gradients else None
    base = attention(q, k, v, [0, n], dout=dout)
    for left in (-1, n, n - 1):
        got = attention(q, k, v, [0, n], dout=dout, causal=False, window=(left, 0))
        for name in base:
            assert same_bits(base[name], got[name]), (left, name)


def test_e16_causal_is_bottom_right():
    # Sage #131, PR 372: 1560 queries on 1560, 3120, 4680, 4680 keys: aligned top-left. One head of
    # twelve, one of the equal documents.
    cu_q, cu_k = offsets([1560] * 3), offsets([1560, 3120, 4680])
    q, k, v = normal(24, (4680, 1, 128), (9360, 1, 128), (9360, 1, 128))
    got = attention(q, k, v, cu_q, cu_k)
    want = exact(q, k, v, cu_q, cu_k)
    assert cosine(got["o"], want["o"]) > 0.998
    assert np.abs(got["lse"] - want["lse"]).max() < 0.1
    assert same_bits(got["o"][:1560], attention(q[:1560], k[:1560], v[:1560], [0, 1560])["o"])


def test_e17_packed_and_causal_is_causal():
    # huggingface/candle PR 3606: causal=true was ignored for packs.
    cu = offsets([40, 90])
    q, k, v, dout = normal(25, *[(130, 2, 64)] * 4)
    causal = attention(q, k, v, cu, dout=dout)
    full = attention(q, k, v, cu, dout=dout, causal=False)
    assert_close_to_exact(causal, exact(q, k, v, cu, dout=dout), 0.997)
    assert_close_to_exact(full, exact(q, k, v, cu, dout=dout, causal=False), 0.997)
    assert cosine(causal["o"], full["o"]) < 0.9
