"""Memory of one rank, item by item, without running anything.

Weights, gradients, moments and the optimizer's bf16 copies follow from the shapes. The activations of an uncompiled
pass are counted on tensors without memory (counting.py). A compiled block on a GPU keeps the inputs and results of its
products and attention: torch's compiler recomputes the rest, and our kernels keep their arguments alone.

tests/unit/report/test_memory.py compares the sum with whole uncompiled steps, within 10 %, for every architecture and
layout. test_compiled_blocks.py compares compiled blocks with the decisions of torch's compiler.
docs/benchmarks/memory.md compares both with a GPU.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from ngpt_train.config.schema import Config
from ngpt_train.config.sections.optim import OptimConfig
from ngpt_train.kernels.cross_entropy import CPU_ROWS, GPU_ROWS
from ngpt_train.models.decoder import Decoder
from ngpt_train.models.layers.linear import cast_linears
from ngpt_train.report.counting import count_pass, count_products, gradients_of_loss


@dataclass(frozen=True)
class MemoryItem:
    """One kind of memory on one rank. formula: of `bytes`, for the user. exact: False for an estimate."""

    name: str
    bytes: int
    exact: bool
    formula: str


@dataclass(frozen=True)
class Layout:
    """The layout of a run, as far as it decides a rank's memory."""

    kind: str  # single, ddp, fsdp, hsdp
    n_shards: int  # of each matrix by FSDP2; 0: without FSDP2
    dtype: torch.dtype  # of the matrix products
    compiled: bool
    micro_rows: int
    micro_batches: int  # of a step
    fused_adam: bool  # the optimizer is RowAdam
    on_gpu: bool


def memory_per_rank(config: Config, model: Decoder, layout: Layout) -> list[MemoryItem]:
    """The items of the fullest of plan.world_size ranks at the peak of a step. model: may be on the meta device."""
    if layout.n_shards:
        return max(moments(config, model, layout), key=lambda items: sum(item.bytes for item in items))
    dtype, recompute = layout.dtype, config.train.activation_checkpointing
    has_copies = layout.fused_adam and config.optim.matrix_step is None and dtype == torch.bfloat16
    copies = sum(linear.matrix.numel() for linear in cast_linears(model)) if has_copies else 0
    found = activations_of(config, model, layout)
    activations = activation_items(found, found.kept, max(found.logits, found.working))
    items = [*state_items(model, 0, config.optim), *cast_items(model, dtype, recompute != "none", copies), *activations]
    if layout.kind == "ddp" or layout.micro_batches > 1:
        return items
    return [gradients_at_peak(item, model, activations) if item.name == "gradients" else item for item in items]


def gradients_at_peak(whole: MemoryItem, model: Decoder, activations: list[MemoryItem]) -> MemoryItem:
    """Gradients at the peak of a step with one micro batch: the backward pass makes them and frees activations. The
    peak is at its begin, without gradients, or at its end, in the first block: with all gradients, and the activations
    of this block alone."""
    sizes = {item.name: item.bytes for item in activations}
    at_the_end = whole.bytes + sizes["activations"] // len(model.blocks()) + sizes["passing values"]
    there = min(whole.bytes, max(0, at_the_end - sum(sizes.values())))
    return MemoryItem("gradients", there, False, f"the part of {whole.formula} that is there at the peak")


@dataclass(frozen=True)
class MicroBatch:
    """FSDP2 in one micro batch of a step. gradients: a rank's bytes after the backward pass of so many blocks, without
    new gradients that are not scattered or added yet."""

    gradients: Callable[[int], float]
    new_gradients: bool  # False: added to the gradients of an earlier micro batch
    scatters: bool
    stays: bool  # gathered blocks stay whole after their backward pass


def micro_batches(config: Config, model: Decoder, layout: Layout, shards: int) -> list[MicroBatch]:
    """The micro batches of a step where the peak may be. shards: bytes of the rank's gradients."""
    several = layout.micro_batches > 1
    stays = several and config.parallel.gather == "step"
    if not several or config.parallel.scatter == "micro_batch":
        n = len(model.blocks())
        return [MicroBatch(lambda done: shards if several else shards * done / n, True, True, stays)]
    blocks, n_params = matrices_of_blocks(model), model.n_params()

    def of_done(done: int) -> int:
        return sum(blocks[len(blocks) - done :])

    first = MicroBatch(lambda done: 4 * of_done(done), True, False, stays)
    between = MicroBatch(lambda done: 4 * n_params, False, False, stays)
    last = MicroBatch(lambda done: 4 * n_params - (4 - shards / n_params) * of_done(done), False, True, False)
    return [first, *([between] if layout.micro_batches > 2 else []), last]


