"""Lines of docs/faults.md: signals to several ranks, slow checks, disks, clocks."""

import contextlib
import fcntl
import os
import re
import shutil
import signal
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.processes import fork_server, runs
from tests.processes.test_streaming import STREAMED, data_hashes, workers_of

pytestmark = pytest.mark.slow


def faulty(fault: str, given: list[str]) -> fork_server.Started:
    """A run of two ranks with a fault of faulty.py."""
    return runs.start(given, 2, program=("tests.processes.faulty", fault, "train"))


@pytest.mark.parametrize(
    ("number", "to"), [(signal.SIGHUP, "torchrun"), (signal.SIGUSR1, "a rank"), (signal.SIGHUP, "a rank")]
)
def test_signals_to_torchrun_or_a_rank(tmp_path: Path, corpus: Path, number: signal.Signals, to: str) -> None:
    """All ranks stop after the same step and save."""
    if signal.getsignal(number) == signal.SIG_IGN:
        pytest.skip(f"{number.name} is ignored here, as under nohup")
    given = runs.arguments(tmp_path, corpus, "train.steps=100000", "checkpoint.every=0")
    process = runs.start(given, ranks=2)
    directory = tmp_path / "runs/test"
    runs.wait_for_step(directory, 3)
    os.kill(process.pid if to == "torchrun" else runs.children(process)[1], number)
    output = process.communicate(timeout=120)[0]
    ended = runs.end_of(directory)
    # torchrun forwards its signal as SIGTERM or as it is.
    assert (ended["code"], ended["reason"].split(" by ")[0]) == (0, "stopped"), ended
    assert f"saved at step {ended['step']}" in output
    assert max(runs.records(directory)) == ended["step"]
    if to == "a rank":
        assert process.returncode == 0, output[-3000:]


def test_a_stop_while_one_of_several_ranks_waits_for_rows(tmp_path: Path) -> None:
    """It cannot save, since the others wait inside the step; it ends soon, and nothing is lost afterwards."""
    text = runs.write_parquet_shards(tmp_path / "text", (90, 13, 200, 41, 77))
    options = [*STREAMED, "train.steps=100000", "data.workers=1", "checkpoint.every=5"]
    given = runs.arguments(tmp_path / "parts", text, *options)
    process = runs.start(given, ranks=2)
    directory = tmp_path / "parts/runs/test"
    runs.wait_for_step(directory, 6)
    stopped = workers_of(process)[0]
    os.kill(stopped, signal.SIGSTOP)
    steps = -1
    while (now := max(runs.records(directory))) > steps:  # until the blocks that it had sent are used up
        steps = now
        time.sleep(4)
    process.terminate()
    output = process.communicate(timeout=45)[0]  # 15 seconds, and torchrun's 30 at most
    with contextlib.suppress(ProcessLookupError):
        os.kill(stopped, signal.SIGKILL)
    assert re.search(r"stopped by SIGTERM, while rank \d waited for rows; the same command goes on", output), output
    assert runs.end_of(directory)["code"] == 1
    until = f"train.stop_at={steps + 5}"
    runs.train([*given, until], ranks=2)
    runs.train([*runs.arguments(tmp_path / "whole", text, *options), until], ranks=2)
    assert data_hashes(directory) == data_hashes(tmp_path / "whole/runs/test")
    assert runs.numbers(directory) == runs.numbers(tmp_path / "whole/runs/test")


def test_a_check_that_is_slower_than_the_timeout(tmp_path: Path, corpus: Path) -> None:
    """Caught: a collective that waits for a rank which compares a checkpoint's files with their checksums."""
    runs.train(runs.arguments(tmp_path, corpus, "train.stop_at=4"), ranks=2)
    process = faulty("slow_check", runs.arguments(tmp_path, corpus, "parallel.timeout=30"))
    output = process.communicate()[0]
    assert process.returncode == 0, output[-3000:]
    assert output.count("slow differences") == 1
    assert sorted(runs.numbers(tmp_path / "runs/test")) == list(range(1, 13))


def test_a_rank_that_runs_out_of_data(tmp_path: Path) -> None:
    """Six documents for eight streams, one of which finds none in three epochs: the rank whose row it is says so, and
    the other does not wait for it. Caught: a wait until parallel.timeout; an end that names the lost connection."""
    corpus = runs.write_corpus(tmp_path / "few.jsonl", 6)
    few = ["data.streaming=true", "data.streams=8", "data.val_fraction=0.4", "eval.rows=1", "parallel=ddp"]
    process = runs.start(runs.arguments(tmp_path, corpus, *few, "train.micro_rows=1"), ranks=2)
    output = process.communicate(timeout=90)[0]
    ended = runs.end_of(tmp_path / "runs/test")
    assert (ended["code"], ended["rank"]) == (3, 0)
    assert ended["reason"].startswith("DataError: data.streams=8: in 3 epochs there is no document for stream")
    assert "error: data.streams=8: in 3 epochs there is no document for stream" in output
    assert re.search(r"rank +: 0 .*\n +exitcode +: 3", output.partition("Root Cause")[2]), output


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Any:
    """Losses, norms, rates and tokens of 30 steps of two ranks."""
    directory = tmp_path_factory.mktemp("undisturbed")
    runs.train(runs.arguments(directory, corpus, "train.steps=30"), ranks=2)
    return runs.numbers(directory / "runs/test")


