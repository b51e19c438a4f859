"""The torch front end on a CUDA device: streams, graphs, memory, no waiting, several devices.

Skips, and says so, without a device that the kernels run on. What every device has is in
test_torch.py.
"""

from __future__ import annotations

import gc
import re
import threading
import time

import mxattn
import mxattn.torch
import numpy as np
import pytest
import torch
from devices import CUDA_DIM, need, needs_cuda
from mxattn_capi import attention, bfloat16
from reference import cosine, exact

pytestmark = needs_cuda

HEADS_Q, HEADS_K = 4, 2
LENGTHS = [5, 0, 200, 77, 130]
TOKENS = sum(LENGTHS) + 9  # rows beyond the last document
SLEEP_CYCLES = 1_000_000_000  # half a second or more: no GPU runs at more than 2 GHz by much


def offsets(lengths=LENGTHS, device="cuda") -> torch.Tensor:
    return mxattn.cu_seqlens_from_lengths(torch.tensor(lengths)).to(device)


def inputs(tokens=TOKENS, dim=CUDA_DIM, seed=0, device="cuda"):
    """q, k, v, which ask for gradients, and a gradient of out."""
    random = torch.Generator().manual_seed(seed)
    shapes = [(tokens, heads, dim) for heads in (HEADS_Q, HEADS_K, HEADS_K, HEADS_Q)]
    q, k, v, dout = (torch.randn(s, generator=random).bfloat16().to(device) for s in shapes)
    return *(x.requires_grad_() for x in (q, k, v)), dout


def step(q, k, v, dout, cu, **options):
    """out, dq, dk, dv"""
    out = mxattn.attn_varlen(q, k, v, cu, **({"causal": True} | options))
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]


def assert_same(got, want) -> None:
    for name, a, b in zip(("out", "dq", "dk", "dv"), got, want, strict=True):
        assert torch.equal(a.view(torch.int16), b.view(torch.int16)), name


def array(x: torch.Tensor) -> np.ndarray:
    x = x.detach().cpu().contiguous()
    if x.dtype == torch.bfloat16:
        return x.view(torch.int16).numpy().view(bfloat16)
    return x.numpy()


def problem_of(q, k, cu) -> mxattn.capi.Problem:
    return mxattn.torch.problem_of(q, k, cu, softmax_scale=None, causal=True, window=(-1, -1),
                                   recipe="fp8")  # fmt: skip


# ---- results -----------------------------------------------------------------------------------

# A code in 2^16 flips between an H200 and the CPU's model of it (sm90_bounds.h); a row of some
# hundred codes, and what depends on it, is one of a few in a hundred that differ. Of `cpu`, whose
# accumulators are not those of the H200, at most 3 rows in 10 agree.
MODEL_COSINE, MODEL_EQUAL_ROWS = 0.9999, 0.8
# docs/numerics.md, section 6: 0.998 for normal inputs; a model of these cases says 0.9977 or more.
EXACT_COSINE = 0.996