def moments(config: Config, model: Decoder, layout: Layout) -> Iterator[list[MemoryItem]]:
    """A rank's memory under FSDP2 at the moments when it may be largest: in the loss, in the backward pass of each
    block, from the last to the first, and in the embedding's backward pass.

    FSDP2 gathers a block for its pass, and in the backward pass also the block before it. After a block's backward pass
    it copies the block's whole gradients into a buffer in fp32 and scatters them from there. The buffer stays until the
    next block's gradients are there. So whole blocks and gradients, of parallel.gather and scatter, go block by block.
    The embeddings, and their gradients, are whole up to the end.
    """
    size, by_pass = layout.dtype.itemsize, config.parallel.gather == "pass"
    weights, gradients, *others = state_items(model, layout.n_shards, config.optim)
    blocks = matrices_of_blocks(model)
    n, output = len(blocks), model.unembedding.numel()
    embeddings = sum(p.numel() for p in model.parameters() if p.ndim == 2) - sum(blocks)

    def moment(
        batch: MicroBatch, found: Activations, done: int, gathered: Sequence[int], passing: int, cast: int = 0
    ) -> list[MemoryItem]:
        """After the backward pass of `done` blocks. gathered: sizes of the whole blocks."""
        scattered = blocks[n - done] if done and batch.scatters else 0
        there, of_which = round(batch.gradients(done)), f"{size} x blocks that are whole at the peak"
        return [
            weights,
            MemoryItem("gradients", there, False, f"the part that is there at the peak; shards: {gradients.formula}"),
            *others,
            MemoryItem("gathered blocks", size * sum(gathered), False, of_which),
            MemoryItem("gathered embeddings", 4 * embeddings, False, "4 x embeddings"),  # gathered in fp32
            MemoryItem("gradients to scatter", 4 * scattered, False, "4 x a block after its backward pass"),
            *([MemoryItem("cast matrices", size * cast, False, f"{size} x output, in the loss")] if cast else []),
            *activation_items(found, found.kept * (n - done) // n, passing),
        ]

    for batch in micro_batches(config, model, layout, gradients.bytes):
        found = activations_of(config, model, layout, batch.new_gradients)
        cast = 0 if layout.dtype == torch.float32 else output
        yield moment(batch, found, 0, [] if by_pass else blocks, found.logits, cast)
        for done in range(n):
            gathered = blocks if batch.stays else blocks[max(0, n - done - 2) if by_pass else 0 : n - done]
            yield moment(batch, found, done, gathered, found.of_stages[0 if done < config.model.n_layers else 1])
        # The embedding's gradient joins the output's, of the loss, unless that was added to whole gradients.
        of_embedding = 4 * (embeddings - output) - (0 if batch.new_gradients else found.of_loss)
        yield moment(batch, found, n, blocks if batch.stays else [], of_embedding)


def matrices_of_blocks(model: Decoder) -> list[int]:
    """The number of values in the matrices of each block."""
    return [sum(p.numel() for p in block.parameters() if p.ndim == 2) for block in model.blocks()]


def state_items(model: Decoder, n_shards: int, optim: OptimConfig) -> list[MemoryItem]:
    """Weights, gradients, moments and moving average, in fp32. Adam has two moments, Muon one, of blocks' matrices."""
    one_moment = optim.matrix_step is not None and optim.matrix_step.direction != "adam"
    blocks = [p for block in model.blocks() for p in block.parameters() if p.ndim == 2] if one_moment else []
    vectors = sum(p.numel() for p in model.parameters() if p.ndim < 2)
    if n_shards:
        # FSDP2 shards a matrix by ceil(rows / shards) rows, so the first rank holds most. Vectors are not sharded.
        rows = {p: -(-p.shape[0] // n_shards) for p in model.parameters() if p.ndim == 2}
        held = vectors + sum(n_rows * p.shape[1] for p, n_rows in rows.items())
        of_blocks = sum(rows[p] * p.shape[1] for p in blocks)
        share = f"(matrices / {n_shards} + vectors)"
    else:
        held, of_blocks = model.n_params(), sum(p.numel() for p in blocks)
        share = "parameters"
    return [
        MemoryItem("weights", 4 * held, True, f"4 x {share}"),
        MemoryItem("gradients", 4 * held, True, f"4 x {share}"),
        MemoryItem("Adam's moments", 8 * (held - of_blocks), True, f"8 x {share}{', without blocks' * one_moment}"),
        *([MemoryItem("momentum", 4 * of_blocks, True, "4 x matrices of blocks")] if one_moment else []),
        *([MemoryItem("moving average", 4 * held, True, f"4 x {share}")] if optim.ema_decay is not None else []),
    ]


def copies_to_save(model: Decoder, averages: bool, world_size: int) -> MemoryItem:
    """A rank's copy in its host's memory, for a checkpoint beside training. All ranks write about as many values."""
    size = 16 if averages else 12
    return MemoryItem("copies to save", size * model.n_params() // world_size, False, f"{size} x parameters / ranks")


def cast_items(model: Decoder, dtype: torch.dtype, checkpointing: bool, copies: int) -> list[MemoryItem]:
    """Casts of weights for the matrix products, without FSDP2. copies: values in the optimizer's bf16 copies."""
    if dtype == torch.float32:
        return []
    size, block, output, items = dtype.itemsize, max(matrices_of_blocks(model)), model.unembedding.numel(), []
    # The backward pass reads the cast that the forward pass made; with activation checkpointing a block's is made
    # again when the block is recomputed. The optimizer's copies stay from step to step.
    if copies:
        items.append(MemoryItem("working copies", size * copies, True, f"{size} x blocks"))
        cast, what = output, "output"
    elif checkpointing:
        cast, what = block + output, "block + output"
    else:
        cast, what = block * len(model.blocks()) + output, "blocks + output"
    return [*items, MemoryItem("cast matrices", size * cast, False, f"{size} x ({what})")]


@dataclass(frozen=True)
class Activations:
    """Bytes of a micro batch's passes, besides weights, their casts and their gradients."""

    kept: int  # by all blocks for the backward pass
    of_loss: int  # gradients from the loss, made in the forward pass
    logits: int  # in the loss, with h
    working: int  # new memory of the backward pass at its peak
    of_stages: tuple[int, ...]  # the same in a block of the decoder, and in a block of the encoder
    formula: str  # of kept
    of_logits: str  # formula of logits


def activations_of(config: Config, model: Decoder, layout: Layout, new_gradients: bool = False) -> Activations:
    """Activations of a micro batch. new_gradients: of matrices, which the backward pass makes or else adds to."""
    shape, dtype, rows, recompute = config.model, layout.dtype, layout.micro_rows, config.train.activation_checkpointing
    tokens = rows * (shape.predicted(shape.context) - shape.source_length(shape.context))
    of_loss, V = gradients_of_loss(model, tokens, dtype.itemsize), len(model.unembedding)
    # The loss computes logits for `chunk` tokens at a time, and keeps the gradients in their place. It reads h, which
    # a last norm reads in fp32.
    chunk, size = min(tokens, GPU_ROWS if layout.on_gpu else CPU_ROWS), dtype.itemsize
    logits = size * chunk * V + (size + 4) * tokens * shape.d_model
    if layout.compiled:
        kept, working, formula = of_compiled_blocks(config, model, layout, new_gradients)
        of_stages: tuple[float, ...] = (working, working)
    else:
        counted = count_pass(shape, dtype, rows, recompute, layout.on_gpu, layout.fused_adam, new_gradients)
        kept, working, formula = counted.kept, counted.working, "counted on tensors without memory, uncompiled"
        of_stages = counted.of_stages
    of_logits = f"logits and h, {size} x {chunk} x V + {size + 4} x micro tokens x d_model"
    return Activations(round(kept), of_loss, logits, round(working), tuple(map(round, of_stages)), formula, of_logits)


def activation_items(found: Activations, kept: int, passing: int) -> list[MemoryItem]:
    """kept: the part of found.kept at the peak. passing: bytes of short-lived values."""
    formula = f"the more of {found.of_logits}, and what the backward pass makes"
    return [
        MemoryItem("activations", kept, False, found.formula),
        MemoryItem("loss", found.of_loss, False, "gradients by the output matrix, 4 x V x d_model, and by h"),
        MemoryItem("passing values", passing, False, formula),
    ]


def of_compiled_blocks(config: Config, model: Decoder, layout: Layout, new_gradients: bool) -> tuple[float, float, str]:
    """Bytes kept by compiled blocks, new bytes of the backward pass, a formula for the first; as `activations_of`."""
    shape, dtype, recompute = config.model, layout.dtype, config.train.activation_checkpointing
    counted = count_products(shape, dtype, layout.micro_rows)
    blocks_passed = counted.hidden / shape.d_model  # bytes for a value of every token in every block
    everything = counted.hidden + counted.results + counted.arguments + blocks_passed * shape.kept_beyond_gpt()
    everything += dropout_bytes(config, model, layout)
    kept, formula = {
        "none": (everything, "blocks' inputs, and what products and attention read and make"),
        "selective": (counted.hidden + counted.results, "blocks' inputs, and what products and attention make"),
        "full": (counted.hidden, "blocks' inputs"),
    }[recompute]
    # A block's backward pass makes the recomputed values, and gradients by the widest product's result and inputs.
    again = max(0.0, everything - kept) / len(model.blocks())
    of_loss = gradients_of_loss(model, 0, dtype.itemsize)
    # Gradients of the loss were added to others, or they stay. A compiled block gives all of its own at its end.
    gradients = dtype.itemsize * max(matrices_of_blocks(model)) if new_gradients else -of_loss
    return kept, max(again + 1.5 * counted.widest + gradients, of_loss), f"{formula}, compiled"


def dropout_bytes(config: Config, model: Decoder, layout: Layout) -> int:
    """Bytes kept by compiled blocks for dropout, in a micro batch: a bool for each value that a block may drop, and
    with attention_dropout the weights of the softmax, in fp32 and, dropped, in the dtype of the products."""
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
