"""Calls a function of a test on several ranks."""

import importlib
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.processes import fork_server


def on_ranks(function: Callable[..., Any], ranks: int, *arguments: Any) -> list[Any]:
    """What the function of a module returns on each of so many ranks. arguments: as JSON has them."""
    with tempfile.TemporaryDirectory() as directory:
        named = [directory, function.__module__, function.__name__, json.dumps(arguments)]
        finished = fork_server.run("tests.processes.launch", named, ranks, timeout=600)
        assert finished.returncode == 0, finished.stderr[-4000:]
        return [torch.load(Path(directory, str(rank)), weights_only=False) for rank in range(ranks)]


if __name__ == "__main__":
    directory, module, name, given = sys.argv[1:]
    returned = getattr(importlib.import_module(module), name)(*json.loads(given))
    torch.save(returned, Path(directory, os.environ["RANK"]))
    # Without the interpreter's farewell: gloo's threads may still hold tensors, and torch 2.13 then deadlocks or
    # aborts when the process group is taken down.
    os._exit(0)
