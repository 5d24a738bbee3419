"""The moving average of the weights is one for all ranks, layouts and restarts."""

from pathlib import Path

import pytest
from torch import Tensor

from tests.processes.runs import arguments, train
from tests.stored import stored_tensors

DECAY = 0.7


def given(directory: Path, corpus: Path, stop_at: int, parallel: str = "auto") -> list[str]:
    ema = ["checkpoint.every=1", f"optim.ema_decay={DECAY}", f"train.stop_at={stop_at}", f"parallel={parallel}"]
    return arguments(directory, corpus, "eval.every=2", *ema)


def stored(directory: Path, step: int) -> dict[str, dict[str, Tensor]]:
    return stored_tensors(directory / f"runs/test/checkpoints/step_{step:08d}")


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> dict[str, dict[str, Tensor]]:
    directory = tmp_path_factory.mktemp("single")
    train(given(directory, corpus, 4))
    return stored(directory, 4)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_ranks(single: dict[str, dict[str, Tensor]], parallel: str, tmp_path: Path, corpus: Path) -> None:
    """After restarts on two ranks and then on one, too. Caught: an average of a rank's own rows of matrices that FSDP2
    has lent to a validation, one that a restart or another layout begins anew."""
    train(given(tmp_path, corpus, 2, parallel), ranks=2)
    train(given(tmp_path, corpus, 4, parallel), ranks=2)
    after_4 = stored(tmp_path, 4)
    assert after_4["ema"].keys() == single["ema"].keys()
    for key, x in single["ema"].items():
        # The ranks' sums round otherwise, and Adam divides a gradient by its own size.
        assert (after_4["ema"][key] - x).norm() <= 1e-4 * x.norm(), key
        assert (x - single["model"][key]).norm() > 1e-3 * x.norm(), key
    train(given(tmp_path, corpus, 5))
    after_5 = stored(tmp_path, 5)
    for key, x in after_5["ema"].items():
        expected = DECAY * after_4["ema"][key].double() + (1 - DECAY) * after_5["model"][key].double()
        assert (x - expected).abs().max() <= 2e-7 * expected.abs().max(), key