def test_a_disk_that_fills_up(tmp_path: Path, corpus: Path, disk: Path, undisturbed: Any) -> None:
    """Checkpoints are not written, the end says so with code 3, and the same command goes on when there is room."""
    given = runs.arguments(tmp_path, corpus, f"run.root={disk}", "train.steps=30")
    process = faulty("paced", given)
    runs.wait_for_step(disk / "test", 6)
    filling = runs.fill(disk)
    output = process.communicate(timeout=120)[0]
    filling.unlink()
    assert re.search(r"MB are missing\. Training goes on; the next attempt follows step \d+", output), output
    assert "alarm: 3 saves in a row have failed" in output, output
    assert re.search(r"error: The checkpoint .* could not be written: .* MB are missing", output), output
    assert re.search(r"exitcode +: 3", output), output
    runs.train(given, ranks=2)
    assert runs.numbers(disk / "test") == undisturbed


def test_a_read_only_disk_at_the_start(tmp_path: Path, corpus: Path, disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    finished = runs.run("train", runs.arguments(tmp_path, corpus, f"run.root={disk}"), ranks=2)
    assert finished.returncode in (2, 3), finished.stderr
    assert "Traceback" not in finished.stderr
    assert str(disk) in finished.stderr


@pytest.fixture
def failing_disk(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """A file system of its own on a loop device, and the file of the kernel by which its disk fails."""
    image, where = tmp_path / "image", tmp_path / "disk"
    where.mkdir()
    with image.open("wb") as file:
        file.truncate(64 << 20)
    mount = ["mount", "-o", "loop,errors=remount-ro", str(image), str(where)]
    for command in (["mkfs.ext4", "-q", "-F", str(image)], mount):
        try:
            subprocess.run(command, capture_output=True, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"a disk that may fail cannot be made here: {error}")
    device = next(line.split()[0] for line in Path("/proc/mounts").read_text().splitlines() if f" {where} " in line)
    trigger = Path("/sys/fs/ext4", Path(device).name, "trigger_fs_error")
    if not os.access(trigger, os.W_OK):
        subprocess.run(["umount", str(where)], check=True)
        pytest.skip(f"this kernel has no {trigger}")
    yield where, trigger
    subprocess.run(["umount", "--lazy", str(where)], check=True)


def turn_read_only(where: Path, trigger: Path) -> None:
    """What ext4 does when its disk reports an error. Files that are open for writing do not keep it from it."""
    trigger.write_text("the test says so")


def shut_down(where: Path, trigger: Path) -> None:
    """From here on each access ends with EIO: ext4's ioctl EXT4_IOC_SHUTDOWN, without writing the journal."""
    handle = os.open(where, os.O_RDONLY)
    fcntl.ioctl(handle, 0x8004587D, struct.pack("I", 2))
    os.close(handle)


@pytest.mark.parametrize(
    ("fail", "reason"), [(turn_read_only, "Read-only file system"), (shut_down, "Input/output error")]
)
def test_a_disk_that_fails_meanwhile(
    tmp_path: Path,
    corpus: Path,
    failing_disk: tuple[Path, Path],
    undisturbed: Any,
    fail: Callable[[Path, Path], None],
    reason: str,
) -> None:
    """The run trains on to its end, which is code 3; on the mended disk the same command goes on. Caught: a traceback,
    a hang, a rank that goes on alone, a checkpoint that is taken although it is not whole."""
    where, trigger = failing_disk
    given = runs.arguments(tmp_path, corpus, f"run.root={where / 'runs'}", "train.steps=30")
    process = faulty("paced", given)
    runs.wait_for_step(where / "runs/test", 6)
    os.sync()
    fail(where, trigger)
    output = process.communicate(timeout=120)[0]
    assert re.search(rf"step_00000008 could not be written: .*{reason}", output), output
    assert "alarm: 3 saves in a row have failed" in output, output
    assert re.search(r"exitcode +: 3", output), output
    assert not re.search(r'File ".*/ngpt_train/', output), output
    subprocess.run(["umount", "--lazy", str(where)], check=True)
    # A copy: while any process holds the failed file system, mounting the image itself gives that one back.
    mended = shutil.copy(tmp_path / "image", tmp_path / "mended")
    subprocess.run(["fsck.ext4", "-p", "-f", str(mended)], check=False, capture_output=True)
    subprocess.run(["mount", "-o", "loop", str(mended), str(where)], check=True)
    runs.train(given, ranks=2)
    assert runs.numbers(where / "runs/test") == undisturbed


def test_a_clock_that_jumps(tmp_path: Path, corpus: Path) -> None:
    """Caught: a time of the wall clock where a duration is meant."""
    options = ["train.steps=16", "parallel.hang_seconds=5", "run.max_time=1", "data.streaming=true"]
    process = faulty("jumping", runs.arguments(tmp_path / "jumping", corpus, *options))
    output = process.communicate()[0]
    assert process.returncode == 0, output[-3000:]
    assert "hung" not in output
    runs.train(runs.arguments(tmp_path / "even", corpus, *options), ranks=2)
    assert runs.numbers(tmp_path / "jumping/runs/test") == runs.numbers(tmp_path / "even/runs/test")
    assert all(0 < record["train_seconds"] < 1000 for record in runs.records(tmp_path / "jumping/runs/test").values())
