"""Prompts from a file, and from a terminal or a pipe."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from ngpt_train.core.errors import DataError
from ngpt_train.core.files import parse_json, read_whole

MOST_BYTES = 1 << 30


def read_prompts(setting: str) -> list[str]:
    """The prompts of the file generate.prompts: `prompt` of each object in a .jsonl file, else each line.

    An empty line of a text file is an empty prompt, so answer k belongs to line k. Raises DataError for a file that
    cannot be read, and for a line that is no prompt.
    """
    path = Path(setting).expanduser()
    try:
        content = read_whole(path, MOST_BYTES)
    except OSError as error:
        raise DataError(f"generate.prompts={setting}: {error.strerror}") from None
    lines = content.removesuffix(b"\n").split(b"\n") if content else []
    read = prompt_of_json if path.suffix == ".jsonl" else text_of
    prompts = [read(line, f"line {number} of generate.prompts={setting}") for number, line in enumerate(lines, 1)]
    if not prompts:
        raise DataError(f"generate.prompts={setting}: it is empty. A text file has a prompt a line")
    return prompts


def text_of(line: bytes, where: str) -> str:
    """The text of a line, without the carriage return of Windows."""
    try:
        return line.removesuffix(b"\r").decode()
    except UnicodeDecodeError:
        raise DataError(f"{where}: it is not UTF-8. Save the file as UTF-8") from None


def prompt_of_json(line: bytes, where: str) -> str:
    try:
        found = parse_json(line)
    except ValueError as error:
        raise DataError(
            f'{where}: it is not JSON ({error}). A line is an object such as {{"prompt": "text"}}'
        ) from None
    if not isinstance(found, dict) or not isinstance(found.get("prompt"), str):
        raise DataError(f'{where}: no object with a text `prompt`. A line is an object such as {{"prompt": "text"}}')
    prompt: str = found["prompt"]
    if any("\ud800" <= letter <= "\udfff" for letter in prompt):
        raise DataError(f"{where}: its prompt has half a surrogate pair, which is no character. Correct the line")
    return prompt


def typed_prompts() -> Iterator[str]:
    """The lines of stdin until it ends (Ctrl-D). A terminal shows `> ` before each. A line that is not UTF-8 is skipped
    with a message on stderr."""
    if sys.stdin.isatty():
        import readline  # noqa: F401  gives `input` the arrow keys and a history

        lines = iter(lambda: input("> ").encode(errors="surrogateescape"), None)
    else:
        lines = (line.removesuffix(b"\n") for line in sys.stdin.buffer)
    try:
        for line in lines:
            try:
                yield text_of(line, "this prompt")
            except DataError as error:
                print(error, file=sys.stderr)
    except EOFError:
        print()  # ends the line of `> `
