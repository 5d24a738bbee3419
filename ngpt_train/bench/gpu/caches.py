"""Carries the caches of torch.compile and Triton from one run of `bench gpu` to the next."""

from __future__ import annotations

import contextlib
import os
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ngpt_train.distributed.compile_cache import VARIABLES


@contextlib.contextmanager
def compile_caches(archive: Path) -> Iterator[Path]:
    """While the body runs, compilers keep their caches in a temporary directory, which is yielded.

    It is filled from the tar file `archive`, if there is one, and stored to it at the end.
    """
    before = {name: os.environ.get(name) for name in VARIABLES}
    # Errors are ignored, because a compiler that is still at work may write into the directory while it is removed.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        if archive.exists():
            with tarfile.open(archive) as stored:
                stored.extractall(directory, filter="data")
        os.environ |= {name: str(Path(directory, part)) for name, part in VARIABLES.items()}
        try:
            yield Path(directory)
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
            store(Path(directory), archive)


def store(directory: Path, archive: Path) -> None:
    """Writes the caches in `directory` to the tar file `archive`, atomically.

    Files that a compiler renames or removes meanwhile are left out.
    """
    partial = archive.with_name(f"{archive.name}.partial")
    with tarfile.open(partial, "w:gz", compresslevel=1) as stored:
        for part in VARIABLES.values():
            # File by file, because TarFile.add of a directory raises where one of its files has gone.
            for parent, _, names in os.walk(directory / part):
                for path in (Path(parent, name) for name in names):
                    with contextlib.suppress(FileNotFoundError):  # raised before anything of the file is written
                        stored.add(path, path.relative_to(directory), recursive=False)
    partial.replace(archive)
