"""The mean of the weights of several checkpoints of a run."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ngpt_train.config.schema import Config
from ngpt_train.config.stored import read_yaml, what_differs
from ngpt_train.config.validate import show
from ngpt_train.core.errors import DataError
from ngpt_train.core.files import read_json
from ngpt_train.distributed.world import World
from ngpt_train.models.decoder import Decoder
from ngpt_train.training.checkpoint.catalogue import list_checkpoints, step_of
from ngpt_train.training.checkpoint.load import load_model


def newest(key: str, n: int, last: Path, config: Config) -> list[Path]:
    """The `n` newest checkpoints of a run up to `last`, the oldest first.

    key: the name in messages. config: of `last`. Raises DataError if there are fewer, or if a config or tokenizer
    differs, as in a directory of several runs.
    """
    last = last.resolve()  # it may be `.` or a link
    there = list_checkpoints(last.parent)
    if last not in there:
        raise DataError(f"{key}={n}: {last} does not have a run's name step_*, so the order of checkpoints is unknown.")
    found = there[: there.index(last) + 1][-n:]
    if len(found) < n:
        steps = ", ".join(str(step_of(path)) for path in found)
        raise DataError(
            f"{key}={n}: {last.parent} has {len(found)} up to step {step_of(last)} ({steps}). This run keeps "
            f"checkpoint.keep_last={config.checkpoint.keep_last}. Set {key}={len(found)}, or train with "
            f"checkpoint.keep_last={n}, which a resumed run may change."
        )
    for path in found[:-1]:
        differences = [
            f"{name}: {show(old)} in {path.name}, {show(new)} in {last.name}"
            for name, old, new in what_differs(read_yaml(path / "config.yaml"), config)
        ]
        if read_json(path / "tokenizer.json") != read_json(last / "tokenizer.json"):
            differences.append(f"{path.name} has another tokenizer than {last.name}")
        if differences:
            raise DataError(f"{key}={n}: {last.parent} holds several runs.\n  " + "\n  ".join(differences))
    return found


@torch.no_grad()
def load_mean(checkpoints: Sequence[Path], model: Decoder, world: World) -> None:
    """Loads the mean of the checkpoints' weights and running statistics into `model`.

    The sums are in fp64. Then the mean is projected onto the sphere: the nearest point has the least sum of squared
    distances to the checkpoints' rows. PowerNorm averages psi^2, BatchNorm mean and variance. A collective call. Raises
    DataError as `load_model`.
    """
    totals: dict[str, Tensor] = {}
    for checkpoint in checkpoints:
        load_model(checkpoint, model, world)
        for name, value in values_of(model).items():
            totals[name] = totals[name].add_(value) if name in totals else value.double()
    for name, value in values_of(model).items():
        value.copy_(totals[name] / len(checkpoints))
    model.project_()


def values_of(model: Decoder) -> dict[str, Tensor]:
    """Weights and running statistics, by name."""
    return {**dict(model.named_parameters()), **model.statistics()}
