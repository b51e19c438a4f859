"""mxattn behind torch's own attention functions, through its registry of implementations."""

from __future__ import annotations

import re
from pathlib import Path

import mxattn
import pytest

torch = pytest.importorskip("torch")
if not hasattr(torch.nn.attention, "register_flash_attention_impl"):
    pytest.skip("this torch has no registry of flash attention", allow_module_level=True)

import mxattn.integrations.torch_sdpa as hooks  # noqa: E402
from reference import cosine  # noqa: E402
from torch.nn import attention as registry  # noqa: E402
from torch.nn.attention.varlen import varlen_attn  # noqa: E402
from torch.nn.functional import scaled_dot_product_attention as sdpa  # noqa: E402

NAME = hooks.register("mxattn", recipe="fp8")
CU = torch.tensor([0, 5, 5, 45, 64], dtype=torch.int32)
OPERATORS = [
    "_flash_attention_forward",
    "_flash_attention_forward_no_dropout_inplace",
    "_flash_attention_backward",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_backward",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
]


@pytest.fixture
def active():
    registry.activate_flash_attention_impl(NAME)
    yield
    registry.restore_flash_attention_impl(_raise_warn=False)


def dense(heads_q=4, heads_k=2, tokens=48, dtype=torch.bfloat16, seed=0, contiguous=False):
    """q, k, v (2, heads, tokens, 64), laid out as models do unless contiguous."""
    random = torch.Generator().manual_seed(seed)
    sizes = [(2, tokens, heads, 64) for heads in (heads_q, heads_k, heads_k)]
    q, k, v = (torch.randn(s, generator=random).to(dtype).transpose(1, 2) for s in sizes)
    return [(x.contiguous() if contiguous else x).requires_grad_() for x in (q, k, v)]


def packed(dtype=torch.bfloat16):
    random = torch.Generator().manual_seed(1)
    return [torch.randn(64, h, 64, generator=random).to(dtype).requires_grad_() for h in (4, 2, 2)]


def step(function, operands, **options):
    out = function(*operands, **options)
    return [out, *torch.autograd.grad(out.float().square().sum(), operands)]


def native(q, k, v, **options):
    rows = (x.transpose(1, 2).bfloat16() for x in (q, k, v))
    return mxattn.attn(*rows, **options).transpose(1, 2).to(q.dtype)


def native_varlen(q, k, v, **options):
    return mxattn.attn_varlen(q, k, v, CU, **options)


def torch_varlen(q, k, v, **options):
    return varlen_attn(q, k, v, CU, CU, 40, 40, enable_gqa=True, **options)


def same(a, b) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_the_example_of_the_documentation():
    page = (Path(__file__).resolve().parents[2] / "docs" / "integrations.md").read_text()
    (code,) = (x for x in re.findall(r"```python\n(.*?)```", page, re.S) if "torch_sdpa" in x)
    names: dict = {}
    exec(compile(code, "docs/integrations.md", "exec"), names)
    assert torch.equal(names["out"], native(*(names[x] for x in "qkv"), causal=True))
    assert registry.current_flash_attention_impl() is None


# ---- results -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("contiguous", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_sdpa_has_the_bits_of_attn(dtype, contiguous, causal, active):
    operands = dense(dtype=dtype, contiguous=contiguous)
    got = step(sdpa, operands, is_causal=causal, enable_gqa=True, scale=0.2)
    assert same(got, step(native, operands, causal=causal, softmax_scale=0.2))
    registry.restore_flash_attention_impl()
    theirs = step(sdpa, operands, is_causal=causal, enable_gqa=True, scale=0.2)
    for x, y in zip(got, theirs, strict=True):
        assert x.dtype == y.dtype and x.stride() == y.stride()
        assert cosine(x.detach().float().numpy(), y.detach().float().numpy()) > 0.98


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (8, 0)])
def test_varlen_attn_has_the_bits_of_attn_varlen(window, active):
    got = step(torch_varlen, packed(), window_size=window)
    assert same(got, step(native_varlen, packed(), causal=window[1] == 0, window_size=window))


