"""Training call on a GPU, piece by piece, beside its peers in the same run.

usage: ./dev bench gpu [--quick] [--json FILE] [--budget SECONDS] [--workloads A,B] [--impls A,B]

Packed, dense, GQA, full and window workloads of gpu/workloads.py on one device. Every
implementation runs in a process of its own and they take turns, two rounds of repeats each; shown
are medians. Before each timed sequence the L2 is flushed and the device waits until the host has
enqueued all of it: times are those of the device (FlashAttention 3: see gpu/flash3_case.py).
A recipe's call is quantise + forward + backward from BF16 to BF16, enqueued as a model would, with
work lists made beforehand; their building is reported apart. The cosine is the worst over heads and
o, dq, dk, dv, against PyTorch in BF16.
FLOPs: 4 d for every visible pair (causal: half the square) and head, 2.5 times that for the
backward.
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE / "gpu"), str(HERE)]

import impls  # noqa: E402
import report  # noqa: E402
from rows import make_row, write_json  # noqa: E402
from worker import Worker, WorkerError, to_message  # noqa: E402
from workloads import BY_NAME, IN_ORDER, QUICK, Workload  # noqa: E402

ROUNDS = 2
LOAD_SECONDS = 60.0  # until then all wait for one that imports
LATE_SECONDS = 240.0  # for one that compiles
PREPARE_SECONDS = 60.0
MEASURE_SECONDS = 60.0
LEFT_AT_END = 3.0  # of the budget, for the report
RESTARTS = 1


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def card() -> dict:
    """What nvidia-smi says of the device now; empty where there is none."""
    fields = ("name", "driver_version", "clocks.sm", "clocks.mem", "temperature.gpu", "power.draw")
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader", "--id=0"]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(fields, (x.strip() for x in run.stdout.split(",")), strict=False))


class Run:
    def __init__(self, options, make_worker=Worker):
        self.options = options
        self.make_worker = make_worker
        self.begin = time.monotonic()
        self.workloads: list[Workload] = options.workloads
        self.workers: dict[str, Worker] = {}
        self.loading: dict[str, float] = {}  # and since when
        self.restarts = dict.fromkeys(options.impls, RESTARTS)
        self.todo = {impl: list(self.workloads) for impl in options.impls}
        self.rows: list[dict] = []
        self.facts: list[dict] = []
        self.refused: list[dict] = []
        self.machine = {
            "system": platform.platform(),
            "clocks_before": card(),
            "clocks_during": {},  # right after the last repeat of a workload
            "versions": {},
            "repeats": ROUNDS * options.repeats,
            "rounds": ROUNDS,
        }
        for impl in options.impls:
            self.start(impl)

    # ---- time -----------------------------------------------------------------------------------

    def left(self) -> float:
        spent = time.monotonic() - self.begin
        return self.options.budget - spent - LEFT_AT_END if self.options.budget else 1e9

    def within(self, seconds: float) -> float:
        return min(seconds, max(0.0, self.left()))

    # ---- workers --------------------------------------------------------------------------------

    def start(self, impl: str) -> None:
        worker = self.make_worker(impl)
        worker.send("load", workloads=[to_message(w) for w in self.todo[impl]])
        self.workers[impl] = worker
        self.loading[impl] = time.monotonic()

    def lost(self, impl: str, workload: str, error: WorkerError) -> None:
        """Notes why an implementation has no figures, and starts it again if it is gone."""
        say(f"  {workload}: {impl}: {error}")
        self.refused.append({"workload": workload, "impl": impl, "reason": str(error)})
        if not error.dead:
            return
        self.workers.pop(impl).end()
        self.loading.pop(impl, None)
        if workload != "all" and self.restarts[impl] > 0 and self.todo[impl] and self.left() > 0:
            self.restarts[impl] -= 1
            self.start(impl)

    def loaded(self, patience: float) -> None:
        """Takes in those that have loaded, for at most this long."""
        until = time.monotonic() + self.within(patience)
        while self.loading:
            for impl in list(self.loading):
                if not self.workers[impl].ready():
                    continue
                since = self.loading.pop(impl)
                try:
                    versions = self.workers[impl].receive(1.0)["versions"]
                    say(f"  {impl}: loaded after {time.monotonic() - since:.0f} s, {versions}")
                    self.machine["versions"] |= versions
                except WorkerError as error:
                    self.lost(impl, "all", error)
            if all(impl in impls.COMPILING for impl in self.loading) and patience <= LOAD_SECONDS:
                break
            if time.monotonic() >= until:
                break
            time.sleep(0.02)

    def end(self) -> None:
        for worker in self.workers.values():
            worker.end()

    # ---- measuring ------------------------------------------------------------------------------

    def ready(self, impl: str, w: Workload, last_pass: bool) -> bool:
        if impl in self.loading or w not in self.todo[impl]:
            return False
        # What it still has to compile would keep all others waiting.
        return last_pass or w.plain or impl not in impls.COMPILING

    def pointless(self) -> bool:
        """Whether recipes are to be measured and there is none any more."""
        wanted = [impl for impl in self.options.impls if impl in impls.RECIPES]
        return bool(wanted) and not any(impl in self.workers for impl in wanted)

    def measure(self, w: Workload, last_pass: bool) -> None:
        group = [impl for impl in self.workers if self.ready(impl, w, last_pass)]
        if not group:
            return
        for impl in group:
            self.todo[impl].remove(w)
            self.workers[impl].send("prepare", workload=to_message(w))
        prepared: dict[str, dict] = {}
        until = time.monotonic() + self.within(PREPARE_SECONDS)
        for impl in group:
            try:
                prepared[impl] = self.workers[impl].receive(max(0.0, until - time.monotonic()))
            except WorkerError as error:
                self.lost(impl, w.name, error)
        samples: dict[str, dict[str, list[float]]] = {impl: {} for impl in prepared}
        equal = dict.fromkeys(prepared, True)
        for _ in range(ROUNDS):
            for impl in list(samples):
                try:
                    seconds = self.within(MEASURE_SECONDS)
                    answer = self.workers[impl].ask("measure", seconds,
                                                    repeats=self.options.repeats)  # fmt: skip
                except WorkerError as error:
                    self.lost(impl, w.name, error)
                    del samples[impl]
                    continue
                equal[impl] &= answer["equal"]
                for piece, values in answer["samples"].items():
                    samples[impl].setdefault(piece, []).extend(values)
        self.machine["clocks_during"][w.name] = card()
        for impl, pieces in samples.items():
            self.workers[impl].send("finish")
            self.keep(w, impl, prepared[impl], pieces, equal[impl])
        for impl in samples:
            try:
                self.workers[impl].receive(self.within(MEASURE_SECONDS))
            except WorkerError as error:
                self.lost(impl, w.name, error)
        self.show(w)

    def keep(self, w: Workload, impl: str, prepared: dict, pieces: dict, equal: bool) -> None:
        cosine, facts = prepared["cosine"], prepared["facts"]
        for piece, values in pieces.items():
            row = make_row(w.name, piece, impl, values, w.forward_flops(), equal)
            report.mark_doubtful(row, cosine)
            # NaN is no JSON.
            row["cosine"] = cosine if cosine == cosine else None
            if prepared["note"]:
                row["note"] = prepared["note"]
            if piece == "quantise":
                row["gbytes_per_s"] = report.quantise_gbytes(facts, row)
            self.rows.append(row)
        if facts:
            self.facts.append({"workload": w.name, "impl": impl, **facts})

    def show(self, w: Workload) -> None:
        """One line now, and the JSON so far: the run may not reach its end."""
        table = report.Table(self.rows)
        calls = [table.at.get((w.name, impl, "call")) for impl in self.options.impls]
        text = ", ".join(f"{r['impl']} {r['ms']:.3f}" for r in calls if r)
        say(f"{time.monotonic() - self.begin:5.0f} s  {w.name}: call ms: {text}")
        self.write()

    def run(self) -> None:
        self.loaded(LOAD_SECONDS)
        # The second pass is for those that came late or came back.
        for last_pass in (False, True):
            for w in self.workloads:
                if self.left() <= 0 or self.pointless():
                    return
                self.loaded(0.0)
                self.measure(w, last_pass)
            if any(self.todo[impl] for impl in self.loading):
                self.loaded(LATE_SECONDS)

    # ---- results --------------------------------------------------------------------------------

    def report(self) -> dict:
        measured = {(row["workload"], row["impl"]) for row in self.rows}
        wanted = {w.name for w in self.workloads}
        quoted = [
            row
            for row in report.quoted_rows(HERE / "gpu" / "peers_h200.json", measured)
            if row["workload"] in wanted
        ]
        rows = self.rows + quoted
        return {
            "machine": self.machine,
            "rows": rows,
            "ratios": report.ratios(report.Table(rows)),
            "plans": self.facts,
            "not_run": self.refused + self.missing(),
        }

    def missing(self) -> list[dict]:
        unloadable = {entry["impl"] for entry in self.refused if entry["workload"] == "all"}
        return [
            {
                "workload": w.name,
                "impl": impl,
                "reason": "not reached" if impl in self.workers else "its process is gone",
            }
            for impl, left in self.todo.items()
            if impl not in unloadable
            for w in left
        ]

    def write(self) -> None:
        if self.options.json and self.options.json != "-":
            write_json(self.options.json, self.report())

    def print(self, result: dict) -> None:
        table = report.Table(result["rows"])
        say("")
        say(report.head())
        for name in table.workloads():
            say(report.workload_title(BY_NAME[name]))
            for line in table.lines(name):
                say(line)
        for line in report.ratio_lines(result["ratios"]):
            say(line)
        for fact in result["plans"]:
            say(f"  {fact['workload']}: {fact['impl']}: work lists {fact['plan_ms']:.3f} ms,"
                f" state and workspace {fact['extra_bytes'] / 2**20:.0f} MiB")  # fmt: skip
        reasons: dict[tuple[str, str], list[str]] = {}
        for entry in result["not_run"]:
            key = (entry["impl"], entry["reason"])
            reasons.setdefault(key, []).append(entry["workload"])
        for (impl, reason), workloads in reasons.items():
            say(f"  not run: {impl}: {', '.join(workloads)}: {reason}")
        say(f"  before {self.machine['clocks_before']}")
        say(f"  after  {self.machine['clocks_after']}")


def names(known) -> type:
    def parse(text: str) -> list[str]:
        chosen = [name.strip() for name in text.split(",")]
        for name in chosen:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r}: expected of {', '.join(known)}")
        return chosen

    return parse


def parse_options(arguments=None):
    parser = argparse.ArgumentParser(prog="./dev bench gpu", description=__doc__.split("\n")[0])
    parser.add_argument("--json", metavar="FILE", help="write one JSON object (- for stdout)")
    parser.add_argument("--quick", action="store_true", help="4 workloads, 3 repeats a round")
    parser.add_argument("--repeats", type=int, metavar="N", help="a round, of two (default 5)")
    parser.add_argument("--budget", type=float, metavar="SECONDS",
                        help="end by then with what there is")  # fmt: skip
    parser.add_argument("--workloads", type=names(BY_NAME), metavar="A,B", help="only these")
    parser.add_argument("--impls", type=names(impls.ALL), metavar="A,B", help="only these")
    options = parser.parse_args(arguments)
    if options.repeats is not None and options.repeats < 1:
        parser.error("--repeats: expected at least 1")
    options.repeats = options.repeats or (3 if options.quick else 5)
    chosen = options.workloads or (QUICK if options.quick else list(BY_NAME))
    options.workloads = [w for w in IN_ORDER if w.name in chosen]
    options.impls = options.impls or list(impls.ALL)
    return options


def main(arguments=None, make_worker=Worker) -> int:
    run = Run(parse_options(arguments), make_worker)
    say(f"{run.machine['system']}, {run.machine['clocks_before']}")
    try:
        run.run()
    except KeyboardInterrupt:
        say("interrupted: what there is")
    finally:
        run.end()
    run.machine["clocks_after"] = card()
    run.machine["seconds"] = round(time.monotonic() - run.begin, 1)
    result = run.report()
    if run.options.json:
        write_json(run.options.json, result)
    run.print(result)
    return 0 if run.rows else 1


if __name__ == "__main__":
    sys.exit(main())
