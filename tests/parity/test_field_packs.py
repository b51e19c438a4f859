"""Replays of public faults: packed lengths (C).

Sources and what the replays share: support/field.py.
"""

from __future__ import annotations

import numpy as np
import pytest
from field import FOLDED, assert_close_to_exact, assert_finite, normal
from mxattn_capi import INVALID_ARGUMENT, Attention, MxattnError, attention, poisoned
from reference import bf16, bits, cosine, exact, offsets, same_bits

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
