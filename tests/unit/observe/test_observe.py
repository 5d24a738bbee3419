"""Meters, the files a run is logged to, and what people see."""

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ngpt_train.config import Config
from ngpt_train.core.progress import format_seconds
from ngpt_train.observe import meters
from ngpt_train.observe.console import Clock, LogFile, describe, format_count
from ngpt_train.observe.meters import Meter, peak_flops, peak_memory_gb
from ngpt_train.observe.sinks import JsonlSink, build_sinks


def train_record(step: int, **values: Any) -> dict[str, Any]:
    about = {"kind": "train", "step": step, "tokens": 4096 * step, "skipped": 0}
    losses = {"loss": 4.1234, "loss_mean": 4.1301, "lr": 0.019, "grad_norm": 0.81}
    speed = {"tokens_per_s": 12345.0, "mfu": 0.3124, "step_time": 0.5, "data_time": 0.001, "memory_gb": 1.5}
    return about | losses | speed | values


def eval_record(step: int) -> dict[str, Any]:
    return {"kind": "eval", "step": step, "tokens": 4096 * step, "loss": 3.9, "ppl": 49.4, "bits_per_byte": 1.5123}


def keys(path: Path) -> list[tuple[str, int]]:
    return [(record["kind"], record["step"]) for record in map(json.loads, path.read_text().splitlines())]


# metrics.jsonl


def test_jsonl_keeps_all_digits_and_stays_valid_json(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl", None)
    loss = 2.302585092994045684
    sink.log(train_record(1, loss=loss, grad_norm=float("nan"), lr=float("inf"), mfu=None))
    text = (tmp_path / "metrics.jsonl").read_text()  # before close: every line is flushed
    record = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert record["loss"] == loss
    assert record["grad_norm"] is None
    assert record["lr"] is None
    assert record["mfu"] is None


def test_jsonl_resume_cuts_off_later_records_and_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = JsonlSink(path, None)
    for record in [eval_record(0), *(train_record(step) for step in range(10, 70, 10))]:
        first.log(record)
    first.close("killed")
    before = path.read_bytes().splitlines(keepends=True)
    with path.open("a") as file:
        file.write('{"kind": "train", "step": 4')  # would pass for a step before 40 if the line were trusted

    resumed = JsonlSink(path, 40)
    assert path.read_bytes() == b"".join(before[:5])  # the bytes of what stays are the old ones
    assert resumed.dropped == 3
    resumed.log(eval_record(40))  # saved before it was evaluated
    resumed.log(train_record(50))
    resumed.close("done")
    assert keys(path) == [("eval", 0), *(("train", step) for step in (10, 20, 30, 40)), ("eval", 40), ("train", 50)]

    again = JsonlSink(path, 40)  # now the evaluation of step 40 is there
    again.log(eval_record(40))
    again.close("done")
    assert keys(path).count(("eval", 40)) == 1
    assert sorted(tmp_path.iterdir()) == [path]


def test_jsonl_keeps_the_rollbacks_that_the_run_has_had(tmp_path: Path) -> None:
    """Caught: a second rollback to one step that is taken for the first; the rollback of a start that was killed before
    it saved again."""
    path = tmp_path / "metrics.jsonl"
    first = JsonlSink(path, None)
    first.log(train_record(10))
    for number in (1, 2, 2):
        first.log({"kind": "rollback", "step": 10, "number": number, "tokens": 1})
    first.close("killed")
    assert keys(path) == [("train", 10), ("rollback", 10), ("rollback", 10)]
    JsonlSink(path, 10, rollbacks=1).close("done")
    assert keys(path) == [("train", 10), ("rollback", 10)]


def test_jsonl_begins_anew_or_after_a_whole_line(tmp_path: Path) -> None:
    """Caught: a last line without its end, in which the next record would go on; records of before a new run."""
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps(train_record(10)) + "\n" + json.dumps(train_record(20)))
    sink = JsonlSink(path, 20)
    sink.log(train_record(30))
    sink.close("done")
    assert keys(path) == [("train", 10), ("train", 30)]
    JsonlSink(path, None).log(eval_record(0))
    assert keys(path) == [("eval", 0)]


# Meters