@pytest.mark.parametrize("mask", ["causal", "full", "window"])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("recipe", ["fp8", "mxfp8", "mxfp8_token", "fp8_ds_row", "bf16"])
def test_results_are_those_of_the_model_and_near_exact(recipe, dim, mask):
    options = {"causal": mask == "causal", "window": (50, 3) if mask == "window" else (-1, -1)}
    need("cuda", recipe, dim, causal=options["causal"], window_size=options["window"])
    q, k, v, dout = inputs(dim=dim)
    cu = offsets()
    out, lse = mxattn.attn_varlen(q, k, v, cu, causal=options["causal"], recipe=recipe,
                                  window_size=options["window"], return_lse=True)  # fmt: skip
    grads = torch.autograd.grad(out, (q, k, v), dout)
    got = dict(zip(("o", "dq", "dk", "dv"), (array(x) for x in (out, *grads)), strict=True))
    operands = [array(x) for x in (q, k, v, cu)]
    modelled = mxattn.can_run(q.shape, k.shape, recipe=recipe, backend="cpu_h200")
    model = attention(*operands, dout=array(dout), recipe=recipe, **options,
                      backend="cpu_h200" if modelled else "auto")  # fmt: skip
    true = exact(*operands, dout=array(dout), **options)
    for name, x in got.items():
        assert cosine(x, model[name]) > MODEL_COSINE, name
        assert cosine(x, true[name]) > EXACT_COSINE, name
        equal = (x.view(np.uint16) == model[name].view(np.uint16)).all(-1)
        assert not modelled or equal.mean() > MODEL_EQUAL_ROWS, name
        assert (x[sum(LENGTHS) :] == 0).all(), name
    # Without a flip, what is left is log2 and one product in FP32; a flip moves a sum by a 16th.
    got_lse, want_lse = array(lse), model["lse"]
    assert (np.isneginf(got_lse) == np.isneginf(want_lse)).all()
    seen = ~np.isneginf(want_lse)
    error = np.abs(got_lse[seen] - want_lse[seen])
    assert error.max() < 1 / 16
    assert not modelled or (error < 1e-5).mean() > MODEL_EQUAL_ROWS


def test_queries_and_keys_of_different_lengths():
    q, k, v, dout = inputs()
    cu_k, tokens_k = offsets([9, 3, 100, 77, 260]), 460
    k, v = (torch.randn(tokens_k, HEADS_K, CUDA_DIM, device="cuda").bfloat16().requires_grad_()
            for _ in range(2))  # fmt: skip
    got = step(q, k, v, dout, offsets(), cu_seqlens_k=cu_k)
    want = exact(*(array(x) for x in (q, k, v)), array(offsets()), array(cu_k), array(dout))
    for name, x in zip(("o", "dq", "dk", "dv"), got, strict=True):
        assert cosine(array(x), want[name]) > EXACT_COSINE, name


def test_sizes_that_change_from_call_to_call():
    """Nothing of one call is left in the next: lists, workspaces and states change their size."""
    first = {}
    for turn in range(2):
        for seed, lengths in enumerate(([300], [3] * 60, [1], [129, 128, 127])):
            got = step(*inputs(sum(lengths), seed=seed), offsets(lengths))
            if turn == 0:
                first[seed] = got
            else:
                assert_same(got, first[seed])


# ---- streams -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def eager():
    """Inputs and their results on the default stream."""
    tensors = *inputs(), offsets()
    want = step(*tensors)
    torch.cuda.synchronize()
    return tensors, want


def test_a_call_runs_on_the_current_stream(eager):
    """The inputs exist only on a stream that is asleep: a call elsewhere would read nothing."""
    (q, k, v, dout, cu), want = eager
    sources = [x.detach() for x in (q, k, v, dout, cu)]
    empty = [torch.zeros_like(x) for x in sources]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP_CYCLES // 10)
        for target, source in zip(empty, sources, strict=True):
            target.copy_(source)
        leaves = [x.requires_grad_() for x in empty[:3]]
        got = step(*leaves, *empty[3:])
    stream.synchronize()
    assert_same(got, want)


