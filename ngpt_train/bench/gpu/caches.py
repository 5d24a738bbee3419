"""What torch.compile and Triton compiled, from one run of `bench gpu` to the next."""

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
    """What is compiled goes to a directory of its own, which is given, from and to `archive`."""
    before = {name: os.environ.get(name) for name in VARIABLES}
    # A compiler that is still at work may write into it while it is removed.
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
    """The archive is the old one or the new one, never half of it. Compilers may still be at work: what they rename or
    remove meanwhile is left out."""
    partial = archive.with_name(f"{archive.name}.partial")
    with tarfile.open(partial, "w:gz", compresslevel=1) as stored:
        for part in VARIABLES.values():
            # One by one: TarFile.add of a directory raises where one of its files is gone.
            for parent, _, names in os.walk(directory / part):
                for path in (Path(parent, name) for name in names):
                    with contextlib.suppress(FileNotFoundError):  # raised before anything of the file is written
                        stored.add(path, path.relative_to(directory), recursive=False)
    partial.replace(archive)
