"""The GPU benchmark without a GPU: workers are small programs that answer as told."""

import json
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"
sys.path[:0] = [str(BENCH), str(BENCH / "gpu")]

import bench_gpu  # noqa: E402
import report  # noqa: E402
from worker import Worker  # noqa: E402

PLAIN = "1x16384,16x4096,8192+224x256"
# Answers every request; `ms` is the time of a call, `at` the workload where `deed` is done.
PROGRAM = """
import json, sys, time
ms, cosine, at, deed = json.loads(sys.argv[1])
def answer(message): print(json.dumps(message), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    op = request["op"]
    if op == "load":
        answer({"versions": {}})
    elif op == "prepare":
        if request["workload"]["name"] == at and deed == "refuse":
            answer({"error": "refused: not today"})
        elif request["workload"]["name"] == at and deed == "crash":
            sys.exit("out of luck")
        elif request["workload"]["name"] == at and deed == "hang":
            time.sleep(60)
        else:
            answer({"cosine": cosine, "note": "", "facts": {}})
    elif op == "measure":
        times = {"forward": ms / 4, "backward": ms * 3 / 4, "call": ms}
        answer({"samples": {p: [t] * request["repeats"] for p, t in times.items()}, "equal": True})
    else:
        answer({})
"""


@pytest.fixture
def bench(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_gpu, "PREPARE_SECONDS", 1.0)
    started = []

    def run(behaviours, *arguments, workloads=PLAIN):
        """The JSON of a run; behaviours: {impl: (ms, cosine, workload, deed)}."""

        def make_worker(impl):
            started.append(impl)
            told = json.dumps(behaviours[impl])
            return Worker(impl, [sys.executable, "-c", PROGRAM, told])

        target = tmp_path / "run.json"
        options = ["--json", str(target), "--impls", ",".join(behaviours)]
        bench_gpu.main([*options, "--workloads", workloads, *arguments], make_worker)
        return json.loads(target.read_text())

    run.started = started
    return run


def measured(result, impl):
    """Workloads with rows of this run."""
    rows = [r for r in result["rows"] if not r.get("another_run", False)]
    return {r["workload"] for r in rows if r["impl"] == impl}


def test_rows_hold_every_piece_with_rate_and_spread(bench):
    result = bench({"fp8": (10.0, 0.99, "", "")}, "--repeats", "3", workloads="1x16384")
    rows = [r for r in result["rows"] if r["impl"] == "fp8"]
    assert [r["piece"] for r in rows] == ["forward", "backward", "call"]
    call = rows[-1]
    assert (call["ms"], call["repeats"], call["bits_equal_runs"]) == (10.0, 6, True)
    # 4 S^2 d heads / 2, and 3.5 times that for both directions.
    assert call["tflops"] == pytest.approx(3.5 * 2 * 16384**2 * 128 * 16 / 10.0 / 1e9, rel=1e-4)


def test_ratio_is_that_to_the_fastest_peer_of_the_same_run(bench):
    times = {"fp8": 2.0, "cudnn_bf16": 3.0, "flash_bf16": 2.5, "cudnn_fp8_casts": 2.2}
    told = {name: (ms, 0.99, "", "") for name, ms in times.items()}
    result = bench(told, workloads="32x2048")
    found = result["ratios"]["fp8"]["workloads"]["32x2048"]
    assert found["call_over_bf16"] == {"x": 1.25, "peer": "flash_bf16"}
    assert found["call_over_any_with_casts"] == {"x": 1.1, "peer": "cudnn_fp8_casts"}


def test_a_peer_that_is_missing_is_quoted_and_marked(bench):
    result = bench({"fp8": (5.0, 0.99, "", "")}, workloads="16x4096")
    quoted = [r for r in result["rows"] if r["impl"] == "flash_attn_4"]
    assert quoted and all(r["another_run"] for r in quoted)
    found = result["ratios"]["fp8"]["workloads"]["16x4096"]["call_over_bf16"]
    assert found["peer"] == "flash_attn_4*"


def test_one_that_refuses_goes_on_with_the_next(bench):
    told = {"fp8": (1.0, 0.99, "", ""), "cudnn_bf16": (2.0, 0.99, "16x4096", "refuse")}
    result = bench(told)
    assert measured(result, "cudnn_bf16") == {"1x16384", "8192+224x256"}
    refusal = {"workload": "16x4096", "impl": "cudnn_bf16", "reason": "refused: not today"}
    assert refusal in result["not_run"]


@pytest.mark.parametrize(
    ("deed", "reason"), [("crash", "out of luck"), ("hang", "no answer in time")]
)
def test_one_that_is_lost_starts_again_and_harms_no_other(bench, deed, reason):
    told = {"fp8": (1.0, 0.99, "", ""), "cudnn_bf16": (2.0, 0.99, "16x4096", deed)}
    result = bench(told)
    assert bench.started.count("cudnn_bf16") == 2
    assert measured(result, "fp8") == set(PLAIN.split(","))
    assert measured(result, "cudnn_bf16") == {"1x16384", "8192+224x256"}
    assert [e["workload"] for e in result["not_run"] if reason in e["reason"]] == ["16x4096"]


def test_without_its_recipe_a_run_ends(bench, monkeypatch):
    monkeypatch.setattr(bench_gpu, "RESTARTS", 0)
    told = {"fp8": (1.0, 0.99, "1x16384", "crash"), "cudnn_bf16": (2.0, 0.99, "", "")}
    result = bench(told)
    assert measured(result, "cudnn_bf16") == {"1x16384"}


@pytest.mark.parametrize(
    ("ms", "cosine", "doubt"),
    [(1e-3, 0.99, "IMPOSSIBLE"), (10.0, 0.5, "WRONG"), (10.0, float("nan"), "WRONG")],
)
def test_figures_beyond_belief_are_marked_and_enter_no_ratio(bench, ms, cosine, doubt):
    told = {"fp8": (9.0, 0.99, "", ""), "cudnn_bf16": (ms, cosine, "", "")}
    result = bench(told, workloads="1x16384 full")
    rows = [r for r in result["rows"] if r["impl"] == "cudnn_bf16"]
    assert rows and all(doubt in r["doubt"] for r in rows)
    assert result["ratios"]["fp8"]["workloads"]["1x16384 full"] == {}


def test_a_budget_ends_the_run_with_what_there_is(bench):
    told = {"fp8": (1.0, 0.99, "16x4096", "hang")}
    result = bench(told, "--budget", str(bench_gpu.LEFT_AT_END + 1.0), workloads="1x16384,16x4096")
    assert measured(result, "fp8") == {"1x16384"}


def test_visible_pairs_of_a_window_are_counted_one_by_one():
    window = report.BY_NAME["1x16384 window 1024"]
    pairs = sum(min(i + 1, 1024) for i in range(16384))
    assert window.forward_flops() == 4 * 128 * 16 * pairs
