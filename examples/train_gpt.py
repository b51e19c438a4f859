#!/usr/bin/env python3
"""Trains a byte-level GPT on packed documents with attention in 8 bits, and evaluates it twice.

usage: train_gpt.py --text FILE [--recipe fp8] [--json FILE] [--plot FILE] ...

The text is any file, plain or gzip. On Debian, for instance (apt-get install dict-gcide):
    examples/train_gpt.py --text /usr/share/dictd/gcide.dict.dz --steps 200

Runs of paragraphs are documents of very different lengths, packed without padding; attention never
crosses from one to another. Every evaluation computes the loss on held-out text twice with the same
weights: with the attention that trained them, and with exact attention (FP32 softmax, PyTorch). A
gap between the two, or a loss above that of `--recipe sdpa` from the same seed, is the price of the
recipe. `sdpa` is PyTorch's own attention in BF16: on the CPU document by document, on a GPU
torch.nn.attention.varlen where PyTorch has it, else the same. compare_runs.py makes a table and one
plot of several --json.

Needs PyTorch and mxattn (pip install ., or PYTHONPATH=python); tqdm shows the progress, matplotlib
draws --plot. docs/training.md has the settings and results on a GPU.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import inspect
import json
import math
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import mxattn
import torch
from torch import nn
from torch.nn.functional import cross_entropy, rms_norm, scaled_dot_product_attention, silu

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # before PyTorch 2.10
    varlen_attn = None
try:
    from tqdm import tqdm
except ImportError:
    tqdm = None

BYTES = 256
HELD_OUT = 0.02  # the last part of the text is for evaluation
SHORTEST = 32  # bytes of a document


# ---- data --------------------------------------------------------------------------------------


@dataclass
class Pack:
    """Documents one after another: a fixed number of tokens, whatever their lengths."""

    tokens: torch.Tensor  # (tokens,) int64
    targets: torch.Tensor  # (tokens,) the next byte of the same document
    positions: torch.Tensor  # (tokens,) from the start of the document
    cu_seqlens: torch.Tensor  # (documents + 1,) int32
    lengths: list[int]


def read_text(path: Path) -> torch.Tensor:
    raw = path.read_bytes()
    if raw[:2] == b"\x1f\x8b":
        raw = gzip.decompress(raw)
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


def document_starts(text: torch.Tensor) -> torch.Tensor:
    """Where paragraphs begin: behind an empty line, or at the start of the text."""
    newline = text == ord("\n")
    ends = (newline[:-1] & newline[1:]).nonzero().flatten() + 2
    return torch.cat([torch.zeros(1, dtype=torch.int64), ends[ends < len(text)]])


class Packer:
    """Random packs of a text. The same seed gives the same packs on every machine."""

    def __init__(self, text: torch.Tensor, tokens: int, seed: int, device: str) -> None:
        self.text, self.tokens, self.device = text, tokens, device
        self.starts = document_starts(text[: len(text) - tokens - 1])
        self.random = torch.Generator().manual_seed(seed)

    def lengths(self) -> list[int]:
        """Log-uniform between SHORTEST and the pack: few long documents, many short ones."""
        left, lengths = self.tokens, []
        while left > 0:
            spread = math.log(self.tokens / SHORTEST) if self.tokens > SHORTEST else 0.0
            draw = torch.rand((), generator=self.random).item()
            lengths.append(min(left, int(SHORTEST * math.exp(spread * draw))))
            left -= lengths[-1]
        return lengths

    def next(self) -> Pack:
        lengths = self.lengths()
        chosen = torch.randint(len(self.starts), (len(lengths),), generator=self.random)
        starts = self.starts[chosen].tolist()
        pieces = [self.text[s : s + n + 1].long() for s, n in zip(starts, lengths, strict=True)]
        return Pack(
            tokens=torch.cat([piece[:-1] for piece in pieces]).to(self.device),
            targets=torch.cat([piece[1:] for piece in pieces]).to(self.device),
            positions=torch.cat([torch.arange(n) for n in lengths]).to(self.device),
            cu_seqlens=mxattn.cu_seqlens_from_lengths(torch.tensor(lengths)).to(self.device),
            lengths=lengths,
        )


# ---- attention ---------------------------------------------------------------------------------


def by_document(q, k, v, pack: Pack) -> torch.Tensor:
    """PyTorch's attention of each document, in the dtype of q. (tokens, heads, dim)."""
    parts = (x.split(pack.lengths) for x in (q, k, v))
    return torch.cat(
        [
            scaled_dot_product_attention(
                *(x.transpose(0, 1)[None] for x in document), is_causal=True
            )[0].transpose(0, 1)
            for document in zip(*parts, strict=True)
        ]
    )


