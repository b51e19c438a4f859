"""Models of transformers with mxattn's attention: documents, padding, caches, training."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import mxattn
import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import mxattn.integrations.transformers as hooks  # noqa: E402
from reference import cosine  # noqa: E402

LENGTHS = [20, 1, 43]
WINDOW = 8
RECIPES = ("fp8", "bf16")
NEAR = {"fp8": 0.99, "bf16": 0.9999}  # cosine of logits with those of torch's attention
NAME = {recipe: hooks.register(f"mxattn_{recipe}", recipe=recipe) for recipe in RECIPES}


def tiny(kind="llama", recipe="fp8", dtype=torch.bfloat16, layers=2, **changes):
    """Random weights, grouped heads, scores wide enough for the softmax to choose."""
    torch.manual_seed(0)
    config, model = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    }[kind]
    if kind == "mistral":
        changes = {"sliding_window": WINDOW} | changes
    if kind == "qwen2":  # the first layer sees all, the second a window
        window = {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 1}
        changes = window | changes
    config = config(
        vocab_size=97, hidden_size=128, intermediate_size=128, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, max_position_embeddings=256,
        pad_token_id=0, eos_token_id=None, **changes,
    )  # fmt: skip
    model = model(config).to(dtype).eval()
    for name, weight in model.named_parameters():
        if "q_proj.weight" in name or "k_proj.weight" in name:
            weight.data *= 6
    model.set_attn_implementation(NAME.get(recipe, recipe))
    return model


def tokens(*shape, seed=0):
    return torch.randint(1, 97, shape, generator=torch.Generator().manual_seed(seed))


def positions(lengths=LENGTHS):
    return torch.cat([torch.arange(n) for n in lengths])[None]


def flash_kwargs(lengths=LENGTHS):
    """As the collator makes them; positions serve the rotary embedding."""
    cu = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    longest = max(lengths)
    return {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": longest,
            "max_length_k": longest, "position_ids": positions(lengths)}  # fmt: skip


@torch.no_grad()
def logits(model, ids, **options):
    return model(ids, use_cache=False, **options).logits


def near(a, b, recipe="fp8") -> bool:
    return cosine(a.float().numpy(), b.float().numpy()) > NEAR[recipe]


def test_the_example_of_the_documentation():
    page = (Path(__file__).resolve().parents[2] / "docs" / "integrations.md").read_text()
    (code,) = (x for x in re.findall(r"```python\n(.*?)```", page, re.S) if "transformers" in x)
    names: dict = {}
    exec(compile(code, "docs/integrations.md", "exec"), names)
    assert names["out"].loss.isfinite()
    assert all(x.grad is not None for x in names["model"].parameters())


# ---- documents ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_pack_has_the_bits_of_its_documents(kind, recipe):
    model, ids = tiny(kind, recipe), tokens(1, sum(LENGTHS))
    packed = logits(model, ids, position_ids=positions())
    alone = torch.cat([logits(model, x) for x in ids.split(LENGTHS, 1)], 1)
    assert torch.equal(packed, alone)
    assert torch.equal(packed, logits(model, ids, **flash_kwargs()))
    model.set_attn_implementation("sdpa")
    assert near(packed, logits(model, ids, position_ids=positions()), recipe)
    # The documents matter here: as one text they give other logits.
    assert not near(packed, logits(model, ids), recipe)


def test_lengths_go_before_positions():
    """Where both are given; some models' positions do not tell the documents."""
    q, k = torch.randn(1, 4, 64, 64), torch.randn(1, 2, 64, 64)
    told = [
        {"cu_seq_lens_q": flash_kwargs()["cu_seq_lens_q"], "position_ids": torch.arange(64)[None]},
        {"position_ids": positions()},
        {"position_ids": positions() + 2},  # as RoBERTa counts
    ]
    outs = [hooks.forward(torch.nn.Module(), q, k, k, None, **where)[0] for where in told]
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])
    assert not torch.equal(outs[0], hooks.forward(torch.nn.Module(), q, k, k, None)[0])


