"""The tensors of a training state under their names in a checkpoint."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions

from ngpt_train.distributed import World
from ngpt_train.models import Decoder
from ngpt_train.training.checkpoint.files import read_progress
from ngpt_train.training.state import TrainState

OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)


def moving_average(state: TrainState) -> dict[str, dict[str, Tensor]]:
    """The state's moving average under its name in a checkpoint, if there is one."""
    return {} if state.ema is None else {"ema": state.ema.weights}


def statistics_of_all_ranks(model: Decoder, world: World) -> dict[str, Tensor]:
    """Each running statistic of all ranks, `(ranks, ...)`, on every rank. The statistics of ranks may differ, and on a
    resume each rank gets its own back."""
    own = {name: value.cpu() for name, value in model.statistics().items()}
    ranks = world.gather(own) if own else []
    return {name: torch.stack([rank[name] for rank in ranks]) for name in own}


def statistics_to_load(checkpoint: Path, model: Decoder) -> dict[str, Tensor]:
    """Uninitialised tensors, in the shapes that `statistics_of_all_ranks` returned when the checkpoint was saved."""
    if not model.statistics():
        return {}
    n_ranks = read_progress(checkpoint)["world_size"]
    return {name: value.new_empty(n_ranks, *value.shape, device="cpu") for name, value in model.statistics().items()}


def set_statistics(model: Decoder, ranks: dict[str, Tensor], world: World) -> None:
    """Sets this rank's statistics: its own if the number of ranks is that of the checkpoint, else the mean of all."""
    for name, value in model.statistics().items():
        same = len(ranks[name]) == world.size
        value.copy_(ranks[name][world.rank] if same else ranks[name].mean(0))


def no_dist() -> bool:
    return not dist.is_initialized()


def describe_error(error: BaseException) -> str:
    """The error in one line; of a CheckpointException the error of the first rank that failed."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return f"{type(error).__name__}: {error}".splitlines()[0]


@contextmanager
def without_process_group_warning() -> Iterator[None]:
    """Hides torch's warning that a single process saves without a process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