def exact(q, k, v, pack: Pack) -> torch.Tensor:
    # NOTE: autocast would turn the operands of scaled_dot_product_attention into BF16.
    with torch.autocast(q.device.type, enabled=False):
        return by_document(q.float(), k.float(), v.float(), pack)


def varlen(q, k, v, pack: Pack) -> torch.Tensor:
    """All documents in one call. BF16 on a GPU."""
    causal = {"window_size": (-1, 0)}
    if "is_causal" in inspect.signature(varlen_attn).parameters:  # PyTorch 2.10
        causal = {"is_causal": True}
    cu, longest = pack.cu_seqlens, max(pack.lengths)
    return varlen_attn(q, k, v, cu, cu, longest, longest, **causal)


def training_attention(recipe: str, device: str):
    """A function of a pack that returns the attention of all its layers."""
    if recipe == "sdpa":
        plain = varlen if device == "cuda" and varlen_attn else by_document
        return lambda pack, heads, dim: lambda q, k, v: plain(
            q.bfloat16(), k.bfloat16(), v.bfloat16(), pack
        )

    def of_pack(pack: Pack, heads: int, dim: int):
        # One work list for all layers; the closure keeps it until the backward is over.
        plan = mxattn.make_plan(
            pack.cu_seqlens, heads_q=heads, head_dim=dim, causal=True, recipe=recipe,
            total_q=len(pack.tokens), total_k=len(pack.tokens),
        )  # fmt: skip
        return lambda q, k, v: mxattn.attn_varlen(
            q.bfloat16(), k.bfloat16(), v.bfloat16(), pack.cu_seqlens, causal=True,
            recipe=recipe, plan=plan,
        )  # fmt: skip

    return of_pack


# ---- model -------------------------------------------------------------------------------------


