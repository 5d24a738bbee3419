"""The base of the norms over a batch, and their running statistics under activation checkpointing and torch.compile.

A block that is recomputed or compiled must be a pure function, which changes no buffer. So a block takes the running
statistics as an argument and returns the statistics of its batch, and the decoder updates the running statistics after
the block. This also allows several forward passes before a backward pass.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from ngpt_train.kernels.norm import rms_norm
from ngpt_train.models.decoder import Decoder, Head
from ngpt_train.models.layers.documents import Mask
from ngpt_train.models.layers.norms import Map, identity
from ngpt_train.models.layers.rope import Rope
from ngpt_train.models.powernorm.keys import PowerNormConfig


class RunningStatistics(NamedTuple):
    """Running statistics for PowerNorm's forward pass, each `(d,)`."""

    psi: Tensor | None  # X is divided by it; None in the warm-up, where the batch's own psi divides X
    nu: Tensor  # times loss_factor, in units of the loss that backward is called on
    sum_for_Lambda: Tensor  # zeros, whose gradient in the backward pass is the sum of dL/dX_hat * X_hat


class BatchStatistics(NamedTuple):
    """The statistics of a batch, from a forward pass."""

    values: tuple[Tensor, ...]  # one for each running statistic, each (d,)
    n_tokens: Tensor  # 0-dim: number of valid tokens

    def counts(self) -> Tensor:
        """0-dim: 1 if the batch may update running statistics; 0 if it is all padding or not finite."""
        finite = torch.stack([value.isfinite().all() for value in self.values]).all()
        return (finite & (self.n_tokens > 0)).to(self.n_tokens.dtype)


Normed = tuple[Tensor, BatchStatistics]  # Y, and the statistics of the batch
Used = RunningStatistics | None  # by a forward pass


