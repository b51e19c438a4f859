"""The torch front end on every device: bits of the binding, autograd, compile, checkpointing.

What only a CUDA device has is in test_torch_cuda.py.
"""

from __future__ import annotations

import gc

import hypothesis_profile  # noqa: F401
import mxattn
import mxattn.torch
import numpy as np
import pytest
import torch
from devices import DEVICES, need, usual_dim
from hypothesis import given, settings
from hypothesis import strategies as st
from mxattn_capi import attention, bfloat16
from reference import cosine, exact, same_bits
from torch.utils.checkpoint import checkpoint

CU = torch.tensor([0, 5, 5, 45, 64], dtype=torch.int32)


@pytest.fixture(scope="module", params=DEVICES)
def device(request) -> str:
    return request.param


def inputs(heads_q=4, heads_k=2, dim=None, tokens=64, seed=0, grad=False, device="cpu"):
    """q, k, v and a gradient of out, BF16: the same values on every device."""
    random = torch.Generator().manual_seed(seed)
    dim = usual_dim(device) if dim is None else dim
    shapes = [(tokens, heads, dim) for heads in (heads_q, heads_k, heads_k, heads_q)]
    q, k, v, dout = (torch.randn(s, generator=random).bfloat16().to(device) for s in shapes)
    return *(x.requires_grad_(grad) for x in (q, k, v)), dout


def array(x: torch.Tensor) -> np.ndarray:
    """The same bits in numpy."""
    x = x.detach().cpu().contiguous()
    if x.dtype == torch.bfloat16:
        return x.view(torch.int16).numpy().view(bfloat16)
    return x.numpy()


def gradients(dout, out, *leaves):
    return torch.autograd.grad(out, leaves, dout)


def same(a, b) -> bool:
    return same_bits(array(a), array(b))


@pytest.mark.parametrize("recipe", ["fp8", "mxfp8_token", "bf16"])
def test_bit_equal_to_the_binding(recipe):
    q, k, v, dout = inputs(grad=True)
    out, lse = mxattn.attn_varlen(q, k, v, CU, causal=True, recipe=recipe, return_lse=True)
    got = dict(zip(("dq", "dk", "dv"), gradients(dout, out, q, k, v), strict=True))
    got |= {"o": out, "lse": lse}
    want = attention(*map(array, (q, k, v)), CU.numpy(), dout=array(dout), recipe=recipe)
    for name, x in got.items():
        assert same_bits(array(x), want[name]), name
    assert out.dtype == torch.bfloat16 and not lse.requires_grad


@settings(max_examples=8)
@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=5).filter(any),
    st.booleans(),
    st.sampled_from([(-1, -1), (4, 0), (2, 3)]),
    st.sampled_from([(2, 2, 64), (4, 2, 32), (3, 1, 128), (2, 1, 128)]),
)
def test_gradients_near_exact(device, lengths, causal, window, shape):
    heads_q, heads_k, dim = shape
    recipe = "bf16"
    if device != "cpu":  # there are fewer recipes and head dimensions
        recipe, dim = "fp8", usual_dim(device)
    bound = 0.999 if recipe == "bf16" else 0.98  # dS of two keys: a difference of two codes
    q, k, v, dout = inputs(heads_q, heads_k, dim, sum(lengths) + 3, grad=True, device=device)
    cu = mxattn.cu_seqlens_from_lengths(torch.tensor(lengths, device=device))
    options = {"causal": causal, "softmax_scale": 0.1}
    out = mxattn.attn_varlen(q, k, v, cu, window_size=window, recipe=recipe, **options)
    got = [out, *gradients(dout, out, q, k, v)]
    want = exact(*map(array, (q, k, v)), array(cu), dout=array(dout), window=window, **options)
    for x, name in zip(got, ("o", "dq", "dk", "dv"), strict=True):
        if np.abs(want[name]).max() > 1e-2:  # not where each query sees one key
            assert cosine(array(x), want[name]) > bound, name
        assert (array(x)[sum(lengths) :] == 0).all(), name