def test_varlen_attn_with_the_callers_output(active):
    q, k, v = (x.detach() for x in packed())
    from torch.nn.attention.varlen import AuxRequest, varlen_attn_out

    out = torch.empty_like(q)
    result, lse = varlen_attn_out(out, q, k, v, CU, CU, 40, 40, enable_gqa=True,
                                  return_aux=AuxRequest(lse=True))  # fmt: skip
    want, want_lse = mxattn.attn_varlen(q, k, v, CU, return_lse=True)
    assert result is out and same([out, lse], [want, want_lse])


def test_the_operators_that_sdpa_calls_on_cuda(active):
    q, k, v = dense(heads_k=4)
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    out, lse = flash(q, k, v, 0.0, True)[:2]
    want, want_lse = mxattn.attn(*(x.transpose(1, 2) for x in (q, k, v)), causal=True,
                                 return_lse=True)  # fmt: skip
    assert same([out, lse], [want.transpose(1, 2), want_lse])
    got = torch.autograd.grad(out.float().square().sum(), (q, k, v))
    assert same(got, step(native, (q, k, v), causal=True)[1:])


def test_results_lie_as_torch_promises(active):
    """The shape functions tell a compiler sizes and strides, which generated code relies on."""
    for contiguous in (False, True):
        operands = [x.detach() for x in dense(heads_k=4, contiguous=contiguous)]
        for name in OPERATORS[3], OPERATORS[5]:
            operator = getattr(torch.ops.aten, name).default
            real = operator(*operands)
            meta = operator(*(x.to("meta") for x in operands))
            for x, y in zip(real, meta, strict=True):
                if isinstance(x, torch.Tensor):
                    found, promised = (x.shape, x.stride(), x.dtype), (y.shape, y.stride(), y.dtype)
                    assert found == promised, name


# ---- the state between forward and backward ----------------------------------------------------


@pytest.mark.parametrize("lost", [False, True])
def test_the_forward_is_repeated_only_if_the_state_is_lost(lost, active, monkeypatch):
    calls = []

    def counted(*args, forward=mxattn.forward_, **options):
        calls.append(1)
        return forward(*args, **options)

    def load(x):
        return x.clone() if lost else x

    monkeypatch.setattr(mxattn, "forward_", counted)
    for function, operands in ((sdpa, dense(heads_k=4)), (torch_varlen, packed())):
        want = step(function, operands)
        calls.clear()
        with torch.autograd.graph.saved_tensors_hooks(load, lambda x: x):
            got = step(function, operands)
        assert same(got, want)
        assert len(calls) == (2 if lost else 1)


def test_merged_results_are_refused(active):
    """Ring attention calls the backward with the log-sum-exp over all parts of the keys."""
    q, k, v = (x.detach() for x in dense(heads_k=4))
    ops = torch.ops.aten
    out, lse, cu_q, cu_k, max_q, max_k, *random = ops._scaled_dot_product_flash_attention(q, k, v)
    rest = (cu_q, cu_k, max_q, max_k, 0.0, False, *random[:2])
    backward = ops._scaled_dot_product_flash_attention_backward
    want = backward(out, q, k, v, out, lse, *rest)
    assert same(backward(out, q, k, v, out, lse.clone(), *rest), want)
    with pytest.raises(mxattn.Unsupported, match="logsumexp = that of other keys"):
        backward(out, q, k, v, out, lse + 1, *rest)


def test_checkpointing_and_compile(active):
    operands = dense(heads_k=4)
    want = step(sdpa, operands, is_causal=True)

    def layer(*operands):
        return sdpa(*operands, is_causal=True)

    def saving(*operands):
        return torch.utils.checkpoint.checkpoint(layer, *operands, use_reentrant=False)

    assert same(step(saving, operands), want)
    torch._dynamo.reset()
    assert same(step(torch.compile(layer, backend="aot_eager", fullgraph=True), operands), want)
    compiled = torch.compile(torch_varlen, backend="aot_eager", fullgraph=True)
    assert same(step(compiled, packed()), step(torch_varlen, packed()))


# ---- activation --------------------------------------------------------------------------------


def dispatched() -> list[str]:
    """What the dispatcher holds of each operator, without where Python registered it."""
    return [torch._C._dispatch_dump(f"aten::{name}") for name in OPERATORS]


