"""The ctypes binding says the same as the header."""

import ctypes

import mxattn_capi as m
import pytest


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


def test_every_recipe_has_a_version_and_a_form():
    recipes = m.recipes()
    assert {"fp8", "mxfp8", "mxfp8_token", "mxfp8_paper", "bf16", "fp8_tensor"} <= set(recipes)
    for info in recipes.values():
        assert info["version"] >= 1 and info["form"] in ("folded", "literal", "plain")
    assert not recipes["fp8"]["control"] and recipes["fp8"]["strictly_causal"]


def test_an_error_names_argument_value_and_expectation():
    with pytest.raises(m.MxattnError, match="no_such_recipe.*fp8") as raised:
        m.Attention((4, 1, 64), (4, 1, 64), [0, 4], recipe="no_such_recipe")
    assert raised.value.status == m.INVALID_ARGUMENT
