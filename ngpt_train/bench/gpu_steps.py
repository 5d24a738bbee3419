"""Optimizer steps of GPT and nGPT at the paper's sizes, in turn in one process, with what was predicted of them.

A step is all of it: forward, backward, clipping, optimizer, projection; 8 rows of tokens, the paper's 512 over 64 GPUs.
MFU = FLOPs per token * tokens/s / peak of dense bf16 products, where the FLOPs per token are 6 weights + 12 L d T
(`mfu`, PaLM's convention) or, with the masked half of attention left out, 6 weights + 6 L d T (`mfu_causal`).
"""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from ngpt_train.bench.interleaved import Entry, by, interleaved
from ngpt_train.bench.step import tokens_of
from ngpt_train.config.architectures import GPTConfig, ModelConfig, NGPTConfig
from ngpt_train.config.keys import AUTO
from ngpt_train.config.schema import Config
from ngpt_train.kernels import dispatch
from ngpt_train.models import Decoder
from ngpt_train.observe.meters import peak_flops
from ngpt_train.training import TrainState, build_state, train_step
from ngpt_train.training.batch import resolve_micro_rows
from ngpt_train.training.guards import DeviceMemoryError

ROWS_PER_STEP = 8
WARM_UP, ROUNDS, FEWEST_ROUNDS = 4, 10, 3
TOTAL_STEPS = 1000  # of the schedule, of which these are the first
UNIT_TOLERANCE = 1e-3
LOSS_TOLERANCE = 1e-2

# d_model, n_layers, n_heads, d_mlp, vocabulary
SIZES = {
    "0.5b": (1024, 24, 16, 4096, 32_000),
    "1b": (1280, 36, 20, 5120, 32_000),
    "debug": (64, 2, 2, 256, 512),
}
# Rates that move both within a few steps; an nGPT step turns a row by about lr * sqrt(d_model) radians.
RATES: dict[str, Callable[[int], float]] = {"gpt": lambda d: 1e-3, "ngpt": lambda d: 0.25 / d**0.5}


@dataclass(frozen=True)
class Row:
    """One line of the table: models of `size` on rows of `context` tokens. ablated: also nGPT without kernels."""

    size: str
    context: int
    ablated: bool = False

    @property
    def name(self) -> str:
        return f"{self.size}, {self.context} tokens"


# The most telling first: later ones may find no time left.
ROWS = {
    "paper": [
        *(Row("0.5b", 4096, ablated=True), Row("1b", 4096), Row("0.5b", 1024), Row("0.5b", 8192)),
        *(Row("1b", 1024), Row("1b", 8192)),
    ],
    "debug": [Row("debug", 64, ablated=True), Row("debug", 128)],
}
# What a row takes besides its steps, in seconds: weights drawn, blocks compiled.
PREPARATION = {"paper": 45.0, "debug": 1.0}

WITHOUT_KERNELS = "ngpt, kernels=torch"
# Made before anything ran on a GPU: GPT's ms per step, nGPT's time over GPT's, the same without kernels.
PREDICTED: dict[str, dict[tuple[str, int], tuple[float, float, float]]] = {
    "H100": {
        ("0.5b", 1024): (53, 1.012, 1.20),
        ("0.5b", 4096): (239, 1.010, 1.15),
        ("0.5b", 8192): (582, 1.009, 1.12),
        ("1b", 1024): (111, 1.010, 1.13),
        ("1b", 4096): (486, 1.010, 1.08),
        ("1b", 8192): (1166, 1.008, 1.06),
    },
    "A100": {
        ("0.5b", 1024): (128, 1.007, 1.13),
        ("0.5b", 4096): (597, 1.006, 1.09),
        ("0.5b", 8192): (1474, 1.005, 1.07),
        ("1b", 1024): (268, 1.007, 1.08),
        ("1b", 4096): (1226, 1.006, 1.05),
        ("1b", 8192): (2975, 1.005, 1.04),
    },
}
PREDICTED_FOR = [(r"NVIDIA H100 80GB HBM3", "H100"), (r"(NVIDIA )?A100-SXM4-80GB", "A100")]


