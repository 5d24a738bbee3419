"""Memory of one rank, item by item, without running anything.

Weights, gradients, moments and the optimizer's bf16 copies follow from the shapes. What an uncompiled pass keeps is
counted on tensors without memory (counting.py). Of a compiled block on a GPU it is what its products and attention read
and make: torch's compiler keeps that and recomputes the rest, and our kernels keep their arguments alone.
tests/unit/report/test_memory.py holds the sum to 10 % of what whole uncompiled steps hold, for every architecture and
layout, test_compiled_blocks.py that of compiled blocks to what torch's compiler decides, and
docs/benchmarks/memory.md compares both with a GPU.
"""

from dataclasses import dataclass

import torch

from ngpt_train.config.schema import Config
from ngpt_train.kernels.cross_entropy import CPU_ROWS, GPU_ROWS
from ngpt_train.models import Decoder
from ngpt_train.models.layers.linear import cast_linears
from ngpt_train.report.counting import count_pass, count_products, gradients_of_loss


@dataclass(frozen=True)
class MemoryItem:
    """One kind of memory on one rank. formula: how `bytes` is computed, for the user; exact: False for an estimate."""

    name: str
    bytes: int
    exact: bool
    formula: str


@dataclass(frozen=True)
class Layout:
    """What of a run's layout decides about the memory of a rank."""

    kind: str  # single, ddp, fsdp, hsdp
    n_shards: int  # of each matrix by FSDP2; 0: without FSDP2
    dtype: torch.dtype  # of the matrix products
    compiled: bool
    micro_rows: int
    micro_batches: int  # of a step
    fused_adam: bool  # whether the optimizer is RowAdam
    on_gpu: bool


def memory_per_rank(config: Config, model: Decoder, layout: Layout) -> list[MemoryItem]:
    """The memory, at the peak of a step, of that of plan.world_size ranks which holds most.

    The sum of the items estimates the peak. model: may be on the meta device.
    """
    dtype, recompute = layout.dtype, config.train.activation_checkpointing
    with_bf16_copy = cast_linears(model) if layout.fused_adam and dtype == torch.bfloat16 else []
    copies = sum(linear.matrix.numel() for linear in with_bf16_copy)
    activations = activation_items(config, model, layout)
    # At the peak the backward pass begins: a block is at work, and the next is prefetched.
    gathered = 0 if not layout.n_shards else 2 if config.parallel.gather == "pass" else len(model.blocks())
    whole_gradients = config.parallel.scatter == "step" and layout.micro_batches > 1
    items = [
        *state_items(model, layout.n_shards, config.optim.ema_decay is not None, whole_gradients),
        *working_items(model, gathered, dtype, recompute != "none", copies),
        *activations,
    ]
    if layout.kind == "ddp" or layout.micro_batches > 1:
        return items
    return [gradients_at_peak(item, model, activations) if item.name == "gradients" else item for item in items]


def gradients_at_peak(whole: MemoryItem, model: Decoder, activations: list[MemoryItem]) -> MemoryItem:
    """The gradients that are there at the peak of a step of one micro batch: they come while the activations go.

    The peak is where the backward pass begins, with no gradients yet, or where it ends, in the first block: with all
    gradients, and of the activations with this block's alone.
    """
    sizes = {item.name: item.bytes for item in activations}
    at_the_end = whole.bytes + sizes["activations"] // len(model.blocks()) + sizes["passing values"]
    there = min(whole.bytes, max(0, at_the_end - sum(sizes.values())))
    return MemoryItem("gradients", there, False, f"those of {whole.formula} that are there at the peak")


