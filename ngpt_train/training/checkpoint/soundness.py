"""Whether a state is worth a checkpoint: numbers that are finite, and a loss that has not exploded."""

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from ngpt_train.optim.row_adam import local_rows
from ngpt_train.training.state import TrainState

# A loss that is so many times the smallest loss of the good checkpoints has exploded. Losses of language models do not
# grow by half while a model learns; a harder text or a small batch raises them by less.
TIMES_THE_SMALLEST = 1.5


def first_not_finite(state: TrainState) -> str | None:
    """The name of a weight, moment, average or running statistic of this rank that holds NaN or an infinity, if one
    does. Waits for the device once."""
    with torch.no_grad():
        found = [(name, tensor) for name, tensor in _tensors(state) if tensor.is_floating_point()]
        # A sum passes once over memory, and is finite only if all its terms are. One of finite terms may overflow.
        sums = torch.stack([tensor.sum().float().to(state.world.device) for _, tensor in found]).tolist()
        suspects = [x for x, total in zip(found, sums, strict=True) if not math.isfinite(total)]
        return next((name for name, tensor in suspects if not torch.isfinite(tensor).all()), None)


def has_exploded(loss: float | None, losses_of_good: Iterable[float]) -> bool:
    """Whether the loss of the step before a checkpoint is not finite, or far above those of the good checkpoints that
    are kept. loss: None where it is not known, which counts as sound."""
    if loss is None:
        return False
    return not math.isfinite(loss) or loss > TIMES_THE_SMALLEST * min(losses_of_good, default=math.inf)


def _tensors(state: TrainState) -> Iterator[tuple[str, Tensor]]:
    """What a checkpoint holds, as far as this rank has it."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in state.model.named_parameters()}
    for parameter, name in names.items():
        yield name, local_rows(parameter)
    for parameter, moments in state.optimizer.state.items():
        for moment, value in moments.items():
            if isinstance(value, Tensor):
                # Between a validation and the next step FSDP2 lends the model whole matrices in the place of its own.
                yield f"{moment} of {names.get(parameter, 'a matrix')}", local_rows(value)
    yield from state.model.statistics().items()
    if state.ema is not None:
        for name, average in state.ema.weights.items():
            yield f"the moving average of {name}", local_rows(average)
