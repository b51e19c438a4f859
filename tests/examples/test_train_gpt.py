"""examples/train_gpt.py learns, evaluates twice, and refuses what it cannot use."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TINY = "--device cpu --tokens 256 --layers 1 --width 64 --head-dim 32 --eval-packs 1".split()


def load(name: str):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclass looks its module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def example():
    yield load("train_gpt")
    del sys.modules["train_gpt"]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Paragraphs of a few words, so that there is something to learn soon."""
    path = tmp_path_factory.mktemp("text") / "words.txt"
    words = ("attention", "keys", "queries", "values", "causal", "documents")
    lines = (" ".join(words[(i * j) % 6] for j in range(1, 9)) for i in range(1, 2000))
    path.write_text("\n\n".join(lines))
    return path


@pytest.mark.parametrize("recipe", ["fp8", "bf16", "sdpa"])
def test_training_learns_and_evaluates_twice(example, text, tmp_path, recipe):
    out = tmp_path / "out.json"
    steps = ["--steps", "30", "--eval-every", "20", "--lr", "3e-3", "--recipe", recipe]
    example.main(["--text", str(text), *TINY, *steps, "--json", str(out)])
    found = json.loads(out.read_text())
    assert len(found["train_loss"]) == 30
    assert found["train_loss"][0] == pytest.approx(5.55, abs=0.1)  # ln 256
    assert found["train_loss"][-1] < 3.2
    assert [point["step"] for point in found["evaluations"]] == [20, 30]
    for point in found["evaluations"]:
        assert point["own"] == pytest.approx(point["exact"], abs=0.01)


def test_the_same_seed_gives_the_same_losses(example, text):
    args = ["--text", str(text), *TINY, "--steps", "4"]
    first, again = (example.train(example.parse(args))["train_loss"] for _ in range(2))
    assert first == again


def test_packs_hold_every_document_apart(example, text):
    packer = example.Packer(example.read_text(text), 300, seed=3, device="cpu")
    for _ in range(5):
        pack = packer.next()
        assert sum(pack.lengths) == len(pack.tokens) == 300
        assert pack.cu_seqlens.tolist()[1:] == torch.tensor(pack.lengths).cumsum(0).tolist()
        for begin, n in zip(pack.cu_seqlens.tolist(), pack.lengths, strict=False):
            assert pack.positions[begin : begin + n].tolist() == list(range(n))
            inside = pack.targets[begin : begin + n - 1]
            assert torch.equal(inside, pack.tokens[begin + 1 : begin + n])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (["--text", "/nowhere"], "/nowhere: no such file"),
        (["--recipe", "fp9"], "fp9: expected sdpa or one of fp8"),
        (["--steps", "0"], "--steps 0: expected at least 1"),
        (["--head-dim", "48"], "--head-dim 48: expected an even divisor of --width 64"),
        (["--tokens", "1000000"], "bytes, expected"),
        (["--lr", "nan"], "--lr nan: expected a positive number"),
        (["--lr", "-1"], "--lr -1.0: expected a positive number"),
        (["--json", "/nowhere/run.json"], "--json /nowhere/run.json: expected a file in a folder"),
        (["--text", "/dev/null"], "--text /dev/null: no such file"),
    ],
)
def test_wrong_options_are_named(example, text, capsys, change, says):
    with pytest.raises(SystemExit) as raised:
        example.main(["--text", str(text), *TINY, *change])
    assert raised.value.code == 2
    assert says in capsys.readouterr().err


def test_exact_attention_is_exact_under_autocast(example):
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(40, 2, 16, generator=random) for _ in range(3))
    pack = example.Pack(None, None, None, None, [15, 25])
    want = example.exact(q, k, v, pack)
    with torch.autocast("cpu", torch.bfloat16):
        got = example.exact(q, k, v, pack)
        rounded = example.by_document(q, k, v, pack)
    assert torch.equal(got, want) and rounded.dtype == torch.bfloat16


def test_runs_are_compared(example, text, tmp_path, capsys):
    compare = load("compare_runs")
    paths = [tmp_path / f"{recipe}.json" for recipe in ("fp8", "sdpa")]
    for path in paths:
        example.main(["--text", str(text), *TINY, "--steps", "3", "--recipe", path.stem,
                      "--json", str(path)])  # fmt: skip
    capsys.readouterr()
    compare.main([str(path) for path in paths])
    lines = capsys.readouterr().out.splitlines()
    assert "3 steps of 256 tokens, seed 1" in lines[0]
    assert lines[-2].startswith("| mxattn fp8 | ")
    assert lines[-1].startswith("| PyTorch BF16, a call a document | ")
    last = json.loads(paths[0].read_text())["evaluations"][-1]
    assert f"| {last['own']:.4f} | {last['exact']:.4f} |" in lines[-2]
    other = json.loads(paths[1].read_text())
    other["options"]["seed"] = 2
    paths[1].write_text(json.dumps(other))
    with pytest.raises(SystemExit):
        compare.main([str(path) for path in paths])
    assert "seed = 2: expected 1" in capsys.readouterr().err


@pytest.mark.parametrize("content", [None, "", "[", "[1]", "{}", '{"options": {}}'])
def test_files_that_are_no_runs_are_named(example, tmp_path, capsys, content):
    compare = load("compare_runs")
    path = tmp_path / "run.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(SystemExit, match="2"):
        compare.main([str(path)])
    said = "No such file" if content is None else "expected what train_gpt.py --json wrote"
    assert f"compare_runs: {path}: {said}" in capsys.readouterr().err


def test_training_goes_on_without_tqdm_and_matplotlib(example, text, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(example, "tqdm", None)
    monkeypatch.setattr(example.importlib.util, "find_spec", lambda name: None)
    plot = tmp_path / "plot.png"
    example.main(["--text", str(text), *TINY, "--steps", "2", "--plot", str(plot)])
    told = capsys.readouterr().err
    assert "step 1: loss" in told and "no matplotlib here" in told and not plot.exists()
