"""What several processes do together is what one process does."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.processes import fork_server
from tests.processes.runs import arguments, children, numbers, records, run, start, train, wait_for_step, write_corpus


def test_evaluate_is_the_same_on_two_ranks(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "text.jsonl", documents=1500)
    # At 128 rows in a forward pass, three passes: two for one rank, one and an empty one for the other.
    rows = 300
    train(arguments(tmp_path, corpus, "train.steps=3", f"eval.rows={rows}"))
    trained = records(tmp_path / "runs/test", "eval")[3]

    def evaluate(ranks: int) -> dict[str, Any]:
        out = tmp_path / f"{ranks}.json"
        given = [f"evaluate.checkpoint={tmp_path / 'runs/test'}", f"evaluate.out={out}", f"eval.rows={rows}"]
        given.append("eval.contexts=[32]")
        finished = run("evaluate", [*given, "train.device=cpu"], ranks)
        assert finished.returncode == 0, finished.stderr[-4000:]
        assert finished.stdout.count("bits/byte") == 1, "one rank reports"
        return json.loads(out.read_text())

    one, two = evaluate(1), evaluate(2)
    assert one == two
    for name in ("", "_context_32"):
        stored = [(tmp_path / f"{ranks}{name}.npz").read_bytes() for ranks in (1, 2)]
        assert stored[0] == stored[1], "to the bit"
    assert (
        stored[0] != (tmp_path / "1.npz").read_bytes() == (tmp_path / "runs/test/evals/step_00000003.npz").read_bytes()
    )
    assert one["rows"] == rows
    assert one["loss"] == trained["loss"]


def test_generate_on_two_ranks(tmp_path: Path, corpus: Path) -> None:
    train(arguments(tmp_path, corpus, "train.steps=2"))
    given = [f"generate.checkpoint={tmp_path / 'runs/test'}", "generate.max_new_tokens=5", "train.device=cpu"]
    one, two = run("generate", given), run("generate", given, ranks=2)
    assert (one.returncode, two.returncode) == (0, 0), two.stderr[-4000:]
    assert one.stdout
    assert two.stdout == one.stdout, "one rank writes"


def test_prepare_on_two_ranks(tmp_path: Path, corpus: Path) -> None:
    def prepare(ranks: int) -> str:
        out = tmp_path / f"{ranks}"
        given = ["data=local", f"data.path={corpus}", "tokenizer=bytes", f"data.out={out}"]
        finished = run("prepare", given, ranks)
        assert finished.returncode == 0, finished.stderr[-4000:]
        return finished.stdout.replace(str(out), "OUT")

    one, two = prepare(1), prepare(2)
    assert two == one, "one rank reports, and the same"
    files = {path.name: path.read_bytes() for path in (tmp_path / "1").iterdir() if path.suffix == ".bin"}
    assert files
    assert files == {path.name: path.read_bytes() for path in (tmp_path / "2").iterdir() if path.suffix == ".bin"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"], "nothing half-made is left"


def kill(process: fork_server.Started) -> None:
    """kill -9 of torchrun and of its ranks, which torchrun has put into sessions of their own."""
    ranks = children(process)
    # Stopped first: a rank that outlives another by a moment would find it gone and write exit.json.
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in [process.pid, *ranks]:
            os.kill(pid, number)
    process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_four_ranks_killed_and_resumed(tmp_path: Path, corpus: Path, parallel: str) -> None:
    options = [f"parallel={parallel}", "train.steps=24", "checkpoint.every=6"]
    whole, parts = arguments(tmp_path / "whole", corpus, *options), arguments(tmp_path / "parts", corpus, *options)
    train(whole, ranks=4)
    process = start(parts, ranks=4)
    directory = tmp_path / "parts/runs/test"
    wait_for_step(directory, 8)
    kill(process)
    assert not (directory / "exit.json").exists(), "killed too late to show anything"
    train(parts, ranks=4)
    starts = json.loads((directory / "run.json").read_text())["starts"]
    assert len(starts) == 2
    assert numbers(directory) == numbers(tmp_path / "whole/runs/test")
    losses = [loss for loss, *_ in numbers(directory).values()]
    assert len(losses) == 24
    assert losses[-1] < 0.95 * losses[0]
    assert max(norm for _, norm, *_ in numbers(directory).values()) > 1.0, "never clipped"
