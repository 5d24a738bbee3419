"""A plain table of a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table of rows with the same keys, which its first line names."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in columns)
    lines = "".join("<tr>" + "".join(_cell(_said(row.get(column))) for column in columns) + "</tr>" for row in rows)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="Table"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{lines}</tbody></table></div>"
    )


SHORT = 20  # letters that no cell needs to break


def _cell(text: str) -> str:
    return f"<td class={'wrap' if len(text) > SHORT else 'short'}>{escape(text)}</td>"


def _said(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.6g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
