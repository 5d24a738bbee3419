"""`audit` as a user starts it: real trainings of windows, its exit codes, and what it leaves alone."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.processes.runs import arguments, contents, run, train, write_corpus
from tests.processes.studies import begin, trainers, wait_for_no_trainer, wait_until

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 8 steps with checkpoints at 4 and 8, killed by nobody; beside it its text."""
    root = tmp_path_factory.mktemp("audit")
    train(of(root, "model=gpt", "run.name=test"))
    return root


def of(root: Path, *overrides: str) -> list[str]:
    corpus = root / "text.jsonl"
    if not corpus.exists():
        write_corpus(corpus)
    return arguments(root, corpus, "train.steps=8", "eval.every=4", *overrides)


def test_an_honest_run_and_an_edited_one(trained: Path) -> None:
    """Caught: a resume that is not the run's own, other threads, a run that is written to; exit code 0 for an edit."""
    directory = trained / "runs/test"
    before = contents(directory)
    finished = run("audit", [str(directory), "audit.windows=1", "audit.seed=0"], code=0)
    assert "equal to the bit" in finished.stdout
    certificate = json.loads((directory / "audit.json").read_text())
    (window,) = certificate["windows"]
    assert (window["eval_records"], window["train_records"], window["checkpoint"]) == (2, 4, True)
    assert {path: x for path, x in contents(directory).items() if path.name != "audit.json"} == before

    edited = trained / "edited"
    shutil.copytree(directory, edited)
    begin = certificate["windows"][0]["start"]
    lines = (edited / "metrics.jsonl").read_text().splitlines(keepends=True)
    # Not of its last digit, which the number may not have.
    (number,) = [i for i, x in enumerate(lines) if '"train"' in x and f'"step": {begin + 2},' in x]
    digit = re.sub(r'("grad_norm": [0-9]+\.[0-9]{3})([0-9])', lambda x: f"{x[1]}{(int(x[2]) + 1) % 10}", lines[number])
    assert digit != lines[number]
    (edited / "metrics.jsonl").write_text("".join([*lines[:number], digit, *lines[number + 1 :]]))
    out = trained / "certificate.json"
    finished = run("audit", [str(edited), "audit.windows=1", "audit.seed=0", f"audit.out={out}"], code=3)
    assert f"the train record of step {begin + 2} says grad_norm" in finished.stdout
    assert [x["field"] for x in json.loads(out.read_text())["found"]][-1] == "grad_norm"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux ends a process with its parent")
def test_a_killed_audit_trains_no_further(trained: Path, tmp_path: Path) -> None:
    """Caught: a training that goes on with nobody to read it."""
    certificate = tmp_path / "certificate.json"
    killed = begin("audit", [str(trained / "runs/test"), f"audit.out={certificate}"], TMPDIR=str(tmp_path))
    wait_until(killed, lambda: any(trainers(tmp_path, "ngpt_train.verbs.audit")))
    killed.kill()
    killed.communicate()
    wait_for_no_trainer(tmp_path, "ngpt_train.verbs.audit")
    assert not list(tmp_path.rglob("metrics.jsonl"))  # the training had no time to begin
    assert not certificate.exists()


def test_a_run_that_diverged(tmp_path: Path) -> None:
    """Caught: an accusation because training again diverges too."""
    given = of(tmp_path, "model=gpt", "run.name=test", "train.steps=30", "optim.lr=1000", "optim.clip_norm=null")
    run("train", given, code=4)
    run("audit", [str(tmp_path / "runs/test")], code=0)


def test_other_data(tmp_path: Path) -> None:
    """From step 0 and from a checkpoint."""
    train(of(tmp_path, "run.name=test"))
    write_corpus(tmp_path / "text.jsonl", seed=1)
    finished = run("audit", [str(tmp_path / "runs/test")], code=3)
    assert "run.json says data_fingerprint" in finished.stdout
    assert "cannot be trained again: run.name=again: the data is not what this run was trained on" in finished.stdout


def test_a_run_of_several_ranks_that_was_resumed(tmp_path: Path) -> None:
    """Caught: one process in the place of two, whose sums are rounded otherwise; a window over the resume."""
    given = of(tmp_path, "run.name=test", "parallel=ddp", "checkpoint.every=0")
    train([*given, "train.stop_at=3"], ranks=2)
    train(given, ranks=2)
    finished = run("audit", [str(tmp_path / "runs/test")], code=0)
    assert "8 of 8 steps were trained again in 2 windows" in finished.stdout


def test_options_that_keep_state(tmp_path: Path) -> None:
    keep_state = ("tokenizer=sentencepiece", "tokenizer.vocab_size=300", "guards.rollback=true", "optim.ema_decay=0.9")
    train(of(tmp_path, "run.name=test", *keep_state, "checkpoint.keep_last=1"))
    run("audit", [str(tmp_path / "runs/test")], code=0)
