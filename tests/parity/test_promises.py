"""The promises of docs/numerics.md, section 5, bit for bit over random packs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mxattn_capi import Attention, attention
from packs import Case, cases, copied
from reference import bf16, first_difference, offsets, same_bits

BACKENDS = ["cpu", "cpu", "cpu_exact", "cpu_h200"]
STRICT = ["fp8", "fp8", "mxfp8_token", "fp8_ds_row", "bf16"]
ISOLATED = [*STRICT, "mxfp8", "mxfp8_paper", "mxfp8_floor", "fp8_integer_ref"]
OUTPUTS = ("o", "lse", "dq", "dk", "dv")


def assert_same(name, a, b, what):
    assert same_bits(a, b), f"{name} {what}: {first_difference(a, b)}"


def parts(case: Case, result, n) -> dict[str, np.ndarray]:
    """What belongs to document n."""
    rows, keys = case.rows(n), case.keys(n)
    return {
        "o": result["o"][rows],
        "lse": result["lse"][:, rows],
        "dq": result["dq"][rows],
        "dk": result["dk"][keys],
        "dv": result["dv"][keys],
    }


def perturb(x, rng, kind, rows, keys):
    """Changes queries `rows` and keys `keys` of packed inputs, in place."""
    factor = bf16(10.0 ** rng.uniform(1, 4))
    if kind in ("all", "nan"):
        for name in ("q", "dout"):
            x[name][rows] *= factor
    if kind in ("all", "kv", "nan"):
        for name in ("k", "v"):
            x[name][keys] *= factor
    if kind == "small":
        x["v"][keys] *= bf16(2.0**-9)
    if kind == "nan":
        for name, at in (("q", rows), ("k", keys), ("v", keys), ("dout", rows)):
            part = x[name][at]
            part.reshape(-1)[: part.size // 2] = np.nan
            x[name][at] = part


# ---- 1. causality -------------------------------------------------------------------------------


@given(
    cases(BACKENDS, STRICT, causal=True),
    st.sampled_from(["all", "kv", "small", "nan"]),
    st.floats(0, 1),
)
def test_later_tokens_change_no_bit(case, kind, where):
    n = int(np.argmax(np.minimum(case.q_lens, case.k_lens)))
    q_len, k_len = case.q_lens[n], case.k_lens[n]
    if min(q_len, k_len) < 2:
        return
    x = case.inputs()
    before = case.run(x)
    # Query `first` and key `first + offset` lie on the diagonal.
    first = max(1, int(where * q_len), q_len - k_len)
    key = first + k_len - q_len
    y = copied(x)
    rows, keys = case.rows(n), case.keys(n)
    perturb(y, np.random.default_rng(case.seed), kind, slice(rows.start + first, rows.stop),
            slice(keys.start + key, keys.stop))  # fmt: skip
    after = case.run(y)
    early = slice(rows.start, rows.start + first)
    assert_same("O", before["o"][early], after["o"][early], "before the change")
    assert_same("LSE", before["lse"][:, early], after["lse"][:, early], "before the change")
    assert_same("dQ", before["dq"][early], after["dq"][early], "before the change")
    # The change is one that later rows see.
    if first < q_len and kind != "small":
        late = slice(rows.start + first, rows.stop)
        assert not same_bits(before["o"][late], after["o"][late])


@pytest.mark.parametrize("backend", ["cpu", "cpu_exact"])
@pytest.mark.parametrize("scale", [1, 4, 8])
def test_perturbations_of_section_6(backend, scale):
    rng = np.random.default_rng(3)
    cu = offsets([200, 400])
    q, k, v, dout = (bf16(rng.standard_normal((600, 1, 128))) for _ in range(4))
    q *= bf16(scale)
    v[130] *= bf16(8)

    def run(q, k, v, dout):
        call = Attention(q.shape, k.shape, cu, backend=backend)
        out, lse = call.forward(q, k, v)
        dq, dk, dv = call.backward(q, k, v, out, lse, dout)
        return {"o": out, "dq": dq, "lse": lse.T, "L": call.state["row_sum"].T}

    before = run(q, k, v, dout)
    changes = [("all", lambda: bf16(10 ** rng.uniform(1, 4))), ("kv", lambda: bf16(1000))]
    changes += [("v", lambda: bf16(2.0**-9))]
    for t0 in (17, 100, 150, 199, 327, 328, 329, 500, 550):
        for names, factor in changes:
            x = {"q": q.copy(), "k": k.copy(), "v": v.copy(), "dout": dout.copy()}
            for name in {"all": x, "kv": ("k", "v"), "v": ("v",)}[names]:
                x[name][t0:] *= factor()
            after = run(**x)
            for name, array in before.items():
                assert_same(name, array[:t0], after[name][:t0], f"before {t0} ({names})")


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_a_token_that_raises_an_exponent_anywhere_in_a_diagonal_tile(name):
    rng = np.random.default_rng(11)
    n, cu = 256, [0, 256]
    x = {key: bf16(rng.standard_normal((n, 1, 64))) for key in ("q", "k", "v", "dout")}

    def run(x):
        return attention(x["q"], x["k"], x["v"], cu, dout=x["dout"], threads=1)

    before = run(x)
    for t in range(128, 256):
        y = {key: array.copy() for key, array in x.items()}
        y[name][t] *= bf16(2.0**9)
        after = run(y)
        for output in ("o", "dq"):
            assert_same(output, before[output][:t], after[output][:t], f"before {t}")
        assert_same("lse", before["lse"][:, :t], after["lse"][:, :t], f"before {t}")


@pytest.mark.parametrize("recipe", ["mxfp8_floor", "fp8_tensor"])
def test_the_same_check_catches_recipes_that_leak(recipe):
    rng = np.random.default_rng(4)
    x = [bf16(rng.standard_normal((128, 1, 128))) for _ in range(4)]
    before = attention(*x[:3], [0, 128], dout=x[3], recipe=recipe, backend="cpu_exact")
    for array in x:
        array[100:] *= bf16(3000)
    after = attention(*x[:3], [0, 128], dout=x[3], recipe=recipe, backend="cpu_exact")
    assert not same_bits(before["o"][:100], after["o"][:100])


# ---- 2. isolation and invariance ----------------------------------------------------------------


@given(cases(BACKENDS, ISOLATED), st.sampled_from(["all", "kv", "small", "nan"]))
def test_a_document_ignores_its_neighbours(case, kind):
    x = case.inputs()
    before = case.run(x)
    rng = np.random.default_rng(case.seed)
    changed = case.seed % len(case.q_lens)
    y = copied(x)
    perturb(y, rng, kind, case.rows(changed), case.keys(changed))
    after = case.run(y)
    for n in range(len(case.q_lens)):
        if n != changed:
            a, b = parts(case, before, n), parts(case, after, n)
            for name in OUTPUTS:
                assert_same(name, a[name], b[name], f"of document {n}")


@given(cases(BACKENDS, ISOLATED))
def test_a_document_alone_gives_the_same_bits(case):
    x = case.inputs()
    packed = case.run(x, threads=2)
    n = case.seed % len(case.q_lens)
    rows, keys = case.rows(n), case.keys(n)
    alone = attention(
        x["q"][rows], x["k"][keys], x["v"][keys], [0, case.q_lens[n]], [0, case.k_lens[n]],
        x["dout"][rows], recipe=case.recipe, backend=case.backend, causal=case.causal,
        window=case.window, threads=1,
    )  # fmt: skip
    part = parts(case, packed, n)
    for name in OUTPUTS:
        assert_same(name, part[name], alone[name], f"of document {n} alone")


@given(cases(["cpu", "cpu_exact", "cpu_h200"], ISOLATED))
def test_threads_and_runs_change_no_bit(case):
    x = case.inputs()
    first = case.run(x, threads=1)
    for threads in (1, 2, 3):
        again = case.run(x, threads=threads)
        for name in OUTPUTS:
            assert_same(name, first[name], again[name], f"with {threads} threads")


@given(cases(BACKENDS, ISOLATED))
@settings(max_examples=15)
def test_heads_can_be_split_over_calls(case):
    x = case.inputs()
    whole = case.run(x)
    for h in range(case.heads_k):
        group = slice(h * case.group, (h + 1) * case.group)
        one = attention(
            x["q"][:, group], x["k"][:, h : h + 1], x["v"][:, h : h + 1], case.cu_q, case.cu_k,
            x["dout"][:, group], recipe=case.recipe, backend=case.backend, causal=case.causal,
            window=case.window,
        )  # fmt: skip
        for name, part in (("o", group), ("dq", group), ("dk", slice(h, h + 1)),
                           ("dv", slice(h, h + 1))):  # fmt: skip
            assert_same(name, whole[name][:, part], one[name], f"of key head {h}")
        assert_same("lse", whole["lse"][group], one["lse"], f"of key head {h}")


@given(cases(BACKENDS, ["fp8", "mxfp8", "bf16"], same_lengths=True))
@settings(max_examples=15)
def test_strides_change_no_bit(case):
    case.fused = True
    x = case.inputs()
    views = case.run(x)
    plain = case.run({name: np.ascontiguousarray(array) for name, array in x.items()})
    for name in OUTPUTS:
        assert_same(name, views[name], plain[name], "of contiguous copies")


# ---- 3. determinism: see also threads above -----------------------------------------------------


@pytest.mark.parametrize("skewed", [[0, 900, 1, 0, 33, 7], [513, 0, 2, 129]])
def test_a_skewed_pack_repeats_its_bits(skewed):
    rng = np.random.default_rng(8)
    total = sum(skewed)
    q, dout = (bf16(rng.standard_normal((total, 8, 128))) for _ in range(2))
    k, v = (bf16(rng.standard_normal((total, 1, 128))) for _ in range(2))
    results = [
        attention(q, k, v, offsets(skewed), dout=dout, window=window, threads=threads)
        for window in [(-1, -1), (77, -1)]
        for threads in (1, 2, 3, 3)
    ]
    for name in OUTPUTS:
        for base in (0, 4):
            for other in range(base + 1, base + 4):
                assert_same(name, results[base][name], results[other][name], "of a second run")
        if name != "lse":
            assert not same_bits(results[0][name], results[4][name])  # the window does something


# ---- 4. forward and backward see the same --------------------------------------------------------


@pytest.mark.parametrize("backend", ["cpu", "cpu_exact", "cpu_h200"])
@pytest.mark.parametrize("recipe", ["fp8", "mxfp8", "mxfp8_token"])
def test_forward_and_backward_use_the_same_weights(recipe, backend):
    # V = I gives O = P; dO = I gives dV = P^T. Roundings in between: the weight's code (and the
    # row sum's, a mean of such), in dV the code of the weight and of 1/L; BF16. Half a step of E4M3
    # is 2^-4 of a normal value; subnormal codes have half steps of 2^-10, which is 2^-18 of the
    # row's largest weight in O, and in dV 2^-18 of the chunk's largest g.
    rng = np.random.default_rng(12)
    n = 128
    q, k = (bf16(2 * rng.standard_normal((n, 1, n))) for _ in range(2))
    eye = bf16(np.eye(n))[:, None, :]
    got = attention(q, k, eye, [0, n], dout=eye, recipe=recipe, backend=backend)
    p, pt = got["o"][:, 0].astype(float), got["dv"][:, 0].astype(float).T
    assert p.max() > 0.9 and np.isclose(p.sum(1), 1, atol=0.01).all()
    relative = (1 + 2.0**-4) ** 4 / (1 - 2.0**-4) * (1 + 2.0**-7) - 1
    floor = 2.0**-16 * np.maximum(p.max(1, keepdims=True), 2.0**-2)
    assert (np.abs(p - pt) <= relative * np.maximum(p, pt) + 8 * floor).all()


@given(cases(BACKENDS, ["fp8", "mxfp8", "mxfp8_token", "fp8_ds_row"]))
@settings(max_examples=15)
def test_one_quantisation_serves_both_directions(case):
    x = case.inputs()
    whole = case.run(x)
    call = Attention(
        x["q"].shape, x["k"].shape, case.cu_q, case.cu_k, recipe=case.recipe,
        backend=case.backend, causal=case.causal, window=case.window,
    )  # fmt: skip
    for name in "qkv":
        call.quantize(name, x[name])
    codes = {name: call.state[f"{name}_codes"].copy() for name in "qkv"}
    # From here on the library has nothing but the codes.
    out, lse = call.forward(None, None, None, quantized="qkv")
    dq, dk, dv = call.backward(None, None, None, out, lse, x["dout"])
    for name, got in zip(OUTPUTS, (out, lse, dq, dk, dv), strict=True):
        assert_same(name, whole[name], got, "from codes alone")
    for name in "qkv":
        assert_same(name, codes[name], call.state[f"{name}_codes"], "codes after both passes")


# ---- 5. poison ----------------------------------------------------------------------------------


@given(cases(BACKENDS, [*ISOLATED, "exact"]))
def test_rows_outside_the_documents_are_zero_and_harmless(case):
    case.tail = 5
    x = case.inputs()  # the tail holds NaN
    y = copied(x)
    for name, array in y.items():
        array[case.cu_k[-1] if name in "kv" else case.cu_q[-1] :] = bf16(np.inf)
    a, b = case.run(x), case.run(y)
    for name in OUTPUTS:
        assert_same(name, a[name], b[name], "with another poison")
        assert np.isfinite(a[name].astype(float)).all() or name == "lse"
    assert not np.isnan(a["lse"]).any()
    for name, end in (("o", case.cu_q), ("dq", case.cu_q), ("dk", case.cu_k), ("dv", case.cu_k)):
        assert not a[name][end[-1] :].view(np.uint16).any()
    assert (a["lse"][:, case.cu_q[-1] :] == -np.inf).all()


@given(
    cases(BACKENDS, ["fp8", "mxfp8_token", "fp8_ds_row", "bf16"], same_lengths=True, causal=True),
    st.sampled_from(["q", "k", "v", "dout"]),
    st.sampled_from([np.nan, np.inf, -np.inf]),
    st.floats(0, 0.999),
)
@settings(max_examples=40)
def test_poison_inside_a_document_stays_where_it_may(case, name, value, where):
    case.window = (-1, -1)
    n = int(np.argmax(case.q_lens))
    if case.q_lens[n] < 2:
        return
    if case.recipe == "bf16":
        value = np.nan  # an infinite score of plain arithmetic may be a legal weight of 0
    rows = case.rows(n)
    t = rows.start + int(where * case.q_lens[n])
    x = case.inputs()
    before = case.run(x)
    y = copied(x)
    y[name][t, :, 3] = bf16(value)
    after = case.run(y)

    # Rows before t and other documents keep their bits; dK and dV only of other documents.
    for m in range(len(case.q_lens)):
        if m != n:
            a, b = parts(case, before, m), parts(case, after, m)
            for output in OUTPUTS:
                assert_same(output, a[output], b[output], f"of document {m}")
    early = slice(rows.start, t)
    for output in ("o", "dq"):
        assert_same(output, before[output][early], after[output][early], f"before {t}")
    assert_same("lse", before["lse"][:, early], after["lse"][:, early], f"before {t}")

    # From t on: what the table of section 5 says. A token scale of its own (and no scale at all)
    # poisons query t alone.
    late = slice(t, rows.stop)
    running = case.recipe in ("fp8", "fp8_ds_row")
    hit = late if name in ("k", "v") or (name == "q" and running) else slice(t, t + 1)

    def all_nan(array):
        return np.isnan(array.astype(float)).all()

    if name == "dout":
        for output in ("o", "lse"):
            assert_same(output, before[output], after[output], "whatever dO holds")
        assert all_nan(after["dq"][t])
        rest = slice(t + 1, rows.stop)
        assert_same("dq", before["dq"][rest], after["dq"][rest], f"after {t}")
    elif case.recipe == "bf16" and name == "v":
        # Plain arithmetic: the NaN reaches its own channel of O.
        assert all_nan(after["o"][hit][..., 3]) and all_nan(after["dq"][hit])
    else:
        assert all_nan(after["o"][hit]) and all_nan(after["dq"][hit])
        if name == "v":
            assert_same("lse", before["lse"], after["lse"], "whatever V holds")
        else:
            assert all_nan(after["lse"][:, hit])
    if name in ("q", "k", "v") and case.recipe != "bf16":
        assert np.isnan(after["dk"][late].astype(float)).any()


# ---- 6. sum -------------------------------------------------------------------------------------


@given(cases(BACKENDS, ["fp8", "fp8", "mxfp8", "mxfp8_token", "bf16"]))
def test_ones_give_ones(case):
    x = case.inputs()
    x["v"][: case.cu_k[-1]] = bf16(1)
    got = case.run(x)
    for n in range(len(case.q_lens)):
        sees = case.last_visible(n) > 0
        o = got["o"][case.rows(n)]
        assert (o[sees] == 1).all() and (o[~sees] == 0).all()
