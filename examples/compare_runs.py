#!/usr/bin/env python3
"""A table, in Markdown, and one plot of several runs of train_gpt.py.

usage: compare_runs.py [--plot FILE] RUN.json...

The runs must have the same data, model and steps. The table shows the held-out loss after the last
step, own (with the attention of the training) and exact; the mean training loss of the last tenth;
the speed.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import mean

SAME = ("seed", "tokens", "steps", "layers", "width", "head_dim", "lr", "eval_packs", "device")


def wrong(message: str) -> None:
    print(f"compare_runs: {message}", file=sys.stderr)
    sys.exit(2)


def load(path: Path) -> dict:
    try:
        run = json.loads(path.read_text())
        options_of(run)
        return run
    except OSError as error:
        wrong(f"{path}: {error.strerror}")
    except (ValueError, LookupError, TypeError):
        wrong(f"{path}: expected what train_gpt.py --json wrote")


def options_of(run: dict) -> dict:
    """What the runs must agree in; of the text, its name."""
    options = run["options"]
    return {name: options[name] for name in SAME} | {"text": Path(options["text"]).name}


def table(runs: list[dict]) -> list[str]:
    options = runs[0]["options"]
    lines = [
        f"{runs[0]['device']}, PyTorch {runs[0]['torch']}; {options['layers']} layers, width "
        f"{options['width']}, heads of {options['head_dim']}, {runs[0]['parameters'] / 1e6:.0f}M "
        f"parameters; {options['steps']} steps of {options['tokens']} tokens, seed "
        f"{options['seed']}. Losses in nats a byte.",
        "",
        "| attention in training | held out: own | held out: exact | training | steps a second |",
        "|---|---|---|---|---|",
    ]
    for run in runs:
        last, losses = run["evaluations"][-1], run["train_loss"]
        tail = mean(losses[-max(1, len(losses) // 10) :])
        lines.append(
            f"| {run['attention']} | {last['own']:.4f} | {last['exact']:.4f} | {tail:.4f} "
            f"| {run['steps_per_second']:.2f} |"
        )
    return lines


def smooth(losses: list[float], half: int) -> list[float]:
    """Means of up to `half` losses on each side."""
    return [mean(losses[max(0, i - half) : i + half + 1]) for i in range(len(losses))]


def draw(runs: list[dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4))
    for i, run in enumerate(runs):
        losses = smooth(run["train_loss"], max(1, len(run["train_loss"]) // 100))
        left.plot(range(1, len(losses) + 1), losses, lw=1, color=f"C{i}", label=run["attention"])
        at = [point["step"] for point in run["evaluations"]]
        for kind, style in (("own", "o-"), ("exact", "x--")):
            values = [point[kind] for point in run["evaluations"]]
            right.plot(at, values, style, lw=1, color=f"C{i}", label=f"{run['attention']}, {kind}")
    left.set(xlabel="step", ylabel="loss, nats a byte", title="training (smoothed)")
    right.set(xlabel="step", title="held out, own and exact attention")
    for axes in (left, right):
        axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN.json")
    parser.add_argument("--plot", type=Path, help="draw all runs here, as PNG or SVG")
    args = parser.parse_args(argv)
    runs = [load(path) for path in args.runs]
    if args.plot and (args.plot.is_dir() or not args.plot.parent.is_dir()):
        wrong(f"--plot {args.plot}: expected a file in a folder that exists")
    for path, run in zip(args.runs, runs, strict=True):
        for name, value in options_of(run).items():
            expected = options_of(runs[0])[name]
            if value != expected:
                wrong(f"{path}: {name} = {value}: expected {expected}, as in {args.runs[0]}")
    print("\n".join(table(runs)))
    if args.plot:
        try:
            draw(runs, args.plot)
        except ImportError as error:
            sys.exit(f"compare_runs: {error}: no plot")


if __name__ == "__main__":
    main()
