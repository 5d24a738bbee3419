"""Damaged and forged checkpoints: an older one is taken, nothing is executed, and each fault is one sentence."""

import hashlib
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from ngpt_train.__main__ import main
from ngpt_train.core.errors import DataError
from ngpt_train.training.checkpoint.catalogue import read_manifest, read_progress
from tests.processes.runs import arguments, numbers, run, starts, train

TENSORS = "shard-00001-model-00001-of-00001.safetensors"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """A run of six steps with checkpoints 2, 4 and 6."""
    directory = tmp_path_factory.mktemp("hostile")
    train(given(directory, corpus, "train.stop_at=6"))
    return directory


@pytest.fixture
def directory(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    return tmp_path


def given(directory: Path, corpus: Path, *overrides: str) -> list[str]:
    return arguments(directory, corpus, "checkpoint.every=2", "checkpoint.keep_last=9", "train.steps=8", *overrides)


def checkpoint(directory: Path, step: int = 6) -> Path:
    return directory / f"runs/test/checkpoints/step_{step:08d}"


def sign(path: Path, name: str) -> None:
    """Makes the manifest true for a file again, as a forger would."""
    manifest = json.loads((path / "MANIFEST.json").read_text())
    content = (path / name).read_bytes()
    manifest["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (path / "MANIFEST.json").write_text(json.dumps(manifest))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("damage", "name"),
    [
        *((flip, name) for name in (TENSORS, "state.json", "MANIFEST.json", "tokenizer.json")),
        (lambda path: path.write_text("{"), "config.yaml"),
        (cut, TENSORS),
        (Path.unlink, TENSORS),
    ],
)
def test_an_older_checkpoint_takes_the_place_of_a_damaged_one(
    directory: Path, corpus: Path, damage: Callable[[Path], object], name: str
) -> None:
    """Caught: a run that ends because its newest checkpoint is damaged; one that goes on without a word; a damaged one
    that is deleted; a cut file or a missing one, that is not noticed or ends in a traceback."""
    damage(checkpoint(directory) / name)
    before = numbers(directory / "runs/test")
    finished = run("train", given(directory, corpus), code=0)
    assert f"goes on from {checkpoint(directory, 4)}" in finished.stderr
    assert "is damaged" in finished.stderr or "missing or damaged" in finished.stderr
    kept = directory / "runs/test/checkpoints/damaged-step_00000006"
    assert (kept / TENSORS).is_file() == (damage is not Path.unlink)
    start = starts(directory / "runs/test")[-1]
    assert start["step"] == 4
    assert list(start["damaged"]) == ["step_00000006"]
    assert name in start["damaged"]["step_00000006"]
    after = numbers(directory / "runs/test")
    assert {step: after[step] for step in before} == before, "steps 5 and 6 are repeated to the bit"
    assert sorted(after) == list(range(1, 9))


def test_swapped_checkpoints_are_passed_over(directory: Path, corpus: Path) -> None:
    """Caught: checkpoints whose files are sound, but of other steps than their directories, end the run."""
    checkpoint(directory, 6).rename(directory / "between")
    checkpoint(directory, 4).rename(checkpoint(directory, 6))
    (directory / "between").rename(checkpoint(directory, 4))
    before = numbers(directory / "runs/test")
    train(given(directory, corpus))
    start = starts(directory / "runs/test")[-1]
    assert start["step"] == 2
    assert sorted(start["damaged"]) == ["step_00000004", "step_00000006"]
    after = numbers(directory / "runs/test")
    assert {step: after[step] for step in before} == before


def test_all_are_damaged(directory: Path, corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (2, 4, 6):
        flip(checkpoint(directory, step) / TENSORS)
    before = (directory / "runs/test/metrics.jsonl").read_bytes()
    assert main(["train", *given(directory, corpus)]) == 3
    assert "step_00000006 is damaged: shard-00001-model-00001-of-00001.safetensors has another xxh3" in (
        message := capsys.readouterr().err
    )
    assert "So are the 2 older ones" in message
    assert (directory / "runs/test/metrics.jsonl").read_bytes() == before


def test_nothing_is_pickled(directory: Path, corpus: Path) -> None:
    """Caught: a file that torch's own format or anything else has pickled."""
    for step in (2, 4, 6):
        for file in checkpoint(directory, step).iterdir():
            if file.suffix == ".json":
                json.loads(file.read_text())
            elif file.suffix == ".safetensors":
                assert safe_open(file, "pt").keys()
            else:
                assert file.name == "config.yaml"


ENTRY = {"bytes": 1, "sha256": 64 * "0"}
USUAL = {"state.json": ENTRY}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("null", "it names no files"),
        ("[]", "it names no files"),
        ("{}", "it names no files"),
        ({"format": 2, "files": []}, "it names no files"),
        ({"format": 1, "files": USUAL}, "its format is 1"),
        ({"format": 2, "files": {}}, "it does not name state.json"),
        ({"format": 2, "files": {TENSORS: ENTRY}}, "it does not name state.json"),
        ({"format": 2, "files": USUAL}, f"it does not name {TENSORS}"),
        ({"format": 2, "files": USUAL | {"../x": ENTRY}}, "it names '../x'"),
        ({"format": 2, "files": USUAL | {"/etc/passwd": ENTRY}}, "it names '/etc/passwd'"),
        ({"format": 2, "files": USUAL | {"..": ENTRY}}, "it names '..'"),
        ({"format": 2, "files": USUAL | {"x": None}}, "it has no size and checksum of x"),
        ({"format": 2, "files": USUAL | {"x": ENTRY | {"bytes": "1"}}}, "it has no size and checksum of x"),
        ({"format": 2, "files": USUAL | {"x": ENTRY | {"sha256": "00"}}}, "it has no size and checksum of x"),
        (100_000 * "[", "missing or damaged"),
        ("{", "missing or damaged"),
    ],
)
def test_forged_manifests(directory: Path, content: Any, problem: str) -> None:
    path = checkpoint(directory)
    (path / "MANIFEST.json").write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(DataError) as caught:
        read_manifest(path)
    assert problem in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda state: [], "it is no object of named values"),
        (lambda state: state | {"step": "6"}, 'step="6" is not'),
        (lambda state: state | {"step": -1}, "step=-1 is not"),
        (lambda state: state | {"step": True}, "step=true is not"),
        (lambda state: state | {"step": 1e30}, "step=1e+30 is not"),
        (lambda state: state | {"step": 10**30}, "step=1000"),
        (lambda state: state | {"step": 4}, "is of step 4, its directory of another"),
        (lambda state: {name: value for name, value in state.items() if name != "step"}, "step=null is not"),
        (lambda state: {name: value for name, value in state.items() if name != "tokens"}, "tokens=null is not"),
        (lambda state: {name: value for name, value in state.items() if name != "data"}, "data=null is not"),
        (lambda state: state | {"data": []}, "data=[] is not"),
        (lambda state: state | {"world_size": 0}, "world_size=0 is not"),
        (lambda state: state | {"guards": []}, "guards: it is no object"),
        (lambda state: state | {"guards": {"losses": ["4"]}}, "guards has losses that are no numbers"),
        (lambda state: state | {"guards": {"skipped_in_a_row": 10**30}}, "skipped_in_a_row=1000"),
        (lambda state: state | {"interval": {}}, "interval: "),
        (lambda state: state | {"interval": state["interval"] | {"n_clipped": math.nan}}, "n_clipped=NaN is not"),
        (lambda state: state | {"train_seconds": []}, "train_seconds=[] is not"),
        (lambda state: state | {"loss_scale": {"value": 1.0}}, "good_steps=null is not"),
        (lambda state: state | {"interval": state["interval"] | {"n_clipped": None}}, "n_clipped=null is not"),
        (lambda state: state | {"rollbacks": {}}, "rollbacks: it is no list"),
        (lambda state: state | {"rollbacks": [{"step": "4"}]}, "rollbacks[0]: "),
    ],
)
def test_forged_counters(directory: Path, change: Callable[[dict[str, Any]], Any], problem: str) -> None:
    path = checkpoint(directory) / "state.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(DataError) as caught:
        read_progress(path.parent)
    assert problem in str(caught.value)


@pytest.mark.parametrize("content", ["[]", "null", '{"kind": "bytez"}', '{"kind": "hf", "file": "../../x"}', "{"])
def test_forged_tokenizers(directory: Path, corpus: Path, content: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = checkpoint(directory)
    (path / "tokenizer.json").write_text(content)
    sign(path, "tokenizer.json")
    assert main(["generate", f"generate.checkpoint={path}", "train.device=cpu", "generate.max_new_tokens=2"]) == 3
    assert len(capsys.readouterr().err.strip().splitlines()[-1:]) == 1