@dataclass
class Measured:
    """A variant of a row; `entry` is of the interleaved times."""

    row: str
    variant: str
    entry: Entry
    tokens: int
    micro_rows: int
    mfu: float | None
    mfu_causal: float | None
    memory_gb: float | None  # at the most in a step, the weights of the other variants included
    first_loss: float
    last_loss: float
    predicted_ms: float | None
    gap: float | None  # measured over predicted, less 1
    problems: list[str] = field(default_factory=list)

    def json(self) -> dict[str, Any]:
        own = {key: value for key, value in asdict(self).items() if key != "entry"}
        names = {"name": f"{self.row}: {self.variant}", "relative_to": f"{self.row}: {self.entry.relative_to}"}
        return self.entry.json() | own | names


class Variant:
    """A state that takes steps on the same tokens, and the losses of them."""

    def __init__(self, config: Config) -> None:
        self.state: TrainState = build_state(config)
        self.micro_batches = tokens_of(self.state)
        self.losses: list[Tensor] = []

    def __call__(self) -> float:
        with dispatch.chosen(self.state.config.kernels.kind):
            self.losses.append(train_step(self.state, self.micro_batches, untouched=True).loss)
        config = self.state.config
        return float(config.train.rows_per_step * config.model.context)


def make_config(architecture: str, row: Row, device: str, kernels: str, micro_rows: int | str) -> Config:
    d_model, n_layers, n_heads, d_mlp, vocab_size = SIZES[row.size]
    model: type[ModelConfig] = GPTConfig if architecture == "gpt" else NGPTConfig
    config = Config(model=model(architecture, d_model, n_layers, n_heads, None, d_mlp, vocab_size, row.context))
    config.train.steps, config.train.batch_rows, config.train.micro_rows = TOTAL_STEPS, ROWS_PER_STEP, micro_rows
    config.train.device = device
    config.optim.name = "adamw" if architecture == "gpt" else "adam"
    config.optim.lr, config.optim.weight_decay = RATES[architecture](d_model), 0.0
    config.schedule.warmup_steps = 0
    config.kernels.kind = kernels
    return config


def predicted_for(device_name: str) -> dict[tuple[str, int], tuple[float, float, float]]:
    """Empty for hardware of which nothing was predicted."""
    return next((PREDICTED[key] for name, key in PREDICTED_FOR if re.fullmatch(name, device_name)), {})


def seconds_needed(row: Row, scale: str, device_name: str) -> float:
    """An estimate: what is not predicted is taken to be as slow as an A100."""
    predicted = predicted_for(device_name) or PREDICTED["A100"]
    step = predicted.get((row.size, row.context), (0, 0, 0))[0] / 1e3
    return PREPARATION[scale] + (3 if row.ablated else 2) * (WARM_UP + FEWEST_ROUNDS) * step


def run_row(
    row: Row, device: str, device_name: str, deadline: float, say: Callable[[str], None]
) -> list[Measured] | None:
    """The variants of a row; None where the deadline, of time.monotonic, leaves too little. Where memory does not
    suffice the micro batch is halved; raises DeviceMemoryError where one row is too much."""
    micro_rows: int | str = AUTO
    while True:
        try:
            return _run_row(row, device, device_name, deadline, micro_rows)
        except (torch.OutOfMemoryError, DeviceMemoryError) as error:
            used = _micro_rows(row, micro_rows)
            if used == 1:
                raise DeviceMemoryError(f"{row.name}: out of memory with one row at a time") from error
        # The traceback, which holds the tensors, is gone here.
        _free_memory()
        micro_rows = used // 2
        say(f"{row.name}: out of memory with {used} rows at a time; again with {micro_rows}")


def _micro_rows(row: Row, micro_rows: int | str) -> int:
    return resolve_micro_rows(ROWS_PER_STEP, micro_rows, row.context, 1)


