"""`transfer.patch`: a diff that writes the learning rates which were found into the tables of their recipes."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable
from pathlib import Path

from ngpt_train.config import ConfigError, load_config, to_dict
from ngpt_train.config.composition.compose import compose
from ngpt_train.config.composition.files import Files
from ngpt_train.config.keys import AUTO, TABLES
from ngpt_train.config.validate import flatten, show
from ngpt_train.study.definition import LR
from ngpt_train.study.transfer.optima import Optimum
from ngpt_train.study.transfer.table_edit import CannotEdit, Entry, with_entry

# What a recipe's table has an entry for, or what follows from it. In everything else that trains a model the run must
# be as its scale, model and recipe say.
_MAY_DIFFER = {LR, *TABLES, "optim.lr_source", "model.context", "model.vocab_size", "schedule.final_lr"}
_MAY_DIFFER |= {"schedule.warmup_steps", "schedule.warmup_tokens", "model.psi_warmup_steps"}


def patch_of(optima: Iterable[Optimum], config_dir: str | None) -> tuple[str, list[str]]:
    """A unified diff of the recipes' YAML files, as `git apply` takes it, and a sentence for each optimum that it has
    or that it leaves out, with the reason. Nothing is written. config_dir: of the command line, which alone says of
    which directory beside ours files are read."""
    texts: dict[Path, tuple[str, str]] = {}  # file -> its text, and with the entries
    said = []
    for one in sorted(optima, key=lambda one: (one.architecture, one.tokens)):
        where = f"{one.architecture}, width {one.width:,}, {one.depth:,} layers, {one.tokens:,} tokens"
        try:
            if one.source is not None and one.source.config_dir not in (None, config_dir):
                raise _LeftOut(
                    f"its study has recipes of its own; to read them add --config-dir {one.source.config_dir}"
                )
            file, entry = _entry(one)
            old, new = texts.get(file) or (_read(file),) * 2
            new = with_entry(new, entry)
        except (_LeftOut, CannotEdit, ConfigError) as error:
            said.append(f"no entry for {where}: {error}")
            continue
        texts[file] = old, new
        said.append(f"{file.name}: {entry.scale}, context {entry.context}: {entry.text()}")
    return "".join(_diff(file, old, new) for file, (old, new) in texts.items()), said


class _LeftOut(Exception):
    """Why an optimum is no entry of a table."""


def _entry(one: Optimum) -> tuple[Path, Entry]:
    """The file of a recipe and what to write into it."""
    if not one.is_tuned or one.tuning.optimum is None:
        raise _LeftOut("it is untuned")
    if one.source is None:
        raise _LeftOut("a run alone does not say its recipe: name the directory of its study")
    config, source = one.run.config, one.source
    composition = compose(source.arguments, source.config_dir)
    recipe, scale, model = (composition.choices[group] for group in ("recipe", "scale", "model"))
    chosen = [f"scale={scale}", f"model={model}", f"recipe={recipe}", f"train.steps={one.run.steps}", f"{LR}=1"]
    plain = dict(flatten(to_dict(load_config(chosen, source.config_dir, world_size=1)), TABLES))
    differing = [
        f"{key}={show(config[key])} is {show(value)} there"
        for key, value in plain.items()
        if key in config and _counts(key) and config[key] != value and AUTO not in (config[key], value)
    ]
    if differing:
        raise _LeftOut(f"it is not what scale={scale} and recipe={recipe} stand for: {', '.join(differing[:3])}")
    seeds = f"{one.n_seeds} seed" + "s" * (one.n_seeds != 1)
    interval = ""
    if one.tuning.low is not None and one.tuning.high is not None:
        interval = f", {one.tuning.low:.3g} to {one.tuning.high:.3g}"
    text = f"transfer, study {source.study}: optimum with {seeds}{interval}"
    name = str(config["model.name"])
    entry = Entry(scale, int(config["model.context"]), one.tokens, one.run.steps, one.tuning.optimum, name, text)
    file = Files(source.config_dir).option(f"recipe/{recipe}").path
    if file is None:
        raise _LeftOut(f"recipe={recipe} has no file")
    return file, entry


def _counts(key: str) -> bool:
    return key not in _MAY_DIFFER and (key.startswith(("model.", "optim.", "schedule.")) or key == "train.batch_rows")


def _read(file: Path) -> str:
    with file.open(encoding="utf-8", newline="") as opened:  # its line ends as they are
        return opened.read()


def _diff(file: Path, old: str, new: str) -> str:
    name = _name_in_repository(file)
    lines = difflib.unified_diff(_lines(old), _lines(new), f"a/{name}", f"b/{name}")
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def _lines(text: str) -> list[str]:
    """With their ends; only \\n ends a line, as git counts."""
    return re.findall(r"[^\n]*\n|[^\n]+$", text)


def _name_in_repository(file: Path) -> str:
    """By which git finds the file at the top of its checkout; without one from configs/ on."""
    file = file.resolve()
    top = next((folder for folder in file.parents if (folder / ".git").exists()), file.parents[2])
    return os.path.relpath(file, top).replace(os.sep, "/")
