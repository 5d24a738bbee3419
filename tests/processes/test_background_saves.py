"""Checkpoints that are written beside training: killed, failing or slow at each point of a save."""

import re
import signal
from pathlib import Path

import pytest

from ngpt_train.distributed.world import World
from ngpt_train.training.checkpoint import list_checkpoints
from ngpt_train.training.checkpoint.catalogue import verify
from ngpt_train.training.hooks.stopping import MOST_STEPS
from tests.processes import fork_server
from tests.processes.runs import arguments, began_at, checkpoints, end_of, numbers, start, train, wait_for_step
from tests.processes.save_worker import POINTS

RANKS = 2


def started(given: list[str], *fault: str, ranks: int = 1, restarts: int = 0) -> fork_server.Started:
    """A trainer with a fault in its saves, which goes on beside the test. fault: what save_worker takes."""
    return start(given, ranks, restarts, ("tests.processes.save_worker", *fault, "train"))


def output_of(process: fork_server.Started) -> str:
    return process.communicate(timeout=240)[0]


def check_all_complete(directory: Path) -> None:
    """Every checkpoint is what its manifest says."""
    for path in list_checkpoints(directory / "checkpoints"):
        verify(path, World(0, 1, 0, None))  # type: ignore[arg-type]


@pytest.mark.slow
def test_killed_in_a_save(tmp_path: Path, corpus: Path, uninterrupted: Path) -> None:
    """At every point: with two ranks, below. Caught: half a checkpoint under a good name."""
    given = arguments(tmp_path, corpus, "checkpoint.keep_last=1", "checkpoint.async=true")
    directory = tmp_path / "runs/test"
    process = started(given, "kill", "writing", "8", "0")
    output = output_of(process)
    assert process.returncode == -signal.SIGKILL, output
    assert checkpoints(directory) == ["step_00000004"]
    check_all_complete(directory)
    train(given)
    assert numbers(directory) == numbers(uninterrupted)
    assert checkpoints(directory) == ["step_00000012"]
    assert not list((directory / "checkpoints").glob(".*")), "what the kill has left is gone"


BY_TWO = ("parallel=fsdp", "checkpoint.keep_last=1", "checkpoint.async=true")
OF_RANK_0 = ("before-rename", "after-rename", "pruning")


@pytest.fixture(scope="module")
def undisturbed_by_two(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    directory = tmp_path_factory.mktemp("undisturbed_by_two")
    train(arguments(directory, corpus, *BY_TWO), ranks=RANKS)
    return directory / "runs/test"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("point", "rank"), [(x, rank) for x in POINTS for rank in "01" if rank == "0" or x not in OF_RANK_0]
)
def test_a_rank_killed_in_a_save(tmp_path: Path, corpus: Path, undisturbed_by_two: Path, point: str, rank: str) -> None:
    """torchrun starts both again from the newest complete checkpoint, and no step is lost or repeated. Caught: a
    checkpoint that is deleted before the newer one has its name."""
    given = arguments(tmp_path / "killed", corpus, *BY_TWO)
    process = started(given, "kill", point, "8", rank, ranks=RANKS, restarts=1)
    output = output_of(process)
    assert process.returncode == 0, output[-4000:]
    directory = tmp_path / "killed/runs/test"
    assert began_at(directory) == [0, 8 if point in ("after-rename", "pruning") else 4]
    assert numbers(directory) == numbers(undisturbed_by_two)
    assert checkpoints(directory) == ["step_00000012"]
    assert not list((directory / "checkpoints").glob(".*")), "what the kill has left is gone"
    check_all_complete(directory)


@pytest.mark.slow
def test_a_failed_save_is_tried_again(tmp_path: Path, corpus: Path) -> None:
    """Rank 1 cannot write at step 40. Caught: a run that ends for it, ranks that disagree on whether a save has failed,
    a next attempt that comes with the next planned checkpoint only."""
    small = ("train.batch_rows=2", "train.micro_rows=1", "train.steps=70", "checkpoint.keep_last=9")
    given = arguments(tmp_path, corpus, *small, "parallel=ddp", "checkpoint.every=40", "checkpoint.async=true")
    process = started(given, "fail", "writing", "40", "1", ranks=RANKS)
    output = output_of(process)
    assert process.returncode == 0, output[-4000:]
    assert "step_00000040 could not be written: OSError: [Errno 28] no room, says the test" in output
    again = int(re.search(r"the next attempt follows step (\d+)\.", output)[1])  # type: ignore[index]
    assert 40 < again <= 40 + MOST_STEPS + 4, "as soon as the ranks ask each other, and four steps later"
    assert [int(step) for step in re.findall(r"saved \S+/step_(\d+)", output)] == [again, 70]
    assert list(numbers(tmp_path / "runs/test")) == list(range(1, 71))


