"""The backward of parts of the keys with a merged LSE, as ring attention runs it.

The keys of one causal document are split in three; each part has a forward of its own, outputs are
merged, and each part's backward divides by the softmax of all. Part [a, b) of N keys is a window:
query i sees key a + j if j <= i - a = i + (b - a - N) + (N - b), and rows before a see nothing.
"""

from __future__ import annotations

import mxattn
import numpy as np
import pytest
import torch
from devices import DEVICES, need, usual_dim
from mxattn_capi import attention, poisoned
from reference import bf16, cosine, exact

TOKENS, HEADS_Q, HEADS_K = 300, 4, 2
BORDERS = [0, 70, 200, TOKENS]
NAMES = ("dq", "dk", "dv")


def inputs(dim, scale=1.0, seed=0):
    """BF16 q, k, v, dout; `scale` of q makes the parts unequal."""
    rng = np.random.default_rng(seed)
    heads = (HEADS_Q, HEADS_K, HEADS_K, HEADS_Q)
    q, k, v, dout = (rng.standard_normal((TOKENS, n, dim), np.float32) for n in heads)
    return bf16(scale * q), bf16(k), bf16(v), bf16(dout)


class Numpy:
    def to(self, x):
        return x

    def empty(self, shape, like):
        return poisoned(shape, like.dtype)

    def floats(self, shape):
        return poisoned(shape, np.float32)

    def rounded(self, out):
        return bf16(out)

    def back(self, x):
        return np.asarray(x, np.float64)


class Torch:
    def __init__(self, device):
        self.device = device

    def to(self, x):
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16).to(self.device)

    def empty(self, shape, like):
        return torch.full(shape, torch.nan, dtype=like.dtype, device=self.device)

    def floats(self, shape):
        return torch.full(shape, torch.nan, device=self.device)

    def rounded(self, out):
        return out.bfloat16()

    def back(self, x):
        return x.double().cpu().numpy()


def ring(kind, tensors, recipe, merge=True):
    """{"o", "lse", "dq", "dk", "dv"} in FP64 from the three parts."""
    q, k, v, dout = (kind.to(x) for x in tensors)
    cu = [np.int32([0, TOKENS]), *(np.int32([0, n]) for n in np.diff(BORDERS))]
    if isinstance(kind, Torch):
        cu = [torch.from_numpy(x).to(kind.device) for x in cu]
    parts = []
    for n, (a, b) in enumerate(zip(BORDERS, BORDERS[1:], strict=False)):
        keys, values = k[a:b], v[a:b]
        options = {"recipe": recipe, "window_size": (-1, TOKENS - b)}
        state = mxattn.make_state(q, keys, cu[0], **options)
        out, lse = kind.empty(q.shape, q), kind.floats((HEADS_Q, TOKENS))
        mxattn.forward_(q, keys, values, out, lse, state, cu[0], cu[n + 1], **options)
        parts.append((keys, values, out, lse, state, cu[n + 1], options))
    out, lse = parts[0][2], parts[0][3]
    for part in parts[1:]:
        out, lse = mxattn.merge_lse(out, lse, part[2], part[3])
    out = kind.rounded(out)
    result = {"o": kind.back(out), "lse": kind.back(lse), "dq": 0, "dk": [], "dv": []}
    for keys, values, own_out, own_lse, state, cu_k, options in parts:
        grads = [kind.empty(x.shape, x) for x in (q, keys, values)]
        merged = {"merged_lse": lse} if merge else {}
        mxattn.backward_(dout, q, keys, values, out if merge else own_out, own_lse, state, *grads,
                         cu[0], cu_k, **merged, **options)  # fmt: skip
        dq, dk, dv = (kind.back(x) for x in grads)
        assert np.isfinite(dq).all()
        result["dq"] = result["dq"] + dq
        result["dk"].append(dk)
        result["dv"].append(dv)
    return result | {name: np.concatenate(result[name]) for name in ("dk", "dv")}


