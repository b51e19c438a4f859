"""The torch front end on the CPU: bits of the binding, autograd, compile, checkpointing."""

from __future__ import annotations

import gc

import hypothesis_profile  # noqa: F401
import mxattn
import mxattn.torch
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mxattn_capi import attention, bfloat16
from reference import cosine, exact, same_bits
from torch.utils.checkpoint import checkpoint

CU = torch.tensor([0, 5, 5, 45, 64], dtype=torch.int32)


def inputs(heads_q=4, heads_k=2, dim=64, tokens=64, seed=0, grad=False):
    """q, k, v and a gradient of out, BF16."""
    random = torch.Generator().manual_seed(seed)
    shapes = [(tokens, heads, dim) for heads in (heads_q, heads_k, heads_k, heads_q)]
    q, k, v, dout = (torch.randn(s, generator=random).bfloat16() for s in shapes)
    return *(x.requires_grad_(grad) for x in (q, k, v)), dout


def array(x: torch.Tensor) -> np.ndarray:
    """The same bits in numpy."""
    x = x.detach().contiguous()
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
    st.sampled_from([(2, 2, 64), (4, 2, 32), (3, 1, 128)]),
)
def test_gradients_near_exact(lengths, causal, window, shape):
    heads_q, heads_k, dim = shape
    q, k, v, dout = inputs(heads_q, heads_k, dim, tokens=sum(lengths) + 3, grad=True)
    cu = mxattn.cu_seqlens_from_lengths(torch.tensor(lengths))
    options = {"causal": causal, "softmax_scale": 0.1}
    out = mxattn.attn_varlen(q, k, v, cu, window_size=window, recipe="bf16", **options)
    got = [out, *gradients(dout, out, q, k, v)]
    want = exact(*map(array, (q, k, v)), cu.numpy(), dout=array(dout), window=window, **options)
    for x, name in zip(got, ("o", "dq", "dk", "dv"), strict=True):
        if np.abs(want[name]).max() > 1e-2:  # not where each query sees one key
            assert cosine(array(x), want[name]) > 0.999, name
        assert (array(x)[sum(lengths) :] == 0).all(), name