def test_strided_views(device):
    cu, dim = CU.to(device), usual_dim(device)
    random = torch.Generator().manual_seed(1)
    qkv = torch.randn(64, 3, 4, dim, generator=random).bfloat16().to(device)
    dout = torch.randn(64, 4, dim, generator=random).bfloat16().to(device)
    flat = qkv.detach().requires_grad_()
    out = mxattn.attn_varlen(*flat.unbind(1), cu, causal=True)
    (got,) = gradients(dout, out, flat)
    leaves = [x.contiguous().requires_grad_() for x in qkv.unbind(1)]
    want = mxattn.attn_varlen(*leaves, cu, causal=True)
    assert same(out, want)
    assert same(got, torch.stack(gradients(dout, want, *leaves), 1))
    want = mxattn.attn_varlen(*leaves, cu, causal=True)
    # The last dimension strided, and a gradient without strides at all.
    turned = [x.detach().mT.contiguous().mT.requires_grad_() for x in leaves]
    assert turned[0].stride(-1) != 1
    again = mxattn.attn_varlen(*turned, cu, causal=True)
    assert same(again, want)
    (a,) = torch.autograd.grad(again.sum(), turned[:1])
    (b,) = gradients(torch.ones_like(want), want, leaves[0])
    assert same(a, b)


def test_a_batch_with_gradients(device):
    q, k, v, dout = inputs(grad=True, device=device)
    batch = [x.detach().view(2, 32, *x.shape[1:]).requires_grad_() for x in (q, k, v)]
    out, lse = mxattn.attn(*batch, causal=True, return_lse=True)
    cu = torch.tensor([0, 32, 64], device=device)  # int64 is converted
    want, want_lse = mxattn.attn_varlen(q, k, v, cu, causal=True, return_lse=True)
    assert same(out.flatten(0, 1), want)
    assert lse.shape == (2, 4, 32) and same(lse[1], want_lse[:, 32:])
    grads = gradients(dout.view_as(out), out, *batch)
    for got, expected in zip(grads, gradients(dout, want, q, k, v), strict=True):
        assert same(got.flatten(0, 1), expected)


def test_only_what_needs_a_gradient(device):
    cu = CU.to(device)
    q, k, v, dout = inputs(device=device)
    assert not mxattn.attn_varlen(q, k, v, cu).requires_grad
    v.requires_grad_()
    with torch.no_grad():
        assert not mxattn.attn_varlen(q, k, v, cu).requires_grad
    out, lse = mxattn.attn_varlen(q, k, v, cu, return_lse=True)
    (dv,) = gradients(dout, out, v)
    assert dv.shape == v.shape and not lse.requires_grad


def test_every_run_gives_the_same_bits(device):
    cu = CU.to(device)
    q, k, v, dout = inputs(grad=True, device=device)
    runs = []
    for _ in range(3):
        out = mxattn.attn_varlen(q, k, v, cu, causal=True)
        runs.append([out, *gradients(dout, out, q, k, v)])
    for again in runs[1:]:
        assert all(same(a, b) for a, b in zip(runs[0], again, strict=True))


def test_later_tokens_and_other_documents_change_nothing_before(device):
    cu = CU.to(device)
    q, k, v, dout = inputs(grad=True, device=device)
    out = mxattn.attn_varlen(q, k, v, cu, causal=True)
    (dq,) = gradients(dout, out, q)
    changed = [x.detach().clone() for x in (q, k, v, dout)]
    for x in changed:
        x[30:] *= -100  # the document of 5 to 45, and the next
    leaf = changed[0].requires_grad_()
    again = mxattn.attn_varlen(leaf, *changed[1:3], cu, causal=True)
    (dq_again,) = gradients(changed[3], again, leaf)
    assert same(out[:30], again[:30]) and same(dq[:30], dq_again[:30])
    assert not same(out[30:], again[30:]) and not same(dq[30:], dq_again[30:])


def test_checkpointing_gives_the_same_bits(device):
    cu = CU.to(device)
    q, k, v, dout = inputs(grad=True, device=device)
    out = mxattn.attn_varlen(q, k, v, cu, causal=True)
    want = gradients(dout, out, q, k, v)
    for reentrant in (False, True):
        out = checkpoint(
            lambda *x: mxattn.attn_varlen(*x, cu, causal=True), q, k, v, use_reentrant=reentrant
        )
        for x in (q, k, v):
            x.grad = None
        out.backward(dout)
        assert all(same(x.grad, w) for x, w in zip((q, k, v), want, strict=True))


