"""The keys that a verb takes of the config of a run that may be somebody else's: docs/trust.md.

Numbers, switches and choices are taken: they say how the run was trained. A text may name a file, an address or code,
so each key that holds text has a rule here, and so has each key that decides what happens on this machine.
"""

from __future__ import annotations

import logging
import os
import shlex
from collections.abc import Collection, Sequence
from operator import attrgetter
from pathlib import Path

from ngpt_train.config.schema import Config, build, schema_keys
from ngpt_train.config.sections.data import mixture_of
from ngpt_train.config.stored import to_dict
from ngpt_train.config.validate import Key, flatten, show
from ngpt_train.core.errors import DataError
from ngpt_train.core.log import say_once
from ngpt_train.core.named import is_known, note
from ngpt_train.core.recorded import printable

TAKEN = "taken"  # names nothing but a part of the run, or of what a key that is NAMED stands for
NAMED = "named"  # what is read: where this command line or a training of ours names it too
PLACE = "place"  # where files are kept: ours, unless a training of ours has used that of the run
OWN = "own"  # never the run's: what runs code, is written, uploaded or kept on this machine
# By key, or for all keys of a section.
RULES = {
    **{
        f"run.{name}": OWN
        for name in ("name", "root", "resume", "resume_step", "allow_change", "overwrite", "max_time")
    },
    "run.init_from": NAMED,
    "scale.name": TAKEN,
    "model": TAKEN,  # of an architecture of ours, or of a --plugin of this command line
    "optim.lr_table": TAKEN,
    "optim.lr_source": TAKEN,
    **{f"data.{name}": NAMED for name in ("path", "repo", "mixture", "val_files")},
    **{f"data.{name}": TAKEN for name in ("revision", "split", "files", "text_field")},
    "data.cache": PLACE,
    **{f"data.{name}": OWN for name in ("out", "cache_gb", "workers", "prepare_workers", "prefetch", "fetch_minutes")},
    "tokenizer.path": NAMED,
    "tokenizer.eos": TAKEN,
    "eval.tasks": OWN,  # whose YAML files run Python
    "eval.tasks_path": OWN,
    "logging.wandb": OWN,
    "logging.sample_prompt": OWN,
    # Of the verbs, each of which has its own from the command line.
    **dict.fromkeys(("generate", "evaluate", "analyze", "probe", "export", "import", "plan", "doctor"), OWN),
    **dict.fromkeys(("study", "compare", "audit", "transfer"), OWN),
}


def rule_of(key: Key) -> str:
    """The rule for the key of a run that is not known to be ours. A text without a rule is not taken."""
    parts = key.name.split(".")
    rules = [RULES[name] for n in range(len(parts), 0, -1) if (name := ".".join(parts[:n])) in RULES]
    holds_text = key.is_free_text or key.items is str or key.is_table
    return rules[0] if rules else OWN if holds_text else TAKEN


def taken(stored: Config, own: Config, overrides: Sequence[str], opens: Collection[str]) -> Config:
    """`stored`, the config of a run, with our own values of all that it must not decide here.

    own: the config of the command line `overrides`. opens: the sections whose files the verb opens. Raises DataError
    where `stored` names one for them that is not known, with the arguments that name it.
    """
    keys = schema_keys(type(stored.model))
    values, ours = (dict(flatten(to_dict(x), schema_keys(type(x.model)))) for x in (stored, own))
    given = {override.partition("=")[0].strip() for override in overrides}
    named, here = names_of(stored), {name for names in names_of(own).values() for name in names}
    unknown = []
    for key, rule in ((key, rule_of(keys[key])) for key in keys):
        if rule == TAKEN:
            continue
        is_read = rule == NAMED and key.partition(".")[0] in opens and key not in given
        if is_read and not all(name in here or is_known(name) for name in named[key]):
            unknown.append(key)
        if is_read or (rule == PLACE and key not in given and all(map(is_known, named[key]))):
            continue
        if rule == PLACE and not here.issuperset(named[key]):
            line = f"{key}={ours[key]}: not the run's {values[key]}, which no training of yours has used"
            say_once(logging.INFO, printable(line))
        values[key] = ours[key]
    if unknown:
        raise DataError(_refusal(stored, unknown))
    return build(values, type(stored.model))


def note_names(config: Config) -> None:
    """Makes known what a training of ours names."""
    note(name for names in names_of(config).values() for name in names)


def is_text_of(own: Config, stored: Config) -> bool:
    """Our command line names the files or the data set that the run was trained on."""
    keys = [key for key, rule in RULES.items() if rule == NAMED and key.startswith("data.")]
    one, other = ([names[key] for key in keys] for names in map(names_of, (own, stored)))
    return own.data.kind == stored.data.kind and any(other) and one == other


def names_of(config: Config) -> dict[str, list[str]]:
    """The paths, absolute, and the data sets of the hub that each key names whose rule is NAMED or PLACE."""
    data = config.data
    parts = [source.data for source in mixture_of(data)] if data.kind == "mixture" else []
    return {
        "run.init_from": _paths(config.run.init_from),
        "data.path": _paths(data.path),
        "data.repo": _sets(data.repo),
        "data.mixture": [name for part in parts for name in (*_paths(part.path), *_sets(part.repo))],
        "data.val_files": [] if data.on_hub else _paths(data.val_files),
        "data.cache": _paths(data.cache),
        "tokenizer.path": _paths(config.tokenizer.path),
    }


def _paths(path: str | None) -> list[str]:
    # With its `..`, which may come after a forger's link. Path.expanduser raises for an unknown user.
    return [] if path is None else [str(Path.cwd() / os.path.expanduser(path))]


def _sets(repo: str | None) -> list[str]:
    return [] if repo is None else [f"hub:{repo}"]


def _refusal(stored: Config, unknown: Sequence[str]) -> str:
    """The keys that name unknown files or data sets, and arguments that name them. Keys of data.* need each other."""
    sections = dict.fromkeys(key.partition(".")[0] for key in unknown)
    named = {key: attrgetter(key)(stored) for key, names in names_of(stored).items() if names and key != "data.cache"}
    add = [f"{section}={getattr(stored, section).kind}" for section in sections if section != "run"]
    add += [f"{key}={show(value)}" for key, value in named.items() if key.partition(".")[0] in sections]
    what = ", ".join(f"{key}={show(named[key])}" for key in unknown)
    said = f"{what}: the config of the run names it, and no training of yours has. To read it add {shlex.join(add)}"
    return printable(said)