def rotary(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """RoPE (Su et al., 2021), base 10000. x (tokens, heads, dim)."""
    half = x.shape[-1] // 2
    frequency = 10000 ** (-torch.arange(half, device=x.device) / half)
    angle = (positions[:, None] * frequency)[:, None]  # (tokens, 1, half)
    a, b = x.float().chunk(2, -1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return rms_norm(x.float(), (x.shape[-1],), self.weight, 1e-6)


class Block(nn.Module):
    """Attention, then SwiGLU (Shazeer, 2020), each behind an RMSNorm."""

    def __init__(self, width: int, head_dim: int, layers: int) -> None:
        super().__init__()
        self.heads, self.head_dim = width // head_dim, head_dim
        hidden = 64 * round(width * 8 / 3 / 64)  # as many weights as with 4 width
        self.norm1, self.norm2 = Norm(width), Norm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)
        for layer in (self.qkv, self.up):
            nn.init.normal_(layer.weight, std=0.02)
        for layer in (self.out, self.down):
            nn.init.normal_(layer.weight, std=0.02 / math.sqrt(2 * layers))

    def forward(self, x, positions, attention):
        qkv = self.qkv(self.norm1(x)).view(len(x), 3, self.heads, self.head_dim)
        q, k, v = qkv.unbind(1)
        mixed = attention(rotary(q, positions), rotary(k, positions), v)
        x = x + self.out(mixed.reshape(len(x), -1).to(x.dtype))
        gate, value = self.up(self.norm2(x)).chunk(2, -1)
        return x + self.down(silu(gate) * value)


class Gpt(nn.Module):
    def __init__(self, layers: int, width: int, head_dim: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.blocks = nn.ModuleList(Block(width, head_dim, layers) for _ in range(layers))
        self.norm = Norm(width)
        self.head = nn.Linear(width, BYTES, bias=False)
        nn.init.normal_(self.head.weight, std=0.02)

    def loss(self, pack: Pack, attention) -> torch.Tensor:
        """Mean cross entropy of the next byte, in nats."""
        x = self.embedding(pack.tokens)
        for block in self.blocks:
            x = block(x, pack.positions, attention)
        return cross_entropy(self.head(self.norm(x)).float(), pack.targets)


# ---- training ----------------------------------------------------------------------------------


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Linear warm-up over a tenth of the steps, then a cosine down to a tenth."""
    warm = max(1, args.steps // 10)
    if step < warm:
        return args.lr * (step + 1) / warm
    return args.lr * (0.55 + 0.45 * math.cos(math.pi * (step - warm) / max(1, args.steps - warm)))


def evaluate(model: Gpt, packs: list[Pack], attention_of, args) -> dict[str, float]:
    """Loss of the same weights with the attention that trains them and with exact attention."""
    own = other = 0.0
    with torch.no_grad(), autocast(args):
        for pack in packs:
            attention = attention_of(pack, args.width // args.head_dim, args.head_dim)
            own += model.loss(pack, attention).item() / len(packs)
            other += model.loss(pack, lambda q, k, v, p=pack: exact(q, k, v, p)).item() / len(packs)
    return {"own": own, "exact": other}


class Progress:
    """The steps, with a bar where tqdm is there and a line every tenth of them where not."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.bar = tqdm(total=args.steps, desc=args.recipe, file=sys.stderr) if tqdm else None

    def step(self, step: int, loss: float) -> None:
        if self.bar:
            self.bar.set_postfix(loss=f"{loss:.4f}", refresh=False)
            self.bar.update()
        elif step % max(1, self.args.steps // 10) == 0:
            self.write(f"{self.args.recipe}: step {step}: loss {loss:.4f}")

    def write(self, text: str) -> None:
        if self.bar:
            self.bar.write(text, file=sys.stderr)
        else:
            print(text, file=sys.stderr, flush=True)


def autocast(args):
    return torch.autocast(args.device, torch.bfloat16, enabled=args.device == "cuda")


def train(args: argparse.Namespace) -> dict:
    torch.manual_seed(args.seed)
    text = read_text(args.text)
    border = int(len(text) * (1 - HELD_OUT))
    if min(border, len(text) - border) < 2 * args.tokens:
        usage(f"--text {args.text}: {len(text)} bytes, expected {int(2 * args.tokens / HELD_OUT)}")
    packer = Packer(text[:border], args.tokens, args.seed, args.device)
    held_out = Packer(text[border:], args.tokens, args.seed + 1, args.device)
    held_out_packs = [held_out.next() for _ in range(args.eval_packs)]

    model = Gpt(args.layers, args.width, args.head_dim).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    attention_of = training_attention(args.recipe, args.device)
    steps, seconds, evaluations = [], [], []
    progress = Progress(args)
    for step in range(args.steps):
        start = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args)
        pack = packer.next()
        attention = attention_of(pack, args.width // args.head_dim, args.head_dim)
        with autocast(args):
            loss = model.loss(pack, attention)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        steps.append(loss.item())  # waits for the device, so the time is that of the step
        seconds.append(time.perf_counter() - start)
        progress.step(step, steps[-1])
        if not math.isfinite(steps[-1]):
            sys.exit(f"train_gpt: the loss of step {step} is {steps[-1]}")
        if (step + 1) % args.eval_every == 0 or step + 1 == args.steps:
            found = evaluate(model, held_out_packs, attention_of, args)
            evaluations.append({"step": step + 1, **found})
            progress.write(
                f"step {step + 1}: held-out loss {found['own']:.4f} with {args.recipe}, "
                f"{found['exact']:.4f} with exact attention"
            )
    options = {name: str(x) if isinstance(x, Path) else x for name, x in vars(args).items()}
    return {
        "options": options,
        "parameters": sum(p.numel() for p in model.parameters()),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
        "attention": attention_name(args),
        # Of the median: the first steps load kernels and fill caches.
        "steps_per_second": 1 / statistics.median(seconds),
        "seconds": sum(seconds),
        "train_loss": steps,
        "evaluations": evaluations,
    }


def attention_name(args: argparse.Namespace) -> str:
    if args.recipe != "sdpa":
        return f"mxattn {args.recipe}"
    together = args.device == "cuda" and varlen_attn
    return f"PyTorch BF16, {'varlen_attn' if together else 'a call a document'}"


def draw(result: dict, path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    recipe, points = result["options"]["recipe"], result["evaluations"]
    figure, axes = pyplot.subplots(figsize=(7, 4))
    axes.plot(range(1, len(result["train_loss"]) + 1), result["train_loss"], lw=0.6, alpha=0.6,
              label="training")  # fmt: skip
    at = [point["step"] for point in points]
    axes.plot(at, [p["own"] for p in points], "o-", label=f"held out, {recipe}")
    axes.plot(at, [p["exact"] for p in points], "x--", label="held out, exact attention")
    axes.set(xlabel="step", ylabel="loss, nats a byte", title=f"attention {recipe}")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def usage(message: str) -> None:
    print(f"train_gpt: {message}", file=sys.stderr)
    sys.exit(2)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    big = torch.cuda.is_available()
    parser.add_argument("--text", type=Path, required=True, help="text file, plain or gzip")
    parser.add_argument("--recipe", default="fp8", help="a recipe of mxattn, or sdpa")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if big else "cpu")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--tokens", type=int, default=16384 if big else 2048, help="of a pack")
    parser.add_argument("--layers", type=int, default=6 if big else 2)
    parser.add_argument("--width", type=int, default=1024 if big else 256)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--lr", type=float, default=6e-4 if big else 1e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--eval-every", type=int, default=100)
    parser.add_argument("--eval-packs", type=int, default=4)
    parser.add_argument("--json", type=Path, help="write losses, evaluations and speed here")
    parser.add_argument("--plot", type=Path, help="draw the losses here, as PNG or SVG")
    args = parser.parse_args(argv)
    for name in ("steps", "tokens", "layers", "width", "head_dim", "eval_every", "eval_packs"):
        if getattr(args, name) < 1:
            usage(f"--{name.replace('_', '-')} {getattr(args, name)}: expected at least 1")
    if not 0 < args.lr < math.inf:
        usage(f"--lr {args.lr}: expected a positive number")
    for name in ("json", "plot"):  # not after a day of training
        path = getattr(args, name)
        if path and (path.is_dir() or not path.parent.is_dir()):
            usage(f"--{name} {path}: expected a file in a folder that exists")
    if args.head_dim % 2 or args.width % args.head_dim:
        usage(f"--head-dim {args.head_dim}: expected an even divisor of --width {args.width}")
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        print("train_gpt: no matplotlib here: --plot is left out", file=sys.stderr)
        args.plot = None
    if args.device == "cuda" and not big:
        usage("--device cuda: torch sees no CUDA device")
    if not args.text.is_file():
        usage(f"--text {args.text}: no such file")
    if args.text.stat().st_size == 0:
        usage(f"--text {args.text}: an empty file")
    if args.recipe != "sdpa":
        known = mxattn.recipes()
        if args.recipe not in known:
            usage(f"--recipe {args.recipe}: expected sdpa or one of {', '.join(known)}")
        shape = (args.tokens, args.width // args.head_dim, args.head_dim)
        device = 0 if args.device == "cuda" else None
        verdict = mxattn.can_run(shape, recipe=args.recipe, causal=True, device=device)
        if not verdict:
            usage(f"--recipe {args.recipe}: {verdict.reason}")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    result = train(args)
    last = result["evaluations"][-1]
    print(
        f"{args.recipe}: {args.steps} steps, {result['steps_per_second']:.2f} a second; held-out "
        f"loss {last['own']:.4f}, with exact attention {last['exact']:.4f}"
    )
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    if args.plot:
        draw(result, args.plot)


if __name__ == "__main__":
    main()
