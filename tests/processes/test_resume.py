"""A run that was killed, interrupted or moved ends as if nothing had happened."""

import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest

from tests.processes import runs


def again_from(directory: Path, step: int) -> runs.Numbers:
    """The numbers of a finished run, whose checkpoints after `step` are deleted, so that it goes on from there."""
    for checkpoint in (directory / "checkpoints").glob("step_*"):
        if int(checkpoint.name.removeprefix("step_")) > step:
            shutil.rmtree(checkpoint)
    assert (directory / f"checkpoints/step_{step:08d}").is_dir()
    return runs.numbers(directory)


@pytest.mark.slow
def test_killed_twice_at_random(tmp_path: Path, corpus: Path, uninterrupted: Path) -> None:
    given = runs.arguments(tmp_path, corpus)
    directory = tmp_path / "runs/test"
    for least in (2, 6):
        process = runs.start(given)
        runs.wait_for_step(directory, least)
        time.sleep(random.random() * 0.3)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    runs.train(given)
    assert runs.numbers(directory) == runs.numbers(uninterrupted)
    assert runs.end_of(directory)["reason"] == "done"


def test_ddp_resumes_bit_for_bit(tmp_path: Path, corpus: Path) -> None:
    """On 3 ranks a sum depends on its place in the bucket, so buckets must not depend on the age of the process."""
    options = ["train.batch_rows=6", "parallel=ddp", "model=gpt", "model.d_model=128", "model.d_mlp=1024"]
    given = runs.arguments(tmp_path, corpus, *options, "train.steps=9", "checkpoint.every=5")
    runs.train(given, ranks=3)
    expected = again_from(tmp_path / "runs/test", 5)
    runs.train(given, ranks=3)
    assert runs.numbers(tmp_path / "runs/test") == expected
    assert runs.began_at(tmp_path / "runs/test") == [0, 5]


def test_dropout_goes_on_bit_for_bit_and_on_other_ranks(tmp_path: Path, corpus: Path) -> None:
    """Caught: masks of a generator whose state is not saved, of a count of steps since the start, or of the rank."""
    whole, others = tmp_path / "whole", tmp_path / "others"
    common = ["train.steps=8", *(f"model.{place}_dropout=0.1" for place in ("embedding", "residual", "attention"))]
    runs.train(runs.arguments(whole, corpus, *common))
    expected = again_from(whole / "runs/test", 4)
    runs.train(runs.arguments(whole, corpus, *common))
    assert runs.numbers(whole / "runs/test") == expected
    assert runs.began_at(whole / "runs/test") == [0, 4]
    runs.train(runs.arguments(others, corpus, *common, "train.stop_at=3", "parallel=ddp"), ranks=2)
    runs.train(runs.arguments(others, corpus, *common, "train.micro_rows=4"))
    runs.assert_near(runs.numbers(others / "runs/test"), expected, 1e-6)


def test_the_parts_of_training_ngpt_go_on_bit_for_bit(tmp_path: Path, corpus: Path) -> None:
    """Caught: a gate without Adam's state, a cap from weights of before the checkpoint."""
    given = runs.arguments(tmp_path, corpus, "recipe=training_ngpt", "optim.lr=2e-2", "train.steps=8")
    runs.train(given)
    expected = again_from(tmp_path / "runs/test", 4)
    runs.train(given)
    assert runs.numbers(tmp_path / "runs/test") == expected
    assert runs.began_at(tmp_path / "runs/test") == [0, 4]


@pytest.mark.slow
def test_other_ranks_and_layouts(tmp_path: Path, corpus: Path, uninterrupted: Path) -> None:
    """fsdp on 2, one process, ddp on 4: the loss of an uninterrupted run within 1e-6."""
    runs.train(runs.arguments(tmp_path, corpus, "parallel=fsdp", "train.stop_at=4"), ranks=2)
    runs.train(runs.arguments(tmp_path, corpus, "parallel=single", "train.stop_at=8"))
    runs.train(runs.arguments(tmp_path, corpus, "parallel=ddp"), ranks=4)
    runs.assert_near(runs.numbers(tmp_path / "runs/test"), runs.numbers(uninterrupted), 1e-6)


