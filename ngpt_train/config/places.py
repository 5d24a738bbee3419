"""Refuses to write where a verb must not: over a run, over somebody's file, where no writing is allowed."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ngpt_train.config.validate import mistake
from ngpt_train.core.errors import DataError
from ngpt_train.core.files import read_json, sync
from ngpt_train.core.recorded import ANSWERS


def check_directory(setting: str, path: Path) -> None:
    """Raises ConfigError unless results can be written into the directory `path`, or it can be made, and it is not that
    of a run. `setting`: KEY=VALUE of the command line."""
    if path.exists() and not path.is_dir():
        raise mistake(f"{setting}: is a file", "Name a directory")
    if (path / "config.yaml").exists():
        raise mistake(f"{setting}: is the directory of a run", "Name another directory")
    there_is = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    if not (there_is.is_dir() and os.access(there_is, os.W_OK)):
        raise mistake(f"{setting}: {there_is} cannot be written", "Name another directory")


def make_directory(setting: str, path: Path) -> None:
    """Raises ConfigError where the directory `path` is not there and cannot be made."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise mistake(f"{setting}: cannot be made ({error.strerror})", "Name another directory") from None


def check_file(setting: str, path: Path) -> None:
    """Raises ConfigError unless a result in JSON can be written to `path`. `setting`: KEY=VALUE of the command line. An
    earlier result there is replaced, but no file that is no JSON: that is somebody's text."""
    if path.is_dir():
        raise mistake(f"{setting}: is a directory", "Name a file in it")
    if not path.parent.is_dir():
        raise mistake(f"{setting}: {path.parent} is not a directory", "Create it, or name another file")
    try:
        tempfile.TemporaryFile(dir=path.parent).close()
        begins = path.read_bytes()[:1] if path.is_file() else b""
    except OSError as error:
        problem = f"{setting}: {path.parent} cannot be written ({error.strerror})"
        raise mistake(problem, "Name a file where you may write") from None
    if begins not in (b"", b"{", b"["):
        raise mistake(f"{setting}: the file is there, and is no earlier result", "Remove it, or name another")


def check_beside(setting: str, out: Path, names: Sequence[str]) -> None:
    """Raises ConfigError where one of the files `names`, which are written beside the result `out`, is there already,
    unless it is of the result that `out` holds now. `setting`: KEY=VALUE of the command line."""
    try:
        earlier = read_json(out)
    except DataError:
        earlier = {}
    own = files_of(earlier, out.stem) if isinstance(earlier, dict) else set()
    for name in names:
        if name == out.name:
            problem = f"{setting}: another file of the result takes this name"
            raise mistake(problem, f"For example {setting.partition('=')[0]}={out.with_name('result.json')}")
        beside = out.with_name(name)
        if os.path.lexists(beside) and name not in own:
            problem = f"{setting}: {beside} would be replaced, and it is of no earlier result in {out.name}"
            raise mistake(problem, "Name another file, or remove that one")


def files_of(result: Mapping[str, object], stem: str) -> set[str]:
    """The files that `evaluate` has written beside `result`, whose name is `stem` and an ending."""
    found = {"tasks": f"{stem}_items.jsonl", "curves": f"{stem}.png", "rows_hash": f"{stem}.npz"}
    found |= dict.fromkeys(("matthews", "pearson"), f"{stem}{ANSWERS}")  # of examples with labels, and with numbers
    found |= {"bleu": f"{stem}_translations.txt", "chrf": f"{stem}_references.txt"}
    contexts = [key.removeprefix("rows_hash_ctx") for key in result if key.startswith("rows_hash_ctx")]
    return {name for key, name in found.items() if key in result} | {f"{stem}_context_{n}.npz" for n in contexts}


def check_free(key: str, out: Path) -> None:
    """Raises ConfigError unless `out` is free or an empty directory."""
    if out.name in ("", ".."):  # for example `.`: the finished directory is renamed to `out`, which needs a name
        raise mistake(f"{key}={out}: a path without a name at its end", f"Name a new directory, such as {key}=model")
    if out.is_dir() and not out.is_symlink() and not any(out.iterdir()):
        return
    if out.exists() or out.is_symlink():
        what = "has files in it, and none is overwritten" if out.is_dir() else "is there, and is no directory"
        raise mistake(f"{key}={out}: {what}", "Name a new directory, or empty this one first")


@contextlib.contextmanager
def new_directory(key: str, out: Path) -> Iterator[Path]:
    """A temporary directory beside `out`, renamed to `out` at the end of the `with`; an exception deletes it. Raises
    ConfigError if `out` is not free, or cannot be made."""
    check_free(key, out)
    work = out.with_name(f".unfinished-{out.name}")
    shutil.rmtree(work, ignore_errors=True)  # of a killed process
    try:
        work.mkdir(parents=True)
    except OSError as error:
        problem = f"{key}={out}: {work} cannot be made ({error.strerror})"
        raise mistake(problem, "Name a directory in a writable place") from None
    try:
        yield work
        if out.is_dir():
            out.rmdir()
        os.rename(work, out)
        sync(out.parent)
    finally:
        shutil.rmtree(work, ignore_errors=True)