def test_a_batch_of_packs():
    model, ids = tiny(), tokens(2, 64)
    rows = torch.cat([positions(), positions([40, 24])])
    got = logits(model, ids, position_ids=rows)
    for i, lengths in enumerate((LENGTHS, [40, 24])):
        assert torch.equal(got[i : i + 1], logits(model, ids[i : i + 1], **flash_kwargs(lengths)))


def test_positions_that_change_in_place_are_read_again():
    model, ids, where = tiny(), tokens(1, 64), positions()
    logits(model, ids, position_ids=where)
    where.copy_(positions([40, 24]))
    got = logits(model, ids, position_ids=where)
    assert torch.equal(got, logits(model, ids, **flash_kwargs([40, 24])))


def test_the_collator_of_transformers():
    collate = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    batch = collate([{"input_ids": tokens(n).tolist()} for n in LENGTHS])
    model = tiny()
    with torch.no_grad():
        got = model(**batch, use_cache=False).logits
    assert torch.equal(got, logits(model, batch["input_ids"], position_ids=positions()))


def test_room_behind_the_last_document_and_empty_documents():
    model, ids = tiny(), tokens(1, 64)
    where = positions([20, 30, 14])
    cu = torch.tensor([0, 0, 20, 20, 50], dtype=torch.int64)
    got = logits(model, ids, position_ids=where, cu_seq_lens_q=cu)
    want = logits(model, ids, position_ids=where)
    assert torch.equal(got[:, :50], want[:, :50]) and got.isfinite().all()


# ---- padding -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "mistral"])
@pytest.mark.parametrize("side", ["left", "right", "hole"])
def test_padding(kind, side):
    lengths = [24, 7, 1, 0]
    ids, keep = tokens(4, 24), torch.zeros(4, 24, dtype=torch.long)
    for row, n in enumerate(lengths):
        keep[row, slice(24 - n, 24) if side == "left" else slice(0, n)] = 1
    if side == "hole":
        keep[0, 5:9] = 0
    where = (keep.cumsum(1) - 1).clamp(min=0)
    model, kept = tiny(kind), keep.bool()
    got = logits(model, ids, attention_mask=keep, position_ids=where)
    for row, n in enumerate(lengths):
        if n > 0 and not (kind == "mistral" and side == "hole"):
            alone = logits(model, ids[row : row + 1, kept[row]])
            assert torch.equal(got[row, kept[row]], alone[0])
    model.set_attn_implementation("sdpa")
    want = logits(model, ids, attention_mask=keep, position_ids=where)
    if side != "hole" or kind != "mistral":  # a hole counts for torch's window, not for ours
        assert near(got[kept], want[kept])
    assert got.isfinite().all()


def test_a_mask_of_ones_is_no_mask():
    model, ids = tiny(), tokens(2, 64)
    for where in (None, positions().expand(2, -1)):  # also where it would hide documents
        got = logits(model, ids, position_ids=where, attention_mask=torch.ones_like(ids))
        assert torch.equal(got, logits(model, ids, position_ids=where))