@pytest.mark.parametrize("asynchronous", ["true", pytest.param("false", marks=pytest.mark.slow)])
def test_three_failures_are_an_alarm(tmp_path: Path, corpus: Path, uninterrupted: Path, asynchronous: str) -> None:
    given = arguments(tmp_path, corpus, f"checkpoint.async={asynchronous}")
    process = started(given, "fail", "checksummed", "all", "0")
    output = output_of(process)
    assert process.returncode == 3, output[-4000:]
    assert "alarm: 3 saves in a row have failed" in output
    assert output.count("It is tried again.") == 2, "the last step's"
    assert "saved" not in output.replace("unsaved steps", "")
    directory = tmp_path / "runs/test"
    assert numbers(directory) == numbers(uninterrupted), "it trains on to its end"
    assert end_of(directory)["code"] == 3
    assert list((directory / "checkpoints").iterdir()) == []


@pytest.mark.slow
def test_one_save_at_a_time(tmp_path: Path, corpus: Path, uninterrupted: Path) -> None:
    """Each write takes two seconds, a step far less. Caught: saves that overtake each other or share their buffers, a
    save that is left out, a copy that training changes."""
    options = ("checkpoint.every=3", "checkpoint.keep_last=9", "checkpoint.async=true")
    slow, quick = (arguments(tmp_path / name, corpus, *options) for name in ("slow", "quick"))
    output = output_of(started(slow, "sleep", "staged", "3,6", "0"))
    train(quick)
    waits = re.findall(
        r"the checkpoint of step (\d+) is still being written; the checkpoint of step (\d+) waits for it", output
    )
    assert waits == [("3", "6"), ("6", "9")], output
    assert re.findall(r"saved \S+/step_(\d+)", output) == [f"{step:08d}" for step in (3, 6, 9, 12)]
    assert numbers(tmp_path / "slow/runs/test") == numbers(uninterrupted)
    kept = [tmp_path / name / "runs/test/checkpoints" for name in ("slow", "quick")]
    for path in list_checkpoints(kept[0]):
        tensors = [next(directory.joinpath(path.name).glob("*.safetensors")).read_bytes() for directory in kept]
        assert tensors[0] == tensors[1], "those of its step"


@pytest.mark.slow
def test_a_stop_waits_for_the_save_under_way(tmp_path: Path, corpus: Path) -> None:
    given = arguments(
        *(tmp_path, corpus, "train.steps=100000", "checkpoint.every=4", "checkpoint.keep_last=9", "parallel=ddp"),
        *("parallel.hang_seconds=3", "checkpoint.async=true"),
    )
    process = started(given, "sleep", "staged", "4", "1", ranks=RANKS)
    wait_for_step(tmp_path / "runs/test", 5)
    process.send_signal(signal.SIGTERM)
    output = output_of(process)
    directory = tmp_path / "runs/test"
    end = end_of(directory)
    assert end["code"] == 0, output[-4000:]
    assert checkpoints(directory) == ["step_00000004", f"step_{end['step']:08d}"]
    assert "hung" not in output
    check_all_complete(directory)


@pytest.mark.slow
def test_torchrun_killed_while_a_save_is_written(tmp_path: Path, corpus: Path) -> None:
    """Caught: ranks that wait for each other without their launcher, a save that they leave half done."""
    given = arguments(tmp_path, corpus, "train.steps=2000", "parallel=ddp", "checkpoint.keep_last=9")
    process = started([*given, "checkpoint.async=true"], "sleep", "staged", "4", "1", ranks=RANKS)
    directory = tmp_path / "runs/test"
    wait_for_step(directory, 5)
    process.kill()
    output_of(process)  # until the ranks have closed it
    end = end_of(directory)
    assert (end["code"], end["reason"]) == (0, "stopped by SIGTERM")
    first, *_, last = checkpoints(directory)
    assert (first, last) == ("step_00000004", f"step_{end['step']:08d}")
    check_all_complete(directory)


@pytest.mark.slow
@pytest.mark.parametrize(("point", "rank"), [("writing", "1"), ("before-rename", "0")])
def test_a_save_that_hangs_names_rank_and_checkpoint(tmp_path: Path, corpus: Path, point: str, rank: str) -> None:
    """Caught: an end in gloo's words, which name neither."""
    given = arguments(
        *(tmp_path, corpus, "train.steps=100000", "checkpoint.every=4", "parallel=ddp", "parallel.timeout=20"),
        "checkpoint.async=true",
    )
    process = started(given, "hang", point, "4", rank, ranks=RANKS)
    output = output_of(process)
    assert process.returncode != 0
    path = tmp_path / "runs/test/checkpoints/step_00000004"
    assert f"The checkpoint {path} could not be written: rank {rank} has not done its part" in output, output[-4000:]
