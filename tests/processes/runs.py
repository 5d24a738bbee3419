"""Starting real runs on a small corpus, and reading what they leave."""

import contextlib
import io
import json
import logging
import os
import random
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ngpt_train.__main__ import main
from ngpt_train.core import log
from ngpt_train.core.files import json_lines
from ngpt_train.study.audit import auditing
from ngpt_train.training.checkpoint import list_checkpoints
from ngpt_train.verbs import train as train_verb
from tests.processes import fork_server

IN_THIS_PROCESS = {"train", "evaluate", "generate", "prepare", "plan"}
IN_THIS_PROCESS |= {"analyze", "probe", "export", "import", "compare"}
# What leaves a process group, torch's choice of algorithms, or processes that begin as this one did.
STAYING = ("parallel", "train.deterministic=true", "data.workers=")

WORDS = ["the", "model", "reads", "a", "row", "of", "tokens", "and", "moves", "every", "vector", "towards", "it"]


def write_corpus(path: Path, documents: int = 200, seed: int = 0) -> Path:
    """A jsonl file of sentences that a small model can learn something from."""
    generator = random.Random(seed)
    with path.open("w") as file:
        for _ in range(documents):
            words = [generator.choice(WORDS) for _ in range(generator.randint(20, 60))]
            file.write(json.dumps({"text": " ".join(words) + "."}) + "\n")
    return path


def write_parquet_shards(directory: Path, documents: Sequence[int], seed: int = 0) -> Path:
    """Parquet files of so many documents each, some of them empty, in row groups of 10."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    generator = random.Random(seed)
    directory.mkdir(parents=True)
    for number, n in enumerate(documents):
        lengths = [generator.choice((0, 1, 3, 5, 20)) for _ in range(n)]
        texts = [" ".join(generator.choice(WORDS) for _ in range(length)) for length in lengths]
        table = pa.table({"text": pa.array(texts, pa.string()), "source": pa.array(["test"] * n, pa.string())})
        pq.write_table(table, directory / f"train-{number:05d}.parquet", row_group_size=10)
    return directory


def arguments(directory: Path, corpus: Path, *overrides: str) -> list[str]:
    """Overrides of a run that takes a second; `overrides` come last and replace those of the same key."""
    defaults = [
        "model=ngpt",
        "scale=debug",
        "data=local",
        f"data.path={corpus}",
        "data.val_fraction=0.2",
        f"data.cache={directory / 'cache'}",
        "tokenizer=bytes",
        f"run.root={directory / 'runs'}",
        "run.name=test",
        "train.steps=12",
        "train.batch_rows=8",
        "train.micro_rows=2",
        "train.device=cpu",
        "eval.every=0",
        "eval.rows=8",
        "checkpoint.every=4",
        "logging.every=1",
        "logging.wandb.mode=disabled",
    ]
    chosen = {override.split("=")[0]: override for override in [*defaults, *overrides]}
    return list(chosen.values())


def command(verb: str, given: list[str], ranks: int = 1) -> list[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    return [sys.executable, *launcher, "-m", "ngpt_train", verb, *given]


def run(verb: str, given: list[str], ranks: int = 1, code: int | None = None) -> subprocess.CompletedProcess[str]:
    """What a command prints and its exit code, which has to be `code` if that is given: in this process, or where it
    would change it, forked from the server's, which has imported the trainer as well."""
    stays = ranks == 1 and verb in IN_THIS_PROCESS and not any(word.startswith(STAYING) for word in given)
    finished = in_this_process(verb, given) if stays else forked(verb, given, ranks)
    assert code in (None, finished.returncode), finished.stdout[-2000:] + finished.stderr[-4000:]
    return finished


def in_this_process(verb: str, given: list[str]) -> subprocess.CompletedProcess[str]:
    output, errors = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(output), redirect_stderr(errors):
        patch.setattr(log, "_said", set())
        # Where nothing else is set up, Python prints warnings; pytest has set up its own.
        patch.setattr(logging.getLogger(), "handlers", [warnings := logging.StreamHandler(errors)])
        warnings.setLevel(logging.WARNING)
        if "NGPT_TESTS_CURVES" not in os.environ:
            patch.setattr(train_verb, "plot_run", lambda directory: None)
        try:
            code = main([verb, *given])
        except Exception:
            code = 1
            traceback.print_exc()
    return subprocess.CompletedProcess([verb, *given], code, output.getvalue(), errors.getvalue())


