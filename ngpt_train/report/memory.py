"""Memory of one rank, item by item, computed without running anything.

Weights, gradients, moments and the optimizer's bf16 copies are exact. The other items depend on when the device
allocates and frees, and are estimates. GPT, nGPT, NormFormer and PowerNorm, in fp32 and bf16, eager and compiled, were
counted to keep 0.7 to 1.2 times the activations that this file computes, and compositions, eager, 0.8 to 1.3 times;
tests/unit/report/test_plan.py counts some of them, eager.
"""

from dataclasses import dataclass

import torch

from ngpt_train.config.schema import Config
from ngpt_train.kernels.cross_entropy import GPU_ROWS
from ngpt_train.models import Decoder
from ngpt_train.models.layers.linear import cast_linears


@dataclass(frozen=True)
class MemoryItem:
    """One kind of memory on one rank. formula: how `bytes` is computed, for the user; exact: False for an estimate."""

    name: str
    bytes: int
    exact: bool
    formula: str


def memory_per_rank(
    config: Config, model: Decoder, n_shards: int, dtype: torch.dtype, compiled: bool, micro_rows: int, fused_adam: bool
) -> list[MemoryItem]:
    """The memory, during the backward pass, of that of plan.world_size ranks which holds most.

    The sum of the items estimates the peak. model: may be on the meta device. n_shards: of each matrix by FSDP2; 0:
    without FSDP2. dtype: of the matrix products. micro_rows: rows in a micro batch. fused_adam: whether the optimizer
    is RowAdam.
    """
    with_bf16_copy = cast_linears(model) if fused_adam and dtype == torch.bfloat16 else []
    copies = sum(linear.matrix.numel() for linear in with_bf16_copy)
    return [
        *state_items(model, n_shards, config.optim.ema_decay is not None),
        *working_items(model, n_shards > 0, dtype, config.train.activation_checkpointing == "full", copies),
        *activation_items(config, model, dtype.itemsize, compiled, micro_rows * config.model.context),
        *dropout_items(config, model, dtype.itemsize, compiled, micro_rows),
    ]