def test_an_encoder_and_cross_attention():
    config = transformers.BartConfig(
        vocab_size=97, d_model=128, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64,
        max_position_embeddings=64, dropout=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.BartForConditionalGeneration(config).bfloat16().eval()
    ids, target = tokens(2, 24), tokens(2, 24, seed=1)
    keep = torch.ones_like(ids)
    keep[1, 9:] = 0  # the padded keys of the encoder are no queries of the decoder
    got = {}
    for name in ("sdpa", NAME["fp8"]):
        model.set_attn_implementation(name)
        with torch.no_grad():
            got[name] = model(ids, attention_mask=keep, decoder_input_ids=target).logits
    assert near(got[NAME["fp8"]], got["sdpa"])


# ---- generation --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "mistral"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("padded", [False, True])
def test_generation_with_a_cache(kind, cache, padded):
    """Each new query sees all keys: logits as without a cache, within what rounding moves."""
    model, ids = tiny(kind), tokens(2, 12)
    keep = torch.ones_like(ids)
    if padded:
        keep[1, :5] = 0
    result = model.generate(
        ids, attention_mask=keep, max_new_tokens=6, do_sample=False, output_logits=True,
        return_dict_in_generate=True, cache_implementation=cache,
    )  # fmt: skip
    for row in range(2):
        text = result.sequences[row : row + 1, 12 - int(keep[row].sum()) :]
        whole = logits(model, text)[0, -7:-1]
        stepwise = torch.stack([step[row] for step in result.logits])
        assert cosine(stepwise.numpy(), whole.float().numpy()) > 0.995


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_a_prompt_in_two_pieces(kind):
    """Several queries against a longer cache are aligned to its end."""
    model, ids = tiny(kind), tokens(2, 24)
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :10], cache=cache)
        second = model(ids[:, 10:], cache=cache).logits
    whole = logits(model, ids)
    assert cosine(second.float().numpy(), whole[:, 10:].float().numpy()) > 0.995


# ---- training ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "mistral"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_on_packs(kind, dtype):
    losses = {}
    ids = tokens(1, 64)
    for recipe in ("fp8", "sdpa"):
        model = tiny(kind, recipe, dtype).train()
        optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
        losses[recipe] = []
        for _ in range(12):
            loss = model(ids, labels=ids, position_ids=positions(), use_cache=False).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[recipe].append(loss.item())
    assert losses["fp8"][-1] < 0.6 * losses["fp8"][0]
    assert abs(losses["fp8"][-1] - losses["sdpa"][-1]) < 0.1 * losses["sdpa"][0]


def gradients(model, ids, **options):
    model.zero_grad()
    model(ids, labels=ids, use_cache=False, **options).loss.backward()
    return {name: x.grad.clone() for name, x in model.named_parameters()}


@pytest.mark.parametrize("told", ["padding", "position_ids"])
def test_training_after_an_evaluation_on_the_same_batch(told):
    """What was read of positions in inference mode serves autograd too."""
    model, ids = tiny(), tokens(1, 64)
    options = {"position_ids": positions()}
    if told == "padding":
        options = {"attention_mask": torch.cat([torch.zeros(1, 9), torch.ones(1, 55)], 1).long()}
    with torch.inference_mode():
        model(ids, use_cache=False, **options)
    got = gradients(model, ids, **options)
    fresh = gradients(model, ids, **{name: x.clone() for name, x in options.items()})
    assert all(torch.equal(got[name], x) for name, x in fresh.items())


def test_gradients_near_those_of_torch():
    model, ids = tiny(dtype=torch.float32), tokens(1, 64)
    got = gradients(model, ids, position_ids=positions())
    model.set_attn_implementation("sdpa")
    want = gradients(model, ids, position_ids=positions())
    for name, x in got.items():
        assert cosine(x.numpy(), want[name].numpy()) > 0.98, name


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_gives_the_same_bits(reentrant):
    model, ids = tiny().train(), tokens(1, 64)
    want = gradients(model, ids, position_ids=positions())
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    got = gradients(model, ids, position_ids=positions())
    assert all(torch.equal(got[name], x) for name, x in want.items())


