"""Activation checkpointing: a block keeps some tensors for its backward pass, which computes the others again.

`full` keeps the block's arguments and computes everything else again: about a third more FLOPs. `selective` also keeps
the results of the matrix products and of attention, where nearly all FLOPs are, and computes the rest again: norms,
rotations, activations, dropout, casts. Recomputed tensors have the same bits, so losses and gradients do not change.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ngpt_train.models.layers.dropout import seeds_now, with_seeds

# Products of activations with weights.
PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
# Kernels of attention, of torch and of the package flash-attn, by the names of their operators.
ATTENTION = ("scaled_dot_product", "flash_att", "efficient_attention", "varlen_attn", "flex_attention")


def checkpoint_blocks(blocks: list[nn.Module], kind: str) -> None:
    """Sets `train.activation_checkpointing` for these blocks: none, selective or full. It replaces the method `forward`
    of a block and does not wrap the block, so that parameters keep their names."""
    if kind == "none":
        return
    for block in blocks:
        block.forward = recomputed(block.forward, selective=kind == "selective")


def recomputed(forward: Callable[..., Any], selective: bool = False) -> Callable[..., Any]:
    """`forward` under activation checkpointing. `run` is a function of ours, because torch.compile skips a block whose
    outermost function is torch's."""
    # Dropout is a function of seeds, so no random state has to be restored. Those of a block are kept for its second
    # forward pass; in compiled code they are an input, which is kept as any other.
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if selective:
        options["context_fn"] = kept_and_recomputed

    def run(*arguments: Any) -> Any:
        if not selective and torch.compiler.is_compiling():
            # Without a policy torch.compile would not see that it may recompute what our kernels return.
            return checkpoint(forward, *arguments, **options, context_fn=all_recomputed)
        if torch.compiler.is_compiling():
            return checkpoint(forward, *arguments, **options)
        return checkpoint(with_seeds, seeds_now(), forward, *arguments, **options)

    return run


def kept_and_recomputed() -> Any:
    """The contexts of a block's forward pass and of its recomputation under `selective`, for torch's `checkpoint`."""

    def policy(context: Any, operator: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if keeps(operator, arguments) else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def all_recomputed() -> Any:
    """`kept_and_recomputed` for `full`."""
    return create_selective_checkpoint_contexts(lambda *_, **__: CheckpointPolicy.PREFER_RECOMPUTE)


def keeps(operator: Any, arguments: tuple[Any, ...]) -> bool:
    """True if `selective` keeps the results of `operator`."""
    if operator in PRODUCTS:
        return True
    if operator is torch.ops.aten.bmm.default:
        # Attention in plain PyTorch has two products. The product of the probabilities and v is small and kept. The
        # scores, (T, S) for each head, are large and recomputed.
        (_, _, width), (_, _, columns) = arguments[0].shape, arguments[1].shape
        return bool(columns <= width)
    return any(name in str(operator) for name in ATTENTION)