def state_items(model: Decoder, n_shards: int, averages: bool) -> list[MemoryItem]:
    """Weights, gradients, Adam's two moments and the moving average of the weights, all in fp32."""
    vectors = sum(p.numel() for p in model.parameters() if p.ndim < 2)
    if n_shards:
        # FSDP2 shards a matrix by ceil(rows / shards) rows, so the first rank holds most. Vectors are not sharded.
        rows = {p: -(-p.shape[0] // n_shards) for p in model.parameters() if p.ndim == 2}
        held = vectors + sum(n_rows * p.shape[1] for p, n_rows in rows.items())
        share = f"(matrices / {n_shards} + vectors)"
    else:
        held = model.n_params()
        share = "parameters"
    return [
        MemoryItem("weights", 4 * held, True, f"4 x {share}"),
        MemoryItem("gradients", 4 * held, True, f"4 x {share}"),
        MemoryItem("Adam's moments", 8 * held, True, f"8 x {share}"),
        *([MemoryItem("moving average", 4 * held, True, f"4 x {share}")] if averages else []),
    ]


def copies_to_save(model: Decoder, averages: bool, world_size: int) -> MemoryItem:
    """What a rank copies into its host's memory to write a checkpoint beside training: each value is written by one
    rank, and all write about as many."""
    size = 16 if averages else 12
    return MemoryItem("copies to save", size * model.n_params() // world_size, False, f"{size} x parameters / ranks")


def working_items(
    model: Decoder, sharded: bool, dtype: torch.dtype, checkpointing: bool, copies: int
) -> list[MemoryItem]:
    """Copies of the weights that the matrix products read: FSDP2's gathered matrices, and casts to bf16.

    copies: how many values the optimizer's bf16 copies have; under FSDP2 it keeps none.
    """
    size = dtype.itemsize
    block = max(sum(p.numel() for p in layer.parameters() if p.ndim == 2) for layer in model.blocks())
    output = model.unembedding.numel()
    in_blocks = sum(p.numel() for layer in model.blocks() for p in layer.parameters() if p.ndim == 2)
    embeddings = sum(p.numel() for p in model.parameters() if p.ndim == 2) - in_blocks
    items = []
    if sharded:
        # The block at work and the next, prefetched, in `dtype`; a block's gradient in `dtype`, and in fp32 while FSDP2
        # scatters it.
        items += [
            MemoryItem("gathered blocks", (3 * size + 4) * block, False, f"(2 x {size} + {size} + 4) x block"),
            MemoryItem("gathered embeddings", 8 * embeddings, False, "(4 + 4) x embeddings"),
        ]
    if dtype != torch.float32:
        # The backward pass reads the cast that the forward pass made; with activation checkpointing a block's is made
        # again when the block is recomputed. The optimizer's copies stay from step to step.
        if sharded:
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
    """What the forward pass of a micro batch of `tokens` tokens keeps for the backward pass.

    size: bytes of a value in the dtype of the matrix products, 2 or 4.
    """
    shape = config.model
    d_head = shape.d_model // shape.n_heads
    d_q, d_kv = shape.n_heads * d_head, (shape.n_kv_heads or shape.n_heads) * d_head
    d_mlp = shape.d_mlp or 4 * shape.d_model
    # d_model wide, for attention and for the MLP: the input, its norm (nGPT: the suggestion) and the sum. An eager
    # block keeps these six in fp32, because norms compute in fp32. Then the product of q, k and v; q and k, rotated;
    # what attention returns; u, v and the hidden layer of the MLP.
    wide = size if compiled else 4
    block = wide * 6 * shape.d_model + size * (3 * d_q + 3 * d_kv + 3 * d_mlp)
    formula = f"({wide} x 6 d_model + {size} x (3 d_q + 3 d_kv + 3 d_mlp))"
    if more := shape.kept_beyond_gpt():
        block += wide * more
        formula = f"({formula} + {wide} x {more})"
    # The source, the beginning of a row, passes the encoder's blocks, the rest the decoder's. A decoder has no source.
    source = shape.source_length(shape.context)
    blocks_passed = (len(model.blocks()) - shape.n_layers) * source + shape.n_layers * (shape.context - source)  # a row
    tokens_decoded = tokens * (shape.context - source) // shape.context
    token_blocks = tokens * blocks_passed // shape.context
    if config.train.activation_checkpointing == "full":
        activations = token_blocks * size * shape.d_model + tokens * block
        formula = f"micro tokens x (n_layers x {size} d_model + {formula})"
    else:
        activations = token_blocks * block
        formula = f"micro tokens x n_layers x {formula}"
    # The loss computes logits for `chunk` tokens at a time, and keeps the gradients in their place.
    vocab_size, chunk = model.unembedding.shape[0], min(tokens_decoded, GPU_ROWS)
    gradients = 4 * vocab_size * shape.d_model + size * tokens_decoded * shape.d_model
    formula_of_loss = f"4 x V x d_model + {size} x micro tokens x d_model + {size} x {chunk} x V"
    return [
        MemoryItem("activations", activations, False, formula),
        MemoryItem("loss", gradients + size * chunk * vocab_size, False, formula_of_loss),
    ]


def dropout_items(config: Config, model: Decoder, size: int, compiled: bool, rows: int) -> list[MemoryItem]:
    """What dropout adds in a micro batch of `rows` rows; size as of `activation_items`. Empty without dropout.

    A block keeps a bool for each value that it may drop. With attention_dropout it also keeps the weights of the
    softmax in fp32 and, dropped, in the dtype of the products. Uncompiled, the random numbers of one place take three
    times 8 bytes each for a moment.
    """
    shape = config.model
    if not shape.uses_dropout:
        return []
    source = shape.source_length(shape.context)
    target = shape.context - source
    encoders = len(model.blocks()) - shape.n_layers
    # Values and softmax weights of a row in one block of the encoder, and in one of the decoder.
    values = [2 * source * shape.d_model, (3 if encoders else 2) * target * shape.d_model]
    weights = [source * source * shape.n_heads, (target * target + target * source) * shape.n_heads]
    kept = [
        bool(shape.residual_dropout) * v + bool(shape.attention_dropout) * (4 + 1 + size) * w
        for v, w in zip(values, weights, strict=True)
    ]
    if config.train.activation_checkpointing == "full":
        held = max(kept)
        formula = "one block's"
    else:
        held = encoders * kept[0] + shape.n_layers * kept[1]
        formula = "all blocks'"
    held += bool(shape.embedding_dropout) * shape.context * shape.d_model
    numbers = 0
    if not compiled:
        widest = shape.n_heads * max(source, target) if shape.attention_dropout else shape.d_model
        numbers = 24 * max(source, target) * widest
    formula = f"micro rows x ({formula} bools and {4 + 1 + size} x softmax weights{' + 24 x numbers' * (numbers > 0)})"
    return [MemoryItem("dropout", rows * (held + numbers), False, formula)]
