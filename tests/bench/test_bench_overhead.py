"""The overhead of a call from Python: what it reports, and that it is small."""

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
sys.path[:0] = [str(Path(__file__).resolve().parents[2] / "bench")]

import bench_overhead  # noqa: E402
from mxattn import capi  # noqa: E402


def test_the_time_in_python_is_small_and_the_library_is_put_back(tmp_path):
    target, library = tmp_path / "overhead.json", capi.lib
    # Three times what was measured: a slow machine passes, a check for each byte does not.
    arguments = ["--device", "cpu", "--calls", "100", "--python-only", "--json", str(target)]
    assert bench_overhead.main([*arguments, "--limit", "180"]) == 0
    assert capi.lib is library
    rows = {row["case"]: row for row in json.loads(target.read_text())["rows"]}
    assert {"forward", "forward, gradient", "forward + backward", "autograd"} <= rows.keys()
    for name, row in rows.items():
        assert 0 < row["python_us"] < 600, name
    assert rows["forward"]["python_us"] < rows["forward + backward"]["python_us"]
    assert bench_overhead.main([*arguments, "--limit", "0.1"]) == 1