def test_two_streams_at_once(eager):
    """Each stream has memory of its own, also while both have calls waiting."""
    _, want = eager
    other = *inputs(seed=7), offsets([150, 262])
    other_want = step(*other)
    tensors, _ = eager
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    results = [[], []]
    for stream in streams:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(SLEEP_CYCLES // 10)
    for _ in range(5):
        for found, stream, x in zip(results, streams, (tensors, other), strict=True):
            with torch.cuda.stream(stream):
                found.append(step(*x))
    torch.cuda.synchronize()
    for found, expected in zip(results, (want, other_want), strict=True):
        for got in found:
            assert_same(got, expected)


def test_two_threads_at_once(eager):
    tensors, want = eager
    results, errors = [], []

    def work():
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                found = [step(*tensors) for _ in range(10)]
                torch.cuda.current_stream().synchronize()
                results.extend(found)
        except Exception as error:  # shown below: an exception of a thread is lost
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and len(results) == 30
    for got in results:
        assert_same(got, want)


# ---- nothing waits -----------------------------------------------------------------------------


def without_waiting(work) -> tuple[object, float]:
    """What `work` returns while the device sleeps, and its seconds; fails if it waits for it."""
    work()  # loads kernels and fills the allocator's caches, both of which may wait
    torch.cuda.synchronize()
    done = torch.cuda.Event()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(SLEEP_CYCLES)
        done.record()
        begin = time.perf_counter()
        result = work()
        seconds = time.perf_counter() - begin
        busy = not done.query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert busy, f"the device was through with its sleep when the call came back, {seconds} s later"
    return result, seconds


def test_forward_and_backward_do_not_wait(eager):
    tensors, want = eager
    got, seconds = without_waiting(lambda: step(*tensors))
    assert_same(got, want)
    assert seconds < 0.1


def test_a_wait_would_be_seen():
    """The test above can fail, in both of its ways."""
    x = torch.ones(1, device="cuda")
    with pytest.raises(RuntimeError, match="synchroniz"):
        without_waiting(lambda: x.item())

    def wait_unseen_by_torch():
        event = torch.cuda.Event()
        event.record()
        while not event.query():
            time.sleep(1e-3)

    with pytest.raises(AssertionError, match="through with its sleep"):
        without_waiting(wait_unseen_by_torch)


def test_plans_batches_and_helpers_do_not_wait(eager):
    (q, k, v, dout, _), want = eager
    lengths = torch.tensor(LENGTHS, device="cuda")

    def work():
        cu = mxattn.cu_seqlens_from_lengths(lengths)
        plan = mxattn.make_plan(cu, heads_q=HEADS_Q, heads_k=HEADS_K, head_dim=CUDA_DIM,
                                total_q=TOKENS, total_k=TOKENS, causal=True)  # fmt: skip
        packed = step(q, k, v, dout, cu, plan=plan)
        batch = mxattn.attn(q[None], k[None], v[None], causal=True)
        return packed, batch, plan

    (got, batch, _), _ = without_waiting(work)
    assert_same(got, want)
    alone = mxattn.attn_varlen(q, k, v, offsets([TOKENS]), causal=True)
    assert torch.equal(batch[0], alone)


# ---- graphs ------------------------------------------------------------------------------------


def test_graph_of_forward_and_backward():
    """Replays take new values and new lengths from the same memory: the bits of eager calls."""
    q, k, v, dout = inputs()
    cu = offsets()
    warm = torch.cuda.Stream()
    warm.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm):
        for _ in range(2):
            step(q, k, v, dout, cu)
    torch.cuda.current_stream().wait_stream(warm)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(q, k, v, dout, cu)
    for seed, lengths in enumerate((LENGTHS, [0, 0, 0, 0, TOKENS], [100, 1, 30, 30, 30])):
        fresh = *inputs(seed=seed), offsets(lengths)
        with torch.no_grad():
            for target, source in zip((q, k, v, dout, cu), fresh, strict=True):
                target.copy_(source)
        graph.replay()
        assert_same(captured, step(*fresh))


def test_graph_with_a_plan():
    """The plan's lists are memory of the caller: they are made anew by a captured make_plan."""
    q, k, v, dout = inputs()
    cu = offsets()

    def work():
        plan = mxattn.make_plan(cu, heads_q=HEADS_Q, heads_k=HEADS_K, head_dim=CUDA_DIM,
                                total_q=TOKENS, total_k=TOKENS, causal=True)  # fmt: skip
        return step(q, k, v, dout, cu, plan=plan), plan

    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured, _plan = work()
    cu.copy_(offsets([60, 60, 60, 60, 60]))
    graph.replay()
    assert_same(captured, step(q, k, v, dout, cu))


