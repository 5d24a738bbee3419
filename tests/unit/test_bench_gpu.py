"""The GPU protocol, at a size that a CPU does in seconds: what it writes, when it stops, what it refuses."""

from __future__ import annotations

import json
import os
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ngpt_train.__main__ import main
from ngpt_train.bench import device_time, gpu, gpu_steps, gpu_tables, kernels
from ngpt_train.bench.gpu_steps import Row
from ngpt_train.bench.interleaved import by
from ngpt_train.kernels import dispatch

SMALL = ["--device", "cpu", "--scale", "debug"]


def found(out: Path) -> dict[str, Any]:
    return json.loads((out / "bench.json").read_text())


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gpu.SCALES, "debug", ([(64, 128, 32)], kernels.Sizes(2, 8, 50, 2)))
    monkeypatch.setitem(gpu.ATTENTION, "debug", [(1, 1, 16, 32)])
    monkeypatch.setitem(gpu_steps.ROWS, "debug", [Row("debug", 32, ablated=True)])
    monkeypatch.setattr(gpu_steps, "ROUNDS", 3)


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
    assert result["skipped"] == result["problems"] == []
    entries = {entry["name"]: entry for entry in result["entries"]}
    assert set(entries["adam_rows_, d 64: ours"]) >= {"median_ms", "spread", "ratio", "relative_to"}
    assert entries["attention, 16 tokens, forward: math"]["relative_to"] in entries
    for variant in ("gpt", "ngpt", "ngpt, kernels=torch"):
        entry = entries[f"debug, 32 tokens: {variant}"]
        assert entry["relative_to"] == "debug, 32 tokens: gpt"
        assert entry["tokens"] == 8 * 32
        assert entry["rate"] == pytest.approx(1e3 * 8 * 32 / entry["median_ms"])
        assert entry["mfu"] is entry["predicted_ms"] is entry["memory_gb"] is None
        assert entry["last_loss"] < entry["first_loss"]
    with tarfile.open(tmp_path / "caches.tar.gz") as archive:
        assert archive.getnames() == []