def bounds(tensors, true) -> dict:
    """How far recipe bf16 of the parts may be from that of the whole, entry by entry.

    Whatever BF16 rounds moves by h = half_ulp = 2^-9 of itself at most. O: the weights and their
    sum are rounded in parts and whole (4 h), O of the parts, merged and of the whole (3 h); so D =
    dO . O moves by 7 h sum |dO| max |v|, and dS by p times that. p, by the LSE (2 h), dS and its
    code, in both, and each part's gradient: 6 h of p (|dP| + |D|). dV: p, its code and dV, in both:
    6 h.
    """
    half_ulp = 2.0**-9
    q, k, v, dout = (np.asarray(x, np.float64) for x in tensors)
    group = HEADS_Q // HEADS_K
    scale = q.shape[2] ** -0.5
    mask = np.tril(np.ones((TOKENS, TOKENS), bool))
    found = {"dq": np.zeros(q.shape), "dk": np.zeros(k.shape), "dv": np.zeros(v.shape)}
    for h in range(HEADS_Q):
        kh, vh, g = k[:, h // group], v[:, h // group], dout[:, h]
        scores = np.where(mask, q[:, h] @ kh.T * scale, -np.inf)
        p = np.exp(scores - true["lse"][h][:, None])
        delta = 7 * half_ulp * (np.abs(g) @ np.abs(vh).max(0))
        ds = p * (np.abs(g @ vh.T) + np.abs((g * true["o"][:, h]).sum(1))[:, None])
        moved = p * delta[:, None] + 6 * half_ulp * ds
        found["dq"][:, h] = scale * moved @ np.abs(kh)
        found["dk"][:, h // group] += scale * moved.T @ np.abs(q[:, h])
        found["dv"][:, h // group] += 6 * half_ulp * p.T @ np.abs(g)
    return found


@pytest.mark.parametrize("scale", [1.0, 12.0], ids=["plain", "peaked"])
def test_parts_add_up_to_the_whole(scale):
    tensors = inputs(64, scale)
    whole = attention(*tensors[:3], [0, TOKENS], dout=tensors[3], recipe="bf16")
    limits = bounds(tensors, exact(*tensors[:3], [0, TOKENS], dout=tensors[3]))
    got = ring(Numpy(), tensors, "bf16")
    for name in NAMES:
        error = np.abs(got[name] - whole[name].astype(np.float64))
        assert (error <= limits[name]).all(), (name, (error / limits[name]).max())


DEVICES_AND_KINDS = [pytest.param("numpy", id="numpy"), *DEVICES]


@pytest.mark.parametrize("kind", DEVICES_AND_KINDS)
@pytest.mark.parametrize("recipe", ["fp8", "mxfp8_token"])
@pytest.mark.parametrize("scale", [1.0, 4.0], ids=["plain", "peaked"])
def test_parts_in_8_bits_are_as_near_to_exact_as_the_whole(kind, recipe, scale):
    device = "cpu" if kind == "numpy" else kind
    dim = usual_dim(device)
    need(device, recipe, dim, window_size=(-1, 100))
    tensors = inputs(dim, scale)
    whole = attention(*tensors[:3], [0, TOKENS], dout=tensors[3], recipe=recipe)
    true = exact(*tensors[:3], [0, TOKENS], dout=tensors[3])
    got = ring(Numpy() if kind == "numpy" else Torch(device), tensors, recipe)
    for name in ("o", *NAMES):
        # Codes are others, as exponents start afresh with each part, and their roundings are as
        # many of the same size: errors, the root of 2 (1 - cosine), may differ by a tenth.
        want = 1 - cosine(whole[name], true[name])
        assert 1 - cosine(got[name], true[name]) < 1.1**2 * want, name


def test_without_the_merged_lse_parts_do_not_add_up():
    """What the tests above look at is there to be seen."""
    tensors = inputs(64)
    true = exact(*tensors[:3], [0, TOKENS], dout=tensors[3])
    got = ring(Numpy(), tensors, "bf16", merge=False)
    assert all(cosine(got[name], true[name]) < 0.9 for name in NAMES)
    limits = bounds(tensors, true)
    assert all((np.abs(got[name] - true[name]) > limits[name]).mean() > 0.1 for name in NAMES)


def test_a_part_that_hardly_counts():
    """Scores some 2^7 below those of another part: its gradients are 0, not NaN."""
    q, k, v, dout = inputs(64, 12.0)
    k[:70] = bf16(-300 * np.asarray(q[:70, :HEADS_K], np.float32))
    q[70:] = q[:230]
    got = ring(Numpy(), (q, k, v, dout), "fp8")
    assert all(np.isfinite(got[name]).all() for name in NAMES)


def test_what_cannot_be_merged_is_refused():
    q, k, v, dout = inputs(64)
    cu = np.int32([0, TOKENS])
    state = mxattn.make_state(q, k, cu)
    out, lse = poisoned(q.shape, q.dtype), poisoned((HEADS_Q, TOKENS), np.float32)
    mxattn.forward_(q, k, v, out, lse, state, cu)
    grads = [np.zeros_like(x) for x in (q, k, v)]
    with pytest.raises(mxattn.InvalidArgument, match="recipe = exact: expected another"):
        mxattn.backward_(dout, q, k, v, out, lse, state, *grads, cu, merged_lse=lse, recipe="exact")
    with pytest.raises(mxattn.InvalidArgument, match=r"merged_lse\.shape = \(300, 4\): expected"):
        mxattn.backward_(dout, q, k, v, out, lse, state, *grads, cu, merged_lse=lse.T)
    for other in (np.float64, np.float16, np.int32, str):
        wrong = np.zeros_like(lse).astype(other)
        with pytest.raises(mxattn.InvalidArgument, match=r"merged_lse\.dtype = .* float32, as lse"):
            mxattn.backward_(dout, q, k, v, out, lse, state, *grads, cu, merged_lse=wrong)
    assert not any(np.asarray(x, np.float32).any() for x in grads)


def test_gradients_through_a_merge_are_refused_where_they_would_be_wrong():
    """The part's own backward knows nothing of the weights' dependence on its log-sum-exp."""
    q, k, v, _ = (Torch("cpu").to(x) for x in inputs(64))
    cu = torch.tensor([0, TOKENS], dtype=torch.int32)
    out, lse = mxattn.attn_varlen(q.requires_grad_(), k, v, cu, return_lse=True)
    constant = out.detach()
    for parts, name in (((out, lse, constant, lse), "out_a"), ((constant, lse, out, lse), "out_b")):
        with pytest.raises(
            mxattn.Unsupported, match=f"{name}.requires_grad = True: expected False"
        ):
            mxattn.merge_lse(*parts)
    with torch.no_grad():
        mxattn.merge_lse(out, lse, out, lse)
    mxattn.merge_lse(out, lse.clone().requires_grad_(), constant, lse)  # of who has both
    with pytest.raises(mxattn.InvalidArgument, match=r"lse_b = ndarray: expected a torch tensor"):
        mxattn.merge_lse(constant, lse, constant, lse.numpy())
