"""Runs a worker of the tests on several ranks."""

from pathlib import Path

from tests.processes import fork_server


def launch(worker: str, out: Path, ranks: int, *arguments: str) -> list[Path]:
    """Runs `worker OUT ARGUMENTS...` of this folder; the files OUT.rank that the ranks write."""
    module = f"tests.processes.{Path(worker).stem}"
    finished = fork_server.run(module, [str(out), *arguments], ranks, timeout=600)
    assert finished.returncode == 0, finished.stderr[-4000:]
    return [Path(f"{out}.{rank}") for rank in range(ranks)]