@pytest.mark.usefixtures("quick")
def test_the_budget(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What there is no time for is begun all the same, or left out without a word."""
    started = time.monotonic()
    assert gpu.main([*SMALL, "--budget", "0.001", "--out", str(tmp_path)]) == 0
    assert time.monotonic() - started < 2
    result = found(tmp_path)
    assert "steps of debug, 32 tokens" in result["skipped"]
    assert "times of adam_rows_, d 64" in result["skipped"]
    assert result["entries"] == []
    assert "steps of debug, 32 tokens: skipped (budget)" in capsys.readouterr().out


def test_rounds_fit_the_budget() -> None:
    """A row that takes longer than was estimated is timed to its end, past the deadline."""
    assert gpu_steps.run_row(Row("debug", 32), "cpu", "CPU", time.monotonic(), print) is None


@pytest.mark.usefixtures("quick")
def test_a_wrong_kernel_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Times are printed of kernels that compute something else."""

    def wrong(*given: Any) -> None:
        kernels.adam.reference(*given)
        given[0].mul_(1.001)

    monkeypatch.setattr(kernels.adam, "adam_rows_", wrong)
    assert gpu.main([*SMALL, "--out", str(tmp_path)]) == 4
    result = found(tmp_path)
    assert not [entry for entry in result["entries"] if not entry["name"].startswith("attention")]
    assert "adam_rows_, d 64 is wrong" in result["problems"][0]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("suffices", [2, 0])
def test_out_of_memory(suffices: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too little memory ends the whole protocol, or a smaller micro batch makes a smaller step."""
    step = gpu_steps.train_step

    def limited(state: Any, batches: Any, **options: Any) -> Any:
        if len(batches[0][0]) > suffices:
            raise torch.OutOfMemoryError("pretended")
        return step(state, batches, **options)

    monkeypatch.setattr(gpu_steps, "train_step", limited)
    code = gpu.main([*SMALL, "--out", str(tmp_path)])
    result = found(tmp_path)
    steps = [entry for entry in result["entries"] if "micro_rows" in entry]
    if suffices:
        assert code == 0
        assert {(entry["micro_rows"], entry["tokens"]) for entry in steps} == {(2, 8 * 32)}
    else:
        assert (code, steps) == (1, [])
        assert "with one row at a time" in result["problems"][0]


def test_what_is_wrong_with_a_run() -> None:
    """Checks that see nothing: of losses, of the sphere, of the kernels' loss beside the reference's."""
    state = gpu_steps.Variant(gpu_steps.make_config("ngpt", Row("debug", 32), "cpu", "auto", 8)).state
    batch = gpu_steps.tokens_of(state)[0]
    assert gpu_steps.problems(state, [2.0, 1.0], batch) == []
    assert "did not fall" in gpu_steps.problems(state, [1.0, 1.0], batch)[0]
    assert "not finite" in gpu_steps.problems(state, [1.0, float("nan")], batch)[0]
    with torch.no_grad():
        state.model.embedding[3].mul_(1.01)
    assert "off the sphere" in gpu_steps.problems(state, [2.0, 1.0], batch)[0]


def test_losses_by_kernels_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both losses are of one path."""
    state = gpu_steps.Variant(gpu_steps.make_config("gpt", Row("debug", 32), "cpu", "auto", 8)).state
    forward = type(state.model).forward

    def different(self: Any, *given: Any) -> Any:
        loss, count = forward(self, *given)
        return loss + (0.02 * count if dispatch._choice == "torch" else 0), count

    monkeypatch.setattr(type(state.model), "forward", different)
    problems = gpu_steps.problems(state, [2.0, 1.0], gpu_steps.tokens_of(state)[0])
    assert len(problems) == 1
    assert "by kernels" in problems[0]


@pytest.mark.parametrize("stored", ["nn", "nt", "tn"])
def test_timed_products(stored: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A transposed factor has the shape of one that is not."""
    monkeypatch.setattr(device_time, "on_device", by(time.perf_counter))
    assert device_time.product_seconds(torch.device("cpu"), 8, 4, 2, stored) > 0


def test_products_of_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A product is forgotten or counted for another number of layers: at 1 TFLOP/s they take 6 weights tokens ps."""
    monkeypatch.setattr(gpu, "product_seconds", lambda device, n, k, m, stored: 2e-12 * n * k * m)
    protocol = gpu.Protocol("paper", torch.device("cpu"), 60, tmp_path)
    protocol.found["ceilings"] = {}
    protocol.products("0.5b")
    weights = 24 * (4 * 1024**2 + 3 * 1024 * 4096) + 1024 * 32_000
    assert protocol.found["ceilings"]["0.5b products, ms"] == pytest.approx(6e-9 * weights * gpu.TOKENS)
    assert protocol.found["ceilings"]["0.5b down, TFLOP/s"]["by weight"] == pytest.approx(1)


def test_kernel_table() -> None:
    """Ours is compared with the compiled form of another pass, or a ratio is upside down."""
    common = {"error": 1e-3, "gb_per_s": 2000.0, "of_ceiling": 0.875, "ratio": 0.25}
    times = {
        "op, d 64: ours": 1.0,
        "op, d 64: eager": 4.0,
        "op, d 64: compiled": 2.0,
        "op, d 64, forward: compiled": 8.0,
    }
    _, *lines = gpu_tables.kernel_table([{"name": name, "median_ms": ms, **common} for name, ms in times.items()])
    assert lines == [["op, d 64", "1.0e-03", "1000", "2000", "88%", "0.25", "0.50"]]


def test_predictions_are_of_known_hardware() -> None:
    """A ratio is read from another column, or another chip is taken for one that something was predicted of."""
    row = Row("0.5b", 4096)
    assert gpu_steps.predicted(row, "gpt", "NVIDIA H100 80GB HBM3") == 239
    assert gpu_steps.predicted(row, "ngpt", "NVIDIA H100 80GB HBM3") == pytest.approx(241.39)
    assert gpu_steps.predicted(row, gpu_steps.WITHOUT_KERNELS, "NVIDIA A100-SXM4-80GB") == pytest.approx(650.73)
    assert gpu_steps.predicted(row, "gpt", "NVIDIA H100 PCIe") is None


def test_caches_travel(tmp_path: Path) -> None:
    """What was compiled is lost, or lies where the next run does not look."""
    archive = tmp_path / "caches.tar.gz"
    with gpu.compile_caches(archive):
        cache = Path(os.environ["TRITON_CACHE_DIR"])
        cache.mkdir()
        (cache / "kernel").write_text("compiled")
    assert not cache.exists()
    with gpu.compile_caches(archive):
        assert Path(os.environ["TRITON_CACHE_DIR"], "kernel").read_text() == "compiled"