def test_meter_averages_over_the_window() -> None:
    meter = Meter(flops_per_token=1e9, world_size=4, device=torch.device("cpu"), dtype=torch.float32)
    for seconds, wait in ((1.0, 0.1), (3.0, 0.3)):
        meter.step(seconds, wait, tokens=1000)
    metrics = meter.read()
    assert metrics["tokens_per_s"] == 500.0
    assert metrics["step_time"] == 2.0
    assert metrics["data_time"] == pytest.approx(0.2)
    assert metrics["mfu"] is None
    meter.step(1.0, 0.1, tokens=10)
    assert meter.read()["tokens_per_s"] == 10.0  # the window before is forgotten


def test_mfu_divides_by_the_peak_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meters, "peak_flops", lambda name, dtype: 1e12)
    meter = Meter(flops_per_token=1e9, world_size=4, device=torch.device("cpu"), dtype=torch.float32)
    meter.step(1.0, 0.1, tokens=1000)
    assert meter.read()["mfu"] == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("name", "dtype", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", torch.bfloat16, 312e12),
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989.4e12),
        ("NVIDIA H100 PCIe", torch.bfloat16, 756e12),
        ("NVIDIA H100 PCIe", torch.float16, 756e12),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", torch.bfloat16, None),
        ("NVIDIA H100 80GB HBM3", torch.float32, None),
        ("NVIDIA A100-SXM-64GB", torch.bfloat16, None),
        ("NVIDIA Z9000", torch.bfloat16, None),
        ("cpu", torch.bfloat16, None),
    ],
)
def test_peak_is_known_or_none(name: str, dtype: torch.dtype, peak: float | None) -> None:
    assert peak_flops(name, dtype) == peak


def test_memory_on_cpus_is_the_resident_set_in_gb() -> None:
    assert 0.05 < peak_memory_gb(torch.device("cpu")) < 20  # Python and torch; another unit is 1000 times off


# What people see


def test_lines() -> None:
    clock = Clock(total_steps=500)
    assert describe(train_record(116), clock) == (
        "step 116/500  loss 4.1234  mean 4.1301  lr 1.9e-02  grad 0.81  12.3k tok/s  mfu 31.2%  eta 3m12s"
    )
    assert describe(train_record(500, mfu=None, skipped=2, grad_norm=float("nan")), clock) == (
        "step 500/500  loss 4.1234  mean 4.1301  lr 1.9e-02  grad nan  12.3k tok/s  skipped 2  eta 0s"
    )
    assert describe(eval_record(500), clock) == "eval 500/500  loss 3.9000  ppl 49.4  bits/byte 1.5123"
    scores = {"mean": 0.45, "mean_stderr": 0.01, "mean_chance": 0.375}
    scores |= {"piqa/acc": 0.68, "piqa/chance": 0.5, "a/f1": 0.2}
    assert describe({"kind": "tasks", "step": 500, **scores}, clock) == (
        "tasks 500/500  mean 0.4500 ± 0.0100 (chance 0.3750)  piqa 0.6800 (chance 0.5000)  a f1 0.2000"
    )


def test_eta_follows_recent_step_times() -> None:
    """Caught: one to the end of the schedule, where train.stop_at ends the run before."""
    clock = Clock(total_steps=1000, stop_at=100)
    clock.remaining(10, step_time=60.0)  # compilation
    for step in range(20, 90, 10):
        eta = clock.remaining(step, step_time=1.0)
    assert 20 <= eta < 21


def test_numbers_for_people() -> None:
    assert [format_count(x) for x in (7.0, 999.6, 12_345, 999_600, 1_234_567, 2e9)] == [
        "7", "1k", "12.3k", "1M", "1.23M", "2G"
    ]  # fmt: skip
    assert [format_seconds(x) for x in (0.4, 59.6, 192, 3_600, 100_000)] == ["0s", "1m00s", "3m12s", "1h00m", "1d03h"]


CONSOLE = """
import sys
from ngpt_train.observe.console import Clock, console_sink
loss = dict(loss=4.0, loss_mean=4.5)
train = dict(kind="train", lr=0.01, grad_norm=1.0, tokens_per_s=1e4, mfu=None, step_time=1.0, skipped=0) | loss
sink = console_sink(Clock(30), resume_step=None)
sink.log(dict(kind="eval", step=0, loss=8.0, ppl=2981.0, bits_per_byte=3.0))
for step in (10, 20, 30):
    sink.log(train | dict(step=step))
sink.message("see [runs/x]")
sink.close("done")
"""