def test_graphed_callables(eager):
    """torch.cuda.make_graphed_callables, as Megatron-LM captures its layers."""

    class Layer(torch.nn.Module):
        def forward(self, q, k, v):
            return mxattn.attn_varlen(q, k, v, cu, causal=True)

    (q, k, v, dout, cu), want = eager
    samples = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    layer = torch.cuda.make_graphed_callables(Layer(), tuple(samples))
    out = layer(q, k, v)
    assert_same([out.detach(), *torch.autograd.grad(out, (q, k, v), dout)], want)


# ---- memory ------------------------------------------------------------------------------------


def test_all_memory_is_torchs_and_is_given_back(eager):
    (q, k, v, dout, cu), _ = eager
    problem = problem_of(q, k, cu)
    # What earlier tests left to streams that have finished goes back first.
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out, lse = mxattn.attn_varlen(q, k, v, cu, causal=True, return_lse=True)
    kept = torch.cuda.memory_allocated() - before
    block = 512  # the allocator's granularity; one a tensor
    assert kept <= out.nbytes + lse.nbytes + problem.state_bytes + 3 * block
    peak = torch.cuda.max_memory_allocated() - before
    assert peak >= kept + problem.workspace_bytes > kept
    torch.autograd.grad(out, (q, k, v), dout)
    del out, lse
    assert torch.cuda.memory_allocated() == before
    step(q, k, v, dout, cu)
    free, _ = torch.cuda.mem_get_info()
    for _ in range(20):
        step(q, k, v, dout, cu)
    torch.cuda.synchronize()
    # Nobody else works on the device in a test run; what torch caches is cached already.
    assert torch.cuda.mem_get_info()[0] >= free - 2**21


def test_memory_of_a_waiting_call_is_not_handed_to_others(eager):
    tensors, want = eager
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    size = problem_of(*tensors[:2], tensors[4]).workspace_bytes
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP_CYCLES // 10)
        got = step(*tensors)
    spoiled = [torch.empty(size, dtype=torch.uint8, device="cuda").fill_(255) for _ in range(8)]
    stream.synchronize()
    assert_same(got, want)
    assert len(spoiled) == 8


def test_a_plan_outlives_its_call_on_another_stream(eager):
    """Its memory belongs to the stream that made it, and is used on one that lags behind."""
    (q, k, v, dout, cu), want = eager
    plan = mxattn.make_plan(cu, heads_q=HEADS_Q, heads_k=HEADS_K, head_dim=CUDA_DIM,
                            total_q=TOKENS, total_k=TOKENS, causal=True)  # fmt: skip
    size = problem_of(q, k, cu).plan_bytes
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP_CYCLES // 10)
        got = step(q, k, v, dout, cu, plan=plan)
    del plan
    spoiled = [torch.empty(size, dtype=torch.uint8, device="cuda").fill_(255) for _ in range(8)]
    stream.synchronize()
    assert_same(got, want)
    assert len(spoiled) == 8


# ---- compile -----------------------------------------------------------------------------------


def test_inductor_compiles_forward_and_backward(eager):
    def layer(q, k, v, cu, longest):
        return mxattn.attn_varlen(q * 1, k, v, cu, None, longest, longest, causal=True) * 1

    (q, k, v, dout, _), _ = eager
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=False):
        for longest, lengths in ((200, LENGTHS), (262, [150, 262]), (300, [100, 300])):
            cu = offsets(lengths)
            out = compiled(q, k, v, cu, longest)
            grads = torch.autograd.grad(out, (q, k, v), dout)
            assert_same([out.detach(), *grads], step(q, k, v, dout, cu))
    with torch._dynamo.config.patch(error_on_recompile=True):
        for longest, lengths in ((301, [40, 60, 301]), (250, [250, 1, 1, 1, 1, 1])):
            cu = offsets(lengths)
            out = compiled(q, k, v, cu, longest)
            grads = torch.autograd.grad(out, (q, k, v), dout)
            assert_same([out.detach(), *grads], step(q, k, v, dout, cu))


