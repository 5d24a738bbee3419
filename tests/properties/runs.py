"""Small training runs: their config and rows that can be learned."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ngpt_train.config import load_config
from ngpt_train.config.schema import Config
from ngpt_train.training.state import TrainState
from tests.properties.architectures import ARCHITECTURES, Size, keys
from tests.reference.training import Recipe


def run_config(
    name: str,
    size: Size,
    recipe: Recipe,
    *,
    rows: int,
    context: int,
    micro_rows: int,
    parallel: str = "auto",
    options: Sequence[str] = (),
) -> Config:
    """fp32 on the CPU, from the config groups as a user would write them."""
    return load_config(
        [
            f"model={name}",
            "scale=debug",
            f"parallel={parallel}",
            "run.seed=3",
            *(f"model.{key}={value}" for key, value in keys(ARCHITECTURES[name], size).items()),
            f"model.context={context}",
            "train.device=cpu",
            f"train.steps={recipe.steps}",
            f"train.batch_rows={rows}",
            f"train.micro_rows={micro_rows}",
            f"optim.lr={recipe.lr}",
            f"optim.betas=[{recipe.beta1},{recipe.beta2}]",
            f"optim.eps={recipe.eps}",
            f"optim.weight_decay={recipe.weight_decay}",
            f"optim.clip_norm={recipe.clip_norm}",
            f"schedule.warmup_steps={recipe.warmup_steps}",
            *options,
        ]
    )


def text_like_rows(rows: int, context: int, vocab_size: int, seed: int) -> tuple[Tensor, Tensor]:
    """tokens and targets (rows, context): mostly a fixed rule, one token in five random; row r has its own share of
    targets that do not count.
    """
    generator = torch.Generator().manual_seed(seed)
    row = torch.randint(vocab_size, (rows, context + 1), generator=generator)
    surprise = torch.rand(rows, context + 1, generator=generator) < 0.2
    for t in range(1, context + 1):
        row[:, t] = torch.where(surprise[:, t], row[:, t], (3 * row[:, t - 1] + 1) % vocab_size)
    tokens, targets = row[:, :-1].clone(), row[:, 1:].clone()
    ignored = torch.rand(rows, context, generator=generator) < torch.linspace(0, 0.8, rows)[:, None]
    targets[ignored] = -100
    return tokens, targets


def padded_rows(rows: int, context: int, size: Size, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """text_like_rows for an encoder-decoder, with document ids: each row shorter than the one before, and with padding
    in its source.
    """
    tokens, targets = text_like_rows(rows, context, size.vocab_size, seed)
    lengths = torch.linspace(context, size.source_context + 4, rows).long()
    doc_ids = torch.where(torch.arange(context) < lengths[:, None], 0, -1)
    doc_ids[:, 3:6] = -1  # which, unlike padding at the end, the decoder would see
    targets = targets.masked_fill(doc_ids < 0, -100)
    targets[:, : size.source_context] = -100
    return tokens, targets, doc_ids


def rows_of(name: str, rows: int, context: int, size: Size, seed: int) -> tuple[Tensor, ...]:
    """A batch for an architecture: padded_rows with an encoder, else text_like_rows."""
    if ARCHITECTURES[name].has_encoder:
        return padded_rows(rows, context, size, seed)
    return text_like_rows(rows, context, size.vocab_size, seed)


def micro_batches(name: str, size: Size, rows: int, context: int, seed: int, n: int = 2) -> list[tuple[Tensor, ...]]:
    """The rows of a step of the architecture `name`, in `n` micro batches; not all rows count as many targets."""
    return list(zip(*(part.chunk(n) for part in rows_of(name, rows, context, size, seed)), strict=True))


@contextmanager
def infinite_loss(state: TrainState, cross_entropy: float = 1.0) -> Iterator[None]:
    """Inside, the loss of a step and its gradients are infinite. cross_entropy: a factor of the reported loss."""

    def poison(module: Any, inputs: Any, output: Any) -> Any:
        if not module.training:
            return output
        return output._replace(total=output.total * torch.inf, cross_entropy=output.cross_entropy * cross_entropy)

    handle = state.forward.register_forward_hook(poison)
    yield
    handle.remove()


def held(state: TrainState) -> dict[str, Tensor]:
    """Weights, and their optimizer state."""
    found = {name: x.detach().clone() for name, x in state.model.named_parameters()}
    for name, x in state.model.named_parameters():
        found |= {f"{name}.{key}": value.clone() for key, value in state.optimizer.state[x].items()}
    return found
