"""The text of `VERB --help`: every group with its options, every key with type, default and meaning."""

import textwrap
from collections.abc import Sequence
from typing import Any

from ngpt_train.config.architectures import architectures
from ngpt_train.config.compose import compose
from ngpt_train.config.schema import schema_keys
from ngpt_train.config.stored import redact, to_dict
from ngpt_train.config.validate import Key, flatten, show
from ngpt_train.config.yaml_files import GROUPS

_WIDTH = 100


def help_text(overrides: Sequence[str], config_dir: str | None = None) -> str:
    """Groups and keys as `overrides` compose them: the value shown is the one that would be used."""
    composition = compose(overrides, config_dir)
    lines = ["Groups, chosen with GROUP=OPTION; [chosen]:", ""]
    for group, doc in GROUPS.items():
        chosen = composition.choices.get(group, "null")
        tables: dict[str, list[str]] = {"": []}
        for option in composition.files.options[group]:
            table, _, row = option.rpartition("/")
            tables.setdefault(table, []).append(f"[{row}]" if option == chosen else row)
        lines.append(f"  {group:<12}{' '.join(tables.pop(''))}")
        for table, rows in tables.items():
            lines += _wrapped(f"{table}/ {' '.join(rows)}", 14, hanging=2)
        lines += _wrapped(doc, 14)

    values = dict(flatten(redact(to_dict(composition.config)), composition.keys))
    section = ""
    lines += ["", "Keys, set with KEY=VALUE; the value is the one that holds now, in brackets what the key takes:"]
    for name, key in composition.keys.items():
        if name.partition(".")[0] != section:
            section = name.partition(".")[0]
            doc = (type(getattr(composition.config, section)).__doc__ or "").strip().splitlines()[0]
            lines += ["", f"{section}: {doc}"]
        lines += _described(key, values[name])

    lines += ["", "Keys that other architectures have, or have with another default or meaning:"]
    for owners, keys in _of_others(composition.config.model.name).items():
        lines.append("")
        for owner in owners:
            doc = (architectures()[owner].__doc__ or "").splitlines()[0]
            lines += _wrapped(f"model={owner}: {doc}", 0, hanging=2)
        lines += [line for key in keys for line in _described(key, key.default)]
    return "\n".join(lines)


def _described(key: Key, value: Any) -> list[str]:
    text = "{...}" if key.is_table else show(value)
    return [f"  {key.name}={text}    ({key.expected()})", *_wrapped(key.doc, 6)]


def _of_others(architecture: str) -> dict[tuple[str, ...], list[Key]]:
    """The keys that `architecture` does not have, or not the same; each once, by the architectures that share it."""
    schemas = {owner: schema_keys(schema) for owner, schema in architectures().items()}
    groups: dict[tuple[str, ...], list[Key]] = {}
    for keys in schemas.values():
        for name, key in keys.items():
            if name != "model.name" and key != schemas[architecture].get(name):
                owners = tuple(owner for owner, others in schemas.items() if others.get(name) == key)
                group = groups.setdefault(owners, [])
                group += [key] if key not in group else []
    return groups


def _wrapped(text: str, indent: int, hanging: int = 0) -> list[str]:
    following = " " * (indent + hanging)
    return textwrap.wrap(text, _WIDTH, initial_indent=" " * indent, subsequent_indent=following, break_on_hyphens=False)
