"""The command `mxattn`: its JSON, its exit statuses, and what it says of bad files."""

from __future__ import annotations

import json
import os
import resource
import struct
import subprocess
from pathlib import Path

import mxattn_capi
import numpy as np
import pytest

# Of the same build as the library under test.
MXATTN = Path(mxattn_capi.library_path()).parents[1] / "bin" / "mxattn"
PARTS = ("q", "k", "v", "do")
OUTPUTS = {"o", "dq", "dk", "dv"}


def mxattn(*arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [MXATTN, *arguments], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done


def bf16(x: np.ndarray) -> np.ndarray:
    """Bits, truncated: any BF16 value will do."""
    return (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def capture(lengths=(20, 0, 33), heads=2, dim=32, layers=("a",)) -> dict[str, tuple[str, object]]:
    """Tensors by name, as (dtype, array)."""
    rng = np.random.default_rng(0)
    total = sum(lengths)
    tensors: dict[str, tuple[str, object]] = {
        "cu_seqlens": ("I32", np.cumsum([0, *lengths]).astype(np.int32))
    }
    for layer in layers:
        for part in PARTS:
            tensors[f"{layer}.{part}"] = ("BF16", bf16(rng.standard_normal((total, heads, dim))))
    return tensors


def file_bytes(tensors: dict[str, tuple[str, object]], change=lambda header: None) -> bytes:
    header: dict[str, dict] = {}
    data = b""
    for name, (dtype, array) in tensors.items():
        raw = array.tobytes()
        header[name] = {
            "dtype": dtype,
            "shape": list(array.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    change(header)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def test_info_lists_what_there_is():
    info = json.loads(mxattn("info", "--json").stdout)
    assert set(info) >= {"version", "backends", "simd_targets", "recipes", "threads", "devices"}
    assert isinstance(info["devices"], list) and info["threads"] >= 1
    recipes = {r["name"]: r for r in info["recipes"]}
    assert recipes["fp8"]["form"] == "folded" and recipes["fp8"]["strictly_causal"]
    assert recipes["fp8_tensor"]["control"]
    cuda = next(b for b in info["backends"] if b["name"] == "cuda")
    assert cuda["available"] or cuda["reason"]
    assert mxattn("--version").stdout.strip() == info["version"]
    text = mxattn("info").stdout
    assert all(name in text for name in recipes)


def test_demo_shows_what_it_is_for():
    arguments = ("demo", "--json", "--recipe", "fp8", "mxfp8", "fp8_integer_ref")
    done = mxattn(*arguments)
    assert done.stderr == ""
    report = json.loads(done.stdout)
    cases = {case["recipe"]: case for case in report["cases"]}
    assert set(cases) == {"fp8", "mxfp8", "fp8_integer_ref"}
    for case in cases.values():
        assert case["layer"] == "layer0" and case["head"] == 0 and case["seconds"] > 0
        assert set(case["cos"]) == set(case["rel"]) == OUTPUTS
    assert min(cases["fp8"]["cos"].values()) >= 0.99
    # The fall that docs/numerics.md states for this head.
    assert cases["fp8_integer_ref"]["cos"]["dq"] == pytest.approx(0.903, abs=0.001)
    assert cases["fp8_integer_ref"]["cos"]["dk"] == pytest.approx(0.838, abs=0.001)
    assert report["causality"]["fp8"]["rows_changed"] == 0
    assert report["causality"]["fp8"]["verdict"] == "strict"
    assert report["causality"]["mxfp8"]["rows_changed"] > 0
    assert report["causality"]["mxfp8"]["verdict"] == "leaks"


def test_run_reports_every_layer_and_head(tmp_path):
    path = tmp_path / "two.safetensors"
    path.write_bytes(file_bytes(capture(layers=("a", "b.c"))))
    report = json.loads(
        mxattn("run", "--capture", str(path), "--recipe", "bf16", "fp8", "--json").stdout
    )
    assert [(c["layer"], c["head"], c["recipe"]) for c in report["cases"]] == [
        (layer, head, recipe)
        for layer in ("a", "b.c")
        for head in (0, 1)
        for recipe in ("bf16", "fp8")
    ]
    assert all(c["capture"] == "two" for c in report["cases"])
    assert min(c["cos"]["dq"] for c in report["cases"]) > 0.99
    text = mxattn("run", "--capture", str(path), "--recipe", "fp8").stdout
    assert "b.c, head 1" in text and "worst of all heads" in text


def test_run_takes_every_backend_and_leaves_out_what_it_cannot_run(tmp_path):
    path = tmp_path / "one.safetensors"
    path.write_bytes(file_bytes(capture()))
    for backend in ("cpu", "cpu_exact", "cpu_h200"):
        report = json.loads(
            mxattn("run", "--capture", str(path), "--backend", backend, "--json").stdout
        )
        recipes = {c["recipe"] for c in report["cases"]}
        assert "fp8" in recipes and all(c["backend"] == backend for c in report["cases"])
        if backend == "cpu":
            assert "fp8_tensor" not in recipes
            assert any(note.startswith("fp8_tensor left out: ") for note in report["notes"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "A command is required"),
        (("dance",), "dance"),
        (("demo", "--recipe", "fp7"), "expected one of fp8, mxfp8"),
        (("demo", "--backend", "tpu"), "expected one of auto, cpu, cpu_exact"),
        (("demo", "--backend", "cuda"), "cuda cannot run the problem"),
        (("demo", "--recipe", "fp8_tensor", "--backend", "cpu"), "cpu cannot run the problem"),
        (("demo", "--threads", "-1"), "threads = -1: expected 0"),
        (("run",), "--capture is required"),
        (("run", "--capture", "/nonexistent.safetensors"), "cannot be opened"),
    ],
)
def test_bad_usage_is_status_2_and_says_why(arguments, message):
    done = mxattn(*arguments, status=2)
    assert message in done.stderr and done.stdout == ""


def without(name):
    return lambda tensors: tensors.pop(name)


def put(name, dtype, array):
    return lambda tensors: tensors.update({name: (dtype, array)})


def poison(bits):
    def change(tensors):
        tensors["a.v"][1][7, 1, 5] = bits

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("cu_seqlens"), "cu_seqlens: missing"),
        (without("a.do"), "a.do: missing"),
        (without("a.q"), "a.q: missing"),
        (put("a.k", "F32", np.zeros((53, 2, 32), np.float32)), "a.k = F32 (53, 2, 32): expected"),
        (put("a.v", "BF16", np.zeros((53, 64), np.uint16)), "a.v = BF16 (53, 64): expected BF16"),
        (put("a.v", "BF16", np.zeros((53, 1, 32), np.uint16)), "expected BF16 (53, 2, 32)"),
        (put("a.do", "BF16", np.zeros((52, 2, 32), np.uint16)), "expected BF16 (53, 2, 32)"),
        (put("cu_seqlens", "I32", np.array([0, 54], np.int32)), "expected at most 53 tokens"),
        (put("cu_seqlens", "I32", np.array([1, 53], np.int32)), "cu_seqlens: does not start at 0"),
        (put("cu_seqlens", "I32", np.array([0, 9, 8], np.int32)), "decreases from 9 to 8"),
        (put("cu_seqlens", "I64", np.array([0, 53])), "cu_seqlens = I64 (2): expected I32"),
        (put("cu_seqlens", "I32", np.zeros(0, np.int32)), "cu_seqlens = I32 (0): expected I32"),
        (poison(0x7FC0), "a.v: NaN or Inf at token 7, head 1, channel 5"),
        (poison(0xFF80), "a.v: NaN or Inf at token 7, head 1, channel 5"),
    ],
)
def test_bad_tensors_are_named(tmp_path, change, message):
    tensors = capture()
    change(tensors)
    path = tmp_path / "bad.safetensors"
    path.write_bytes(file_bytes(tensors))
    done = mxattn("run", "--capture", str(path), "--json", status=2)
    assert f"{path}: " in done.stderr and message in done.stderr and done.stdout == ""


