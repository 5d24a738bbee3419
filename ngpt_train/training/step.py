"""One optimizer step, from rows of tokens to updated weights. The host does not wait for the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ngpt_train.core.constants import IGNORED
from ngpt_train.distributed.compilation import hold_gradients
from ngpt_train.distributed.layouts import accumulating, average_vectors_, gradient_norm
from ngpt_train.kernels.dropout import row_seeds
from ngpt_train.optim.angle_cap import hidden_matrices, turning_at_most
from ngpt_train.optim.optimizer import round_to_bf16_
from ngpt_train.optim.row_adam import RowAdam
from ngpt_train.optim.schedule import lr_at
from ngpt_train.training.feed import to_device

if TYPE_CHECKING:
    from ngpt_train.training.state import TrainState

MicroBatch = Sequence[Tensor]  # tokens, targets and optionally document ids, each (micro_rows, context) int64


class StepResult(NamedTuple):
    """The result of a step, the same on every rank. Tensors are 0-dim and on the device; reading them waits for it."""

    loss: Tensor  # mean cross-entropy in nats over all valid targets of the step, of the weights before the step
    grad_norm: Tensor  # before clipping, of the loss itself and not of the scaled one
    n_tokens: Tensor  # valid targets of the step, over all ranks
    skipped: Tensor  # true if a gradient was not finite; then weights and moments are bit for bit unchanged
    lr: float  # by the schedule; a group of parameters may have another rate, relative to this one
    z_loss: Tensor | None  # optim.z_loss * logsumexp(logits)^2, mean over the same targets; None if optim.z_loss is 0
    loss_sum: Tensor  # cross-entropy summed over the same targets, fp64
    loss_scale: Tensor | None = None  # the factor of the step's loss with train.precision=fp16; else None


class Observer:
    """Looks at a step and changes nothing. Every rank has an observer, at the same steps. This one does nothing."""

    def before_step(self, state: TrainState, micro_batches: Sequence[MicroBatch]) -> None:
        """Before the first forward pass. micro_batches: this rank's, on the device."""

    def before_update(self, state: TrainState) -> None:
        """Before the optimizer. The gradients of the whole step are averaged over ranks, and not yet clipped. With
        train.precision=fp16 they are multiplied by the loss scale, `state.loss_scale.value`."""

    def after_update(self, state: TrainState) -> None:
        """After the projection. state.step and state.tokens count the step already."""


NOBODY = Observer()


def train_step(
    state: TrainState,
    micro_batches: Sequence[MicroBatch],
    untouched: bool = False,
    rows: Tensor | None = None,
    observer: Observer = NOBODY,
) -> StepResult:
    """Forward and backward over this rank's micro batches, clip, optimizer step, projection, moving average.

    Every rank passes the same number of micro batches. The loss is summed over valid targets and divided once by their
    number in the whole step, so it does not depend on accumulation, padding or the number of ranks. Raises ValueError
    if there are no micro batches, or if ids are not int64.

    untouched: the caller promises that nothing has changed the weights since the last step unseen by torch, for
    example through `.data`. Then the optimizer's bf16 copies of the last step are used again.

    rows: int64, the number of each of this rank's rows in the batch of all ranks; dropout is a function of them. By
    default the rows are numbered rank by rank.
    observer: sees the weights and gradients at three moments of the step.
    """
    check_batches(micro_batches)
    world, config = state.world, state.config
    batches = [[to_device(part, world.device) for part in batch] for batch in micro_batches]
    seeds = dropout_seeds(state, [len(batch[0]) for batch in batches], rows)
    counts = torch.stack([(targets != IGNORED).sum() for _, targets, *_ in batches])
    n_tokens = world.sum_(counts.sum())
    # The factor of the summed loss: 1 / n_tokens for the mean, and world.size because DDP and FSDP2 average gradients
    # over ranks, while the loss of the step is a sum over ranks.
    loss_factor = world.size / n_tokens.clamp(min=1).to(torch.float64)
    loss_scale = None if state.loss_scale is None else state.loss_scale.value
    if loss_scale is not None:  # the gradients are scaled until apply_gradients divides them by it
        loss_factor = loss_factor * loss_scale

    observer.before_step(state, batches)
    state.model.begin_step_(state.step, loss_factor)
    loss_sum, z_sum = forward_and_backward(state, batches, seeds, loss_factor, untouched)
    loss = world.sum_(loss_sum) / n_tokens.clamp(min=1)  # sum_ works in place: loss_sum now covers all ranks
    z_loss = world.sum_(z_sum) / n_tokens.clamp(min=1) if config.optim.z_loss else None

    average_vectors_(state.model, world)
    grad_norm = gradient_norm(state.model.parameters(), world)
    if loss_scale is not None:
        grad_norm = grad_norm / loss_scale
    skipped = ~torch.isfinite(grad_norm)
    lr = lr_at(state.step, config.schedule, float(config.optim.lr), config.train.steps)

    observer.before_update(state)
    update_weights_(state, grad_norm, skipped, lr)
    if state.loss_scale is not None:
        state.loss_scale.update_(skipped)
    state.step += 1
    state.tokens += n_tokens
    observer.after_update(state)
    return StepResult(loss, grad_norm, n_tokens, skipped, lr, z_loss, loss_sum, loss_scale)


