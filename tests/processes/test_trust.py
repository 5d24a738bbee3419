"""Runs of somebody else: their configs name code, places and texts, and no verb runs, writes or reads them."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from ngpt_train.__main__ import main
from ngpt_train.study.audit.auditing import copy_checkpoint
from tests.processes.runs import arguments, run, train, write_corpus
from tests.processes.test_hostile_checkpoints import sign

TASK = "task: evil\ndataset_path: json\noutput_type: loglikelihood\nprocess_docs: !function evil.docs\n"
HERE = ["train.device=cpu"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Our own run on our own text."""
    root = tmp_path_factory.mktemp("trust")
    train(arguments(root, write_corpus(root / "text.jsonl"), "model=gpt", "train.steps=4", "logging.telemetry=2"))
    return root


@pytest.fixture
def theirs(trained: Path, tmp_path: Path) -> Path:
    """A copy of it whose configs name code that leaves a mark, places to write to, and an account to upload to."""
    path = Path(shutil.copytree(trained / "runs/test", tmp_path / "theirs"))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks/evil.yaml").write_text(TASK)
    (tmp_path / "tasks/evil.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w')\ndocs = None\n")
    written = str(tmp_path / "written")
    verbs = ("generate", "evaluate", "analyze", "probe", "export", "audit", "compare", "transfer")
    forge(
        path,
        eval={"tasks": ["evil"], "tasks_path": str(tmp_path / "tasks")},
        data={"cache": written, "out": written, "cache_gb": 1e-6},
        run={"root": written, "overwrite": True},
        logging={"telemetry": 1, "tensorboard": True, "wandb": {"mode": "online", "project": "forged"}},
        **{verb: {"out": written} for verb in verbs},
    )
    return path


def forge(directory: Path, **sections: dict[str, Any]) -> None:
    """Into config.yaml of a run and of its checkpoints, whose manifests stay true."""
    for file in (directory / "config.yaml", *directory.glob("checkpoints/*/config.yaml")):
        config = yaml.safe_load(file.read_text())
        for section, values in sections.items():
            config[section] |= values
        file.write_text(yaml.safe_dump(config))
        if file.with_name("MANIFEST.json").exists():
            sign(file.parent, file.name)


def verbs(path: Path, out: Path, trained: Path) -> dict[str, list[str]]:
    """The command of each verb that reads a run, on `path`."""
    again = arguments(trained, trained / "text.jsonl", "model=gpt", "train.steps=4", "logging.telemetry=2")
    replaced = {"run.root", "run.name", "train.steps"}
    ours = [x for x in again if x.partition("=")[0] not in replaced]
    return {
        "audit": ["audit", str(path), f"audit.out={out / 'audit.json'}", "audit.windows=1"],
        "evaluate": ["evaluate", f"evaluate.checkpoint={path}", *HERE],
        "generate": ["generate", f"generate.checkpoint={path}", "generate.max_new_tokens=2", *HERE],
        "export": ["export", f"export.checkpoint={path}", f"export.out={out / 'exported'}", "export.rows=1"],
        "analyze": ["analyze", f"analyze.checkpoints=[{path}]", "analyze.figures=[normformer_3,ngpt_5]", *HERE],
        "probe": ["probe", f"probe.checkpoints=[{path}]", *HERE],
        "compare": ["compare", str(path), str(trained / "runs/test"), "compare.step_times=true"],
        "transfer": ["transfer", str(path)],
        "resume": ["train", *ours, "train.steps=6", f"run.root={path.parent}", f"run.name={path.name}"],
        "init_from": ["train", *ours, "train.steps=2", f"run.root={out}", "run.name=new", f"run.init_from={path}"],
    }


def assert_nothing_of_theirs(directory: Path) -> None:
    assert not (directory / "mark").exists()
    assert not (directory / "written").exists()
    assert not list(directory.rglob("wandb"))