def test_autocast_rounds_to_bf16(device):
    q, k, v, _ = inputs(device=device)
    leaves = [x.float().requires_grad_() for x in (q, k, v)]
    with torch.autocast(device, dtype=torch.bfloat16):
        out = mxattn.attn_varlen(*leaves, CU.to(device))
    assert same(out, mxattn.attn_varlen(q, k, v, CU.to(device)))
    grads = torch.autograd.grad(out.float().sum(), leaves)
    assert [x.dtype for x in grads] == [torch.float32] * 3


def make_plan(cu, dim, **options):
    options = {"causal": True, "total_q": 64, "total_k": 64} | options
    return mxattn.make_plan(cu, heads_q=4, heads_k=2, head_dim=dim, **options)


def test_plans(device):
    cu, dim = CU.to(device), usual_dim(device)
    q, k, v, dout = inputs(grad=True, device=device)
    want = mxattn.attn_varlen(q, k, v, cu, causal=True)
    grads = gradients(dout, want, q, k, v)
    plan = make_plan(cu, dim)
    for _ in range(3):  # layers of one microbatch
        out = mxattn.attn_varlen(q, k, v, cu, causal=True, plan=plan)
        assert same(out, want)
        for a, b in zip(grads, gradients(dout, out, q, k, v), strict=True):
            assert same(a, b)
    if device != "cpu":
        with pytest.raises(mxattn.InvalidArgument, match="total_q = None"):
            make_plan(cu, dim, total_q=None)
    out = mxattn.attn_varlen(q, k, v, cu, causal=True, plan=plan)
    del plan
    gc.collect()
    with pytest.raises(mxattn.InvalidArgument, match="kept until the last backward"):
        out.backward(dout)
    foreign = mxattn.make_plan(CU.numpy(), heads_q=4, heads_k=2, head_dim=dim, causal=True)
    with pytest.raises(mxattn.InvalidArgument, match="made of tensors"):
        mxattn.attn_varlen(q, k, v, cu, causal=True, plan=foreign)


def test_callers_buffers(device):
    cu = CU.to(device)
    q, k, v, dout = inputs(grad=True, device=device)
    want, want_lse = mxattn.attn_varlen(q, k, v, cu, causal=True, return_lse=True)
    wanted = want, want_lse, *gradients(dout, want, q, k, v)
    q, k, v = (x.detach() for x in (q, k, v))
    state = mxattn.make_state(q, k, cu, causal=True)
    out, dq, dk, dv = (torch.full_like(x, torch.nan) for x in (q, q, k, v))
    lse = torch.full((4, 64), torch.nan, device=device)
    mxattn.forward_(q, k, v, out, lse, state, cu, causal=True)
    mxattn.backward_(dout, q, k, v, out, lse, state, dq, dk, dv, cu, causal=True)
    for got, expected in zip((out, lse, dq, dk, dv), wanted, strict=True):
        assert same(got, expected)


# ---- torch.library -----------------------------------------------------------------------------


