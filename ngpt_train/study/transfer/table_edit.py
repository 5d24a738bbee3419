"""New entries in the lr_table of a recipe's YAML text, without touching anything else of it."""

from __future__ import annotations

import copy
import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from ngpt_train.config.composition.reading import parse

# Budgets so near are the same one, written with fewer digits.
_SAME_BUDGET = 0.05


class CannotEdit(Exception):
    """Why an entry cannot be written into this text."""


@dataclass(frozen=True)
class Entry:
    """A learning rate that was measured."""

    scale: str
    context: int
    tokens: int
    steps: int
    lr: float
    model: str
    source: str

    def fields(self, unit: str = "tokens") -> dict[str, Any]:
        """What the table holds of it. unit: `tokens` or `steps`, as the other entries of its list have."""
        lr = float(f"{self.lr:.3g}")
        return {unit: getattr(self, unit), "lr": lr, "model": self.model, "source": self.source}

    def text(self, unit: str = "tokens") -> str:
        fields = self.fields(unit)
        source = json.dumps(self.source, ensure_ascii=False)
        return f"{{{unit}: {fields[unit]}, lr: {_number(fields['lr'])}, model: {self.model}, source: {source}}}"


def with_entry(text: str, entry: Entry) -> str:
    """The text of a recipe with the entry in its lr_table: in the place of one of the same budget, else between its
    neighbours. Raises CannotEdit where the text is not of a kind that this knows; then nothing is changed."""
    tree = parse(text) or {}
    row = ((tree.get("optim") or {}).get("lr_table") or {}).get(entry.scale) or {}
    edited = _edited(text, entry, row.get(entry.context))
    expected = copy.deepcopy(tree)
    for_scale = expected.setdefault("optim", {}).setdefault("lr_table", {}).setdefault(entry.scale, {})
    for_scale[entry.context] = _with(row.get(entry.context), entry)
    try:
        same = parse(edited) == expected
    except yaml.YAMLError:
        same = False
    if not same:
        raise CannotEdit(f"its text is written in a way that cannot be edited safely: add {entry.text()} by hand")
    return edited


def _with(old: Any, entry: Entry) -> list[Any]:
    """A context's list with the entry in it."""
    items = list(old) if isinstance(old, list) else []
    unit = _unit(items)
    place, replaces = _place(items, entry)
    return [*items[:place], entry.fields(unit), *items[place + replaces :]]


def _unit(items: list[Any]) -> str:
    return "steps" if any("steps" in item for item in items) else "tokens"


def _place(items: list[Any], entry: Entry) -> tuple[int, bool]:
    """Where in a list the entry goes, and whether in the place of what is there."""
    unit = _unit(items)
    new = getattr(entry, unit)
    for number, item in enumerate(items):
        if unit not in item or abs(math.log(item[unit] / new)) < _SAME_BUDGET:
            return number, True  # one for any budget is alone
    return next((number for number, item in enumerate(items) if item[unit] > new), len(items)), False


def _edited(text: str, entry: Entry, old: Any) -> str:
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    if root is None:
        return _after(text, len(text), "\n".join(_block("optim", entry, 0, 0)) + "\n")
    node, keys = root, ["optim", "lr_table", entry.scale, str(entry.context)]
    for depth, name in enumerate(keys):
        if not isinstance(node, yaml.MappingNode):
            raise CannotEdit(f"{'.'.join(keys[:depth])} is no mapping")
        _check_own(root, node, keys[:depth])
        child = next((value for key, value in node.value if key.value == name), None)
        if child is None:
            return _with_key(text, node, name, entry, depth)
        node = child
    _check_own(root, node, keys)
    if not isinstance(node, yaml.SequenceNode):
        return text[: node.start_mark.index] + f"[{entry.text()}]" + text[node.end_mark.index :]
    unit = _unit(old)
    place, replaces = _place(old, entry)
    items = node.value
    if replaces:
        item = items[place]
        _check_own(root, item, [*keys, str(place)])
        end = _end(item)
        return text[: item.start_mark.index] + entry.text(unit) + text[end:]
    if node.flow_style:
        column = " " * items[0].start_mark.column
        if place < len(items):
            at = items[place].start_mark.index
            return f"{text[:at]}{entry.text(unit)},\n{column}{text[at:]}"
        at = _end(items[-1])
        return f"{text[:at]},\n{column}{entry.text(unit)}{text[at:]}"
    line = " " * node.start_mark.column + f"- {entry.text(unit)}\n"
    if place < len(items):
        at = text.rfind("\n", 0, items[place].start_mark.index) + 1
        return text[:at] + line + text[at:]
    return _after(text, _end(items[-1]), line)


def _with_key(text: str, node: yaml.MappingNode, name: str, entry: Entry, depth: int) -> str:
    """The text with a new key at the end of a mapping. depth: of the key in optim.lr_table.SCALE.CONTEXT."""
    if node.flow_style:
        at = node.end_mark.index - 1
        separator = ", " if node.value else ""
        return f"{text[:at].rstrip()}{separator}{_flow(entry, depth)}{text[at:]}"
    lines = _block(name, entry, depth, node.start_mark.column)
    return _after(text, _end(node), "\n".join(lines) + "\n")


def _flow(entry: Entry, depth: int) -> str:
    """`KEY: VALUE` of a key of optim.lr_table.SCALE.CONTEXT, in braces from the second on."""
    inner = f"{entry.context}: [{entry.text()}]"
    for name in [entry.scale, "lr_table", "optim"][: 3 - depth]:
        inner = f"{name}: {{{inner}}}"
    return inner


def _block(name: str, entry: Entry, depth: int, column: int) -> list[str]:
    """The lines of a key of optim.lr_table.SCALE.CONTEXT, each level on a line of its own down to the scale."""
    lines, names = [], ["optim", "lr_table"]
    for level in range(depth, 2):
        lines.append(" " * (column + 2 * (level - depth)) + f"{names[level]}:")
    inner = column + 2 * max(0, 2 - depth)
    return [*lines, " " * inner + _flow(entry, max(depth, 2))]


def _after(text: str, end: int, lines: str) -> str:
    """The text with `lines` after the line in which position `end` is."""
    newline = text.find("\n", end)
    if newline < 0:
        return f"{text}\n{lines}"
    return text[: newline + 1] + lines + text[newline + 1 :]


def _end(node: yaml.Node) -> int:
    """Where a node's text ends; of a block its own mark may stand behind comments and empty lines."""
    if isinstance(node, yaml.ScalarNode) or getattr(node, "flow_style", True):
        return int(node.end_mark.index)
    last = node.value[-1]
    if isinstance(last, tuple):
        key, value = last
        is_alias = value.start_mark.index < key.end_mark.index
        return int(key.end_mark.index) if is_alias else _end(value)
    return _end(last)


def _check_own(root: yaml.Node, node: yaml.Node, keys: list[str]) -> None:
    """Raises CannotEdit for a part that other places of the file name as well, by an alias."""
    if Counter(map(id, _nodes(root)))[id(node)] > 1:
        raise CannotEdit(f"{'.'.join(keys)} is shared with another place of the file (an alias): add it by hand")


def _nodes(node: yaml.Node) -> Iterator[yaml.Node]:
    """All nodes, those of an alias as often as they are named."""
    yield node
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield from (*_nodes(key), *_nodes(value))
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _nodes(item)


def _number(value: float) -> str:
    """As YAML reads a float: 8e-05 without a dot would be text."""
    text = f"{value:.3g}"
    return text.replace("e", ".0e") if "e" in text and "." not in text else text