def test_a_later_layer_that_cannot_run_is_named_at_once(tmp_path):
    tensors = capture()
    for part in PARTS:
        heads = 3 if part in ("q", "do") else 2
        tensors[f"b.{part}"] = ("BF16", np.zeros((53, heads, 32), np.uint16))
    path = tmp_path / "two.safetensors"
    path.write_bytes(file_bytes(tensors))
    message = "b: heads_q = 3: expected a multiple of heads_k = 2"
    assert message in mxattn("run", "--capture", str(path), status=2).stderr
    assert message in mxattn("run", "--capture", str(path), "--recipe", "fp8", status=2).stderr


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda raw: b"", "header: truncated"),
        (lambda raw: raw[:7], "header: truncated"),
        (lambda raw: raw[:50], "truncated, or no safetensors file"),
        (lambda raw: raw[:-1], "the file is truncated"),
        (lambda raw: b"\xff" * 8 + raw[8:], "truncated, or no safetensors file"),
        (lambda raw: raw[:8] + b"?" + raw[9:], "header: "),
    ],
)
def test_broken_files_are_refused(tmp_path, spoil, message):
    path = tmp_path / "broken.safetensors"
    path.write_bytes(spoil(file_bytes(capture())))
    assert message in mxattn("run", "--capture", str(path), status=2).stderr


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h: h["a.k"].update(data_offsets=h["a.q"]["data_offsets"]), "overlap"),
        (lambda h: h["a.k"].update(data_offsets=[4, 2]), "a.k: data_offsets [4, 2] are no range"),
        (lambda h: h["a.k"].update(data_offsets=[-4, 2]), "are no range"),
        (lambda h: h["a.k"].update(shape=[53, 2, 31]), "dtype and shape need 6572"),
        (lambda h: h["a.k"].update(shape=[53, -2, 32]), "a.k: negative dimension -2"),
        (lambda h: h["a.k"].update(shape=[2**40, 2**40, 1]), "a shape too large"),
        (lambda h: h["a.k"].update(dtype="Q5"), "a.k: unknown dtype Q5"),
        (lambda h: h["a.k"].pop("shape"), "a.k: "),
        (lambda h: h.update({"a.k": 3}), "a.k: "),
        (lambda h: h["a.k"].update(shape=[53.9, 2, 32]), "a.k: shape: 53.9: expected"),
        (lambda h: h["a.k"].update(shape=[1e300, 2, 32]), "expected a list of 64-bit integers"),
        (lambda h: h["a.k"].update(shape=[2**63, 2, 32]), "expected a list of 64-bit integers"),
        (lambda h: h["cu_seqlens"].update(shape=4), "cu_seqlens: shape: 4: expected a list"),
        (lambda h: h["cu_seqlens"].update(data_offsets=[0, 16, 99]), "[0, 16, 99] are no range"),
        (lambda h: h["cu_seqlens"].update(data_offsets=[0.5, 16.5]), "expected a list of 64-bit"),
    ],
)
def test_broken_headers_are_refused(tmp_path, change, message):
    path = tmp_path / "header.safetensors"
    path.write_bytes(file_bytes(capture(), change))
    assert message in mxattn("run", "--capture", str(path), status=2).stderr