def test_autocast():
    model, ids = tiny(dtype=torch.float32), tokens(1, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = logits(model, ids, position_ids=positions())
    assert near(got, logits(model, ids, position_ids=positions()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_floats_are_rounded_to_bf16(dtype):
    model, ids = tiny(dtype=dtype), tokens(1, 64)
    got = logits(model, ids, position_ids=positions())
    assert got.dtype == dtype
    model.set_attn_implementation("sdpa")
    assert near(got, logits(model, ids, position_ids=positions()))


@pytest.mark.parametrize("told", ["cu_seq_lens", "position_ids", "padding"])
def test_compiled(told):
    """With lengths as arguments in one graph, else with breaks; the same bits as without."""
    model, ids = tiny(layers=1), tokens(1, 64)
    options = {"position_ids": positions()}
    if told == "cu_seq_lens":
        options = flash_kwargs()
    if told == "padding":
        keep = torch.ones_like(ids)
        keep[0, :9] = 0
        options = {"attention_mask": keep}
    want = gradients(model, ids, **options)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=told == "cu_seq_lens")
    got = gradients(compiled, ids, **options)
    assert all(torch.equal(got[f"_orig_mod.{name}"], x) for name, x in want.items())


# ---- what is refused ---------------------------------------------------------------------------


def test_names_and_recipes():
    with pytest.raises(mxattn.InvalidArgument, match=r"recipe = 'int3': expected one of fp8"):
        hooks.register(recipe="int3")
    with pytest.raises(mxattn.InvalidArgument, match=r"recipe = .*: expected one of fp8"):
        hooks.register(recipe=["fp8"])
    for name in ("", "sdpa", "my_flash", "org/mxattn", 5, None):
        with pytest.raises(mxattn.InvalidArgument, match=rf"name = {name!r}: expected a name"):
            hooks.register(name)


def test_an_old_version_is_refused(monkeypatch):
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "5.3.1")
    with pytest.raises(ImportError, match=r"__version__ = 5\.3\.1: expected >= 5\.4"):
        hooks.register()


def test_dropout_is_refused_in_training_only():
    model, ids = tiny(attention_dropout=0.1), tokens(1, 8)
    logits(model, ids)
    with pytest.raises(mxattn.Unsupported, match=r"dropout = 0\.1: expected 0"):
        model.train()(ids)


def test_masks_of_four_dimensions_are_refused():
    keep = torch.ones(1, 1, 8, 8, dtype=torch.bool).tril()
    with pytest.raises(mxattn.Unsupported, match=r"attention_mask\.shape = \(1, 1, 8, 8\)"):
        logits(tiny(), tokens(1, 8), attention_mask=keep)


def test_restarts_under_padding_are_refused():
    keep = torch.ones(1, 64, dtype=torch.long)
    keep[0, -3:] = 0
    with pytest.raises(mxattn.InvalidArgument, match="position_ids = documents that restart"):
        logits(tiny(), tokens(1, 64), attention_mask=keep, position_ids=positions())
    with pytest.raises(mxattn.InvalidArgument, match="None beside cu_seq_lens_q"):
        logits(tiny(), tokens(1, 64), attention_mask=keep, **flash_kwargs())


def test_restarts_under_padding_are_refused_whatever_went_before():
    """The mask is read once for all layers, and so are positions: not those of another call."""
    x = torch.randn(2, 2, 16, 64)
    keep = torch.ones(2, 16, dtype=torch.bool)
    keep[:, :2] = False
    rising = torch.arange(16).expand(2, 16)
    packed = torch.cat([torch.arange(9), torch.arange(7)])
    layer = torch.nn.Identity()
    for before in (None, rising):
        hooks.forward(layer, x, x, x, keep, position_ids=before)
        for positions in (packed.expand(2, 16), packed[None]):
            with pytest.raises(mxattn.InvalidArgument, match="position_ids = documents that rest"):
                hooks.forward(layer, x, x, x, keep, position_ids=positions)
    changed = rising.clone()
    hooks.forward(layer, x, x, x, keep, position_ids=changed)
    changed[:, 9:] -= 9
    with pytest.raises(mxattn.InvalidArgument, match="position_ids = documents that restart"):
        hooks.forward(layer, x, x, x, keep, position_ids=changed)


@pytest.mark.parametrize("padded", [False, True])
def test_restarts_behind_a_cache_are_refused(padded):
    """Whether the tokens of the cache belong to the first document is said nowhere."""
    keys, positions = torch.randn(1, 2, 24, 64), torch.tensor([[8, 9, 10, 0, 1, 2, 3, 4]])
    keep = None
    if padded:
        keep = torch.ones(1, 24, dtype=torch.bool)
        keep[:, 0] = False
    layer, queries = torch.nn.Identity(), keys[:, :, -8:]
    hooks.forward(layer, queries, keys, keys, keep, position_ids=torch.arange(8, 16)[None])
    with pytest.raises(mxattn.InvalidArgument, match="position_ids = documents that restart"):
        hooks.forward(layer, queries, keys, keys, keep, position_ids=positions)


def test_sinks_are_refused():
    config = transformers.GptOssConfig(
        vocab_size=97, hidden_size=128, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=64, num_local_experts=2,
        num_experts_per_tok=1, layer_types=["full_attention"],
    )  # fmt: skip
    model = transformers.GptOssForCausalLM(config).eval()
    model.set_attn_implementation(NAME["fp8"])
    with pytest.raises(mxattn.Unsupported, match="s_aux = given: expected None"):
        logits(model, tokens(1, 8))


def test_softcap_is_refused():
    config = transformers.Gemma2Config(
        vocab_size=97, hidden_size=128, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=64,
    )  # fmt: skip
    model = transformers.Gemma2ForCausalLM(config).eval()
    model.set_attn_implementation(NAME["fp8"])
    with pytest.raises(mxattn.Unsupported, match="softcap = given: expected None"):
        logits(model, tokens(1, 8))


Q, K = torch.randn(1, 2, 8, 64), torch.randn(1, 1, 8, 64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"output_attentions": True}, "output_attentions = True: expected False"),
        ({"s_aux": torch.zeros(2)}, "s_aux = given"),
        ({"position_bias": torch.zeros(1)}, "position_bias = given"),
        ({"position_ids": torch.zeros(3, 1, 8)}, r"position_ids\.shape = \(3, 1, 8\)"),
        ({"position_ids": torch.zeros(1, 9)}, r"position_ids\.shape = \(1, 9\): expected \(1, 8"),
        ({"query": Q.double()}, r"query\.dtype = torch\.float64: expected bfloat16, float16"),
        ({"key": Q[0]}, r"query, key, value = .*: expected \(batch, heads, tokens"),
        ({"cu_seq_lens_q": torch.tensor([0, 9])}, "9"),
    ],
)
def test_arguments_of_the_function(change, message):
    arguments = {"query": Q, "key": K, "value": K, "attention_mask": None} | change
    with pytest.raises(mxattn.MxattnError, match=message):
        hooks.forward(torch.nn.Module(), **arguments)


