"""The tables of docs/papers.md, from the configs: `python -m tests.unit.config.paper_page` writes them there."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

from ngpt_train.config import Config, list_experiments, load_config

PAGE = Path(__file__).parents[3] / "docs" / "papers.md"
COLUMNS = ("steps", "lr")


def tables_of_page() -> dict[str, list[str]]:
    """The lines of each table, by its name."""
    found: dict[str, dict[tuple[str, ...], list[str]]] = {}
    for name in list_experiments():
        if name.startswith("paper/"):
            _, table, row = name.split("/")
            found.setdefault(table, {}).setdefault(described(name), []).append(f"`{row}`")
    return {table: lines_of(rows) for table, rows in found.items()}


def lines_of(rows: dict[tuple[str, ...], list[str]]) -> list[str]:
    """Rows of equal numbers are one line. Numbers that all rows have stand above the table."""
    columns = list(zip(*rows, strict=True))
    shared = [f"{name} {cells[0]}" for name, cells in zip(COLUMNS, columns, strict=True) if len(set(cells)) == 1]
    varied = [(name, cells) for name, cells in zip(COLUMNS, columns, strict=True) if len(set(cells)) > 1]
    above = [f"All rows: {', '.join(shared)}.", ""] if shared else []
    cells_by_row = zip((", ".join(names) for names in rows.values()), *(cells for _, cells in varied), strict=True)
    head = ["row", *(name for name, _ in varied)]
    return [*above, line(head), line("---" for _ in head), *map(line, cells_by_row)]


def line(cells: Any) -> str:
    return f"| {' | '.join(cells)} |"


@cache  # the tests of the rows look at the same ones
def config_of_row(name: str) -> Config:
    return load_config([f"experiment={name}"])


def described(name: str) -> tuple[str, ...]:
    config = config_of_row(name)
    # A recipe's table of learning rates has sources of its own.
    lr = "recipe" if name.split("/")[1] == "ngpt_runs" else f"{config.optim.lr:g}"
    return f"{config.train.steps:,}", lr


def main() -> None:
    """Puts each table between its two comments in the page."""
    text = PAGE.read_text()
    for table, lines in tables_of_page().items():
        begin, end = f"<!-- {table} -->", f"<!-- end of {table} -->"
        assert begin in text, f"{PAGE} has no place for {table}: {begin}, {end}"
        block = f"{begin}\n\n" + "\n".join(lines) + f"\n\n{end}"
        text = re.sub(f"{re.escape(begin)}.*?{re.escape(end)}", lambda _, block=block: block, text, flags=re.DOTALL)
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