def test_strided_views():
    qkv = torch.randn(64, 3, 4, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    dout = torch.randn(64, 4, 64).bfloat16()
    flat = qkv.detach().requires_grad_()
    out = mxattn.attn_varlen(*flat.unbind(1), CU, causal=True)
    (got,) = gradients(dout, out, flat)
    leaves = [x.contiguous().requires_grad_() for x in qkv.unbind(1)]
    want = mxattn.attn_varlen(*leaves, CU, causal=True)
    assert same(out, want)
    assert same(got, torch.stack(gradients(dout, want, *leaves), 1))
    want = mxattn.attn_varlen(*leaves, CU, causal=True)
    # The last dimension strided, and a gradient without strides at all.
    turned = [x.detach().mT.contiguous().mT.requires_grad_() for x in leaves]
    assert turned[0].stride(-1) != 1
    again = mxattn.attn_varlen(*turned, CU, causal=True)
    assert same(again, want)
    (a,) = torch.autograd.grad(again.sum(), turned[:1])
    (b,) = gradients(torch.ones_like(want), want, leaves[0])
    assert same(a, b)


def test_a_batch_with_gradients():
    q, k, v, dout = inputs(grad=True)
    batch = [x.detach().view(2, 32, *x.shape[1:]).requires_grad_() for x in (q, k, v)]
    out, lse = mxattn.attn(*batch, causal=True, return_lse=True)
    cu = torch.tensor([0, 32, 64])  # int64 is converted
    want, want_lse = mxattn.attn_varlen(q, k, v, cu, causal=True, return_lse=True)
    assert same(out.flatten(0, 1), want)
    assert lse.shape == (2, 4, 32) and same(lse[1], want_lse[:, 32:])
    grads = gradients(dout.view_as(out), out, *batch)
    for got, expected in zip(grads, gradients(dout, want, q, k, v), strict=True):
        assert same(got.flatten(0, 1), expected)


def test_only_what_needs_a_gradient():
    q, k, v, dout = inputs()
    assert not mxattn.attn_varlen(q, k, v, CU).requires_grad
    v.requires_grad_()
    out, lse = mxattn.attn_varlen(q, k, v, CU, return_lse=True)
    (dv,) = gradients(dout, out, v)
    assert dv.shape == v.shape and not lse.requires_grad


def test_checkpointing_gives_the_same_bits():
    q, k, v, dout = inputs(grad=True)
    out = mxattn.attn_varlen(q, k, v, CU, causal=True)
    want = gradients(dout, out, q, k, v)
    for reentrant in (False, True):
        out = checkpoint(
            lambda *x: mxattn.attn_varlen(*x, CU, causal=True), q, k, v, use_reentrant=reentrant
        )
        for x in (q, k, v):
            x.grad = None
        out.backward(dout)
        assert all(same(x.grad, w) for x, w in zip((q, k, v), want, strict=True))


def test_autocast_rounds_to_bf16():
    q, k, v, _ = inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = mxattn.attn_varlen(q.float(), k.float(), v.float(), CU)
    assert same(out, mxattn.attn_varlen(q, k, v, CU))


def test_plans():
    q, k, v, dout = inputs(grad=True)
    want = mxattn.attn_varlen(q, k, v, CU, causal=True)
    plan = mxattn.make_plan(CU, heads_q=4, heads_k=2, head_dim=64, causal=True)
    out = mxattn.attn_varlen(q, k, v, CU, causal=True, plan=plan)
    assert same(out, want)
    for a, b in zip(gradients(dout, want, q), gradients(dout, out, q), strict=True):
        assert same(a, b)
    out = mxattn.attn_varlen(q, k, v, CU, causal=True, plan=plan)
    del plan
    gc.collect()
    with pytest.raises(mxattn.InvalidArgument, match="kept until the last backward"):
        out.backward(dout)
    foreign = mxattn.make_plan(CU.numpy(), heads_q=4, heads_k=2, head_dim=64, causal=True)
    with pytest.raises(mxattn.InvalidArgument, match="made of tensors"):
        mxattn.attn_varlen(q, k, v, CU, causal=True, plan=foreign)


def test_callers_buffers():
    q, k, v, dout = inputs()
    state = mxattn.make_state(q, k, CU, causal=True)
    out, dq, dk, dv = (torch.empty_like(x) for x in (q, q, k, v))
    lse = torch.empty(4, 64)
    mxattn.forward_(q, k, v, out, lse, state, CU, causal=True)
    mxattn.backward_(dout, q, k, v, out, lse, state, dq, dk, dv, CU, causal=True)
    want = attention(*map(array, (q, k, v)), CU.numpy(), dout=array(dout))
    for x, name in zip((out, lse, dq, dk, dv), ("o", "lse", "dq", "dk", "dv"), strict=True):
        assert same_bits(array(x), want[name]), name


# ---- torch.library -----------------------------------------------------------------------------


@pytest.fixture
def filled_memory():
    """opcheck compares whole outputs: the gaps of the state must hold the same on each run."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("recipe", ["fp8", "bf16"])
def test_opcheck(recipe, filled_memory):
    options = (None, True, -1, -1, recipe)
    q, k, v, dout = inputs(grad=True)
    plan = mxattn.make_plan(CU, heads_q=4, heads_k=2, head_dim=64, causal=True, recipe=recipe)
    for token in (None, plan.token):
        arguments = (q, k, v, CU, None, token, *options)
        torch.library.opcheck(torch.ops.mxattn.forward.default, arguments)
    q, k, v = (x.detach() for x in (q, k, v))
    out, lse, state = torch.ops.mxattn.forward(q, k, v, CU, None, None, *options)
    arguments = (dout, q, k, v, out, lse, state, CU, None, None, *options)
    torch.library.opcheck(torch.ops.mxattn.backward.default, arguments)


def test_compile_needs_two_graphs_for_all_microbatches():
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
    q, k, v, _ = inputs()
    for documents in range(2, 7):
        cu = torch.tensor([*range(documents), 64], dtype=torch.int32)
        plan = mxattn.make_plan(cu, heads_q=4, heads_k=2, head_dim=64, causal=True)
        longest = cu.diff().max()
        want = step(q, k, v, cu, longest, plan)
        assert same(compiled(q, k, v, cu, longest, plan), want)
    assert len(graphs) == 2


@pytest.mark.parametrize("again", [False, True], ids=["saved", "checkpointed"])
def test_compiled_gradients_have_the_same_bits(again):
    def layer(q, k, v, cu):
        return mxattn.attn_varlen(q, k, v, cu, causal=True) * 2

    def saving_little(*x):
        return checkpoint(layer, *x, use_reentrant=False)

    torch._dynamo.reset()
    step = torch.compile(saving_little if again else layer, fullgraph=True, backend="aot_eager")
    q, k, v, dout = inputs(grad=True)
    for cu in (CU, CU[:3], CU[:4]):
        want = gradients(dout, mxattn.attn_varlen(q, k, v, cu, causal=True) * 2, q, k, v)
        got = gradients(dout, step(q, k, v, cu), q, k, v)
        assert all(same(a, b) for a, b in zip(got, want, strict=True))


def test_other_kinds_of_derivatives_are_refused():
    q, k, v, dout = inputs(grad=True)
    (dq,) = torch.autograd.grad(mxattn.attn_varlen(q, k, v, CU), q, dout, create_graph=True)
    with pytest.raises(mxattn.Unsupported, match="first order"):
        dq.sum().backward()
    q, k, v = (x.detach() for x in (q, k, v))
    with pytest.raises(RuntimeError, match="jvp|setup_context"):
        torch.func.jvp(lambda x: mxattn.attn_varlen(x, k, v, CU), (q,), (q,))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, q)
        with pytest.raises((RuntimeError, NotImplementedError), match="jvp"):
            mxattn.attn_varlen(dual, k, v, CU)
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.grad(lambda x: mxattn.attn_varlen(x, k, v, CU).float().sum())(q)


def test_vmap_is_refused():
    q, k, v, _ = inputs()
    with pytest.raises(mxattn.Unsupported, match="pack documents"):
        torch.vmap(lambda x: mxattn.attn_varlen(x, k, v, CU))(torch.stack([q, q]))


# ---- errors and helpers ------------------------------------------------------------------------


Q, K, V, _ = inputs()


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((Q.float(), K, V, CU), {}, r"q\.dtype = f32: expected bf16"),
        ((Q.half(), K, V, CU), {}, r"q\.dtype = .*: expected bf16"),
        ((Q[0], K, V, CU), {}, r"q\.shape = \(4, 64\): expected \(tokens, heads"),
        ((Q, K, V[:9], CU), {}, r"v\.shape = \(9, 2, 64\): expected"),
        ((Q, K, V, [0, 64]), {}, r"cu_seqlens_q = list: expected an int32 tensor"),
        ((Q, K, V, CU.float()), {}, r"cu_seqlens_q\.dtype = f32: expected i32"),
        ((Q, K, V, CU[None]), {}, r"cu_seqlens_q\.rank|num_documents"),
        ((Q, K, V, CU + 1), {}, r"cu_seqlens_q\[0\] = 1: expected 0"),
        ((Q, K, V, CU, CU[:2]), {}, r"cu_seqlens_k\.shape"),
        ((Q, K, V, CU), {"recipe": "int3"}, r'recipe = "int3": expected one of fp8'),
        ((Q, K, V, CU), {"window_size": 5}, r"window_size = 5: expected \(left, right\)"),
        ((Q, K.to("meta"), V, CU), {}, r"k\.device = meta: expected cpu, as q"),
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


def test_helpers_agree_with_numpy():
    lengths = torch.tensor([5, 0, 40, 19])
    assert torch.equal(mxattn.cu_seqlens_from_lengths(lengths), CU)
    positions = torch.cat([torch.arange(n) for n in (5, 40, 19)])
    got = mxattn.cu_seqlens_from_position_ids(positions[None])
    assert got.dtype == torch.int32 and got.tolist() == [0, 5, 45, 64]
    with pytest.raises(mxattn.InvalidArgument, match=r"lengths\[1\] = -2"):
        mxattn.cu_seqlens_from_lengths(torch.tensor([3, -2]))
    parts = [torch.randn(6, 2, 8), torch.randn(2, 6), torch.randn(6, 2, 8), torch.randn(2, 6)]
    parts[1][0, 0] = parts[3][0, 0] = -torch.inf
    out, lse = mxattn.merge_lse(*parts)
    want, want_lse = mxattn.merge_lse(*(x.numpy() for x in parts))
    torch.testing.assert_close(out, torch.from_numpy(want))
    torch.testing.assert_close(lse, torch.from_numpy(want_lse))


def test_a_plain_loop_learns():
    """Packed documents, an optimiser, one layer: the loss falls."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(64, 3 * 64).bfloat16()
    head = torch.nn.Linear(64, 64).bfloat16()
    x, target = torch.randn(64, 64).bfloat16(), torch.randn(64, 64).bfloat16()
    optimizer = torch.optim.Adam([*layer.parameters(), *head.parameters()], 1e-2)
    losses = []
    for _ in range(30):
        q, k, v = layer(x).view(64, 3, 1, 64).unbind(1)
        out = mxattn.attn_varlen(q, k, v, CU, causal=True)
        loss = (head(out.flatten(1)) - target).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
