"""The command `mxattn plan`: its JSON, its picture, and what it says of bad input."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET

import pytest
from test_cli import mxattn

SKEWED = ("plan", "--lengths", "8192,256x224", "--workers", "132", "--mask", "causal")


def test_json_compares_the_orders():
    done = mxattn(*SKEWED, "--json")
    assert done.stderr == ""
    report = json.loads(done.stdout)
    # The table of docs/scheduling.md.
    figures = {o["name"]: round(o["makespan_over_bound"], 3) for o in report["orders"]}
    assert figures == {
        "input": 1.190,
        "long-first": 1.241,
        "sorted-round-robin": 1.199,
        "serpentine": 1.010,
        "sorted-dynamic": 1.004,
    }
    assert report["chosen"] == "sorted-dynamic"
    assert report["reason"].startswith("sorted-dynamic ends at 1.004")
    assert report["items"] == 4096 and report["documents"] == 225 and report["tokens"] == 65536


def test_text_names_the_same_choice():
    text = mxattn(*SKEWED).stdout
    row, reason = (line for line in text.splitlines() if line.startswith("* "))
    assert row.split()[1:4] == ["sorted-dynamic", "335", "1.004"]
    assert reason.startswith("* sorted-dynamic ends at 1.004 of the lower bound")


def test_picture_is_well_formed_and_complete(tmp_path):
    path = tmp_path / "gantt.svg"
    mxattn("plan", "--lengths", "300x3,0", "--heads", "2", "--workers", "4", "--svg", str(path))
    space = "{http://www.w3.org/2000/svg}"
    root = ET.parse(path).getroot()
    assert root.tag == space + "svg"
    bars = [p for p in root.iter(space + "path") if p.find(space + "title") is not None]
    names = {p.find(space + "title").text for p in bars}
    assert names == {f"document {d}: 300 tokens" for d in range(3)}  # nothing for the empty one
    # Five orders, each with two items of each document and head.
    assert sum(p.get("d").count("z") for p in bars) == 5 * 3 * 2 * 2


@pytest.mark.parametrize("arguments", [("--pass", "dkv"), ("--heads", "8", "--heads-k", "2"), ()])
def test_masks_and_passes(arguments):
    costs = {}
    for mask in ("full", "causal", "window:128", "window:0"):
        done = mxattn("plan", "--lengths", "1024,0,1", "--mask", mask, "--json", *arguments)
        costs[mask] = json.loads(done.stdout)["total_cost"]
    assert costs["full"] > costs["causal"] > costs["window:128"] > costs["window:0"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--lengths", "8192,b"), '--lengths, entry 2 "b": expected LENGTH or LENGTHxCOUNT'),
        (("--lengths", "1", "--k-lengths", "1,2"), "--k-lengths: 2 documents: expected 1"),
        (("--lengths", "1", "--mask", "triangle"), '--mask "triangle": expected causal, full'),
        (("--lengths", "1", "--workers", "0"), "workers = 0: expected at least 1"),
        (("--lengths", "1", "--tile", "100"), "tile = 100: expected 128, 192 or 256 queries"),
        (("--lengths", "1", "--heads", "3", "--heads-k", "2"), "expected a divisor of heads_q = 3"),
        (("--lengths", "1", "--heads-k", "-5"), "heads_k = -5: expected a divisor of heads_q = 16"),
        (("--lengths", "1", "--tile", "-5"), "tile = -5: expected 128, 192 or 256 queries"),
        (("--lengths", "1x16777216", "--heads", "2"), "33554432 items: expected at most 16777216"),
        (("--lengths", "1", "--svg", "/nowhere/x.svg"), "--svg /nowhere/x.svg: cannot write"),
        ((), "--lengths is required"),
    ],
)
def test_bad_input(arguments, message):
    done = mxattn("plan", *arguments, status=2)
    assert done.stdout == ""
    assert message in done.stderr


def test_more_workers_than_items_cost_nothing():
    done = mxattn("plan", "--lengths", "300", "--workers", "2147483647", "--json")
    report = json.loads(done.stdout)
    assert report["workers"] == 2147483647
    assert {o["makespan"] for o in report["orders"]} == {report["largest_cost"]}