def test_an_interrupt_saves_and_exits_cleanly(tmp_path: Path, corpus: Path) -> None:
    """Signals to several ranks: test_faults.py."""
    given = runs.arguments(tmp_path, corpus, "train.steps=100000", "checkpoint.every=0")
    directory = tmp_path / "runs/test"
    process = runs.start(given)
    runs.wait_for_step(directory, 3)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    ended = runs.end_of(directory)
    assert (ended["code"], ended["reason"]) == (0, "stopped by SIGINT")
    assert (directory / f"checkpoints/step_{ended['step']:08d}/MANIFEST.json").is_file()
    assert f"saved at step {ended['step']}" in output


def test_second_interrupt_exits_at_once(tmp_path: Path, corpus: Path) -> None:
    process = runs.start(runs.arguments(tmp_path, corpus, "train.steps=100000", "train.batch_rows=4096"))
    log = tmp_path / "runs/test/logs/rank_0.log"
    runs.wait_for(lambda: log.exists() and "eval 0/" in log.read_text(), 120)
    process.send_signal(signal.SIGINT)
    time.sleep(1.5)
    assert process.poll() is None, "the step is long, the first signal waits for its end"
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=10) == 130


def test_time_limit(tmp_path: Path, corpus: Path) -> None:
    runs.train(runs.arguments(tmp_path, corpus, "train.steps=100000", "run.max_time=0.0005"))
    ended = runs.end_of(tmp_path / "runs/test")
    assert (ended["code"], ended["reason"]) == (0, "stopped by run.max_time")
    assert 0 < ended["step"] < 100000


def test_finished_run_is_left_alone(uninterrupted: Path, corpus: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in uninterrupted.rglob("*")}
    finished = runs.run("train", runs.arguments(uninterrupted.parent.parent, corpus), code=0)
    assert "step 12 and would end at 12" in finished.stdout
    assert {path: path.stat().st_mtime_ns for path in uninterrupted.rglob("*")} == before


def test_sigterm_before_the_first_step(tmp_path: Path, corpus: Path) -> None:
    """From the moment that the directory is a run's, a wish to stop is heard: one step, saved, exit code 0."""
    process = runs.start(runs.arguments(tmp_path, corpus, "train.steps=1000", "eval.every=0"))
    for line in process.stdout:
        if b"runs/test: new" in line:
            process.send_signal(signal.SIGTERM)
            break
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 0, output
    end = runs.end_of(tmp_path / "runs/test")
    assert (end["code"], end["reason"]) == (0, "stopped by SIGTERM")
    assert (tmp_path / f"runs/test/checkpoints/step_{end['step']:08d}").is_dir()


def test_the_step_to_go_on_from(
    tmp_path: Path, corpus: Path, uninterrupted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """run.resume_step insists, puts aside what is newer, and counts once in a job. Caught: another checkpoint in its
    place, rows of another step, newer checkpoints that the next start takes; a restart by torchrun that begins at the
    named step again."""
    given = runs.arguments(tmp_path, corpus, "checkpoint.keep_last=9")
    directory = tmp_path / "runs/test"
    runs.train(given)
    refused = runs.run("train", [*given, "run.resume_step=6"], code=3)
    assert "run.resume_step=6: there is no complete checkpoint of this step in" in refused.stderr
    assert "(there are: 4, 8, 12)" in refused.stderr
    named = [*given, "run.resume_step=4"]
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a-job")
    runs.train([*named, "train.stop_at=6"])
    kept = sorted(path.name for path in (directory / "checkpoints").glob("*step*"))
    assert kept == ["replaced-step_00000008", "replaced-step_00000012", "step_00000004", "step_00000006"]
    runs.train(named)
    assert runs.began_at(directory) == [0, 4, 6]
    assert runs.numbers(directory) == runs.numbers(uninterrupted)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    damaged = next((directory / "checkpoints/step_00000004").glob("*.safetensors"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    refused = runs.run("train", named, code=3)
    assert "step_00000004 is damaged" in refused.stderr
    assert (directory / "checkpoints/step_00000012").is_dir()