@pytest.mark.parametrize("verb", ["generate", "export", "compare", "transfer", "resume", "init_from"])
def test_a_config_names_neither_code_nor_places(theirs: Path, trained: Path, tmp_path: Path, verb: str) -> None:
    """The other verbs are below. Caught: Python of task files that a run names; shards, compiled code or results where
    it says."""
    name, *given = verbs(theirs, tmp_path, trained)[verb]
    run(name, given, code=0)
    assert_nothing_of_theirs(tmp_path)


@pytest.mark.parametrize("verb", [pytest.param("audit", marks=pytest.mark.slow), "evaluate", "probe", "analyze"])
def test_a_text_is_read_once_it_is_named(
    theirs: Path, trained: Path, tmp_path: Path, verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Caught: a file that the run alone names and that is read; arguments that are given and do not help; other rows
    than the run's; what the test above has."""
    secret = shutil.copy(trained / "text.jsonl", tmp_path / "secret.jsonl")
    forge(theirs, data={"path": str(secret)})
    command, name = verbs(theirs, tmp_path, trained)[verb], f"data=local data.path={secret}"
    cache = f"data.cache={tmp_path / 'ours'}"
    assert main([*command, cache]) == (0 if verb == "analyze" else 3)
    said = "".join(capsys.readouterr())
    if verb == "analyze":  # figures that need no rows are there
        assert "ngpt_5: theirs" in said
    assert f"data.path={secret}: the config of the run names it" in said
    assert f"To read it add {name}" in said or verb == "analyze"
    assert not (tmp_path / "ours").exists()
    finished = run(command[0], [*command[1:], *name.split()], code=0)
    assert_nothing_of_theirs(tmp_path)
    if verb == "evaluate":
        losses = [json.loads(x) for x in (theirs / "metrics.jsonl").read_text().splitlines() if '"eval"' in x]
        assert f"loss {losses[-1]['loss']:.6f}" in finished.stdout, "data.val_fraction is the run's"


def test_links_and_numbers_of_a_run(theirs: Path, trained: Path, tmp_path: Path) -> None:
    """Caught: an audit that writes through a link, waits for a pipe, or starts as many processes as a file says; a
    resume that deletes the checkpoints of another run."""
    audit, resume = (verbs(theirs, tmp_path, trained)[verb] for verb in ("audit", "resume"))
    audit = [x for x in audit if not x.startswith("audit.out")]
    os.mkfifo(theirs / "lock.pipe")
    (theirs / "lock").unlink(missing_ok=True)
    (theirs / "lock.pipe").rename(theirs / "lock")
    (theirs / "audit.json").symlink_to(tmp_path / "linked")
    assert main(audit) == 3
    assert not (tmp_path / "linked").exists()
    (theirs / "audit.json").unlink()
    content = json.loads((theirs / "run.json").read_text())
    content["starts"][0]["world_size"] = 10**6
    (theirs / "run.json").write_text(json.dumps(content))
    assert main(audit) == 3
    (theirs / "lock").unlink()
    shutil.rmtree(theirs / "checkpoints")
    (theirs / "checkpoints").symlink_to(trained / "runs/test/checkpoints")
    before = sorted((trained / "runs/test/checkpoints").iterdir())
    assert main(resume) == 3
    assert sorted((trained / "runs/test/checkpoints").iterdir()) == before


def test_a_copied_checkpoint_has_its_files_alone(trained: Path, tmp_path: Path) -> None:
    """Caught: a link in a checkpoint that leads to a whole disk, which is copied."""
    (checkpoint,) = trained.glob("runs/test/checkpoints/*4")
    theirs = Path(shutil.copytree(checkpoint, tmp_path / checkpoint.name))
    (theirs / "disk").symlink_to(trained)
    copy_checkpoint(theirs, tmp_path / "copy")
    assert sorted(x.name for x in (tmp_path / "copy").iterdir()) == sorted(x.name for x in checkpoint.iterdir())
