"""What torch.compile and Triton compiled, from one run of `bench gpu` to the next."""

from __future__ import annotations

import contextlib
import os
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

VARIABLES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}


@contextlib.contextmanager
def compile_caches(archive: Path) -> Iterator[Path]:
    """What is compiled goes to a directory of its own, which is given, from and to `archive`."""
    before = {name: os.environ.get(name) for name in VARIABLES}
    with tempfile.TemporaryDirectory() as directory:
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
    """The archive is the old one or the new one, never half of it."""
    partial = archive.with_name(f"{archive.name}.partial")
    with tarfile.open(partial, "w:gz", compresslevel=1) as stored:
        for part in VARIABLES.values():
            if (directory / part).exists():
                stored.add(directory / part, part)
    partial.replace(archive)
