"""An exponential moving average of the weights, beside the weights that are trained."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ngpt_train.models.rank_rows import local_rows


class MovingAverage:
    """ema <- decay ema + (1 - decay) w after every step that is not skipped; it begins as the weights before step 0.

    After t steps the weights after step i have the share (1 - decay) decay^(t - i), and the first weights decay^t:
    there is no correction for the start. The average has the dtype and the shards of the parameters, and needs no
    communication. The average of rows of unit length is shorter: project it before use.
    """

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]], decay: float) -> None:
        self.decay = decay
        # Not asked from the model again: between a validation and the next step FSDP2 lends it whole matrices.
        self._parameters = dict(parameters)
        self.weights: dict[str, Tensor] = {}  # by the name of the parameter
        self.begin()

    @torch.no_grad()
    def begin(self) -> None:
        """Takes the weights as they are."""
        self.weights.clear()  # first, so that there are never two averages
        for name, parameter in self._parameters.items():
            self.weights[name] = parameter.detach().clone()

    @torch.no_grad()
    def update_(self, skipped: Tensor) -> None:
        """Follows a step. skipped: 0-dim bool on the device; if it is true, no bit changes. The host does not wait."""
        share = (1 - self.decay) * (~skipped).double()
        for name, parameter in self._parameters.items():
            ema, w = local_rows(self.weights[name]), local_rows(parameter)
            ema.lerp_(w, share.to(ema.dtype))  # decay ema + (1 - decay) w
