"""New entries in the lr_table of a recipe: the text around them stays, and `git apply` takes the diff."""

import subprocess
from pathlib import Path

import pytest

from ngpt_train.config.composition.files import config_dir
from ngpt_train.config.composition.reading import parse
from ngpt_train.config.lr_table import problem_of
from ngpt_train.study.transfer.patch import _diff
from ngpt_train.study.transfer.table_edit import CannotEdit, Entry, with_entry

ENTRY = Entry("tiny", 256, 2_457_600, 600, 0.01234, "ngpt", 'study "a": 3 seeds')
FIELDS = {"tokens": 2_457_600, "lr": 0.0123, "model": "ngpt", "source": 'study "a": 3 seeds'}


def table(text: str) -> dict:
    return parse(text)["optim"]["lr_table"]


OLD = {"tokens": 1.0e6, "lr": 2.0e-2}
FLOW = """# one
optim:
  lr_table:
    tiny: {256: [{tokens: 1.0e+6, lr: 2.0e-2}]}  # kept

# below
schedule: {kind: cosine}
"""
BLOCK = """optim:
  betas: [0.9, 0.95]
  lr_table:
    tiny:
      256:
        # why
        - {tokens: 1.0e+6, lr: 2.0e-2}
        - {tokens: 5.0e+6, lr: 8.0e-3,
           source: "a line more"}

    # after
schedule: {kind: cosine}
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (FLOW, [OLD, FIELDS]),
        (BLOCK, [OLD, FIELDS, {"tokens": 5e6, "lr": 8e-3, "source": "a line more"}]),
        (FLOW.replace("1.0e+6", "9.0e+6"), [FIELDS, OLD | {"tokens": 9e6}]),
        (FLOW.replace("1.0e+6", "2.46e+6"), [FIELDS]),  # the same budget in fewer digits
        (FLOW.replace("tokens: 1.0e+6", "steps: 100"), [{"steps": 100, "lr": 0.02}, FIELDS | {"steps": 600}]),
        (FLOW.replace("[{tokens: 1.0e+6, lr: 2.0e-2}]", "2.0e-2"), [FIELDS]),  # a number for any budget
        (FLOW.replace("tokens: 1.0e+6, ", ""), [FIELDS]),
        (FLOW.replace("256", "512"), [FIELDS]),
        (FLOW.replace("tiny", "debug"), [FIELDS]),
        (BLOCK.replace("256", "512"), [FIELDS]),
        (BLOCK.replace("tiny", "debug"), [FIELDS]),
        ("optim:\n  lr_table: {debug: {64: 0.1}}\n", [FIELDS]),
        ("optim: {betas: [0.9, 0.95]}\n", [FIELDS]),
        ("optim:\n  betas: [0.9, 0.95]\n", [FIELDS]),
        ("defaults: [gpt]", [FIELDS]),
        ("# nothing\n", [FIELDS]),
    ],
)
def test_an_entry_is_added(text: str, expected: list[dict]) -> None:
    """Caught: entries out of order, two of one budget, a table that is replaced, a number that YAML reads as text."""
    edited = with_entry(text, ENTRY)
    unit = {key for item in expected for key in item} & {"steps"}
    expected = [{k: v for k, v in item.items() if not (unit and k == "tokens")} for item in expected]
    assert table(edited)["tiny"][256] == expected
    assert problem_of(table(edited)) is None
    old, new = parse(text) or {}, parse(edited)
    for key in old:
        assert key == "optim" or new[key] == old[key]
    for scale, row in ((old.get("optim") or {}).get("lr_table") or {}).items():
        assert {c: x for c, x in new["optim"]["lr_table"][scale].items() if (scale, c) != ("tiny", 256)} == {
            c: x for c, x in row.items() if (scale, c) != ("tiny", 256)
        }
    for line in text.splitlines():
        assert "#" not in line or line[line.index("#") :] in edited  # comments stay


def test_rates_are_numbers_in_yaml() -> None:
    """Caught: 8e-05, which YAML 1.1 reads as text."""
    small = Entry("tiny", 256, 1000, 1, 8e-5, "gpt", "x")
    assert table(with_entry(FLOW, small))["tiny"][256][0]["lr"] == 8e-5


@pytest.mark.parametrize(
    "text",
    [
        "optim:\n  lr_table:\n    tiny: {256: &same [{tokens: 1.0e+6, lr: 0.1}], 512: *same}\n",
        "optim:\n  lr_table:\n    tiny: &same {256: [{tokens: 1.0e+6, lr: 0.1}]}\n    mini: *same\n",
        "optim:\n  lr_table:\n    tiny: {256: [{tokens: 2.4576e+6, lr: &lr 0.1}], 512: *lr}\n",
    ],
)
def test_what_is_shared_by_an_alias_is_left_alone(text: str) -> None:
    """Caught: an entry that another context or scale gets as well."""
    with pytest.raises(CannotEdit, match="by hand" if "&lr" in text else "is shared"):
        with_entry(text, ENTRY)


RECIPES = sorted((config_dir() / "recipe").glob("*.yaml"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_git_applies_the_diff(recipe: Path, tmp_path: Path) -> None:
    """To every packaged recipe, at a scale that it has, one that it lacks, and with Windows' line ends."""
    for number, ends in enumerate(("\n", "\r\n")):
        top = tmp_path / str(number)
        file = top / "configs" / "recipe" / recipe.name
        file.parent.mkdir(parents=True)
        git = ["git", "-c", "core.autocrlf=false", "-C", str(top)]
        subprocess.run([*git, "init", "-q"], check=True)
        old = recipe.read_text().replace("\n", ends)
        if number:
            old = old.rstrip()  # and no end of the last line
        file.write_bytes(old.encode())
        new = with_entry(with_entry(old, ENTRY), Entry("mine", 64, 10, 1, 3e-3, "ngpt", "x"))
        patch = top / "new.patch"
        patch.write_bytes(_diff(file, old, new).encode())
        subprocess.run([*git, "apply", "--whitespace=nowarn", "new.patch"], check=True)
        assert file.read_bytes() == new.encode()
        assert table(new)["mine"] == {64: [{"tokens": 10, "lr": 3e-3, "model": "ngpt", "source": "x"}]}
        assert FIELDS in table(new)["tiny"][256]