def test_plain_lines_where_the_output_is_not_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # which makes rich believe in a terminal
    exec(CONSOLE, {})
    steps = [
        f"step {n}/30  loss 4.0000  mean 4.5000  lr 1.0e-02  grad 1.00  10k tok/s  eta {30 - n}s" for n in (10, 20, 30)
    ]
    said = ["eval 0/30  loss 8.0000  ppl 2981  bits/byte 3.0000", *steps, "see [runs/x]", "end: done"]
    assert capsys.readouterr() == ("\n".join([*said, ""]), "")


def test_a_run_outlives_its_reader() -> None:
    program = "import sys; sys.stdin.read()\n" + CONSOLE + "print('still here'); print('alive', file=sys.stderr)"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        process.stdin.close()
        assert process.stderr.read() == b"alive\n"
    assert process.returncode == 0


def test_live_bar_on_a_terminal() -> None:
    main, terminal = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "100"}
    with subprocess.Popen(
        [sys.executable, "-c", CONSOLE], stdout=terminal, stderr=terminal, env=environment
    ) as process:
        os.close(terminal)
        output = b""
        try:
            while chunk := os.read(main, 65536):
                output += chunk
        except OSError:  # how Linux says that the terminal has no other side any more
            pass
    os.close(main)
    assert process.returncode == 0
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", output.decode())
    for expected in ("step 20/30", "eta 10s", "eval 0/30  loss 8.0000", "see [runs/x]", "end: done"):
        assert expected in text
    assert "━" in text


# All together


def config(**logging: Any) -> Config:
    cfg = Config()
    cfg.logging.wandb.mode = "disabled"
    for name, value in logging.items():
        setattr(cfg.logging, name, value)
    return cfg


def test_build_sinks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for resume_step in (None, 10):
        sinks = build_sinks(config(), tmp_path, {}, resume_step=resume_step)
        for sink in sinks:
            sink.log(eval_record(resume_step or 0))
            sink.log(train_record(10))
            sink.log(train_record(20))
            sink.message("saved")
        for sink in sinks:
            sink.close("done")
    assert keys(tmp_path / "metrics.jsonl") == [("eval", 0), ("train", 10), ("eval", 10), ("train", 20)]
    lines = (tmp_path / "logs" / "rank_0.log").read_text().splitlines()
    stripped = [re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  (.*)", line) for line in lines]
    assert [match and match[1] for match in stripped] == capsys.readouterr().out.splitlines()
    assert any("cut off 1 lines" in line for line in lines)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_a_full_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    sinks = build_sinks(config(), tmp_path, {}, resume_step=None)
    for sink in sinks:
        if isinstance(sink, JsonlSink):
            sink._file = open("/dev/full", "ab", buffering=0)  # noqa: SIM115
        if isinstance(sink, LogFile):
            sink._file = open("/dev/full", "a")  # noqa: SIM115
    for sink in sinks:
        sink.message("a line")
    assert "No space left on device: a line" in capsys.readouterr().err
    for step in (1, 2):
        sinks[0].log(train_record(step))
        assert f"metrics.jsonl: cannot be written (No space left on device). Make room; {step} records" in caplog.text
    with pytest.raises(OSError, match=r"2 records of .*metrics\.jsonl are lost: .*No space left"):
        sinks[0].close("done")


def test_records_wait_for_room(tmp_path: Path) -> None:
    """A disk takes bytes up to a limit, and later more. Caught: half a line, a record that is lost or comes twice, a
    run that ends for want of room."""
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path, None)
    file = sink._file

    class Full:
        limit = 0
        truncate, close = file.truncate, file.close

        def write(self, content: bytes) -> int:
            return file.write(content[: max(0, self.limit - path.stat().st_size)])

    sink._file = full = Full()  # type: ignore[assignment]
    seen = []
    for step, full.limit in enumerate([1000, 130, 130, 1000, 1000]):
        sink.log({"kind": "train", "step": step, "loss": 40 * "1"})
        seen.append(path.read_bytes().count(b"\n"))
        assert path.read_bytes().endswith(b"\n"), "never half a line"
    sink.close("done")
    assert seen == [1, 1, 1, 4, 5]
    assert keys(path) == [("train", step) for step in range(5)]


def test_tensorboard(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for resume_step, steps in ((None, (10, 20)), (10, (20, 30))):
        for sink in build_sinks(config(tensorboard=True), tmp_path, {}, resume_step=resume_step):
            for step in steps:
                sink.log(train_record(step, loss=float(step), mfu=None))
            sink.close("done")
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(10, 10.0), (20, 20.0), (30, 30.0)]
    assert "train/mfu" not in events.Tags()["scalars"]
