"""Compiled blocks as CUDA graphs, and the conditions under which a replay is correct.

torch records each block's forward and backward pass as a graph (torch/_inductor/cudagraph_trees.py). All graphs share
one pool of memory. A replay writes its outputs (hidden states, gradients of parameters) to the recorded addresses.
torch tracks outputs in use only within one "step", and the caller tells torch where a step begins. Recording a block
frees all outputs of earlier steps, and a later use of one raises an error. A replay overwrites them silently. So no
output of a graph may be needed after the next step begins. Here a step is one forward pass of the model and its
backward pass, if there is one (`begin_graph_step_at_forward`). A block has two kinds of outputs:

- Hidden states, and tensors saved for the backward pass or recomputed in it. They are not needed after the backward
  pass.
- Gradients of parameters. They are needed. If `.grad` were None, autograd would put the graph's memory there, and a
  second micro batch would overwrite the gradient instead of adding to it. So from the first step on `.grad` is a tensor
  of ours (`hold_gradients`). It is zeroed, never dropped, and autograd adds a graph's gradient to it at once.

Losses, their sums and the gradients of embeddings are computed outside of graphs. Graphs read the weights in place,
where the optimizer changes them. All other inputs are copied into the graph's memory, and the backward pass uses the
copy.

Evaluation must also tell torch where its forward passes begin. Otherwise torch takes each call of a block for a step,
because no backward pass is pending, and frees the hidden state that is the input of the next block.

The config refuses DDP and FSDP2, whose gradients and weights have their own memory, and PowerNorm, whose statistics
leave the graphs through hooks. Nobody has worked these out.
"""

import logging
from typing import Any

import torch
from torch import nn

from ngpt_train.core.errors import ConfigError
from ngpt_train.core.log import say_once


def check_cuda_graphs(device: torch.device) -> None:
    """Raises ConfigError if the device is not a GPU, as train.device=auto may find."""
    if device.type != "cuda":
        raise ConfigError(
            f"train.cuda_graphs=true: the device is {device.type}, and only GPUs have CUDA graphs\n"
            "  Set train.cuda_graphs=false"
        )


def begin_graph_step_at_forward(model: nn.Module) -> None:
    """Makes each forward pass of `model` begin a step of torch's CUDA graphs."""

    def begin(*_: Any) -> None:
        torch.compiler.cudagraph_mark_step_begin()

    model.register_forward_pre_hook(begin)
    say_once(logging.INFO, "compiled blocks are recorded as CUDA graphs and replayed (train.cuda_graphs)")


def hold_gradients(model: nn.Module) -> None:
    """Gives every parameter without a gradient a zero gradient, to which backward passes add in place.

    To be called in a step and not earlier, because a checkpoint is loaded into parameters without gradients.
    """
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