# ---- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["k", "v", "cu_seqlens_q", "cu_seqlens_k"])
def test_tensors_of_the_cpu_are_refused(name):
    q, k, v, _ = inputs()
    arguments = {"q": q, "k": k, "v": v, "cu_seqlens_q": offsets(), "cu_seqlens_k": offsets()}
    arguments[name] = arguments[name].cpu()
    with pytest.raises(mxattn.InvalidArgument, match=rf"{name}\.device = cpu: expected cuda:0"):
        mxattn.attn_varlen(**arguments)


def test_what_the_device_cannot_run_is_refused_with_the_reason():
    q, k, v, _ = inputs(dim=40)
    verdict = mxattn.can_run(q.shape, k.shape, len(LENGTHS), device=0)
    assert not verdict and "head_dim = 40" in verdict.reason
    with pytest.raises(mxattn.Unsupported, match=re.escape(verdict.reason)):
        mxattn.attn_varlen(q, k, v, offsets())
    q, k, v, _ = inputs()
    verdict = mxattn.can_run(q.shape, k.shape, recipe="mxfp8_paper", device=0)
    assert not verdict and verdict.reason
    with pytest.raises(mxattn.Unsupported, match=re.escape(verdict.reason)):
        mxattn.attn_varlen(q, k, v, offsets(), recipe="mxfp8_paper")


def test_wrong_dtypes_and_shapes_are_refused():
    q, k, v, _ = inputs()
    with pytest.raises(mxattn.InvalidArgument, match=r"q\.dtype = torch.float32: expected torch"):
        mxattn.attn_varlen(q.float(), k, v, offsets())
    with pytest.raises(mxattn.InvalidArgument, match=r"v\.shape = \(9, 2, "):
        mxattn.attn_varlen(q, k, v[:9], offsets())
    with pytest.raises(mxattn.InvalidArgument, match=r"cu_seqlens_q\.dtype = f32: expected i32"):
        mxattn.attn_varlen(q, k, v, offsets().float())
    assert torch.isfinite(mxattn.attn_varlen(q, k, v, offsets()).float()).all()  # the device lives


# ---- several devices ---------------------------------------------------------------------------

needs_two = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason=f"{torch.cuda.device_count()} CUDA devices, two needed"
)


@needs_two
def test_tensors_decide_the_device_not_the_current_one(eager):
    (q, k, v, dout, cu), want = eager
    there = [x.detach().to("cuda:1") for x in (q, k, v, dout, cu)]
    leaves = [x.requires_grad_() for x in there[:3]]
    assert torch.cuda.current_device() == 0
    got = step(*leaves, *there[3:])
    assert all(x.device == torch.device("cuda", 1) for x in got)
    assert_same([x.to("cuda:0") for x in got], want)
    plan = mxattn.make_plan(there[4], heads_q=HEADS_Q, heads_k=HEADS_K, head_dim=CUDA_DIM,
                            total_q=TOKENS, total_k=TOKENS, causal=True)  # fmt: skip
    got = step(*leaves, *there[3:], plan=plan)
    assert_same([x.to("cuda:0") for x in got], want)
    assert torch.cuda.current_device() == 0


@needs_two
def test_a_side_stream_of_another_device(eager):
    (q, k, v, dout, cu), want = eager
    there = [x.detach().to("cuda:1") for x in (q, k, v, dout, cu)]
    leaves = [x.requires_grad_() for x in there[:3]]
    torch.cuda.synchronize(1)
    stream = torch.cuda.Stream(1)
    with torch.cuda.stream(stream):  # makes cuda:1 current
        got = step(*leaves, *there[3:])
    stream.synchronize()
    assert_same([x.to("cuda:0") for x in got], want)


@needs_two
def test_mixed_devices_are_refused():
    q, k, v, _ = inputs()
    with pytest.raises(mxattn.InvalidArgument, match=r"k\.device = cuda:1: expected cuda:0"):
        mxattn.attn_varlen(q, k.to("cuda:1"), v, offsets())
