"""Megatron-Core's GPT with mxattn's core attention, and the module alone."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import mxattn
import pytest

torch = pytest.importorskip("torch")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it misses Apex and Transformer Engine
    pytest.importorskip("megatron.core")
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.spec_utils import ModuleSpec, build_module
    from megatron.core.transformer.transformer_config import TransformerConfig
    from mxattn.integrations.megatron import MxDotProductAttention

from reference import cosine  # noqa: E402

LENGTHS = [20, 1, 43]
CU = torch.tensor([0, 20, 21, 64], dtype=torch.int32)
POSITIONS = torch.cat([torch.arange(n) for n in LENGTHS])[None]
PACKED = PackedSeqParams(
    qkv_format="thd", cu_seqlens_q=CU, cu_seqlens_kv=CU, max_seqlen_q=43, max_seqlen_kv=43
)


def configuration(**changes):
    given = {
        "num_layers": 2, "hidden_size": 128, "num_attention_heads": 4, "num_query_groups": 2,
        "kv_channels": 64, "attention_dropout": 0.0, "hidden_dropout": 0.0, "bf16": True,
        "params_dtype": torch.bfloat16, "use_cpu_initialization": True,
    }  # fmt: skip
    return TransformerConfig(**(given | changes))


def core(spec=MxDotProductAttention, mask=AttnMaskType.causal, config=None, **options):
    return build_module(spec, config=config or configuration(), layer_number=1,
                        attn_mask_type=mask, attention_type="self", **options)  # fmt: skip


# ---- a model -----------------------------------------------------------------------------------


class Exact(torch.nn.Module):
    """Attention of PyTorch where Megatron's own core attention needs a CUDA device."""

    def __init__(self, **_):
        super().__init__()

    def forward(self, query, key, value, *_, packed_seq_params, **__):
        assert packed_seq_params is None
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True
        )
        return out.permute(2, 0, 1, 3).flatten(2)


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    store = tmp_path_factory.mktemp("ranks") / "store"
    torch.distributed.init_process_group("gloo", f"file://{store}", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def tiny(core_attention=MxDotProductAttention):
    spec = get_gpt_layer_local_spec()
    spec.submodules.self_attention.submodules.core_attention = core_attention
    torch.manual_seed(0)
    # Without a CUDA device Megatron has no rotary embedding.
    model = GPTModel(configuration(), spec, vocab_size=96, max_sequence_length=64)
    model = model.bfloat16()
    for layer in model.decoder.layers:
        layer.self_attention.linear_qkv.weight.data *= 8  # a softmax that chooses
    return model


def tokens(*shape):
    return torch.randint(96, shape, generator=torch.Generator().manual_seed(0))


def test_a_pack_has_the_bits_of_its_sequences(one_rank):
    model, ids = tiny(), tokens(1, 64)
    with torch.no_grad():
        packed = model(ids, POSITIONS, None, packed_seq_params=PACKED)
        alone = [model(x, torch.arange(x.shape[1])[None], None) for x in ids.split(LENGTHS, 1)]
        other = model(ids, POSITIONS, None)
    assert torch.equal(packed, torch.cat(alone, 1))
    assert not torch.equal(packed, other)


def test_a_batch_is_near_exact_attention(one_rank):
    ids, positions = tokens(2, 64), torch.arange(64).expand(2, -1)
    with torch.no_grad():
        got, want = (tiny(x)(ids, positions, None) for x in (MxDotProductAttention, Exact))
    assert cosine(got.float().numpy(), want.float().numpy()) > 0.99


def test_the_loss_falls(one_rank):
    model, ids = tiny().train(), tokens(1, 64)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    losses = []
    for _ in range(8):
        loss = model(ids, POSITIONS, None, labels=ids, packed_seq_params=PACKED).float().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0]


# ---- the module --------------------------------------------------------------------------------


def operands(*lead, dtype=torch.bfloat16, value_dim=64):
    random = torch.Generator().manual_seed(0)
    return [torch.randn(*lead, h, d, generator=random).to(dtype)
            for h, d in ((4, 64), (2, 64), (2, value_dim))]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("mask", [AttnMaskType.causal, AttnMaskType.no_mask])
def test_sbhd(mask, dtype):
    q, k, v = operands(48, 2, dtype=dtype)
    out = core(mask=mask, softmax_scale=0.2)(q, k, v, None)
    rows = (x.transpose(0, 1).bfloat16() for x in (q, k, v))
    want = mxattn.attn(*rows, causal=mask == AttnMaskType.causal, softmax_scale=0.2)
    assert out.dtype == dtype and torch.equal(out, want.transpose(0, 1).flatten(2).to(dtype))


