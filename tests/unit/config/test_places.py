"""Where verbs write: files of the user that a result would replace."""

import json
from pathlib import Path

import pytest

from ngpt_train.__main__ import main
from ngpt_train.config.places import check_beside
from ngpt_train.core.errors import ConfigError


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs/a").mkdir(parents=True)
    Path("notes.txt").write_text("my notes\n")
    Path("earlier.json").write_text("{}\n")


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", "plan.out=notes.txt"],
        ["evaluate", "evaluate.checkpoint=runs/a", "evaluate.out=notes.txt"],
        ["audit", "runs/a", "audit.out=notes.txt"],
        ["transfer", "runs/a", "transfer.out=notes.txt"],
        ["analyze", "analyze.checkpoints=[runs/a]", "analyze.out=site"],
        ["probe", "probe.checkpoints=[runs/a]", "probe.out=site"],
    ],
)
def test_files_that_stay(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Caught: a result in the place of a user's file; a traceback where a directory cannot be made."""
    Path("site").mkdir()
    Path("site/page.html").write_text("my page\n")
    assert main(arguments) == 2
    assert arguments[-1] in capsys.readouterr().err
    assert Path("notes.txt").read_text() == "my notes\n"
    assert Path("site/page.html").read_text() == "my page\n"


@pytest.mark.parametrize("out", ["earlier.json", "new.json", "/dev/null"])
def test_files_that_are_written(out: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Caught: an earlier result that is not replaced, so that a command cannot be run twice."""
    assert main(["evaluate", "evaluate.checkpoint=nowhere", f"evaluate.out={out}"]) == 3
    assert "nowhere: does not exist" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("new_items.jsonl", "tasks"),
        ("new.npz", "rows_hash"),
        ("new_context_32.npz", "rows_hash_ctx32"),
        ("new.png", "curves"),
        ("new_answers.jsonl", "matthews"),
        ("new_references.txt", "chrf"),
    ],
)
def test_files_beside_a_result(name: str, key: str, tmp_path: Path) -> None:
    """Caught: a user's file that is replaced because it is called as one beside evaluate.out; the file of an earlier
    result that is not; a result over the file beside it."""
    out = tmp_path / "new.json"
    check_beside("evaluate.out=new.json", out, [name])
    Path(name).write_text("mine\n")
    for before in (None, {}, {"step": 1, "rows_hash_ctx8": ""}, [name], 3):
        if before is not None:
            out.write_text(json.dumps(before))
        with pytest.raises(ConfigError, match=f"{name} would be replaced"):
            check_beside("evaluate.out=new.json", out, [name])
    out.write_text(json.dumps({key: "x"}))
    check_beside("evaluate.out=new.json", out, [name])
    with pytest.raises(ConfigError, match=r"takes this name\n.*evaluate.out=.*result.json"):
        check_beside(f"evaluate.out={name}", tmp_path / name, [name])