class NormOverBatch(nn.Module):
    """gain * X_hat + bias, where X_hat is X divided, per channel, by a statistic over the tokens of the batch.

    In training the statistic is the batch's, or PowerNorm's running one; in evaluation it is a running one. It is
    computed in fp32 (fp64 for an fp64 model). X `(B, T, d)`; valid `(B, T)` is false for padding, which counts in no
    statistic; None: all tokens are valid.
    """

    place = 0  # among the norms over the batch of its block; DecoderOverBatch sets it
    starts: ClassVar[dict[str, float]] = {}  # the running statistics, each (d,), and their values at step 0

    def __init__(self, size: int, config: PowerNormConfig) -> None:
        super().__init__()
        self.eps = config.norm_eps
        self.alpha_fwd, self.alpha_bkw = config.alpha_fwd, config.alpha_bkw
        self.groups = int(config.group_scaling)
        self.gain, self.bias = nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size))
        for name, value in self.starts.items():
            self.register_buffer(name, torch.full((size,), value), persistent=False)
        # Sums a tensor over ranks, with a gradient; the identity where each rank has statistics of its own.
        # distributed/layouts.py sets it if statistics are synchronised.
        self.over_ranks: Map = identity
        # Sees the statistics of each batch in training before they move the running ones; set for telemetry alone.
        self.on_batch: Callable[[BatchStatistics], None] | None = None

    def reset_parameters(self) -> None:
        nn.init.ones_(self.gain)
        nn.init.zeros_(self.bias)
        for name, value in self.starts.items():
            self.get_buffer(name).fill_(value)

    def statistics(self) -> dict[str, Tensor]:
        """The running statistics by name, each `(d,)` or 0-dim: buffers, which a caller may change in place."""
        return dict(self.named_buffers(recurse=False))

    def running_statistics(self, warming_up: bool, loss_factor: Tensor | float) -> Used:
        """The argument `running` of the next forward pass. loss_factor: of its summed loss."""
        return None

    @torch.no_grad()
    def update_(self, running: Used, batch: BatchStatistics | None, loss_factor: Tensor | float) -> None:
        """Updates the running statistics after a forward pass, which took `running` and returned `batch`."""
        if batch is None:
            return
        for mean, value in zip(self.statistics().values(), batch.values, strict=True):
            move_average_(mean, value, (1 - self.alpha_fwd) * batch.counts())

    def forward_in_training(self, X: Tensor, valid: Tensor | None, running: Used) -> Normed:
        """Y `(B, T, d)` in training, and the statistics of the batch."""
        raise NotImplementedError

    def infer(self, X: Tensor) -> Tensor:
        """Y `(B, T, d)` in evaluation, by the running statistics."""
        raise NotImplementedError

    def forward(self, x: Tensor, valid: Tensor | None, running: Used) -> tuple[Tensor, BatchStatistics | None]:
        """Y `(B, T, d)` in x's dtype, and in training the statistics of the batch."""
        X = self.group_scaled(x.to(self.gain.dtype))
        Y, batch = self.forward_in_training(X, valid, running) if self.training else (self.infer(X), None)
        return Y.to(x.dtype), batch

    def group_scaled(self, x: Tensor) -> Tensor:
        """x with each group of a token's channels divided by its root mean square (the paper's layer-scale, A.1)."""
        if not self.groups:
            return x
        grouped = x.unflatten(-1, (self.groups, -1))
        return rms_norm(grouped, None, self.eps).flatten(-2)

    def mean(self, x: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
        """The mean `(d,)` of x `(B, T, d)` over the valid tokens, and their number, 0-dim. They are the tokens of this
        rank or, if statistics are synchronised, of all ranks."""
        weight = x.new_ones(x.shape[:2]) if valid is None else valid.to(x.dtype)
        weighted = x if valid is None else x * weight.unsqueeze(-1)
        total = self.over_ranks(torch.cat([weighted.sum((0, 1)), weight.sum().view(1)]))
        return total[:-1] / total[-1].clamp(min=1), total[-1]

    def root(self, mean_square: Tensor) -> Tensor:
        return (mean_square + self.eps).sqrt()


# A block takes the running statistics of its norms, and returns h and the batch's statistics.
Running = tuple[Used, ...]
Output = tuple[Tensor, tuple[BatchStatistics | None, ...]]


def norms_in(block: nn.Module) -> list[NormOverBatch]:
    """The norms over the batch of a block, in the order of their statistics in its argument and result."""
    return [module for module in block.modules() if isinstance(module, NormOverBatch)]


class NormPass:
    """A forward pass through the norms of a block: those over the batch read `running`, and their statistics of the
    batch are kept. Both are in the order of the norms' `place`.

    valid `(B, T)` is false for padding; None: there is none.
    """

    def __init__(self, valid: Tensor | None, running: Running) -> None:
        self.valid, self.running = valid, running
        self.batches: list[BatchStatistics | None] = [None] * len(running)

    def __call__(self, norm: nn.Module) -> Map:
        """`norm` as a function of x alone."""
        return partial(self._over_batch, norm) if isinstance(norm, NormOverBatch) else norm

    def _over_batch(self, norm: NormOverBatch, x: Tensor) -> Tensor:
        y, self.batches[norm.place] = norm(x, self.valid, self.running[norm.place])
        return y


def move_average_(mean: Tensor, value: Tensor, share: Tensor | float) -> None:
    """mean <- mean + share (value - mean), in place, for the channels where value is finite."""
    mean.copy_(torch.where(value.isfinite(), mean + share * (value - mean), mean))


class DecoderOverBatch(Decoder):
    """A decoder or encoder-decoder with norms over the batch, whose running statistics it updates in training. A block
    is called as (h, *arguments, running), with the running statistics of its norms over the batch, and returns h and
    their statistics of the batch, both in the order of `norms_in`. `norm_final` is the norm after the last block."""

    config: PowerNormConfig
    norm_final: nn.Module

    def __init__(self, config: PowerNormConfig, *stacks: Iterable[nn.Module]) -> None:
        super().__init__(config, *stacks)
        for block in self.blocks():
            for place, norm in enumerate(norms_in(block)):
                norm.place = place
        self.step = 0
        self.loss_factor: Tensor | float = 1.0

    @property
    def norms_over_batch(self) -> dict[str, NormOverBatch]:
        """The norms by the path of the module."""
        return {place: module for place, module in self.named_modules() if isinstance(module, NormOverBatch)}

    def begin_step_(self, step: int, loss_factor: Tensor) -> None:
        self.step, self.loss_factor = step, loss_factor
        if step == 0:  # weights from run.init_from come with the n_warmup of another run
            for name, value in self.statistics().items():
                if name.endswith(".n_warmup"):
                    value.zero_()

    def stack(self, h: Tensor, rope: Rope | None, mask: Mask, doc_ids: Tensor | None) -> Tensor:
        """The blocks and the last norm. Padding, whose doc_ids are below 0, counts in no statistic."""
        valid = None if doc_ids is None else doc_ids >= 0
        h = self.run_blocks(self.layers, h, rope, mask, valid)
        return self.run_norm(self.norm_final, h, valid)

    def head(self, h: Tensor) -> Head:
        """`stack` has normalised h already."""
        return Head(h, self.unembedding)

    def run_block(self, block: nn.Module, h: Tensor, *arguments: Any) -> Tensor:
        return self.run_and_update(norms_in(block), lambda running: block(h, *arguments, running))

    def run_norm(self, norm: nn.Module, h: Tensor, valid: Tensor | None) -> Tensor:
        """norm(h) `(B, T, d)` outside a block."""
        if not isinstance(norm, NormOverBatch):
            return norm(h)

        def run(running: Running) -> Output:
            y, batch = norm(h, valid, *running)
            return y, (batch,)

        return self.run_and_update([norm], run)

    def run_and_update(self, norms: Sequence[NormOverBatch], compute: Callable[[Running], Output]) -> Tensor:
        """Calls `compute` with the running statistics of `norms`, updates these, and returns the h of `compute`."""
        warming_up = self.step < int(self.config.psi_warmup_steps)
        running = tuple(norm.running_statistics(warming_up, self.loss_factor) for norm in norms)
        h, batches = compute(running)
        for norm, used, batch in zip(norms, running, batches, strict=True):
            if norm.on_batch is not None and batch is not None:
                norm.on_batch(batch)
            norm.update_(used, batch, self.loss_factor)
        return h

    def statistics(self) -> dict[str, Tensor]:
        return {
            f"{place}.{name}": value
            for place, norm in self.norms_over_batch.items()
            for name, value in norm.statistics().items()
        }

    def notes(self) -> list[str]:
        return notes_of(self.config)


def notes_of(config: PowerNormConfig) -> list[str]:
    """Where norms of a causal model see later tokens."""
    norm, warmup_steps = config.norm, int(config.psi_warmup_steps)
    if not config.norm_over_batch or config.bidirectional or (norm == "pn" and warmup_steps == 0):
        return []
    when = f"in the first {warmup_steps} steps" if norm == "pn" else "in training"
    return [
        f"model.norm={norm} uses the statistics of the batch {when}, later tokens included: the training "
        "loss is too low there. Validation uses running statistics and is causal."
    ]
