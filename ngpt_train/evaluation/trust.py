"""Which keys does a verb take from the config of a foreign run? See docs/trust.md.

Numbers, switches and choices are taken: they describe the training. A text may name a file, an address or code, so each
key of text has a rule here. So has each key that acts on this machine.
"""

import contextlib
import hashlib
import logging
import os
import shlex
from collections.abc import Collection, Sequence
from operator import attrgetter
from pathlib import Path

from ngpt_train.config.schema import Config, build, schema_keys
from ngpt_train.config.sections.data import sources_of
from ngpt_train.config.stored import to_dict
from ngpt_train.config.validate import Key, flatten, show
from ngpt_train.core.errors import DataError
from ngpt_train.core.log import say_once
from ngpt_train.core.recorded import printable

TAKEN = "taken"  # the run's value: it names only a part of the run, or a part of a NAMED source
NAMED = "named"  # a source to read: the run's value, if this command line or an own training names it too
PLACE = "place"  # a directory for files: our value, unless an own training has used the run's
OWN = "own"  # our value: the key runs code, or writes, uploads or keeps files
# By key or by section.
RULES = {
    **{
        f"run.{name}": OWN
        for name in ("name", "root", "resume", "resume_step", "allow_change", "overwrite", "max_time")
    },
    "run.init_from": NAMED,
    "scale.name": TAKEN,
    "model": TAKEN,  # of our own architectures, or of a --plugin of this command line
    "optim.lr_table": TAKEN,
    "optim.lr_source": TAKEN,
    **{f"data.{name}": NAMED for name in ("path", "repo", "mixture", "val_files")},
    **{f"data.{name}": TAKEN for name in ("revision", "split", "files", "labels", "task")},
    **{f"data.{name}_field": TAKEN for name in ("text", "label", "translation")},
    "data.cache": PLACE,
    **{f"data.{name}": OWN for name in ("out", "cache_gb", "workers", "prepare_workers", "prefetch", "fetch_minutes")},
    "tokenizer.path": NAMED,
    "tokenizer.eos": TAKEN,
    "eval.tasks": OWN,  # YAML files of tasks run Python
    "eval.tasks_path": OWN,
    "logging.wandb": OWN,
    "logging.sample_prompt": OWN,
    # The sections of verbs come from the command line.
    **dict.fromkeys(("generate", "evaluate", "analyze", "probe", "export", "import", "plan", "doctor"), OWN),
    **dict.fromkeys(("study", "compare", "audit", "transfer"), OWN),
}


def rule_of(key: Key) -> str:
    """The rule for a key of a foreign run. A text without a rule is OWN."""
    parts = key.name.split(".")
    rules = [RULES[name] for n in range(len(parts), 0, -1) if (name := ".".join(parts[:n])) in RULES]
    holds_text = key.is_free_text or key.items is str or key.is_table
    return rules[0] if rules else OWN if holds_text else TAKEN


def taken(stored: Config, own: Config, overrides: Sequence[str], opens: Collection[str]) -> Config:
    """A run's config `stored`, with our own values for all keys that it must not decide.

    own: the config of the command line `overrides`. opens: the verb opens the sources of these sections. Raises
    DataError if `stored` has an unknown source for them; the message has the arguments that name it.
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
    """Remembers the sources and directories of an own training on this machine, one file each below
    $XDG_STATE_HOME/ngpt_train/named (~/.local/state); who deletes a file forgets. Where that cannot be written, they
    stay unknown."""
    with contextlib.suppress(OSError):
        for name in [name for names in names_of(config).values() for name in names if not is_known(name)]:
            _file(name).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            _file(name).write_text(name + "\n")


def is_known(name: str) -> bool:
    """Whether an own training has named this source or directory."""
    return _file(name).is_file()


def _file(name: str) -> Path:
    state = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser()
    return state / "ngpt_train" / "named" / hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()


def is_text_of(own: Config, stored: Config) -> bool:
    """True if our command line names the training text of the run."""
    keys = [key for key, rule in RULES.items() if rule == NAMED and key.startswith("data.")]
    one, other = ([names[key] for key in keys] for names in map(names_of, (own, stored)))
    return own.data.kind == stored.data.kind and any(other) and one == other


def names_of(config: Config) -> dict[str, list[str]]:
    """The absolute paths, and the data sets of the hub, for each key with the rule NAMED or PLACE."""
    data = config.data
    parts = [source.data for source in sources_of(data) if source.name]
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
    # `..` stays: it may come after a forged link. Path.expanduser raises for an unknown user.
    return [] if path is None else [str(Path.cwd() / os.path.expanduser(path))]


def _sets(repo: str | None) -> list[str]:
    return [] if repo is None else [f"hub:{repo}"]


def _refusal(stored: Config, unknown: Sequence[str]) -> str:
    """The message for unknown sources, with arguments that name them. Keys of data.* need each other."""
    sections = dict.fromkeys(key.partition(".")[0] for key in unknown)
    named = {key: attrgetter(key)(stored) for key, names in names_of(stored).items() if names and key != "data.cache"}
    add = [f"{section}={getattr(stored, section).kind}" for section in sections if section != "run"]
    add += [f"{key}={show(value)}" for key, value in named.items() if key.partition(".")[0] in sections]
    what = ", ".join(f"{key}={show(named[key])}" for key in unknown)
    said = f"{what}: the config of the run names it, and no training of yours has. To read it add {shlex.join(add)}"
    return printable(said)