@pytest.mark.parametrize("mask", [AttnMaskType.padding_causal, AttnMaskType.padding])
def test_thd(mask):
    q, k, v = operands(64)
    out = core(mask=AttnMaskType.causal)(q, k, v, None, mask, None, PACKED)
    want = mxattn.attn_varlen(q, k, v, CU, causal=mask == AttnMaskType.padding_causal)
    assert torch.equal(out, want.flatten(1))


def test_padding_between_sequences_changes_no_token():
    q, k, v = operands(64)
    padded = torch.tensor([0, 24, 32, 75], dtype=torch.int32)
    at = torch.cat([torch.arange(n) + start for n, start in zip(LENGTHS, padded, strict=False)])
    with_gaps = [x.new_full((75, *x.shape[1:]), torch.nan).index_copy(0, at, x) for x in (q, k, v)]
    packed = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=CU, cu_seqlens_kv=CU, cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
    )  # fmt: skip
    module = core()
    got = module(*with_gaps, None, packed_seq_params=packed)
    assert torch.equal(got[at], module(q, k, v, None, packed_seq_params=PACKED))
    with pytest.raises(mxattn.Unsupported, match="cu_seqlens_q_padded = a tensor: expected None"):
        module(*with_gaps, None, AttnMaskType.padding, None, packed)


def test_windows_by_layer():
    q, k, v = operands(48, 2)
    config = configuration(window_size=(7, 0), window_attn_skip_freq=2)
    outs = [build_module(MxDotProductAttention, config=config, layer_number=layer,
                         attn_mask_type=AttnMaskType.causal, attention_type="self")(q, k, v, None)
            for layer in (1, 2)]  # fmt: skip
    rows = [x.transpose(0, 1) for x in (q, k, v)]
    for out, window in zip(outs, ((7, 0), (-1, -1)), strict=True):
        want = mxattn.attn(*rows, causal=True, window_size=window)
        assert torch.equal(out, want.transpose(0, 1).flatten(2))


def test_a_recipe_in_the_spec_and_values_narrower_than_queries():
    q, k, v = operands(48, 2, value_dim=48)
    spec = ModuleSpec(module=MxDotProductAttention, params={"recipe": "bf16"})
    out = core(spec, k_channels=64, v_channels=48)(q, k, v, None)
    wide = torch.nn.functional.pad(v, (0, 16))
    want = mxattn.attn(*(x.transpose(0, 1) for x in (q, k, wide)), causal=True, recipe="bf16")
    assert torch.equal(out, want[..., :48].transpose(0, 1).flatten(2))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_dropout": 0.1}, r"attention_dropout = 0\.1: expected 0"),
        ({"softmax_type": "learnable"}, "softmax_type = learnable: expected vanilla"),
        ({"log_max_attention_logit": True}, "log_max_attention_logit = True: expected False"),
    ],
)
def test_configurations_that_are_refused(changes, message):
    with pytest.raises(mxattn.Unsupported, match=message):
        core(config=configuration(**changes))


def test_context_parallelism_and_unknown_recipes_are_refused():
    config = configuration()
    config.context_parallel_size = 2
    with pytest.raises(mxattn.Unsupported, match="context_parallel_size = 2: expected 1"):
        core(config=config)
    with pytest.raises(mxattn.InvalidArgument, match="recipe = 'int3': expected one of"):
        core(recipe="int3")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_mask": torch.zeros(1)}, "attention_mask = a tensor: expected None"),
        ({"attention_bias": torch.zeros(1)}, "attention_bias = a tensor: expected None"),
        ({"attn_mask_type": AttnMaskType.arbitrary}, "attn_mask_type = .*arbitrary"),
        ({"attn_mask_type": AttnMaskType.padding}, "attn_mask_type = padding: expected causal"),
        ({"query": operands(9, 2)[0]}, r"key\.shape\[0\] = 48: expected 9"),
        ({"query": operands(9)[0]}, r"query\.shape = \(9, 4, 64\): expected \(tokens, batch"),
        ({"value": operands(48, 2)[2].double()}, r"value\.dtype = torch\.float64"),
        ({"packed_seq_params": SimpleNamespace(qkv_format="bshd")}, "qkv_format = bshd"),
    ],
)
def test_calls_that_are_refused(change, message):
    q, k, v = operands(48, 2)
    given = {"query": q, "key": k, "value": v, "attention_mask": None} | change
    with pytest.raises(mxattn.MxattnError, match=message):
        core()(**given)