@pytest.mark.parametrize("field", ["shape", "data_offsets", "dtype"])
def test_a_header_nested_without_end_is_refused(tmp_path, field):
    path = tmp_path / "deep.safetensors"
    raw = file_bytes(capture(), lambda header: header["a.k"].update({field: "HERE"}))
    length = struct.unpack("<Q", raw[:8])[0]
    text = raw[8 : 8 + length].replace(b'"HERE"', b"[" * 200000 + b"]" * 200000)
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])
    assert "a.k: " in mxattn("run", "--capture", str(path), status=2).stderr


@pytest.mark.parametrize("text", [b"[1, 2]", b"5", b"null"])
def test_a_header_that_is_no_object_is_refused(tmp_path, text):
    path = tmp_path / "header.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    assert "header: a JSON" in mxattn("run", "--capture", str(path), status=2).stderr


def test_messages_stay_short_whatever_a_header_holds(tmp_path):
    text = b'{"' + b"a" * 100000
    path = tmp_path / "long.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    done = mxattn("run", "--capture", str(path), status=2)
    assert "header: " in done.stderr and len(done.stderr) < len(str(path)) + 1000


def test_a_tensor_that_is_there_twice_is_refused(tmp_path):
    raw = file_bytes(capture())
    length = struct.unpack("<Q", raw[:8])[0]
    first = b'{"a.q": {"dtype": "BF16", "shape": [0], "data_offsets": [0, 0]}, '
    text = first + raw[9 : 8 + length]
    path = tmp_path / "twice.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])
    assert "header: a.q is there twice" in mxattn("run", "--capture", str(path), status=2).stderr


def test_sizes_beyond_32_bits_are_refused(tmp_path):
    parts = {f"a.{part}": ("BF16", np.zeros((0, 2, 32), np.uint16)) for part in PARTS}
    tensors = {"cu_seqlens": ("I32", np.zeros(2, np.int32)), **parts}

    def widen(header):
        for name in parts:
            header[name]["shape"] = [0, 2**32 + 1, 2**32 + 16]

    path = tmp_path / "wide.safetensors"
    path.write_bytes(file_bytes(tensors, widen))
    assert "expected heads and dim from 1" in mxattn("run", "--capture", str(path), status=2).stderr


def test_a_folder_is_no_capture(tmp_path):
    done = mxattn("run", "--capture", str(tmp_path), status=2)
    assert f"{tmp_path}: a folder" in done.stderr


def test_a_file_beyond_memory_is_named(tmp_path):
    path = tmp_path / "large.safetensors"
    with path.open("wb") as file:
        file.truncate(16 << 30)  # takes no space
    done = subprocess.run(
        [MXATTN, "run", "--capture", str(path)],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30)),
    )
    assert done.returncode == 2
    assert f"{path}: {16 << 30} bytes: out of memory" in done.stderr


def test_a_file_name_may_hold_any_byte(tmp_path):
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.safetensors"))
    path.write_bytes(file_bytes(capture()))
    report = json.loads(mxattn("run", "--capture", str(path), "--recipe", "fp8", "--json").stdout)
    assert report["cases"][0]["capture"] == "\ufffd"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_output_that_cannot_be_written_is_status_2():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [MXATTN, "info"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 2 and "standard output: cannot write" in done.stderr
