"""Memory of one rank, item by item, worked out without running anything.

Weights, gradients and moments are exact. The rest depends on when the device allocates and frees, and is an
estimate: what GPT, nGPT, NormFormer and PowerNorm keep for the backward pass was counted, in fp32 and bf16, eager and
compiled, to be 0.7 to 1.2 times the activations given here (of eager ones tests/unit/report/test_plan.py holds it).
"""

from dataclasses import dataclass

import torch

from ngpt_train.config.schema import Config
from ngpt_train.kernels.cross_entropy import GPU_ROWS
from ngpt_train.models import Decoder
from ngpt_train.models.layers.linear import cast_linears


@dataclass(frozen=True)
class MemoryItem:
    """Bytes on one rank, and how they come about."""

    name: str
    bytes: int
    exact: bool
    formula: str


def memory_per_rank(
    config: Config, model: Decoder, kind: str, dtype: torch.dtype, compiled: bool, micro_rows: int, fused_adam: bool
) -> list[MemoryItem]:
    """What the fullest of plan.world_size ranks holds while the loss is differentiated; the sum estimates its peak.

    kind: single, ddp or fsdp. dtype: of the matrix products. fused_adam: whether the optimizer is RowAdam.
    """
    copied = cast_linears(model) if fused_adam and dtype == torch.bfloat16 else []
    copies = sum(linear.matrix.numel() for linear in copied)
    return [
        *state_items(model, kind, config.plan.world_size),
        *working_items(model, kind, dtype, config.train.activation_checkpointing == "full", copies),
        *activation_items(config, model, dtype.itemsize, compiled, micro_rows * config.model.context),
    ]


def state_items(model: Decoder, kind: str, world_size: int) -> list[MemoryItem]:
    """What stays from step to step."""
    vectors = sum(p.numel() for p in model.parameters() if p.ndim < 2)
    if kind == "fsdp":
        # FSDP2 deals out rows in parts of equal size, so the first rank has the most; vectors stay whole.
        rows = {p: -(-p.shape[0] // world_size) for p in model.parameters() if p.ndim == 2}
        held = vectors + sum(n_rows * p.shape[1] for p, n_rows in rows.items())
        share = f"(matrices / {world_size} + vectors)"
    else:
        held = model.n_params()
        share = "parameters"
    return [
        MemoryItem("weights", 4 * held, True, f"4 x {share}"),
        MemoryItem("gradients", 4 * held, True, f"4 x {share}"),
        MemoryItem("Adam's moments", 8 * held, True, f"8 x {share}"),
    ]


def working_items(model: Decoder, kind: str, dtype: torch.dtype, checkpointing: bool, copies: int) -> list[MemoryItem]:
    """Copies of the matrices that the products work on: whole ones under FSDP2, cast ones in bf16.

    copies: values of which the optimizer keeps a copy, where FSDP2 does not gather them.
    """
    size = dtype.itemsize
    block = max(sum(p.numel() for p in layer.parameters() if p.ndim == 2) for layer in model.blocks())
    output = model.unembedding.numel()
    in_blocks = sum(p.numel() for layer in model.blocks() for p in layer.parameters() if p.ndim == 2)
    embeddings = sum(p.numel() for p in model.parameters() if p.ndim == 2) - in_blocks
    items = []
    if kind == "fsdp":
        # A block at work and the next one on its way, and the gradient before and in fp32 while it is scattered.
        items += [
            MemoryItem("gathered blocks", (3 * size + 4) * block, False, f"(2 x {size} + {size} + 4) x block"),
            MemoryItem("gathered embeddings", 8 * embeddings, False, "(4 + 4) x embeddings"),
        ]
    if dtype != torch.float32:
        # The backward pass needs the copy that the forward pass made, but recomputing a block makes it anew. The
        # optimizer's copies stay.
        if kind == "fsdp":
            cast, what = output, "output"
        elif copies:
            items.append(MemoryItem("working copies", size * copies, True, f"{size} x blocks"))
            cast, what = output, "output"
        elif checkpointing:
            cast, what = block + output, "block + output"
        else:
            cast, what = block * len(model.blocks()) + output, "blocks + output"
        items.append(MemoryItem("cast matrices", size * cast, False, f"{size} x ({what})"))
    return items


def activation_items(config: Config, model: Decoder, size: int, compiled: bool, tokens: int) -> list[MemoryItem]:
    """What the forward pass of one micro batch of `tokens` tokens keeps for the backward pass."""
    shape = config.model
    d_head = shape.d_model // shape.n_heads
    d_q, d_kv = shape.n_heads * d_head, (shape.n_kv_heads or shape.n_heads) * d_head
    d_mlp = shape.d_mlp or 4 * shape.d_model
    # Input, its norm or the suggestion, and sum of both halves; q, k, v before and after; attention's y; u, v, hidden.
    # Of the first six an eager block keeps fp32 copies, which norms work on.
    wide = size if compiled else 4
    block = wide * 6 * shape.d_model + size * (3 * d_q + 3 * d_kv + 3 * d_mlp)
    formula = f"({wide} x 6 d_model + {size} x (3 d_q + 3 d_kv + 3 d_mlp))"
    # Of a row's tokens the source goes through the encoder's blocks, the rest through the decoder's.
    source = shape.source_length(shape.context)
    passed = [(len(model.blocks()) - shape.n_layers) * source, shape.n_layers * (shape.context - source)]
    tokens_decoded = tokens * (shape.context - source) // shape.context
    token_blocks = tokens * sum(passed) // shape.context
    if config.train.activation_checkpointing == "full":
        activations = token_blocks * size * shape.d_model + tokens * block
        formula = f"micro tokens x (n_layers x {size} d_model + {formula})"
    else:
        activations = token_blocks * block
        formula = f"micro tokens x n_layers x {formula}"
    # The loss keeps its gradients instead of logits, which it makes for some tokens at a time.
    vocab_size, chunk = model.unembedding.shape[0], min(tokens_decoded, GPU_ROWS)
    gradients = 4 * vocab_size * shape.d_model + size * tokens_decoded * shape.d_model
    formula_of_loss = f"4 x V x d_model + {size} x micro tokens x d_model + {size} x {chunk} x V"
    return [
        MemoryItem("activations", activations, False, formula),
        MemoryItem("loss", gradients + size * chunk * vocab_size, False, formula_of_loss),
    ]
