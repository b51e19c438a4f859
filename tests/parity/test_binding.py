"""The ctypes binding says the same as the header."""

import array
import ctypes

import mxattn.capi as m
import numpy as np
import pytest
from mxattn_capi import Attention


@pytest.mark.parametrize(
    ("init", "kind"),
    [
        ("problem_config", m.ProblemConfig),
        ("forward_args", m.ForwardArgs),
        ("backward_args", m.BackwardArgs),
        ("quantize_args", m.QuantizeArgs),
        ("device_plan_args", m.DevicePlanArgs),
    ],
)
def test_structs_have_the_size_of_the_header(init, kind):
    args = kind()
    getattr(m.lib, f"mxattn_{init}_init")(ctypes.byref(args))
    assert args.size == ctypes.sizeof(kind)


def test_packed_arguments_are_the_structs():
    """A call packs its numbers without ctypes: each must stand where the struct has it."""
    call, tensors = m.CallInputs(), [np.zeros((n + 1, 2, 64), np.float32) for n in range(9)]
    call.lengths = m._view(np.arange(3, dtype=np.int32)) + m._view(None)
    call.state = array.array("Q", [11, 12, 13, 14])
    call.workspace, call.workspace_bytes, call.stream, call.plan = 21, 22, 23, 24
    views = [number for x in tensors for number in m._view(x)]
    one = len(views) // 9
    names = ("q", "k", "v", "out", "lse", "dout", "dq", "dk", "dv")
    packed = {
        m.ForwardArgs: (m._pack_forward(1, *call.fields(), *views[: 5 * one], 5, 0), names[:5]),
        m.BackwardArgs: (m._pack_backward(1, *call.fields(), *views), names),
        m.QuantizeArgs: (m._pack_quantize(1, *call.fields(), *views[:one], 5, 0), ("tensor",)),
    }
    for kind, (data, members) in packed.items():
        assert len(data) == ctypes.sizeof(kind)
        args = kind.from_buffer_copy(data)
        assert args.size == 1 and (kind is m.BackwardArgs or data[-8:] == bytes([5] + [0] * 7))
        assert list(args.call.cu_seqlens_q.shape) == [3, 0, 0, 0]
        assert args.call.cu_seqlens_k.data is None and args.call.num_state == 2
        assert [(b.data, b.bytes) for b in args.call.state[:2]] == [(11, 12), (13, 14)]
        given = (args.call.workspace, args.call.workspace_bytes, args.call.stream, args.call.plan)
        assert given == (21, 22, 23, 24)
        for name, x in zip(members, tensors, strict=False):
            view = getattr(args, name)
            assert (view.data, view.dtype, view.rank) == (x.ctypes.data, 2, 3), name
            assert list(view.shape) == [*x.shape, 0] and list(view.strides) == [128, 64, 1, 0], name


def test_every_recipe_has_a_version_and_a_form():
    recipes = m.recipes()
    assert {"fp8", "mxfp8", "mxfp8_token", "mxfp8_paper", "bf16", "fp8_tensor"} <= set(recipes)
    for info in recipes.values():
        assert info["version"] >= 1 and info["form"] in ("folded", "literal", "plain")
    assert not recipes["fp8"]["control"] and recipes["fp8"]["strictly_causal"]


def test_an_error_names_argument_value_and_expectation():
    with pytest.raises(m.MxattnError, match="no_such_recipe.*fp8") as raised:
        Attention((4, 1, 64), (4, 1, 64), [0, 4], recipe="no_such_recipe")
    assert raised.value.status == m.INVALID_ARGUMENT