def forked(verb: str, given: list[str], ranks: int = 1) -> subprocess.CompletedProcess[str]:
    """A command in a process of its own, or in as many as there are ranks."""
    return fork_server.run("ngpt_train", [verb, *given], ranks if ranks > 1 else None)


def fork_audits(patch: pytest.MonkeyPatch) -> None:
    """From here on the trainings of an audit in this process are forks too."""

    def popen(arguments: Sequence[str], env: dict[str, str], stdout: io.BufferedWriter, stderr: int) -> Any:
        return fork_server.Started(arguments[arguments.index("-m") + 1 :], Path(stdout.name), **env)

    patch.setattr(auditing, "subprocess", SimpleNamespace(Popen=popen, STDOUT=subprocess.STDOUT))


def train(given: list[str], ranks: int = 1) -> None:
    run("train", given, ranks, code=0)


def start(
    given: list[str], ranks: int = 1, restarts: int = 0, program: Sequence[str] = ("ngpt_train", "train")
) -> fork_server.Started:
    """A `train`, or a program of the test's in its place, that goes on beside the test in a session of its own; on
    several ranks under a torchrun."""
    launcher = ["tests.processes.torchrun", "--standalone", f"--nproc-per-node={ranks}", f"--max-restarts={restarts}"]
    return fork_server.Started([*([*launcher, "-m"] if ranks > 1 else []), *program, *given])


def children(process: fork_server.Started) -> list[int]:
    """The ranks of a torchrun."""
    found = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True).stdout
    return [int(pid) for pid in found.split()]


def wait_for(happened: Callable[[], object], seconds: float, otherwise: str = "it takes too long") -> None:
    """Waits until something has happened."""
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.02)


def has_step(directory: Path, step: int) -> bool:
    """Whether a run has recorded a training step from `step` on."""
    metrics = directory / "metrics.jsonl"
    found = [record for _, record in json_lines(metrics)] if metrics.exists() else []
    return any(x is not None and x["kind"] == "train" and x["step"] >= step for x in found)


def wait_for_step(directory: Path, step: int) -> None:
    # Eight ranks on two slow cores take two minutes to begin.
    wait_for(lambda: has_step(directory, step), 300, f"{directory} did not reach step {step}")


def starts(directory: Path) -> list[dict[str, Any]]:
    """What run.json says of each start of a run."""
    return json.loads((directory / "run.json").read_text())["starts"]


def began_at(directory: Path) -> list[int]:
    """The steps at which a run began and went on."""
    return [start["step"] for start in starts(directory)]


def end_of(directory: Path) -> dict[str, Any]:
    """exit.json of a run."""
    return json.loads((directory / "exit.json").read_text())


def checkpoints(directory: Path) -> list[str]:
    """The names of a run's complete checkpoints."""
    return [path.name for path in list_checkpoints(directory / "checkpoints")]


def contents(directory: Path) -> dict[Path, tuple[int, bytes]]:
    """The files below a directory, with the times at which they were written."""
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in directory.rglob("*") if path.is_file()}


def fill(disk: Path) -> Path:
    """Takes all room of a disk; the file that has it."""
    with contextlib.suppress(OSError), (disk / "filling").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    return disk / "filling"


def records(directory: Path, kind: str = "train") -> dict[int, dict[str, Any]]:
    """Records of metrics.jsonl by step; fails where a step appears twice."""
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    chosen = [line for line in lines if line["kind"] == kind]
    by_step = {line["step"]: line for line in chosen}
    assert len(by_step) == len(chosen), f"a step appears twice in {directory}"
    return by_step


Numbers = dict[int, tuple[float, float, float, int]]


def numbers(directory: Path) -> Numbers:
    """What must not change between an interrupted and an uninterrupted run."""
    return {
        step: (record["loss"], record["grad_norm"], record["lr"], record["tokens"])
        for step, record in records(directory).items()
    }


def assert_near(found: Numbers, expected: Numbers, rel: float) -> None:
    """Losses within `rel`, norms within ten times that, rates and tokens the same."""
    assert found.keys() == expected.keys()
    for step, (loss, norm, *others) in found.items():
        assert loss == pytest.approx(expected[step][0], rel=rel)
        assert norm == pytest.approx(expected[step][1], rel=10 * rel)
        assert others == [*expected[step][2:]]
