"""The numpy front end against exact attention and against the binding it stands on."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import signal
import subprocess
import sys

import hypothesis_profile  # noqa: F401
import mxattn
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mxattn_capi import attention, bfloat16
from reference import bf16, cosine, exact, same_bits

LENGTHS = [5, 0, 40, 19]
CU = [0, 5, 5, 45, 64]


def inputs(heads_q=4, heads_k=2, dim=64, tokens=64, seed=0):
    rng = np.random.default_rng(seed)
    shapes = [(tokens, heads, dim) for heads in (heads_q, heads_k, heads_k)]
    return [rng.standard_normal(shape, np.float32) for shape in shapes]


def test_bit_equal_to_the_binding_from_float32_and_bf16():
    x = inputs()
    rounded = [bf16(array) for array in x]
    want = attention(*rounded, CU, causal=True)
    for q, k, v in (x, rounded):
        out, lse = mxattn.attn_varlen(q, k, v, CU, causal=True, return_lse=True)
        assert out.dtype == np.float32 and lse.dtype == np.float32
        assert same_bits(out.astype(bfloat16), want["o"]) and same_bits(lse, want["lse"])


def test_float32_is_rounded_to_nearest_even():
    # Halfway between two BF16 numbers, below and above an even one.
    ties = np.float32([1 + 2.0**-8, 1 + 3 * 2.0**-8])
    v = np.resize(ties, (1, 1, 64)).astype(np.float32)
    zero = np.zeros_like(v)
    out = mxattn.attn_varlen(zero, zero, v, [0, 1], recipe="bf16")
    assert (out[0, 0, :2] == np.float32([1, 1 + 2.0**-6])).all()


@pytest.mark.parametrize("window", [(-1, -1), (7, 0), (3, 2)])
@pytest.mark.parametrize("causal", [True, False])
def test_near_exact_attention(causal, window):
    q, k, v = inputs()
    options = {"causal": causal, "softmax_scale": 0.2}
    want = exact(*map(bf16, (q, k, v)), CU, window=window, **options)
    for recipe, least in (("bf16", 0.9999), ("fp8", 0.995)):
        out, lse = mxattn.attn_varlen(q, k, v, CU, recipe=recipe, window_size=window,
                                      return_lse=True, **options)  # fmt: skip
        assert cosine(out, want["o"]) > least
        assert np.array_equal(np.isneginf(lse), np.isneginf(want["lse"]))


def test_max_seqlen_is_never_used():
    q, k, v = inputs()
    plain = mxattn.attn_varlen(q, k, v, CU, CU, causal=True)
    assert same_bits(plain, mxattn.attn_varlen(q, k, v, CU, CU, 1, 10**9, causal=True))


def test_views_give_the_same_bits():
    qkv = np.random.default_rng(1).standard_normal((64, 3, 4, 64), np.float32).astype(bfloat16)
    views = [qkv[:, i] for i in range(3)]
    assert not views[0].flags.c_contiguous
    want = mxattn.attn_varlen(*(np.ascontiguousarray(x) for x in views), CU)
    assert same_bits(mxattn.attn_varlen(*views, CU), want)
    reversed_views = [x[::-1, :, ::-1][::-1, :, ::-1] for x in views]
    assert same_bits(mxattn.attn_varlen(*reversed_views, CU), want)


def test_a_batch_is_a_pack_of_equal_documents():
    rng = np.random.default_rng(2)
    q = rng.standard_normal((3, 10, 4, 64), np.float32)
    k, v = (rng.standard_normal((3, 14, 2, 64), np.float32) for _ in range(2))
    out, lse = mxattn.attn(q, k, v, causal=True, return_lse=True)
    assert out.shape == q.shape and lse.shape == (3, 4, 10)
    for b in range(3):
        one, one_lse = mxattn.attn_varlen(q[b], k[b], v[b], [0, 10], [0, 14], causal=True,
                                          return_lse=True)  # fmt: skip
        assert same_bits(out[b], one) and same_bits(lse[b], one_lse)


def test_a_plan_changes_nothing_and_must_fit():
    q, k, v = inputs()
    plan = mxattn.make_plan(CU, heads_q=4, heads_k=2, head_dim=64, causal=True)
    want = mxattn.attn_varlen(q, k, v, CU, causal=True)
    assert same_bits(mxattn.attn_varlen(q, k, v, CU, causal=True, plan=plan), want)
    with pytest.raises(mxattn.InvalidArgument, match="plan"):
        mxattn.attn_varlen(q, k, v, CU, causal=False, plan=plan)
    with pytest.raises(mxattn.InvalidArgument, match="cu_seqlens_q"):
        mxattn.attn_varlen(q, k, v, [0, 5, 6, 45, 64], causal=True, plan=plan)


def test_callers_buffers_forward_and_backward():
    q, k, v = map(bf16, inputs())
    dout = bf16(inputs(seed=3)[0])
    want = attention(q, k, v, CU, dout=dout, causal=True)
    state = mxattn.make_state(q, k, CU, causal=True)
    out, dq, dk, dv = (np.empty_like(x) for x in (q, q, k, v))
    lse = np.empty((4, 64), np.float32)
    mxattn.forward_(q, k, v, out, lse, state, CU, causal=True)
    mxattn.backward_(dout, q, k, v, out, lse, state, dq, dk, dv, CU, causal=True)
    got = {"o": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
    for name, array in got.items():
        assert same_bits(array, want[name]), name


def in_place(**changes):
    """Runs forward_ and backward_ with other arguments than right ones."""
    q, k, v = (bf16(x) for x in inputs())
    given = {"q": q, "k": k, "v": v, "out": np.zeros_like(q), "cu": CU, "merged": None}
    given |= {"lse": np.zeros((4, 64), np.float32), "state": mxattn.make_state(q, k, CU)}
    given |= {"dq": np.zeros_like(q), "dk": np.zeros_like(k), "dv": np.zeros_like(v)}
    x = given | {name: change(given[name]) for name, change in changes.items()}
    mxattn.forward_(x["q"], x["k"], x["v"], x["out"], x["lse"], x["state"], x["cu"])
    mxattn.backward_(
        x["q"], x["q"], x["k"], x["v"], x["out"], x["lse"], x["state"], x["dq"], x["dk"], x["dv"],
        x["cu"], merged_lse=x["merged"],
    )  # fmt: skip


def read_only(x):
    x = x.copy()
    x.flags.writeable = False
    return x


def between_bytes(x):
    """Rows that begin at every other byte."""
    memory = np.zeros(2 * x.nbytes, np.uint8).view(x.dtype)
    strides = (x.strides[0] + 1, *x.strides[1:])
    return np.lib.stride_tricks.as_strided(memory, x.shape, strides)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": list}, r"q = list: expected a numpy array or a torch tensor"),
        ({"k": lambda _: None}, r"k = NoneType: expected a numpy array, as q"),
        ({"lse": np.ndarray.tolist}, r"lse = list: expected a numpy array, as q"),
        ({"cu": lambda _: 64}, r"cu_seqlens_q = int64 of shape \(\): expected integers"),
        ({"cu": lambda _: None}, r"cu_seqlens_q = object of shape"),
        ({"v": between_bytes}, r"v\.strides = \(257, 128, 2\): expected multiples of 2 bytes"),
        ({"out": read_only}, r"out = a read-only array: expected one that can be written"),
        ({"dk": read_only}, r"dk = a read-only array: expected"),
        ({"state": lambda s: [*s[:-1], read_only(s[-1])]}, r"state\[8\] = a read-only array"),
        ({"state": lambda s: [s[0][::-1], *s[1:]]}, r"state\[0\] = a strided view: expected cont"),
        ({"state": lambda _: 4096}, r"state = int: expected the buffers of make_state"),
        ({"state": lambda _: None}, r"state = NoneType: expected the buffers of make_state"),
        ({"state": lambda s: [None, *s[1:]]}, r"state\[0\] = NoneType: expected a numpy array"),
        ({"merged": lambda _: [[0.0]]}, r"state, merged_lse = 9 buffers, list: expected"),
    ],
)
def test_buffers_of_the_caller_are_checked(changes, message):
    with pytest.raises(mxattn.InvalidArgument, match=message):
        in_place(**changes)


@pytest.mark.parametrize("operand", ["q", "k", "v"])
@pytest.mark.parametrize("recipe", ["fp8", "mxfp8", "mxfp8_token"])
def test_quantize_and_back(recipe, operand):
    x = inputs()[0]
    quantized = mxattn.quantize(x, CU, operand, recipe=recipe)
    assert quantized.buffers["codes"].dtype.name == "float8_e4m3fn"
    back = mxattn.dequantize(quantized)
    assert back.shape == x.shape and back.dtype == np.float32
    assert cosine(back, x) > 0.999 and not same_bits(back, x)


def test_recipes_that_do_not_quantise_say_so():
    with pytest.raises(mxattn.MxattnError, match="bf16|operand|quantis"):
        mxattn.quantize(inputs()[0], CU, recipe="bf16")


@pytest.mark.parametrize(
    "options",
    [
        {"softmax_scale": "x"}, {"softmax_scale": 1j}, {"window_size": (np.inf, 0)},
        {"backend": None}, {"backend": "cpu\0"}, {"recipe": "\udcff"}, {"device": "cuda"},
        {"device": 2**32}, {"num_documents": None}, {"k_shape": 5},
    ],
)  # fmt: skip
def test_can_run_never_raises(options):
    verdict = mxattn.can_run((64, 4, 64), **options)
    assert not verdict and ": expected" in verdict.reason


def test_can_run_and_explain():
    assert mxattn.can_run((64, 4, 64), (64, 2, 64), 4)
    verdict = mxattn.can_run((64, 4, 64), (64, 3, 64))
    assert not verdict and "heads_q" in verdict.reason
    assert "head_dim" in mxattn.can_run((64, 4, 300)).reason
    assert "as q" in mxattn.can_run((64, 4, 64), (64, 2, 32)).reason
    for shape in (5, "x", (64, 64), (64, 2**32 + 4, 64), (2**64, 4, 64), (1.5, 4, 64)):
        assert mxattn.can_run(shape).reason
    assert mxattn.can_run(np.array([64, 4, 64]), num_documents=np.int64(4))
    assert not mxattn.can_run((64, 64)) and not mxattn.can_run((64, 4, 64), recipe="none")
    assert "cpu" in mxattn.explain((64, 4, 64))
    assert not mxattn.recipes()["fp8"]["control"] and mxattn.recipes()["fp8_tensor"]["control"]


Q, K, V = inputs()


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((Q.astype(np.float64), K, V, CU), {}, r"q\.dtype = float64: expected float32"),
        ((Q[0], K, V, CU), {}, r"q\.shape = \(4, 64\): expected \(tokens, heads"),
        ((Q, K[:, :, :32], V, CU), {}, r"k\.shape = \(64, 2, 32\): expected"),
        ((Q, K, V[:9], CU), {}, r"v\.shape = \(9, 2, 64\): expected"),
        ((Q, np.repeat(K, 3, 1)[:, :3], V, CU), {}, r"heads_q = 4"),
        ((Q, K, V, [0.0, 64.0]), {}, r"cu_seqlens_q = float64 of shape \(2,\): expected integers"),
        ((Q, K, V, [0]), {}, r"cu_seqlens_q = .*: expected integers of shape \(documents \+ 1,\)"),
        ((Q, K, V, [0, 2**31]), {}, r"cu_seqlens_q = 0 to 2147483648: expected values"),
        ((Q, K, V, [0, -1]), {}, r"cu_seqlens_q = -1 to 0: expected values"),
        ((Q, K, V, [1, 64]), {}, r"cu_seqlens_q\[0\] = 1: expected 0"),
        ((Q, K, V, [0, 9, 5]), {}, r"cu_seqlens_q\[2\] = 5: expected"),
        ((Q, K, V, [0, 65]), {}, r"cu_seqlens_q\[1\] = 65: expected at most total_q = 64"),
        ((Q, K, V, CU, [0, 64]), {}, r"cu_seqlens_k\.shape = \(2,\): expected \(5,\)"),
        ((Q, K, V, CU), {"recipe": "int3"}, r'recipe = "int3": expected one of fp8'),
        ((Q, K, V, CU), {"recipe": None}, r"recipe = None: expected one of fp8"),
        ((Q, K, V, CU), {"window_size": 5}, r"window_size = 5: expected \(left, right\)"),
        ((Q, K, V, CU), {"window_size": (-2, 0)}, r"window_left = -2"),
        ((Q, K, V, CU), {"window_size": (2**32, 0)}, r"window_left = 4294967296: expected an int"),
        ((Q, K, V, CU), {"window_size": (1.5, 0)}, r"window_size = \(1\.5, 0\): expected"),
        ((Q, K, V, CU), {"window_size": (np.inf, 0)}, r"window_size = \(inf, 0\): expected"),
        ((Q, K, V, CU), {"softmax_scale": np.inf}, r"softmax_scale = inf"),
        ((Q, K, V, CU), {"softmax_scale": "x"}, r"softmax_scale = x: expected a number or None"),
        ((Q, K, V, CU), {"recipe": "fp8\0x"}, r"recipe = 'fp8\\x00x': expected a name"),
        ((Q, K, V, CU), {"recipe": "\udcff"}, r"recipe = .*: expected a name"),
        ((Q, K, V, CU), {"plan": "x"}, r"plan = str: expected what make_plan returned"),
    ],
)
def test_errors_name_argument_value_and_expectation(arguments, options, message):
    with pytest.raises(mxattn.InvalidArgument, match=message) as raised:
        mxattn.attn_varlen(*arguments, **options)
    assert isinstance(raised.value, ValueError)


def test_batched_errors():
    with pytest.raises(mxattn.InvalidArgument, match=r"k\.shape = .*\(batch, tokens"):
        mxattn.attn(Q[None], K, V[None])
    with pytest.raises(mxattn.InvalidArgument, match=r"k\.shape = .*batch as large"):
        mxattn.attn(Q[None], np.stack([K, K]), V[None])


# ---- helpers -----------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8))
def test_offsets_from_lengths_and_positions(lengths):
    cu = mxattn.cu_seqlens_from_lengths(lengths)
    assert cu.dtype == np.int32 and cu[0] == 0 and np.array_equal(np.diff(cu), lengths)
    full = [n for n in lengths if n]
    if full:
        positions = np.concatenate([np.arange(n) for n in full])
        for ids in (positions, positions[None]):
            got = mxattn.cu_seqlens_from_position_ids(ids)
            assert got.dtype == np.int32 and np.array_equal(np.diff(got), full)


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        ([1, 2], r"position_ids\[0\] = 1: expected 0"),
        ([0, 1, 3], r"position_ids\[2\] = 3: expected 0 or 2"),
        ([0, 1, 1], r"position_ids\[2\] = 1: expected 0 or 2"),
        ([[0, 1], [0, 1]], r"position_ids = .*\(2, 2\): expected integers"),
        ([0.0], r"position_ids = float64"),
        ([], r"position_ids = "),
    ],
)
def test_positions_are_checked(positions, message):
    with pytest.raises(mxattn.InvalidArgument, match=message):
        mxattn.cu_seqlens_from_position_ids(positions)


def test_lengths_are_checked():
    with pytest.raises(mxattn.InvalidArgument, match=r"lengths\[1\] = -2: expected at least 0"):
        mxattn.cu_seqlens_from_lengths([3, -2])
    with pytest.raises(mxattn.InvalidArgument, match="2147483648"):
        mxattn.cu_seqlens_from_lengths([2**31 - 1, 1])
    for length in (2**31, 2**40):
        with pytest.raises(mxattn.InvalidArgument, match="cu_seqlens"):
            mxattn.cu_seqlens_from_lengths([length])
    with pytest.raises(mxattn.InvalidArgument, match="cu_seqlens = .*2147483653"):
        mxattn.cu_seqlens_from_lengths(np.array([5, 2**64 - 1], np.uint64))


def test_merged_halves_are_the_whole():
    """Two halves of the keys, some queries of which see none of one: exact up to float32."""
    q, k, v = (np.float32(bf16(x)) for x in inputs(tokens=48))
    whole = exact(q, k, v, [0, 48], causal=False)
    parts = []
    for keys in (slice(0, 20), slice(20, 48)):
        part = exact(q, k[keys], v[keys], [0, 48], [0, keys.stop - keys.start], causal=False)
        parts += [part["o"], part["lse"]]
    out, lse = mxattn.merge_lse(*parts)
    # Weights and products round a few times; 16 ulp of the largest value covers them.
    assert np.abs(out - whole["o"]).max() <= 16 * 2.0**-24 * np.abs(v).max()
    assert np.abs(lse - whole["lse"]).max() <= 16 * 2.0**-24 * np.abs(whole["lse"]).max()


def test_merging_with_nothing():
    out, lse = np.ones((2, 1, 4), np.float32), np.float32([[0.5, -np.inf]])
    nothing = np.zeros_like(out), np.full_like(lse, -np.inf)
    got, got_lse = mxattn.merge_lse(out, lse, *nothing)
    assert np.array_equal(got[0], out[0]) and got_lse[0, 0] == np.float32(0.5)
    assert (got[1] == 0).all() and np.isneginf(got_lse[0, 1])
    with pytest.raises(mxattn.InvalidArgument, match=r"lse_b\.shape"):
        mxattn.merge_lse(out, lse, out, lse[:, :1])


@pytest.mark.parametrize("kind", [mxattn.InvalidArgument, mxattn.Unsupported, mxattn.MxattnError])
def test_errors_are_made_again_of_their_message(kind):
    error = kind("x = 1: expected 2")
    error.status = 3
    for made in (copy.copy(error), copy.deepcopy(error), pickle.loads(pickle.dumps(error))):
        assert (type(made), str(made), made.status) == (kind, str(error), 3)
    assert type(error)(f"{error} (in layer 3)").status == kind.status


# ---- handles of the library --------------------------------------------------------------------


def test_copies_of_plans_are_plans():
    plan = mxattn.make_plan(CU, heads_q=4, heads_k=2, head_dim=64)
    copies = [copy.copy(plan), copy.deepcopy(plan)]
    want = mxattn.attn_varlen(Q, K, V, CU, plan=plan)
    with pytest.raises(TypeError, match="a Plan cannot be pickled"):
        pickle.dumps(plan)
    del plan
    gc.collect()
    for kept in copies:
        assert same_bits(mxattn.attn_varlen(Q, K, V, CU, plan=kept), want)


def test_copies_of_operands_are_dequantized():
    quantized = mxattn.quantize(Q, CU, "q")
    again = copy.deepcopy(quantized)
    assert same_bits(mxattn.dequantize(again), mxattn.dequantize(quantized))


def test_problems_live_until_the_process_ends():
    """Threads that do not end with the interpreter may be inside calls when it exits."""
    code = """if True:
        import atexit
        atexit.register(lambda: print(call()))  # after whatever the package would do at exit
        from mxattn import capi
        problem = capi.cached_problem((9, 2, 64), (9, 2, 64), 1)
        plan = problem.make_plan(capi.np.array([0, 9], capi.np.int32))
        before = problem.explanation
        def call():
            problem.make_plan(capi.np.array([0, 9], capi.np.int32))
            return problem.explanation == before
    """
    folders = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": folders},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


def test_a_forked_process_has_no_threads_to_wait_for():
    """Neither after calls of its parent nor for good: the same bits from one thread."""
    want = mxattn.attn_varlen(Q, K, V, CU, causal=True)
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        same = same_bits(mxattn.attn_varlen(Q, K, V, CU, causal=True), want)
        os._exit(0 if same else 1)
    assert os.waitpid(child, 0)[1] == 0
