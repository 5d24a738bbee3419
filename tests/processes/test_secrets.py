"""What leaves a run, read as bytes: no file of it and nothing that it prints has a secret."""

from pathlib import Path

import pytest

from tests.processes.runs import arguments, forked, write_corpus

PLANTED = "hunter2/hunter2+x"
LOGIN = "swordfish"


def test_no_secret_leaves_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught: a secret in wandb's own file, in the log, in exit.json, in a plan or in a message."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MY_PASSPHRASE", PLANTED)
    corpus = write_corpus(tmp_path / "corpus.jsonl")
    described = [f"logging.wandb.{key}=x ${{oc.env:MY_PASSPHRASE}}" for key in ("name", "group", "notes", "project")]
    others = ["logging.wandb.tags=[a,'${oc.env:MY_PASSPHRASE}']", "generate.prompt=${oc.env:MY_PASSPHRASE} in a text"]
    url = f"generate.prompts=https://me:{LOGIN}@host/x?access_token={LOGIN}&n=1"
    on = ["logging.wandb.mode=offline", "logging.tensorboard=true", "train.steps=2"]
    given = arguments(tmp_path, corpus, *described, *others, url, *on)

    trained, planned = forked("train", given), forked("plan", [*given, f"plan.out={tmp_path / 'runs' / 'plan.json'}"])
    ends_badly = [f"data.val_files={tmp_path}/{PLANTED}", "run.name=bad"]
    no_file = [f"data.path=https://me:{LOGIN}@host/x", "run.name=none"]  # pathlib makes https:/me of it
    refused = [forked("train", [*given, *each]) for each in (ends_badly, no_file, [f"optim.lr={PLANTED}"])]

    assert [trained.returncode, planned.returncode] == [0, 0], trained.stderr + planned.stderr
    assert all(one.returncode in (2, 3) for one in refused)
    assert "prompts=https://<redacted>@host/x?access_token=<redacted>&n=1" in planned.stdout
    left = {str(path): path.read_bytes() for path in (tmp_path / "runs").rglob("*") if path.is_file()}
    assert [b"train/loss" in content for name, content in left.items() if name.endswith(".wandb")] == [True]
    said = {str(index): one.stdout + one.stderr for index, one in enumerate((trained, planned, *refused))}
    everything = left | {name: text.encode() for name, text in said.items()}
    leaks = [name for name, content in everything.items() if PLANTED.encode() in content or LOGIN.encode() in content]
    assert leaks == []