def test_masks_that_are_more_than_causal_are_refused():
    from transformers.masking_utils import create_causal_mask, create_chunked_causal_mask

    config = transformers.LlamaConfig(attention_chunk_size=4)
    config._attn_implementation = NAME["fp8"]
    of = {"config": config, "inputs_embeds": torch.zeros(1, 8, 4), "attention_mask": None,
          "cache": None}  # fmt: skip
    with pytest.raises(mxattn.Unsupported, match="mask_function = chunked_overlay"):
        create_chunked_causal_mask(**of)
    with pytest.raises(mxattn.Unsupported, match="mask_function = .*or_masks"):
        create_causal_mask(**of, or_mask_function=lambda *_: True)
    blocks = torch.tensor([[0, 0, 1, 1, -1, -1, -1, -1]])
    with pytest.raises(mxattn.Unsupported, match="mask_function = blockwise_overlay"):
        create_causal_mask(**of, block_sequence_ids=blocks)
    assert create_causal_mask(**of) is None


def test_values_narrower_than_queries():
    value = torch.randn(1, 1, 8, 48)
    out, weights = hooks.forward(torch.nn.Module(), Q, K, value, None, scaling=0.1)
    want, _ = hooks.forward(
        torch.nn.Module(), Q, K, torch.nn.functional.pad(value, (0, 16)), None, scaling=0.1
    )
    assert weights is None and torch.equal(out, want[..., :48])
