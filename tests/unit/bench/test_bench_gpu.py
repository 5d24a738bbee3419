"""The GPU protocol, at a size that a CPU does in seconds: what it writes, when it stops, what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ngpt_train.__main__ import main
from ngpt_train.bench import device_facts, device_time, kernels
from ngpt_train.bench.gpu import ceilings, comparisons, protocol, steps, tables
from ngpt_train.bench.gpu.predictions import OPERATIONS, PUBLIC_STYLE, expected_seconds, predicted_ms, without
from ngpt_train.bench.gpu.steps import Row
from ngpt_train.bench.interleaved import by
from ngpt_train.kernels import dispatch
from ngpt_train.kernels.check import cases
from ngpt_train.models import initialisation

SMALL = ["--device", "cpu", "--scale", "debug"]
ROOT = Path(__file__).parents[3]
# What a machine with torch alone lacks. Its own finder stands for that: an import that fails, as if it were not there.
BARE = """
import runpy, sys
from importlib.machinery import PathFinder
lacking = {"hydra", "omegaconf", "datasets", "wandb", "numpy", "yaml", "pyarrow", "sentencepiece", "tiktoken", "rich"}
class Bare(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in lacking else super().find_spec(name, path, target)
sys.meta_path[sys.meta_path.index(PathFinder)] = Bare
runpy.run_module("ngpt_train", run_name="__main__")
"""


def found(out: Path) -> dict[str, Any]:
    return json.loads((out / "bench.json").read_text())


def process(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(protocol.SCALES, "debug", ([(64, 128, 32)], kernels.Sizes(2, 8, 50, 2)))
    monkeypatch.setitem(protocol.ATTENTION, "debug", [(1, 1, 16, 32)])
    monkeypatch.setitem(protocol.HEADLINES, "debug", [Row("debug", 32)])
    monkeypatch.setitem(protocol.OTHER_ROWS, "debug", [Row("debug", 16)])
    monkeypatch.setattr(steps, "ROUNDS", 3)
    monkeypatch.setattr(comparisons, "ABLATION_ROUNDS", 2)


@pytest.mark.usefixtures("quick")
def test_the_whole_protocol(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A part is left out, a CPU's numbers pass for a GPU's, the process keeps another choice of kernels."""
    before = dict(os.environ), dispatch._choice
    assert main(["bench", "gpu", *SMALL, "--budget", "60", "--out", str(tmp_path)]) == 0
    assert (dict(os.environ), dispatch._choice) == before
    printed = capsys.readouterr().out
    assert "THIS IS NOT A GPU" in printed
    assert printed.count("NOT A GPU") == 2, "the tables say it too"
    result = found(tmp_path)
    assert not result["is_gpu"]
    assert result["skipped"] == result["problems"] == result["cut_off"] == []
    assert result["torch has F.linear_cross_entropy"] == hasattr(torch.nn.functional, "linear_cross_entropy")
    assert result["torch has addmm with out_dtype"].startswith("no: "), "a CPU has none"
    assert "MATH" in result["order of attention's backends"]
    assert "attention, 16 tokens: torch picks FLASH_ATTENTION" in result["log"]
    assert "attention, 16 tokens: documents, flex does not run here: NotImplementedError" in printed
    assert "attention, 16 tokens: flash-attn does not run here: its kernels are for GPUs" in printed
    entries = {entry["name"]: entry for entry in result["entries"]}
    assert set(entries["adam_rows_, d 64: ours"]) >= {"median_ms", "spread", "ratio", "relative_to"}
    assert entries["attention, 16 tokens, forward: math"]["relative_to"] in entries
    others = ["ngpt, kernels=torch", PUBLIC_STYLE, *map(without, OPERATIONS)]
    for row, tokens, variants in (
        ("debug, 32 tokens", 8 * 32, ["gpt", "ngpt", *others]),
        ("debug, 16 tokens", 8 * 16, ["gpt", "ngpt"]),
    ):
        for variant in variants:
            entry = entries[f"{row}: {variant}"]
            assert entry["relative_to"] == f"{row}: {'ngpt' if variant in others else 'gpt'}"
            assert entry["spread"][0] <= entry["ratio"] <= entry["spread"][1]
            assert entry["tokens"] == tokens
            assert entry["rate"] == pytest.approx(1e3 * tokens / entry["median_ms"])
            assert entry["mfu"] is entry["predicted_ms"] is entry["memory_gb"] is None
            assert (entry["over_gpt"] is None) == (variant == PUBLIC_STYLE)
            assert f"{row}, {variant}: " in printed
    for variant in ("gpt", "ngpt", PUBLIC_STYLE):
        entry = entries[f"debug, 32 tokens: {variant}"]
        assert entry["last_loss"] < entry["first_loss"]
    of_ngpt = [entries[f"debug, 32 tokens: {variant}"]["first_loss"] for variant in ("ngpt", PUBLIC_STYLE)]
    assert of_ngpt[0] == pytest.approx(of_ngpt[1], abs=1e-4), "not of the same weights"
    with tarfile.open(tmp_path / "caches.tar.gz") as archive:
        assert archive.getnames() == []


@pytest.mark.usefixtures("quick")
def test_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """What there is no time for is begun all the same, or left out without a word."""
    monkeypatch.setattr(protocol, "reserved", lambda budget: budget)
    assert protocol.main([*SMALL, "--out", str(tmp_path)]) == 0
    result = found(tmp_path)
    for what in ("check of swiglu, d 64", "times of adam_rows_, d 64", "attention, 16 tokens"):
        assert what in result["skipped"]
    for what in ("", f", {PUBLIC_STYLE}", ", ablations"):
        assert f"steps of debug, 32 tokens{what}" in result["skipped"]
    assert result["entries"] == []
    assert "steps of debug, 32 tokens: skipped (budget)" in capsys.readouterr().out


def test_rounds_fit_the_budget() -> None:
    """A row that takes longer than was estimated is timed to its end, past the deadline."""
    place = steps.Place("cpu", "CPU", time.monotonic() + 0.1, preparation=0)
    with pytest.raises(steps.OutOfTimeError):
        steps.run_pair(Row("debug", 32), place, print)


def test_what_hangs_is_cut_off(tmp_path: Path) -> None:
    """A hung compilation costs the table, what was found before it, or the machine's time beyond the budget."""
    program = (
        "import sys, time; from ngpt_train.bench.gpu import protocol; from ngpt_train.bench import attention; "
        "attention.bench = lambda *given: (time.sleep(600), iter(()))[1]; "
        f"sys.exit(protocol.main([*{SMALL}, '--budget', '16', '--out', sys.argv[1]]))"
    )
    started = time.monotonic()
    ended = process("-c", program, str(tmp_path))
    assert ended.returncode == 5, ended.stderr
    assert time.monotonic() - started < 60
    result = found(tmp_path)
    assert result["cut_off"] == ["attention, 64 tokens"]
    assert "debug, 64 tokens: ngpt" in [entry["name"] for entry in result["entries"]]
    *_, cut, tables = ended.stdout.partition("attention, 64 tokens: cut off (budget)")
    assert cut
    assert "debug, 64 tokens" in tables
    assert float(ended.stdout.split(" s  attention, 64 tokens: cut off")[0].split()[-1]) < 16
    with tarfile.open(tmp_path / "caches.tar.gz") as archive:
        assert archive.getnames() == []


def test_what_lets_no_thread_run_is_ended(tmp_path: Path) -> None:
    """The thread that ends it waits for ever for what hangs."""
    program = (
        "import ctypes, sys; from ngpt_train.bench.gpu import protocol; "
        "protocol.Protocol.ceilings = lambda self: ctypes.PyDLL(None).sleep(30); "  # PyDLL keeps Python's lock
        f"sys.exit(protocol.main([*{SMALL}, '--budget', '8', '--out', sys.argv[1]]))"
    )
    ended = process("-c", program, str(tmp_path))
    assert ended.returncode == 1
    assert "Timeout" in ended.stderr
    assert found(tmp_path)["torch"] == torch.__version__, "what was found before is lost"


def test_torch_is_all_it_takes(tmp_path: Path) -> None:
    """A GPU is lent with torch and triton alone, and the command stops at an import."""
    arguments = ["bench", "gpu", *SMALL, "--budget", "300", "--out", str(tmp_path)]
    ended = process("-c", BARE, *arguments)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    result = found(tmp_path)
    assert result["problems"] == []
    assert "debug, 64 tokens: ngpt" in [entry["name"] for entry in result["entries"]]


@pytest.mark.usefixtures("quick")
def test_a_wrong_kernel_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Times are printed of kernels that compute something else; of two that are wrong one is told."""

    def wrong(*given: Any, **more: Any) -> None:
        wrong.formula(*given, **more)
        given[0].mul_(1.001)

    right = cases.sphere_step.sphere_step

    def moved(h: Any, x: Any, alpha: Any) -> Any:
        return right(h, x, 1.01 * alpha)

    wrong.formula, moved.formula = cases.adam.adam_rows_.formula, right.formula
    monkeypatch.setattr(cases.adam, "adam_rows_", wrong)
    monkeypatch.setattr(cases.sphere_step, "sphere_step", moved)
    assert protocol.main([*SMALL, "--out", str(tmp_path)]) == 4
    result = found(tmp_path)
    assert result["entries"] == []
    assert "sphere_step, d 64 is wrong" in result["problems"][0]
    assert "adam_rows_, d 64 is wrong" in result["problems"][1]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("suffices", [2, 0])
def test_out_of_memory(suffices: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too little memory ends the whole protocol, or a smaller micro batch makes a smaller step."""
    step = steps.train_step

    def limited(state: Any, batches: Any, **options: Any) -> Any:
        if len(batches[0][0]) > suffices:
            raise torch.OutOfMemoryError("pretended")
        return step(state, batches, **options)

    monkeypatch.setattr(steps, "train_step", limited)
    monkeypatch.setitem(protocol.OTHER_ROWS, "debug", [])
    monkeypatch.setattr(protocol, "ABLATIONS", protocol.ABLATIONS[:1])
    code = protocol.main([*SMALL, "--out", str(tmp_path)])
    result = found(tmp_path)
    pairs = [entry for entry in result["entries"] if "micro_rows" in entry and not entry["name"].endswith(PUBLIC_STYLE)]
    if suffices:
        assert code == 0
        assert {(entry["micro_rows"], entry["tokens"]) for entry in pairs} == {(2, 8 * 32)}
    else:
        assert (code, pairs) == (1, [])
        assert "with one row at a time" in result["problems"][0]


def test_what_is_wrong_with_a_run() -> None:
    """Checks that see nothing: of losses, of the sphere, of the kernels' loss beside the reference's."""
    state = steps.build_state(steps.make_config("ngpt", Row("debug", 32), "cpu", 8))
    batch = steps.tokens_of(state)[0]
    assert steps.problems(state, [2.0, 1.0], batch) == []
    assert "did not fall" in steps.problems(state, [1.0, 1.0], batch)[0]
    assert "not finite" in steps.problems(state, [1.0, float("nan")], batch)[0]
    with torch.no_grad():
        state.model.embedding[3].mul_(1.01)
    assert "off the sphere" in steps.problems(state, [2.0, 1.0], batch)[0]


def test_weights_drawn_on_the_device() -> None:
    """They are of another distribution than in training, or training draws its own that way from then on."""
    place = steps.Place("cpu", "CPU", time.monotonic() + 60, preparation=0)
    drawn = initialisation._source
    for name in steps.PAIR:
        found = steps.build(name, Row("debug", 32), place, 8).state.model
        expected = steps.build_state(steps.make_config(name, Row("debug", 32), "cpu", 8)).model
        for ours, other in zip(found.parameters(), expected.parameters(), strict=True):
            assert ours.std().item() == pytest.approx(other.std().item(), rel=0.05)
            assert torch.equal(ours, other) == (ours.ndim == 1)
    assert initialisation._source is drawn


def test_losses_by_kernels_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both losses are of one path."""
    state = steps.build_state(steps.make_config("gpt", Row("debug", 32), "cpu", 8))
    forward = type(state.model).forward

    def different(self: Any, *given: Any) -> Any:
        loss = forward(self, *given)
        return loss._replace(total=loss.total + (0.02 * loss.n_tokens if dispatch._choice == "torch" else 0))

    monkeypatch.setattr(type(state.model), "forward", different)
    problems = steps.problems(state, [2.0, 1.0], steps.tokens_of(state)[0])
    assert len(problems) == 1
    assert "by kernels" in problems[0]


@pytest.mark.parametrize("stored", ["nn", "nt", "tn"])
def test_timed_products(stored: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A transposed factor has the shape of one that is not."""
    monkeypatch.setattr(device_time, "on_device", by(time.perf_counter))
    assert device_time.product_seconds(torch.device("cpu"), 8, 4, 2, stored) > 0


def test_products_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product is forgotten or counted for another number of layers: at 1 TFLOP/s they take 6 weights tokens ps."""
    monkeypatch.setattr(ceilings, "product_seconds", lambda device, n, k, m, stored: 2e-12 * n * k * m)
    products = ceilings.products("0.5b", torch.device("cpu"), print)
    weights = 24 * (4 * 1024**2 + 3 * 1024 * 4096) + 1024 * 32_000
    assert products["0.5b products, ms"] == pytest.approx(6e-9 * weights * ceilings.TOKENS)
    assert products["0.5b down, TFLOP/s"]["by weight"] == pytest.approx(1)


def test_kernel_table() -> None:
    """Ours is compared with the compiled form of another pass, or a ratio is upside down."""
    common = {"error": 1e-3, "gb_per_s": 2000.0, "of_ceiling": 0.875, "ratio": 0.25}
    times = {
        "op, d 64: ours": 1.0,
        "op, d 64: eager": 4.0,
        "op, d 64: compiled": 2.0,
        "op, d 64, forward: compiled": 8.0,
    }
    _, *lines = tables.kernel_table([{"name": name, "median_ms": ms, **common} for name, ms in times.items()])
    assert lines == [["op, d 64", "1.0e-03", "1000", "2000", "88%", "0.25", "0.50"]]


def test_predictions_are_of_known_hardware() -> None:
    """A ratio is read from another column, or another chip is taken for one that something was predicted of."""
    size, h100, a100 = ("0.5b", 4096), "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"
    assert predicted_ms(size, "gpt", h100) == 239
    assert predicted_ms(size, "ngpt", h100) == pytest.approx(241.39)
    assert predicted_ms(size, "ngpt, kernels=torch", a100) == pytest.approx(650.73)
    assert predicted_ms(size, without("swiglu"), h100) == pytest.approx(255.73)
    assert predicted_ms(("0.5b", 1024), without("swiglu"), h100) is None
    assert predicted_ms(size, PUBLIC_STYLE, h100) == pytest.approx(1e3 * 8 * 4096 / 40_000, rel=1e-3)
    assert predicted_ms(size, "gpt", "NVIDIA H100 PCIe") is predicted_ms(("debug", 64), "gpt", h100) is None
    assert predicted_ms(size, "gpt", "NVIDIA H200") is None
    devices = {h100: 0.239, "NVIDIA H200": 0.239, a100: 0.597, "NVIDIA H100 PCIe": 0.597}
    assert {name: expected_seconds(size, name) for name in devices} == pytest.approx(devices)


def test_what_a_torch_lacks_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first question to an older torch ends the protocol, or to one whose triton is another's."""
    assert device_facts.there_is("torch.nn.attention", "sdpa_kernel")
    assert not device_facts.there_is("torch.nn.attention", "none_such")
    assert not device_facts.there_is("torch.none_such", "sdpa_kernel")
    monkeypatch.syspath_prepend(tmp_path)
    for error in ("AttributeError", "RuntimeError"):
        (tmp_path / f"mismatched_{error}.py").write_text(f"raise {error}('of another version')")
        assert not device_facts.there_is(f"mismatched_{error}", "anything")
    assert (
        device_facts.tried(lambda: torch.none_such) == "no: AttributeError: module 'torch' has no attribute 'none_such'"
    )


def test_caches_travel(tmp_path: Path) -> None:
    """What was compiled is lost, or lies where the next run does not look."""
    archive = tmp_path / "caches.tar.gz"
    with protocol.compile_caches(archive):
        cache = Path(os.environ["TRITON_CACHE_DIR"])
        cache.mkdir()
        (cache / "kernel").write_text("compiled")
    assert not cache.exists()
    with protocol.compile_caches(archive):
        assert Path(os.environ["TRITON_CACHE_DIR"], "kernel").read_text() == "compiled"
