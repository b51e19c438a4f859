"""torchtitan's llama3 with the override, from its configuration to gradients."""

from __future__ import annotations

import mxattn
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torchtitan")
# torchtitan imports triton, which a torch for the CPU does not bring.
hooks = pytest.importorskip("mxattn.integrations.torchtitan", exc_type=ImportError)

from torchtitan.config.override import OverrideConfig, apply_overrides  # noqa: E402
from torchtitan.models.common.attention import VarlenMetadata  # noqa: E402
from torchtitan.models.llama3 import model_registry  # noqa: E402

TARGET = "mxattn.integrations.torchtitan.varlen"
LENGTHS = [20, 1, 43]
POSITIONS = torch.cat([torch.arange(n) for n in LENGTHS])[None]


def tiny(recipe="fp8"):
    spec = model_registry("debugmodel", attn_backend="varlen")
    config = spec.model
    lines = apply_overrides(OverrideConfig(imports=[(TARGET, {"recipe": recipe})]), config)
    assert len(lines) == len(config.layers)
    torch.manual_seed(0)
    model = config.build()
    model.init_states(buffer_device=torch.device("cpu"))
    return model.bfloat16()


def run(model, ids, positions):
    return model(ids, positions, model.get_attention_masks(positions))


def test_the_override_reaches_every_layer():
    model = tiny("bf16")
    for layer in model.layers.values():
        inner = layer.attention.inner_attention
        assert type(inner) is hooks.MxVarlenAttention
        assert (inner.recipe, inner.window_size) == ("bf16", (-1, 0))
    assert torch.nn.attention.current_flash_attention_impl() is None


def test_a_pack_has_the_bits_of_its_documents():
    model = tiny()
    ids = torch.randint(2048, (1, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        packed = run(model, ids, POSITIONS)
        alone = [run(model, x, torch.arange(x.shape[1])[None]) for x in ids.split(LENGTHS, 1)]
        other = run(model, ids, torch.arange(64)[None])
    assert torch.equal(packed, torch.cat(alone, 1))
    assert not torch.equal(packed, other)


def test_the_loss_falls():
    model = tiny()
    ids = torch.randint(2048, (2, 64), generator=torch.Generator().manual_seed(0))
    positions = POSITIONS.expand(2, -1)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    losses = []
    for _ in range(8):
        loss = torch.nn.functional.cross_entropy(
            run(model, ids, positions)[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


def inner(**changes):
    return hooks.MxVarlenAttention.Config(**changes).build()


CU = torch.tensor([0, 20, 64, 128], dtype=torch.int32)
META = VarlenMetadata(CU, CU, 64, 64)


@pytest.mark.parametrize("window", [(-1, 0), (-1, -1), (8, 0)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_module_calls_attn_varlen(window, dtype):
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 64, h, d, generator=random).to(dtype)
               for h, d in ((4, 64), (2, 64), (2, 48)))  # fmt: skip
    out = inner(window_size=window)(q, k, v, attention_masks=META, scale=0.2, enable_gqa=True)
    assert out.dtype == dtype and out.shape == (2, 64, 4, 48)
    rows = (x.bfloat16().flatten(0, 1) for x in (q, k, torch.nn.functional.pad(v, (0, 16))))
    want = mxattn.attn_varlen(
        *rows, CU, causal=window[1] == 0, window_size=window, softmax_scale=0.2
    )
    assert torch.equal(out.flatten(0, 1), want[..., :48].to(dtype))


def test_what_is_refused():
    x = torch.randn(2, 64, 2, 64)
    with pytest.raises(mxattn.InvalidArgument, match="attention_masks = NoneType: expected Varlen"):
        inner()(x, x, x, attention_masks=None)
    with pytest.raises(mxattn.Unsupported, match="out_transform = a function: expected None"):
        inner()(x, x, x, attention_masks=META, out_transform=lambda out, lse: out)
    with pytest.raises(mxattn.InvalidArgument, match=r"query\.dtype = torch\.float64"):
        inner()(x.double(), x, x, attention_masks=META)
    with pytest.raises(mxattn.InvalidArgument, match="recipe = 'int3': expected one of"):
        inner(recipe="int3")
