"""Compiled blocks as CUDA graphs: what must hold so that replaying them is right.

torch records each block's forward and backward pass as a graph (torch/_inductor/cudagraph_trees.py). All graphs share
one pool of memory; a replay writes its outputs, hidden states and gradients of parameters, where they lay when it was
recorded. torch keeps account of what is alive only within a "step", which begins where it is told so: before a block
is recorded, everything of an earlier step is freed, and touching it raises; a replay overwrites it in silence. So
nothing that a graph has written may be needed after the next step begins. Here a step is one forward pass of the
model, with the backward pass that follows, if one does (`begin_graphs_anew`). Of what blocks write,

- hidden states, and what is saved for the backward pass, recomputation included, are dead when that is over;
- gradients of parameters would not be: where `.grad` is None, autograd puts the graph's own memory there, and a second
  micro batch would overwrite what it is to be added to. So `.grad` is memory of our own from the first step on
  (`hold_gradients`), zeroed and never dropped, and what graphs write is added to it at once.

Losses, their sums and the gradients of embeddings are made outside of graphs. Weights, which the optimizer changes in
place, are read where they are; all other inputs are copied in, and what the backward pass needs of them is saved from
the copy. nGPT's two views of one hidden state share their storage, and with it one account.

Evaluation's passes need their beginning as well: untold, torch takes each call of a block for a step where no backward
pass is pending, and would free the hidden state that the next block is given.

Refused (config/resolve.py), because nobody has thought them through: DDP and FSDP2, which put memory of theirs into
gradients and weights, and PowerNorm's statistics, which leave graphs by hooks. None of this has run on a GPU.
"""

import logging
from typing import Any

import torch
from torch import nn

from ngpt_train.core.errors import ConfigError
from ngpt_train.core.log import say_once


def check_cuda_graphs(device: torch.device) -> None:
    """Raises ConfigError where `train.device=auto` has found no GPU."""
    if device.type != "cuda":
        raise ConfigError(
            f"train.cuda_graphs=true: the device is {device.type}, and only GPUs have CUDA graphs\n"
            "  Set train.cuda_graphs=false"
        )


def begin_graphs_anew(model: nn.Module) -> None:
    """From now on each forward pass of `model` begins a step of torch's CUDA graphs."""

    def begin(*_: Any) -> None:
        torch.compiler.cudagraph_mark_step_begin()

    model.register_forward_pre_hook(begin)
    say_once(logging.INFO, "compiled blocks are recorded as CUDA graphs and replayed (train.cuda_graphs)")


def hold_gradients(model: nn.Module) -> None:
    """Gives every parameter that has no gradient one of zeros, which backward passes add to in place.

    Not before the first step: a checkpoint is loaded without gradients.
    """
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
