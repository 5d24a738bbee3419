"""Which keys are taken from the config of a foreign run? tests/processes/test_trust.py attacks each verb."""

import ast
import shlex
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

import ngpt_train
from ngpt_train.config import Config, load_config
from ngpt_train.config.architectures import all_keys
from ngpt_train.config.schema import build
from ngpt_train.config.stored import write_yaml
from ngpt_train.core.errors import DataError
from ngpt_train.evaluation.trust import NAMED, OWN, PLACE, RULES, TAKEN, names_of, note_names, rule_of, taken
from ngpt_train.evaluation.trust import is_text_of as is_its_text
from ngpt_train.study.compare import step_times
from ngpt_train.study.compare.runs import Run

# The readers of a run's config, and the keys that they use. All other keys go through `taken`.
READERS = {
    "analysis/run_contents.py": "model",
    "config/stored.py": "defines it",
    "evaluation/restore.py": "model, compared; generate and export use no more, `combine` takes the text",
    "interop/importing.py": "model; the rest becomes the config of the imported run, which `taken` guards in turn",
    "study/audit/auditing.py": "compared; taken",
    "study/audit/record_checks.py": "compared",
    "study/compare/step_times.py": "taken",
    "study/points.py": "compared",
    "study/runner.py": "compared",
    "training/run_directory.py": "compared; model",
    "verbs/audit.py": "train.device, train.deterministic; the config of the audit's own copy",
    "training/checkpoint/taken_over.py": "model",
    "verbs/train.py": "optim.lr and its source; commits of data sets that the command line names",
}


def test_each_key_has_a_rule() -> None:
    """Caught: a new key for a path, an address or code without a rule."""
    keys = all_keys()
    texts = [x.name for x in keys.values() if x.is_free_text or x.items is str or x.is_table]
    names = {name: [".".join(name.split(".")[:n]) for n in range(1, 4)] for name in texts}
    assert [name for name in texts if not RULES.keys() & {*names[name]}] == []
    assert [name for name in RULES if name not in keys and not any(x.startswith(f"{name}.") for x in keys)] == []
    assert [name for name, rule in RULES.items() if rule == TAKEN and name not in keys] == ["model"]
    named = {name for name, key in keys.items() if rule_of(key) in (NAMED, PLACE)}
    assert named == names_of(load_config([])).keys()


def test_readers_of_configs_are_known() -> None:
    package = Path(ngpt_train.__file__).parent
    calls = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if "read_yaml(" in (text := path.read_text())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) == "read_yaml"
    }
    assert calls == READERS.keys() - {"config/stored.py"}


def forged(**values: Any) -> Config:
    """A config with these values, by dotted names with __ for the dot."""
    return build({name.replace("__", "."): value for name, value in values.items()}, type(load_config([]).model))


def test_own_values_stay() -> None:
    """Caught: tasks, whose files run Python, a wandb account or an output that a run names."""
    texts = {
        name: ["forged"] if list in key.types else "forged"
        for name, key in all_keys().items()
        if rule_of(key) == OWN and not key.is_table and not key.choices and {str, list} & {*key.types}
        if key.items is not int
    }
    assert {"eval.tasks", "eval.tasks_path", "logging.wandb.entity", "data.out", "export.out"} <= texts.keys()
    own, stored = load_config([]), build({**texts, "data.cache": "/forged", "run.seed": 7}, type(load_config([]).model))
    config = taken(stored, own, [], opens=("run", "data", "tokenizer"))
    for name in (*texts, "data.cache"):
        assert attrgetter(name)(config) == attrgetter(name)(own), name
    assert config.run.seed == 7, "which says how it was trained"


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"data__kind": "local", "data__path": "{}/a b.txt"}, "data.path"),
        ({"data__kind": "local", "data__path": "{}/a.txt", "data__val_files": "{}/b.txt"}, "data.val_files"),
        ({"data__kind": "tokens", "data__path": "{}/shards"}, "data.path"),
        ({"data__kind": "hf", "data__repo": "forger/set-of-{}"}, "data.repo"),
        ({"data__kind": "mixture", "data__mixture": "a 1 local {}/a.txt; b 2 hf forger/set"}, "data.mixture"),
        ({"tokenizer__kind": "hf", "tokenizer__path": "{}/tokenizer.json"}, "tokenizer.path"),
        ({"run__init_from": "{}/other"}, "run.init_from"),
    ],
)
def test_what_is_read_is_named(values: dict[str, str], key: str, tmp_path: Path) -> None:
    """Caught: a path or a data set that the run alone names; a message whose arguments do not help; a text of ours that
    is refused."""
    place = tmp_path.name if "data__repo" in values else str(tmp_path)
    stored = forged(**{name: value.format(place) for name, value in values.items()})
    own, opens = load_config([]), ("run", "data", "tokenizer")
    with pytest.raises(DataError) as refused:
        taken(stored, own, [], opens)
    message = str(refused.value)
    assert f"{key}={attrgetter(key)(stored)}" in message.partition(": ")[0]
    arguments = shlex.split(message.partition("To read it add ")[2])
    named = load_config(arguments)
    assert attrgetter(key)(taken(stored, named, arguments, opens)) == attrgetter(key)(stored)
    assert is_its_text(named, stored) == key.startswith("data.")
    assert attrgetter(key)(taken(stored, own, [], opens=())) == attrgetter(key)(own), "it is not opened"
    note_names(stored)
    assert attrgetter(key)(taken(stored, own, [], opens)) == attrgetter(key)(stored)


def test_compiled_code_is_not_where_a_run_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught: `compare compare.step_times=true` that runs what lies in a cache of the run's choice."""
    own, stored = load_config(["data.cache=ours"]), load_config(["data.cache=theirs", "scale=debug"])
    write_yaml(stored, tmp_path / "config.yaml")
    built: list[Config] = []

    def build_state(config: Config) -> None:
        built.append(config)
        raise RuntimeError("seen")

    monkeypatch.setattr("ngpt_train.training.state.build_state", build_state)
    step_times.measure({"arm": Run(tmp_path, {}, [], [], [], [], None)}, own, rounds=0)
    assert [(x.data.cache, x.model.d_model) for x in built] == [("ours", stored.model.d_model)]


@pytest.mark.parametrize("path", ["x\nerror: run\x1b[2J this", "~nobody-of-this-name/x", "\ud800", "link/../known.txt"])
def test_strange_paths_are_refused(path: str) -> None:
    """Caught: lines of a forger in our message, a traceback, a path that leads elsewhere than a known one by a link."""
    note_names(forged(data__kind="local", data__path="known.txt"))
    with pytest.raises(DataError) as refused:
        taken(forged(data__kind="local", data__path=path), load_config([]), [], ("data",))
    assert str(refused.value).isprintable()