@pytest.fixture
def filled_memory():
    """opcheck compares whole outputs: the gaps of the state must hold the same on each run."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("recipe", ["fp8", "bf16"])
def test_opcheck(recipe, device, filled_memory):
    need(device, recipe, usual_dim(device))
    options = (None, True, -1, -1, recipe)
    cu = CU.to(device)
    q, k, v, dout = inputs(grad=True, device=device)
    plan = make_plan(cu, usual_dim(device), recipe=recipe)
    for token in (None, plan.token):
        arguments = (q, k, v, cu, None, token, *options)
        torch.library.opcheck(torch.ops.mxattn.forward.default, arguments)
    q, k, v = (x.detach() for x in (q, k, v))
    out, lse, state = torch.ops.mxattn.forward(q, k, v, cu, None, None, *options)
    arguments = (dout, q, k, v, out, lse, state, cu, None, None, *options)
    torch.library.opcheck(torch.ops.mxattn.backward.default, arguments)


def test_compile_needs_two_graphs_for_all_microbatches(device):
    """No graph break; after the second pack, other lengths, plans, max_seqlen compile nothing."""
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    def step(q, k, v, cu, longest, plan):
        q = q * 1
        return mxattn.attn_varlen(q, k, v, cu, None, longest, longest, causal=True, plan=plan)

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    q, k, v, _ = inputs(device=device)
    for documents in range(2, 7):
        cu = torch.tensor([*range(documents), 64], dtype=torch.int32, device=device)
        plan = make_plan(cu, usual_dim(device))
        longest = int(cu.diff().max()) if documents % 2 else cu.diff().max()
        want = step(q, k, v, cu, longest, plan)
        assert same(compiled(q, k, v, cu, longest, plan), want)
    assert len(graphs) == 2


@pytest.mark.parametrize("again", [False, True], ids=["saved", "checkpointed"])
def test_compiled_gradients_have_the_same_bits(again, device):
    def layer(q, k, v, cu):
        return mxattn.attn_varlen(q, k, v, cu, causal=True) * 2

    def saving_little(*x):
        return checkpoint(layer, *x, use_reentrant=False)

    torch._dynamo.reset()
    step = torch.compile(saving_little if again else layer, fullgraph=True, backend="aot_eager")
    q, k, v, dout = inputs(grad=True, device=device)
    for entries in (5, 3, 4):
        cu = CU[:entries].to(device)
        want = gradients(dout, mxattn.attn_varlen(q, k, v, cu, causal=True) * 2, q, k, v)
        got = gradients(dout, step(q, k, v, cu), q, k, v)
        assert all(same(a, b) for a, b in zip(got, want, strict=True))


def test_other_kinds_of_derivatives_are_refused(device):
    cu = CU.to(device)
    q, k, v, dout = inputs(grad=True, device=device)
    (dq,) = torch.autograd.grad(mxattn.attn_varlen(q, k, v, cu), q, dout, create_graph=True)
    with pytest.raises(mxattn.Unsupported, match="first order"):
        dq.sum().backward()
    q, k, v = (x.detach() for x in (q, k, v))
    with pytest.raises(RuntimeError, match="jvp|setup_context"):
        torch.func.jvp(lambda x: mxattn.attn_varlen(x, k, v, cu), (q,), (q,))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, q)
        with pytest.raises((RuntimeError, NotImplementedError), match="jvp"):
            mxattn.attn_varlen(dual, k, v, cu)
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.grad(lambda x: mxattn.attn_varlen(x, k, v, cu).float().sum())(q)


def test_vmap_is_refused(device):
    q, k, v, _ = inputs(device=device)
    with pytest.raises(mxattn.Unsupported, match="pack documents"):
        torch.vmap(lambda x: mxattn.attn_varlen(x, k, v, CU.to(device)))(torch.stack([q, q]))


# ---- errors and helpers ------------------------------------------------------------------------


Q, K, V, _ = inputs()


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((Q.float(), K, V, CU), {}, r"q\.dtype = torch.float32: expected torch.bfloat16"),
        ((Q, K.half(), V, CU), {}, r"k\.dtype = torch.float16: expected torch.bfloat16"),
        ((Q.to("meta"), K.to("meta"), V.to("meta"), CU.to("meta")), {}, r"q\.device = meta: exp"),
        ((Q, None, V, CU), {}, r"k = NoneType: expected a torch tensor, as q"),
        ((Q, K, V, CU), {"plan": 1}, r"plan = int: expected what make_plan returned"),
        ((Q[0], K, V, CU), {}, r"q\.shape = \(4, 64\): expected \(tokens, heads"),
        ((Q, K, V[:9], CU), {}, r"v\.shape = \(9, 2, 64\): expected"),
        ((Q, K, V, [0, 64]), {}, r"cu_seqlens_q = list: expected an int32 tensor"),
        ((Q, K, V, CU.float()), {}, r"cu_seqlens_q\.dtype = f32: expected i32"),
        ((Q, K, V, CU[None]), {}, r"cu_seqlens_q\.shape = \(1, 5\): expected"),
        ((Q, K, V, CU.long() + 2**32), {}, r"cu_seqlens_q\[0\] = 2147483647: expected 0"),
        ((Q, K, V, torch.tensor([0, 2**32 + 64])), {}, r"cu_seqlens_q\[1\] = 2147483647: expected"),
        (
            (Q, K, V, torch.tensor([0, 64 - 2**32])),
            {},
            r"cu_seqlens_q\[1\] = -1: expected at least",
        ),
        ((Q, K, V, CU, torch.tensor([0, 5, 5, 45, 2**32])), {}, r"cu_seqlens_k\[4\] = 2147483647"),
        ((Q, K, V, CU[0]), {}, r"cu_seqlens_q\.shape = \(\): expected \(documents \+ 1,\)"),
        ((Q, K, V, CU + 1), {}, r"cu_seqlens_q\[0\] = 1: expected 0"),
        ((Q, K, V, CU, CU[:2]), {}, r"cu_seqlens_k\.shape"),
        ((Q, K, V, CU), {"recipe": "int3"}, r'recipe = "int3": expected one of fp8'),
        ((Q, K, V, CU), {"window_size": 5}, r"window_size = 5: expected \(left, right\)"),
        ((Q, K.to("meta"), V, CU), {}, r"k\.device = meta: expected cpu, as q"),
        ((Q, K, V, CU[:1]), {}, r"cu_seqlens_q\.shape = \(1,\): expected \(documents \+ 1,\)"),
        ((Q, K, V, CU, CU[:0]), {}, r"cu_seqlens_k\.shape = \(0,\): expected \(5,\), as cu_"),
        ((Q, K, V, CU), {"causal": None}, r"causal = None: expected True or False"),
    ],
)
def test_errors_name_argument_value_and_expectation(arguments, options, message):
    with pytest.raises(mxattn.InvalidArgument, match=message):
        mxattn.attn_varlen(*arguments, **options)


def test_tensors_of_other_devices_are_refused_before_they_are_read():
    state = mxattn.make_state(Q, K, CU)
    out, lse = torch.empty_like(Q), torch.empty(4, 64)
    with pytest.raises(mxattn.InvalidArgument, match=r"lse\.device = meta"):
        mxattn.forward_(Q, K, V, out, lse.to("meta"), state, CU)
    state[1] = state[1].to("meta")
    with pytest.raises(mxattn.InvalidArgument, match=r"state\[1\]\.device = meta"):
        mxattn.forward_(Q, K, V, out, lse, state, CU)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_autocast_takes_floats_only(dtype):
    with torch.autocast("cpu"), pytest.raises(mxattn.InvalidArgument, match=f"k.dtype = {dtype}"):
        mxattn.attn_varlen(Q, K.to(dtype), V, CU)


@pytest.mark.parametrize(
    ("cu", "message"),
    [
        (torch.tensor([0, 2**32 + 5]), r"cu_seqlens_q\[-?1\] = .* expected"),
        (CU[:0], r"cu_seqlens_q\.shape = \(0,\): expected \(documents \+ 1,\)"),
        (CU[None], r"cu_seqlens_q\.shape = \(1, 5\): expected \(documents \+ 1,\)"),
    ],
)
def test_lengths_of_a_plan_are_checked(cu, message):
    for total in (None, 64):
        with pytest.raises(mxattn.InvalidArgument, match=message):
            mxattn.make_plan(cu, heads_q=4, head_dim=64, total_q=total, total_k=total)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        (
            [2**31 - 1, 2**31 - 1, 5],
            r"lengths = 4294967299 or more in all: expected less than 2\^31",
        ),
        ([2**32, 5], r"lengths = 2147483653 or more in all: expected less"),
        ([2**63 - 1, 2**63 - 1, 5], r"lengths = 4294967301 or more in all: expected less"),
        ([5, -1], r"lengths\[1\] = -1: expected at least 0"),
        ([True, True], r"lengths = torch.bool of shape \(2,\): expected integers"),
        ([1j], r"lengths = torch.complex64 of shape \(1,\): expected integers"),
    ],
)
def test_lengths_do_not_wrap(lengths, message):
    with pytest.raises(mxattn.InvalidArgument, match=message):
        mxattn.cu_seqlens_from_lengths(torch.tensor(lengths))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k": array}, r"k = ndarray: expected a torch tensor, as q"),
        ({"lse": lambda _: None}, r"lse = NoneType: expected a torch tensor, as q"),
        ({"cu": torch.Tensor.tolist}, r"cu_seqlens_q = list: expected a torch tensor"),
        ({"cu": lambda cu: cu[0]}, r"cu_seqlens_q\.shape = \(\): expected \(documents \+ 1,\)"),
        (
            {"state": lambda _: torch.zeros(1, dtype=torch.uint8).expand(10**6)},
            r"state = a strided",
        ),
        ({"state": lambda s: [s[0][:1].expand(s[0].shape), *s[1:]]}, r"state\[0\] = a strided"),
        ({"state": lambda _: 4096}, r"state = int: expected the buffers of make_state"),
        ({"state": lambda s: [array(s[-1]), *s[1:]]}, r"state\[0\] = ndarray: expected a torch"),
        ({"merged": array}, r"merged_lse = ndarray: expected Tensor, as state"),
        ({"merged": lambda m: m, "state": lambda s: s[-1]}, r"state = Tensor: expected"),
    ],
)
def test_buffers_of_the_caller_are_checked(changes, message):
    x = {"k": K, "out": torch.empty_like(Q), "lse": torch.zeros(4, 64), "cu": CU}
    x |= {"state": mxattn.make_state(Q, K, CU), "merged": torch.zeros(4, 64)}
    x |= {name: change(x[name]) for name, change in changes.items()}
    grads = [torch.empty_like(like) for like in (Q, K, V)]
    with pytest.raises(mxattn.InvalidArgument, match=message):
        if "merged" not in changes:
            mxattn.forward_(Q, x["k"], V, x["out"], x["lse"], x["state"], x["cu"])
        mxattn.backward_(Q, Q, K, V, x["out"], x["lse"], x["state"], *grads, CU,
                         merged_lse=x["merged"])  # fmt: skip


def test_helpers_agree_with_numpy(device):
    lengths = torch.tensor([5, 0, 40, 19], device=device)
    assert torch.equal(mxattn.cu_seqlens_from_lengths(lengths), CU.to(device))
    positions = torch.cat([torch.arange(n) for n in (5, 40, 19)]).to(device)
    got = mxattn.cu_seqlens_from_position_ids(positions[None])
    assert got.device.type == device and got.dtype == torch.int32 and got.tolist() == [0, 5, 45, 64]
    with pytest.raises(mxattn.InvalidArgument, match=r"lengths\[1\] = -2"):
        mxattn.cu_seqlens_from_lengths(torch.tensor([3, -2]))
    parts = [torch.randn(6, 2, 8), torch.randn(2, 6), torch.randn(6, 2, 8), torch.randn(2, 6)]
    parts[1][0, 0] = parts[3][0, 0] = -torch.inf
    out, lse = mxattn.merge_lse(*(x.to(device) for x in parts))
    want, want_lse = mxattn.merge_lse(*(x.numpy() for x in parts))
    torch.testing.assert_close(out.cpu(), torch.from_numpy(want))
    torch.testing.assert_close(lse.cpu(), torch.from_numpy(want_lse))


def test_a_plain_loop_learns(device):
    """Packed documents, an optimiser, one layer: the loss falls."""
    torch.manual_seed(0)
    cu, dim = CU.to(device), usual_dim(device)
    layer = torch.nn.Linear(64, 3 * dim).bfloat16().to(device)
    head = torch.nn.Linear(dim, 64).bfloat16().to(device)
    x, target = (torch.randn(64, 64).bfloat16().to(device) for _ in range(2))
    optimizer = torch.optim.Adam([*layer.parameters(), *head.parameters()], 1e-2)
    losses = []
    for _ in range(30):
        q, k, v = layer(x).view(64, 3, 1, dim).unbind(1)
        out = mxattn.attn_varlen(q, k, v, cu, causal=True)
        loss = (head(out.flatten(1)) - target).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