def _free_memory() -> None:
    gc.collect()
    torch._dynamo.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _run_row(row: Row, device: str, device_name: str, deadline: float, micro_rows: int | str) -> list[Measured] | None:
    _free_memory()
    kinds = {"gpt": AUTO, "ngpt": AUTO} | ({WITHOUT_KERNELS: "torch"} if row.ablated else {})
    with dispatch.chosen(AUTO):  # each state that is built chooses for the process
        variants = {
            name: Variant(make_config(name.partition(",")[0], row, device, kind, micro_rows))
            for name, kind in kinds.items()
        }
        measure = by(_synchronized) if device == "cuda" else by(time.process_time)
        round_seconds = 0.0
        for _ in range(WARM_UP):
            started = time.monotonic()
            for variant in variants.values():
                measure(variant)
            round_seconds = time.monotonic() - started
        # interleaved runs a round untimed.
        rounds = min(ROUNDS, int((deadline - time.monotonic()) / round_seconds) - 1)
        if rounds < FEWEST_ROUNDS:
            return None
        entries = interleaved(variants, "gpt", rounds, "tokens", measure)
        return [_measured(row, entry, variants[entry.name], device_name) for entry in entries]


def _synchronized() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


def _measured(row: Row, entry: Entry, variant: Variant, device_name: str) -> Measured:
    state, context = variant.state, row.context
    peak = peak_flops(device_name, state.model.compute_dtype or torch.float32)
    assert entry.rate is not None
    mfus = [
        None if peak is None else state.model.flops_per_token(context, causal) * entry.rate / peak
        for causal in (False, True)
    ]
    predicted_ms = predicted(row, entry.name, device_name)
    losses = [float(loss) for loss in variant.losses]
    return Measured(
        row=row.name,
        variant=entry.name,
        entry=entry,
        tokens=ROWS_PER_STEP * context,
        micro_rows=state.micro_rows,
        mfu=mfus[0],
        mfu_causal=mfus[1],
        memory_gb=_peak_memory(variant),
        first_loss=losses[0],
        last_loss=losses[-1],
        predicted_ms=predicted_ms,
        gap=None if predicted_ms is None else entry.median_ms / predicted_ms - 1,
        problems=problems(state, losses, variant.micro_batches[0]),
    )


def predicted(row: Row, variant: str, device_name: str) -> float | None:
    """Milliseconds."""
    found = predicted_for(device_name).get((row.size, row.context))
    if found is None:
        return None
    gpt, with_kernels, without = found
    return gpt * {"gpt": 1.0, "ngpt": with_kernels, WITHOUT_KERNELS: without}[variant]


def _peak_memory(variant: Variant) -> float | None:
    if variant.state.world.device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats()
    variant()
    return torch.cuda.max_memory_allocated() / 1e9


@torch.no_grad()
def problems(state: TrainState, losses: list[float], micro_batch: tuple[Tensor, Tensor]) -> list[str]:
    """What is wrong with a run; nothing, if it is one."""
    found = []
    if not all(map(_finite, losses)):
        found.append(f"a loss is not finite: {losses}")
    elif not losses[-1] < losses[0]:
        found.append(f"the loss did not fall: {losses[0]:.4f} -> {losses[-1]:.4f}")
    if state.model.projects:
        off = max(float((p.norm(dim=-1) - 1).abs().max()) for p in state.model.parameters() if p.ndim == 2)
        if not off <= UNIT_TOLERANCE:
            found.append(f"rows are off the sphere by {off:.1e}")
    ours, plain = (_loss(state.model, micro_batch, kernels) for kernels in (AUTO, "torch"))
    if not abs(ours - plain) <= LOSS_TOLERANCE:
        found.append(f"the loss is {ours:.4f} by kernels, {plain:.4f} without")
    return found


def _loss(model: Decoder, micro_batch: tuple[Tensor, Tensor], kernels: str) -> float:
    """Per token, of the first row; not compiled, so that nothing is compiled for it."""
    with dispatch.chosen(kernels), torch.compiler.set_stance("force_eager"):
        loss_sum, count = model(*(part[:1] for part in micro_batch))
    return float(loss_sum / count)


def _finite(value: float) -> bool:
    return abs(value) < float("inf")
