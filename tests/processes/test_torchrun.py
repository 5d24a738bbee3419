"""What several processes do together is what one process does."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.processes import fork_server, runs
from tests.stored import stored_tensors

DECAY = 0.7  # of the moving average


def test_evaluate_is_the_same_on_two_ranks(tmp_path: Path) -> None:
    corpus = runs.write_corpus(tmp_path / "text.jsonl", documents=1500)
    # At 128 rows in a forward pass, three passes: two for one rank, one and an empty one for the other.
    rows = 300
    runs.train(runs.arguments(tmp_path, corpus, "train.steps=3", f"eval.rows={rows}"))
    trained = runs.records(tmp_path / "runs/test", "eval")[3]

    def evaluate(ranks: int) -> dict[str, Any]:
        out = tmp_path / f"{ranks}.json"
        given = [f"evaluate.checkpoint={tmp_path / 'runs/test'}", f"evaluate.out={out}", f"eval.rows={rows}"]
        given.append("eval.contexts=[32]")
        finished = runs.run("evaluate", [*given, "train.device=cpu"], ranks, code=0)
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
    runs.train(runs.arguments(tmp_path, corpus, "train.steps=2"))
    given = [f"generate.checkpoint={tmp_path / 'runs/test'}", "generate.max_new_tokens=5", "train.device=cpu"]
    one, two = runs.run("generate", given, code=0), runs.run("generate", given, ranks=2, code=0)
    assert one.stdout
    assert two.stdout == one.stdout, "one rank writes"


def test_prepare_on_two_ranks(tmp_path: Path, corpus: Path) -> None:
    def prepare(ranks: int) -> str:
        out = tmp_path / f"{ranks}"
        given = ["data=local", f"data.path={corpus}", "tokenizer=bytes", f"data.out={out}"]
        return runs.run("prepare", given, ranks, code=0).stdout.replace(str(out), "OUT")

    one, two = prepare(1), prepare(2)
    assert two == one, "one rank reports, and the same"
    files = {path.name: path.read_bytes() for path in (tmp_path / "1").iterdir() if path.suffix == ".bin"}
    assert files
    assert files == {path.name: path.read_bytes() for path in (tmp_path / "2").iterdir() if path.suffix == ".bin"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"], "nothing half-made is left"


def averaged(directory: Path, corpus: Path, stop_at: int, parallel: str = "auto") -> list[str]:
    ema = ["checkpoint.every=1", f"optim.ema_decay={DECAY}", f"train.stop_at={stop_at}", f"parallel={parallel}"]
    return runs.arguments(directory, corpus, "eval.every=2", *ema)


def stored(directory: Path, step: int) -> dict[str, dict[str, Tensor]]:
    return stored_tensors(directory / f"runs/test/checkpoints/step_{step:08d}")


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> dict[str, dict[str, Tensor]]:
    directory = tmp_path_factory.mktemp("single")
    runs.train(averaged(directory, corpus, 4))
    return stored(directory, 4)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_moving_average_on_two_ranks(
    single: dict[str, dict[str, Tensor]], parallel: str, tmp_path: Path, corpus: Path
) -> None:
    """After restarts on two ranks and then on one, too. Caught: an average of a rank's own rows of matrices that FSDP2
    has lent to a validation, one that a restart or another layout begins anew."""
    runs.train(averaged(tmp_path, corpus, 2, parallel), ranks=2)
    runs.train(averaged(tmp_path, corpus, 4, parallel), ranks=2)
    after_4 = stored(tmp_path, 4)
    assert after_4["ema"].keys() == single["ema"].keys()
    for key, x in single["ema"].items():
        # The ranks' sums round otherwise, and Adam divides a gradient by its own size.
        assert (after_4["ema"][key] - x).norm() <= 1e-4 * x.norm(), key
        assert (x - single["model"][key]).norm() > 1e-3 * x.norm(), key
    runs.train(averaged(tmp_path, corpus, 5))
    after_5 = stored(tmp_path, 5)
    for key, x in after_5["ema"].items():
        expected = DECAY * after_4["ema"][key].double() + (1 - DECAY) * after_5["model"][key].double()
        assert (x - expected).abs().max() <= 2e-7 * expected.abs().max(), key


def kill(process: fork_server.Started) -> None:
    """kill -9 of torchrun and of its ranks, which torchrun has put into sessions of their own."""
    ranks = runs.children(process)
    # Stopped first: a rank that outlives another by a moment would find it gone and write exit.json.
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in [process.pid, *ranks]:
            os.kill(pid, number)
    process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_four_ranks_killed_and_resumed(tmp_path: Path, corpus: Path, parallel: str) -> None:
    options = [f"parallel={parallel}", "train.steps=24", "checkpoint.every=6"]
    whole, parts = (runs.arguments(tmp_path / name, corpus, *options) for name in ("whole", "parts"))
    runs.train(whole, ranks=4)
    process = runs.start(parts, ranks=4)
    directory = tmp_path / "parts/runs/test"
    runs.wait_for_step(directory, 8)
    kill(process)
    assert not (directory / "exit.json").exists(), "killed too late to show anything"
    runs.train(parts, ranks=4)
    assert len(runs.starts(directory)) == 2
    assert runs.numbers(directory) == runs.numbers(tmp_path / "whole/runs/test")
    losses = [loss for loss, *_ in runs.numbers(directory).values()]
    assert len(losses) == 24
    assert losses[-1] < 0.95 * losses[0]
    assert max(norm for _, norm, *_ in runs.numbers(directory).values()) > 1.0, "never clipped"
