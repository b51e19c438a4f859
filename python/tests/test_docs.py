"""The examples of docs/python.md run, and its table names every public function."""

from __future__ import annotations

import re
from pathlib import Path

import mxattn
import pytest

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "python.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", TEXT, re.S)


@pytest.mark.parametrize("code", EXAMPLES, ids=["torch", "numpy"])
def test_example_runs(code):
    names: dict = {}
    exec(compile(code, "docs/python.md", "exec"), names)
    assert names["out"].shape == names.get("x", names.get("q")).shape


def test_every_function_is_in_the_table():
    functions = [name for name in mxattn.__all__ if name[0].islower()]
    assert len(functions) > 10
    for name in functions:
        assert f"| `{name}(" in TEXT, name