def state_items(model: Decoder, n_shards: int, averages: bool, whole_gradients: bool = False) -> list[MemoryItem]:
    """Weights, gradients, Adam's two moments and the moving average of the weights, all in fp32.

    whole_gradients: FSDP2 shards them in the last micro batch only.
    """
    vectors = sum(p.numel() for p in model.parameters() if p.ndim < 2)
    if n_shards:
        # FSDP2 shards a matrix by ceil(rows / shards) rows, so the first rank holds most. Vectors are not sharded.
        rows = {p: -(-p.shape[0] // n_shards) for p in model.parameters() if p.ndim == 2}
        held = vectors + sum(n_rows * p.shape[1] for p, n_rows in rows.items())
        share = f"(matrices / {n_shards} + vectors)"
    else:
        held = model.n_params()
        share = "parameters"
    of_gradients = model.n_params() if whole_gradients else held
    return [
        MemoryItem("weights", 4 * held, True, f"4 x {share}"),
        MemoryItem("gradients", 4 * of_gradients, True, f"4 x {'parameters' if whole_gradients else share}"),
        MemoryItem("Adam's moments", 8 * held, True, f"8 x {share}"),
        *([MemoryItem("moving average", 4 * held, True, f"4 x {share}")] if averages else []),
    ]


def copies_to_save(model: Decoder, averages: bool, world_size: int) -> MemoryItem:
    """What a rank copies into its host's memory to write a checkpoint beside training: each value is written by one
    rank, and all write about as many."""
    size = 16 if averages else 12
    return MemoryItem("copies to save", size * model.n_params() // world_size, False, f"{size} x parameters / ranks")


def working_items(
    model: Decoder, gathered: int, dtype: torch.dtype, checkpointing: bool, copies: int
) -> list[MemoryItem]:
    """Copies of the weights that the matrix products read: FSDP2's gathered matrices, and casts to bf16.

    gathered: how many blocks FSDP2 has gathered at the peak; 0: without FSDP2. copies: how many values the optimizer's
    bf16 copies have; under FSDP2 it keeps none.
    """
    size = dtype.itemsize
    block = max(sum(p.numel() for p in layer.parameters() if p.ndim == 2) for layer in model.blocks())
    output = model.unembedding.numel()
    in_blocks = sum(p.numel() for layer in model.blocks() for p in layer.parameters() if p.ndim == 2)
    embeddings = sum(p.numel() for p in model.parameters() if p.ndim == 2) - in_blocks
    items = []
    if gathered:
        # Embeddings are gathered in fp32. The gradients of a block count as passing values.
        items += [
            MemoryItem("gathered blocks", gathered * size * block, False, f"{gathered} x {size} x block"),
            MemoryItem("gathered embeddings", 4 * embeddings, False, "4 x embeddings"),
        ]
    if dtype != torch.float32:
        # The backward pass reads the cast that the forward pass made; with activation checkpointing a block's is made
        # again when the block is recomputed. The optimizer's copies stay from step to step.
        if gathered:
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


def activation_items(config: Config, model: Decoder, layout: Layout) -> list[MemoryItem]:
    """What the forward pass of a micro batch keeps for the backward pass, and what the backward pass needs besides."""
    shape, dtype, rows, recompute = config.model, layout.dtype, layout.micro_rows, config.train.activation_checkpointing
    tokens = rows * (shape.context - shape.source_length(shape.context))
    of_loss, V = gradients_of_loss(model, tokens, dtype.itemsize), len(model.unembedding)
    # The loss computes logits for `chunk` tokens at a time, and keeps the gradients in their place. It reads h, which
    # a last norm reads in fp32.
    chunk, size = min(tokens, GPU_ROWS if layout.on_gpu else CPU_ROWS), dtype.itemsize
    logits = size * chunk * V + (size + 4) * tokens * shape.d_model
    if layout.compiled:
        kept, working, formula = of_compiled_blocks(config, model, layout)
    else:
        counted = count_pass(shape, dtype, rows, recompute, layout.on_gpu, layout.fused_adam)
        kept, working, formula = counted.kept, counted.working, "counted on tensors without memory, uncompiled"
    return [
        MemoryItem("activations", round(kept), False, formula),
        MemoryItem("loss", of_loss, False, f"4 x V x d_model + {size} x micro tokens x d_model"),
        MemoryItem(
            "passing values",
            round(max(logits, working)),
            False,
            f"the more of logits and h, {size} x {chunk} x V + {size + 4} x micro tokens x d_model, and what the "
            "backward pass makes",
        ),
    ]


def of_compiled_blocks(config: Config, model: Decoder, layout: Layout) -> tuple[float, float, str]:
    """Bytes that the compiled blocks keep, those that the backward pass makes, and a formula for the former."""
    shape, dtype, recompute = config.model, layout.dtype, config.train.activation_checkpointing
    counted = count_products(shape, dtype, layout.micro_rows)
    blocks_passed = counted.hidden / shape.d_model  # bytes for a value of every token in every block
    results = counted.results
    everything = counted.hidden + results + counted.arguments + blocks_passed * shape.kept_beyond_gpt()
    dropped = dropout_bytes(config, model, layout)
    kept, formula = {
        "none": (everything + dropped, "blocks' inputs, and what products and attention read and make"),
        "selective": (counted.hidden + results, "blocks' inputs, and what products and attention make"),
        "full": (counted.hidden, "blocks' inputs"),
    }[recompute]
    # Of a block: what is recomputed, and the gradients by the widest product's result and by what made it.
    n_blocks = len(model.blocks())
    again = max(0.0, everything + dropped - kept) / n_blocks
    of_loss = gradients_of_loss(model, 0, dtype.itemsize)
    return kept, max(again + 1.5 * counted.widest - of_loss, of_loss), f"{formula}, compiled"


def dropout_bytes(config: Config, model: Decoder, layout: Layout) -> int:
    """What dropout adds to what compiled blocks keep of a micro batch, in bytes.

    A block keeps a bool for each value that it may drop. With attention_dropout it also keeps the weights of the
    softmax in fp32 and, dropped, in the dtype of the products.
    """
    shape = config.model
    if not shape.uses_dropout:
        return 0
    source = shape.source_length(shape.context)
    target = shape.context - source
    encoders = len(model.blocks()) - shape.n_layers
    # Values and softmax weights of a row in one block of the encoder, and in one of the decoder.
    values = [2 * source * shape.d_model, (3 if encoders else 2) * target * shape.d_model]
    weights = [source * source * shape.n_heads, (target * target + target * source) * shape.n_heads]
    kept = [
        bool(shape.residual_dropout) * v + bool(shape.attention_dropout) * (4 + 1 + layout.dtype.itemsize) * w
        for v, w in zip(values, weights, strict=True)
    ]
    return layout.micro_rows * (encoders * kept[0] + shape.n_layers * kept[1])
