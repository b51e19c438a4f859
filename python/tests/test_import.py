"""What importing the package needs and does, each in a fresh process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import mxattn_capi

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
