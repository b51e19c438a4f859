"""What importing the package needs and does, each in a fresh process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import mxattn_capi
import pytest

PACKAGE = Path(__file__).resolve().parents[1]


def run(code: str, **environment) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": str(PACKAGE)} | environment
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, text=True, capture_output=True, timeout=120
    )


def test_import_needs_no_torch():
    code = "import sys; sys.modules['torch'] = None; import mxattn; print(mxattn.__version__)"
    result = run(code)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == mxattn_capi.lib.mxattn_version().decode()


def test_import_does_not_import_torch():
    result = run("import mxattn, sys; print('torch' in sys.modules)")
    assert result.stdout.strip() == "False", result.stderr


def test_a_missing_library_is_an_import_error_that_says_what_to_do():
    result = run("import mxattn", MXATTN_LIBRARY="/nowhere/libmxattn.so")
    assert "ImportError: /nowhere/libmxattn.so" in result.stderr
    assert "MXATTN_LIBRARY" in result.stderr


def test_integrations_import_no_host():
    hosts = ("torch", "transformers", "torchtitan", "megatron")
    code = f"import mxattn.integrations, sys; print([x for x in {hosts} if x in sys.modules])"
    result = run(code)
    assert result.stdout.strip() == "[]", result.stderr
    # That of transformers imports it when a name is registered; the others say what is missing.
    code = "import mxattn.integrations.transformers, sys; print('transformers' in sys.modules)"
    assert run(code).stdout.strip() == "False"


@pytest.mark.parametrize(
    ("host", "call"),
    [
        ("transformers", "import mxattn.integrations.transformers as x; x.register()"),
        ("torchtitan", "import mxattn.integrations.torchtitan"),
        ("megatron", "import mxattn.integrations.megatron"),
    ],
)
def test_a_missing_host_is_an_import_error_that_names_it(host, call):
    result = run(f"import sys; sys.modules[{host!r}] = None; {call}")
    assert f"ImportError: mxattn.integrations.{host} needs " in result.stderr
