"""Compiled blocks as CUDA graphs: what must hold for a replay to be right.

torch records each block's forward and backward pass as a graph (torch/_inductor/cudagraph_trees.py). All graphs share
one pool of memory. A replay writes its outputs (hidden states, gradients of parameters) to the place where they were
recorded. torch knows which of them are in use only within one "step", and the caller tells it where a step begins.
Recording a block frees everything of earlier steps, and touching that raises; a replay overwrites it silently. So
nothing that a graph has written may be needed after the next step begins. Here a step is one forward pass of the
model, with the backward pass that follows, if one does (`begin_graphs_anew`). Of what blocks write,

- hidden states, and what is saved for the backward pass, recomputation included, are no longer needed after it;
- gradients of parameters are. Where `.grad` is None, autograd puts the graph's own memory there, and a second micro
  batch would overwrite it instead of adding to it. So `.grad` is memory of ours from the first step on
  (`hold_gradients`); it is zeroed, never dropped, and what a graph writes is added to it at once.

Losses, their sums and the gradients of embeddings are computed outside of graphs. Weights, which the optimizer changes
in place, are read where they are. All other inputs are copied in, and the backward pass uses the copy.

Evaluation must tell torch where its passes begin as well. Else torch takes each call of a block for a step, because no
backward pass is pending, and frees the hidden state that the next block is given.

Refused in the config, because nobody has worked them out: DDP and FSDP2, which put memory of their own into gradients
and weights, and PowerNorm's statistics, which leave the graphs through hooks. None of this has run on a GPU.
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
