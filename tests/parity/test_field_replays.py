"""Faults that users of attention libraries reported in public, replayed with the right answer.

Sources, as OWNER/REPOSITORY: FA Dao-AILab/flash-attention, TE NVIDIA/TransformerEngine, CFE
NVIDIA/cudnn-frontend, PT pytorch/pytorch, FI flashinfer-ai/flashinfer, HF huggingface/transformers,
Sage thu-ml/SageAttention; #n is an issue, PR n a pull request. FP16 of a report is BF16 here.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from conftest import read_safetensors
from mxattn_capi import INVALID_ARGUMENT, Attention, MxattnError, attention, poisoned, recipes
from reference import bf16, bits, cosine, cosines, exact, offsets, same_bits
from sparse import sparse

OUTPUTS = ("o", "lse", "dq", "dk", "dv")
FOLDED = ["fp8", "mxfp8", "mxfp8_token"]
EXAMPLE = Path(__file__).parents[2] / "examples" / "data" / "gpt_layer0_head6.safetensors"


def normal(seed, *shapes):
    rng = np.random.default_rng(seed)
    return [bf16(rng.standard_normal(shape)) for shape in shapes]


def assert_close_to_exact(got, want, least=0.99):
    found = cosines(got, want)
    assert all(c >= least for c in found), found  # NaN, of zeros, is not


def assert_finite(got, *names):
    for name in names or ("o", "dq", "dk", "dv"):
        assert np.isfinite(got[name].astype(float)).all(), name


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


# ---- C: packed lengths --------------------------------------------------------------------------


def test_c1_rows_beyond_the_last_document_are_zero():
    # PT #176793: 946 rows, the last document ends at 944; the backward gave NaN.
    q, k, v, dout = normal(5, *[(946, 16, 64)] * 4)
    cu = [0, 144, 432, 944]
    for array in (q, k, v, dout):
        array[944:] = np.nan
    got = attention(q, k, v, cu, dout=dout)
    assert_finite(got)
    for name in ("o", "dq", "dk", "dv"):
        assert not bits(got[name][944:]).any(), name
    used = slice(0, 944)
    want = exact(q[used], k[used], v[used], cu, dout=dout[used])
    assert_close_to_exact({name: got[name][used] for name in ("o", "dq", "dk", "dv")}, want)


def test_c3_keys_that_nobody_sees_get_zero_gradients():
    # FA #2562: empty and keyless documents, d = 256, grouped heads: illegal access in the backward.
    cu_q, cu_k = [0, 0, 1208, 2048, 2048], [0, 2538, 4280, 5120, 8192]
    q, dout = normal(6, (2048, 4, 256), (2048, 4, 256))
    k, v = normal(7, (8192, 1, 256), (8192, 1, 256))
    got = attention(q, k, v, cu_q, cu_k, dout)
    assert_finite(got)
    for name in ("dk", "dv"):
        assert not bits(got[name][:2538]).any() and not bits(got[name][5120:]).any(), name
        assert (got[name][2538:5120] != 0).any((1, 2)).all(), name
    want = exact(q, k, v, cu_q, cu_k, dout)
    assert_close_to_exact(got, want)


def test_c4_empty_documents_before_a_long_one():
    # FA #1254: queries [0, 0, 1023], keys [0, 1, 2044], 32 heads: the backward hung.
    cu_q, cu_k = offsets([0, 0, 1023]), offsets([0, 1, 2043])
    q, dout = normal(8, (1023, 32, 128), (1023, 32, 128))
    k, v = normal(9, (2044, 32, 128), (2044, 32, 128))
    got = attention(q, k, v, cu_q, cu_k, dout)
    assert_finite(got)
    assert not bits(got["dk"][:1]).any() and not bits(got["dv"][:1]).any()
    heads = slice(0, 2)
    want = exact(q[:, heads], k[:, heads], v[:, heads], cu_q, cu_k, dout[:, heads])
    assert_close_to_exact({name: got[name][:, heads] for name in ("o", "dq", "dk", "dv")}, want)


@pytest.mark.parametrize("recipe", [*FOLDED, "bf16"])
def test_c6_single_queries_and_odd_groups(recipe):
    # FA #1537: queries 1, 0, 1; keys 3, 0, 5; 9 query heads on 3 key heads; scale 1: refused.
    cu_q, cu_k = [0, 1, 1, 2], [0, 3, 3, 8]
    q, dout = normal(10, (2, 9, 64), (2, 9, 64))
    k, v = normal(11, (8, 3, 64), (8, 3, 64))
    q *= bf16(0.125)
    got = attention(q, k, v, cu_q, cu_k, dout, softmax_scale=1.0, recipe=recipe)
    want = exact(q, k, v, cu_q, cu_k, dout, softmax_scale=1.0)
    assert_close_to_exact(got, want)


def test_c8_more_queries_than_keys():
    # FA #443: one key for each document, causal: dQ was NaN. Only the last query sees the key.
    cu_q, cu_k = [0, 76, 110, 256], [0, 1, 2, 3]
    q, k, v, dout = normal(12, (256, 1, 32), (3, 1, 32), (3, 1, 32), (256, 1, 32))
    got = attention(q, k, v, cu_q, cu_k, dout)
    assert_finite(got)
    last = np.zeros(256, bool)
    last[[75, 109, 255]] = True
    for name in ("o", "dq"):
        assert not bits(got[name][~last]).any(), name
    assert (got["lse"][0][~last] == -np.inf).all() and np.isfinite(got["lse"][0][last]).all()
    # One key has weight 1: O is the value's code (half a step of E4M3: 2^-4), dV is the code of g
    # times that of p, which is relative to 2^mu.
    for name, array, want, codes in (("o", got["o"][last], v, 1), ("dv", got["dv"], dout[last], 2)):
        error = np.abs(array.astype(float) - want.astype(float))
        bound = ((1 + 2.0**-4) ** codes - 1) * np.abs(want.astype(float)) + 2.0**-9
        assert (error <= bound).all(), name


def test_c11_c12_capacity_filled_with_nan_harms_no_valid_row():
    # CFE #878: NaN beyond the packed total reached valid rows; tile-ai/tilelang PR 2461: unwritten
    # LSE and deltas of the tail made dK NaN through 0 times NaN.
    cu = [0, 100, 333]
    x = normal(13, *[(333, 4, 64)] * 4)
    q, dout = (np.concatenate([a, np.full((179, 4, 64), np.nan, a.dtype)]) for a in (x[0], x[3]))
    k, v = (np.concatenate([a, np.full((179, 4, 64), np.nan, a.dtype)])[:, :2] for a in x[1:3])
    want = attention(x[0], x[1][:, :2], x[2][:, :2], cu, dout=x[3])
    call = Attention(q.shape, k.shape, cu)
    out, lse = call.forward(q, k, v)
    out[333:] = np.nan
    lse[:, 333:] = np.nan
    dq, dk, dv = call.backward(q, k, v, out, lse, dout)
    for name, array in (("o", out), ("dq", dq), ("dk", dk), ("dv", dv)):
        assert same_bits(array[:333], want[name]), name
        assert name == "o" or not bits(array[333:]).any(), name
    assert same_bits(lse[:, :333], want["lse"])


@pytest.mark.parametrize(
    ("cu", "says"),
    [
        ([0, 256, 512, 768], "256"),  # HF #44643, PR 44911: beyond the tensor, read out of bounds
        ([0, 200, 100, 256], "100"),  # decreasing
        ([1, 100, 200, 256], "1"),  # does not start at 0
        ([0, -5, 200, 256], "-5"),
    ],
)
def test_c13_wrong_offsets_are_refused_and_nothing_is_written(cu, says):
    q, k, v = normal(14, *[(256, 16, 256)] * 3)
    call = Attention(q.shape, k.shape, cu)
    out, lse = poisoned(q.shape, q.dtype), poisoned((16, 256), np.float32)
    before = {name: array.copy() for name, array in call.state.items()}
    with pytest.raises(MxattnError, match="cu_seqlens") as raised:
        call.forward(q, k, v, out=out, lse=lse)
    assert raised.value.status == INVALID_ARGUMENT and says in str(raised.value)
    assert (bits(out) == 0xFFFF).all() and (bits(lse) == 0xFFFFFFFF).all()
    gradients = {name: poisoned(q.shape, q.dtype) for name in ("dq", "dk", "dv")}
    with pytest.raises(MxattnError, match="cu_seqlens"):
        call.backward(q, k, v, q, np.zeros_like(lse), q, **gradients)
    for name, array in gradients.items():
        assert (bits(array) == 0xFFFF).all(), name
    for name, array in before.items():
        assert same_bits(array, call.state[name]), name


def test_c14_any_number_of_tokens():
    # ms-swift PR 9722: 31936 tokens over 4 ranks are 7984, 16 mod 32: the quantiser asserted.
    q, k, v, dout = normal(15, *[(7984, 1, 64)] * 4)
    got = attention(q, k, v, [0, 7984], dout=dout)
    assert_finite(got)
    short = attention(q[:777], k[:777], v[:777], [0, 777], dout=dout[:777])
    for name in ("o", "dq"):  # causal: a prefix is a run of its own
        assert same_bits(got[name][:777], short[name]), name
    late = slice(7000, 7984)  # gradients of the last keys need only the last queries
    want = exact(q[late], k, v, [0, 984], [0, 7984], dout[late])
    assert cosine(got["o"][late], want["o"]) > 0.997
    assert cosine(got["dq"][late], want["dq"]) > 0.997
    assert cosine(got["dv"][late], want["dv"][late]) > 0.997


def test_c15_lists_that_do_not_fit_are_refused_by_name():
    # sglang PR 37785: an array that did not fit the number of documents gave a bare shape error.
    q, k, v = normal(16, *[(64, 1, 64)] * 3)
    with pytest.raises(MxattnError, match="cu_seqlens_k.*3.*4") as raised:
        attention(q, k, v, [0, 20, 40, 64], [0, 20, 64])
    assert raised.value.status == INVALID_ARGUMENT
    # What may be left out: one list then serves queries and keys.
    cu = [0, 20, 40, 64]
    assert same_bits(attention(q, k, v, cu)["o"], attention(q, k, v, cu, cu)["o"])


@pytest.mark.parametrize("name", ["q_exponents", "k_exponents", "v_exponents", "v_norms"])
def test_c15_scales_that_do_not_fit_are_refused_by_name(name):
    # The same PR: the array was one of scales. Ours lie in the state, an entry for each slot.
    q, k, v = normal(16, *[(64, 2, 64)] * 3)
    cu, short = [0, 20, 40, 64], 2 * 3  # bytes: one entry for each head and document
    fits = Attention(q.shape, k.shape, cu)
    at = list(fits.state).index(name)

    class Short(Attention):
        made = 0

        @staticmethod
        def _buffer(shape, dtype):
            Short.made += 1
            return poisoned(short if Short.made == at + 1 else shape, dtype)

    out = poisoned(q.shape, q.dtype)
    says = rf"state\[{at}\] \({name}\)\.bytes = 6: expected at least {fits.state[name].nbytes}"
    with pytest.raises(MxattnError, match=says) as raised:
        Short(q.shape, k.shape, cu).forward(q, k, v, out=out)
    assert raised.value.status == INVALID_ARGUMENT and (bits(out) == 0xFFFF).all()
    fits.forward(q, k, v, out=out)
    assert_finite({"o": out}, "o")


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