def test_restoring_leaves_torch_as_it_was():
    before, operands = dispatched(), dense()
    want = step(sdpa, operands, is_causal=True, enable_gqa=True)
    for _ in range(2):
        registry.activate_flash_attention_impl(NAME)
        assert registry.current_flash_attention_impl() == NAME
        assert dispatched() != before
        assert not same(step(sdpa, operands, is_causal=True, enable_gqa=True), want)
        registry.restore_flash_attention_impl()
        assert registry.current_flash_attention_impl() is None
        assert dispatched() == before
        assert same(step(sdpa, operands, is_causal=True, enable_gqa=True), want)
    with pytest.raises(NotImplementedError, match="_flash_attention_forward"):
        torch_varlen(*packed())


def test_two_recipes_under_two_names():
    hooks.register("mxattn_bf16", recipe="bf16")
    assert {NAME, "mxattn_bf16"} <= set(registry.list_flash_attention_impls())
    try:
        for name, recipe in ((NAME, "fp8"), ("mxattn_bf16", "bf16")):
            registry.activate_flash_attention_impl(name)
            assert same(step(torch_varlen, packed()), step(native_varlen, packed(), recipe=recipe))
    finally:
        registry.restore_flash_attention_impl()


def test_a_recipe_activated_before_the_backward_is_refused():
    """Its state lies as that of the recipe of the forward, and means something else."""
    hooks.register("mxattn_token", recipe="mxfp8_token")
    q, k, v = dense(heads_k=4)
    try:
        registry.activate_flash_attention_impl(NAME)
        out = sdpa(q, k, v, is_causal=True)
        registry.activate_flash_attention_impl("mxattn_token")
        with pytest.raises(mxattn.Unsupported, match="logsumexp = .* of another recipe"):
            out.sum().backward()
    finally:
        registry.restore_flash_attention_impl()


# ---- what is refused ---------------------------------------------------------------------------


def test_what_is_refused(active):
    with pytest.raises(mxattn.InvalidArgument, match="recipe = 'int3': expected one of fp8"):
        hooks.register(recipe="int3")
    q, k, v = dense(heads_k=4)
    with pytest.raises(mxattn.Unsupported, match="attn_mask = a tensor: expected nothing"):
        sdpa(q, k, v, attn_mask=torch.ones(48, 48, dtype=torch.bool))
    with pytest.raises(mxattn.Unsupported, match=r"key\.shape\[2\] = 48: expected 9, as query"):
        sdpa(q[:, :, :9], k, v, is_causal=True)
    with pytest.raises(mxattn.InvalidArgument, match=r"query\.dtype = torch\.float64"):
        sdpa(q.double(), k.double(), v.double())
    q, k, v = packed()
    with pytest.raises(mxattn.Unsupported, match="seqused_k = a tensor"):
        torch_varlen(q, k, v, seqused_k=CU[1:])
    with pytest.raises(mxattn.Unsupported, match=r"dropout_p = 0\.1: expected nothing"):
        torch.ops.aten._flash_attention_forward(q, k, v, CU, CU, 40, 40, 0.1, False, False)
    # What torch does not send to flash attention is computed as without us.
    with registry.sdpa_kernel(registry.SDPBackend.MATH):
        assert sdpa(*(x.double() for x in dense(heads_k=4))).isfinite().all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_device(active):
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(64, 2, 128, generator=random).bfloat16().cuda().requires_grad_()
               for _ in range(3))  # fmt: skip
    cu = CU.cuda()

    def theirs(*operands):
        return varlen_attn(*operands, cu, cu, 40, 40, window_size=(-1, 0))

    def ours(*operands):
        return mxattn.attn_varlen(*operands, cu, causal=True)

    assert same(step(theirs, (q, k, v)), step(ours, (q, k, v)))
    batch = [x.detach().view(2, 32, 2, 128).transpose(1, 2).requires_grad_() for x in (q, k, v)]
    with registry.sdpa_kernel(registry.SDPBackend.FLASH_ATTENTION):
        got = step(sdpa, batch, is_causal=True)
    assert same(got, step(native, batch, causal=True))