def check_batches(micro_batches: Sequence[MicroBatch]) -> None:
    if not micro_batches:
        raise ValueError("train_step: no micro batches; every rank passes at least one, and all the same number")
    for index, batch in enumerate(micro_batches):
        if found := [str(part.dtype) for part in batch if part.dtype != torch.int64]:
            raise ValueError(f"train_step: micro batch {index} holds {found[0]}; ids are torch.int64 tensors")


def dropout_seeds(
    state: TrainState, sizes: Sequence[int], rows: Tensor | None = None
) -> Sequence[Mapping[str, Tensor]]:
    """For each micro batch the model's argument `seeds`, for the dropout of its rows; none for a model without dropout.
    sizes: the number of rows of each micro batch of this rank. rows: as for `train_step`."""
    if not state.config.model.uses_dropout:
        return [{}] * len(sizes)
    n = sum(sizes)
    rows = state.world.rank * n + torch.arange(n) if rows is None else rows
    seeds = to_device(row_seeds(state.config.run.seed, state.step, rows), state.world.device)
    return [{"seeds": part} for part in seeds.split(list(sizes))]


def forward_and_backward(
    state: TrainState,
    batches: Sequence[MicroBatch],
    seeds: Sequence[Mapping[str, Tensor]],
    loss_factor: Tensor,
    untouched: bool,
) -> tuple[Tensor, Tensor]:
    """Both passes over this rank's micro batches, which are on the device: the gradients of loss_factor (0-dim fp64)
    times the summed loss. Returns the sums of cross-entropy and z-loss over this rank's targets: 0-dim fp64, nats."""
    if state.config.train.cuda_graphs:
        hold_gradients(state.model)
    loss_sum = torch.zeros((), dtype=torch.float64, device=state.world.device)
    z_sum = torch.zeros_like(loss_sum)
    # The optimizer lends its bf16 copies of the matrices, if it keeps any, to the blocks' products.
    with state.optimizer.copies.lent(untouched) if isinstance(state.optimizer, RowAdam) else nullcontext():
        for index, batch in enumerate(batches):
            with accumulating(state.forward, state.config.parallel, last=index == len(batches) - 1):
                micro_loss = state.forward(*batch, **seeds[index])
                (micro_loss.total * loss_factor.to(micro_loss.total.dtype)).backward()
            loss_sum += micro_loss.cross_entropy
            if micro_loss.z_term is not None:
                z_sum += micro_loss.z_term
    return loss_sum, z_sum


def update_weights_(state: TrainState, grad_norm: Tensor, skipped: Tensor, lr: float) -> None:
    """The optimizer's step, the projection, the angle's cap and the moving average. A skipped step changes no bit."""
    if state.ema is not None and state.step == 0:  # weights may have been loaded since it was made
        state.ema.begin()
    cap = state.config.optim.angle_cap
    with nullcontext() if cap is None else turning_at_most(cap, hidden_matrices(state.model)):
        apply_gradients(state, grad_norm, skipped, lr)
        if not isinstance(state.optimizer, RowAdam):  # RowAdam has projected every row already
            state.model.project_(skipped)
    if state.config.optim.storage == "bf16":
        round_to_bf16_(state.model, state.optimizer)
    if state.ema is not None:
        state.ema.update_(skipped)


def apply_gradients(state: TrainState, grad_norm: Tensor, skipped: Tensor, lr: float) -> None:
    """Clips the gradients and takes the optimizer's step, in one pass over memory. Then drops the gradients, or zeroes
    them if CUDA graphs hold them.

    torch's fused optimizers divide gradients by `grad_scale`, and if `found_inf` is 1 they change nothing. Here
    `grad_scale` clips, by the factor of clip_grad_norm_, and undoes the loss scale in the same pass, and `found_inf`
    skips a step without a wait of the host.
    """
    optimizer = state.optimizer
    clip_norm = state.config.optim.clip_norm
    scale = None if clip_norm is None else ((grad_norm + 1e-6) / clip_norm).clamp(min=1.0).to(torch.float32)
    if state.loss_scale is not None:
        scale = state.loss_scale.value if scale is None else scale * state.loss_scale.value
    optimizer.grad_scale = scale
    optimizer.found_inf = skipped.to(torch.float32)
    for group, factor in zip(optimizer.param_groups, state.lr_factors, strict=True):
        group["lr"] = lr * factor
    optimizer.step()
    optimizer.zero_grad(set_to_none=not state.config.train.cuda_graphs)  # see distributed/compilation.py
