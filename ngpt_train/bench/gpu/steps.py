"""Optimizer steps of GPT and nGPT at the paper's sizes, in turn in one process, with what was predicted of them.

A step is all of it: forward, backward, clipping, optimizer, projection; 8 rows of tokens, the paper's 512 over 64 GPUs.
MFU = FLOPs per token * tokens/s / peak of dense bf16 products, where the FLOPs per token are 6 weights + 12 L d T
(`mfu`, PaLM's convention) or, with the masked half of attention left out, 6 weights + 6 L d T (`mfu_causal`).
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from ngpt_train.bench.gpu.predictions import expected_seconds, predicted_ms
from ngpt_train.bench.interleaved import Entry, Measure, Run, by, interleaved
from ngpt_train.bench.step import tokens_of
from ngpt_train.config.architectures import architectures
from ngpt_train.config.keys import AUTO
from ngpt_train.config.schema import Config
from ngpt_train.kernels import dispatch
from ngpt_train.models import Decoder
from ngpt_train.models.initialisation import drawn_by
from ngpt_train.observe.meters import peak_flops
from ngpt_train.optim import build_optimizer
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
PAIR = ("gpt", "ngpt")

Result = TypeVar("Result")


@dataclass(frozen=True)
class Row:
    """Models of `size` on rows of `context` tokens."""

    size: str
    context: int

    @property
    def name(self) -> str:
        return f"{self.size}, {self.context} tokens"


class OutOfTimeError(Exception):
    """The deadline leaves too little."""


@dataclass
class Place:
    """Where it runs, and until when, of time.monotonic; preparation: seconds that the weights and blocks of a pair
    take to be drawn and compiled, a guess until there was one."""

    device: str
    name: str
    deadline: float
    preparation: float

    def check_time_for(self, row: Row, steps: int, of_preparation: float = 1.0) -> None:
        """steps: of GPT's length. Raises OutOfTimeError."""
        needed = of_preparation * self.preparation + steps * expected_seconds((row.size, row.context), self.name)
        if time.monotonic() + needed > self.deadline:
            raise OutOfTimeError


@dataclass
class Measured:
    """A variant of a row; `entry` is of the interleaved times."""

    row: str
    variant: str
    entry: Entry
    over_gpt: float | None  # the time over GPT's, medians of the same rounds
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
    """A state that takes steps on the same tokens, with all kernels or without some, and the losses of them."""

    def __init__(self, state: TrainState, kernels: str = AUTO, without: str | None = None) -> None:
        self.state, self.kernels, self.without = state, kernels, without
        self.micro_batches = tokens_of(state)
        self.losses: list[Tensor] = []
        self.shares_weights = False  # with a variant that moves them, too, where this one's optimizer does not see it

    def __call__(self) -> float:
        with dispatch.chosen(self.kernels, self.without):
            result = train_step(self.state, self.micro_batches, untouched=not self.shares_weights)
        self.losses.append(result.loss)
        config = self.state.config
        return float(config.train.rows_per_step * config.model.context)

    def changed(self, kernels: str = AUTO, without: str | None = None) -> Variant:
        """The same weights under other kernels; an optimizer of its own where that is what changes, because which one
        it is is decided when it is built."""
        state = self.state
        if kernels == "torch" or without == "adam":
            with dispatch.chosen(kernels, without):
                optimizer = build_optimizer(state.model, state.model.parameter_groups(), state.config.optim)
            state = replace(state, optimizer=optimizer)
        other = Variant(state, kernels, without)
        self.shares_weights = other.shares_weights = True
        return other


def make_config(architecture: str, row: Row, device: str, micro_rows: int | str = AUTO) -> Config:
    d_model, n_layers, n_heads, d_mlp, vocab_size = SIZES[row.size]
    model = architectures()[architecture]
    config = Config(model=model(architecture, d_model, n_layers, n_heads, None, d_mlp, vocab_size, row.context))
    config.train.steps, config.train.batch_rows, config.train.micro_rows = TOTAL_STEPS, ROWS_PER_STEP, micro_rows
    config.train.device = device
    config.optim.name = "adamw" if architecture == "gpt" else "adam"
    config.optim.lr, config.optim.weight_decay = RATES[architecture](d_model), 0.0
    config.schedule.warmup_steps = 0
    return config


def compiled_pair(row: Row, place: Place, micro_rows: int | str) -> dict[str, Variant]:
    """GPT and nGPT, a step each behind them."""
    started = time.monotonic()
    variants = {name: build(name, row, place, micro_rows) for name in PAIR}
    for variant in variants.values():
        variant()
    place.preparation = time.monotonic() - started
    return variants


def build(architecture: str, row: Row, place: Place, micro_rows: int | str) -> Variant:
    with drawn_on(torch.device(place.device)):
        return Variant(build_state(make_config(architecture, row, place.device, micro_rows)))


@contextlib.contextmanager
def drawn_on(device: torch.device) -> Iterator[None]:
    """Weights are drawn on the device, from the same distributions. In training they are the same on all of them, which
    takes a CPU some seconds for each model: here that would be an eighth of all the time there is."""
    generator = torch.Generator(device).manual_seed(0)

    def drawn(seed: int, path: str, shape: tuple[int, ...], std: float) -> Tensor:
        return torch.empty(shape, device=device).normal_(std=std, generator=generator)

    with drawn_by(drawn):
        yield


def run_pair(row: Row, place: Place, say: Callable[[str], None]) -> list[Measured]:
    """GPT and nGPT in turn. Raises OutOfTimeError, and DeviceMemoryError where one row of tokens is too much."""
    place.check_time_for(row, 2 * (WARM_UP + FEWEST_ROUNDS))

    def measure(micro_rows: int | str) -> list[Measured]:
        variants = compiled_pair(row, place, micro_rows)
        entries = timed(variants, "gpt", place, WARM_UP - 1, ROUNDS, FEWEST_ROUNDS)
        return [measured(row, entry, entries[0], variants[entry.name], place) for entry in entries]

    return halving_rows(row, AUTO, measure, say)


def halving_rows(
    row: Row, micro_rows: int | str, work: Callable[[int | str], Result], say: Callable[[str], None]
) -> Result:
    """`work` of a number of rows in a micro batch, half of it where memory does not suffice, and so on. Memory is
    freed before. Raises DeviceMemoryError where one row is too much."""
    while True:
        free_memory()
        try:
            with dispatch.chosen(AUTO):  # each state that is built chooses for the process
                return work(micro_rows)
        except (torch.OutOfMemoryError, DeviceMemoryError) as error:
            used = resolve_micro_rows(ROWS_PER_STEP, micro_rows, row.context, 1)
            if used == 1:
                raise DeviceMemoryError(f"{row.name}: out of memory with one row at a time") from error
        # The traceback, which holds the tensors, is gone here.
        micro_rows = used // 2
        say(f"{row.name}: out of memory with {used} rows at a time; again with {micro_rows}")


def free_memory() -> None:
    gc.collect()
    torch._dynamo.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def timed(runs: Mapping[str, Run], relative_to: str, place: Place, warm_up: int, most: int, fewest: int) -> list[Entry]:
    """Interleaved entries of as many rounds as there is time for; raises OutOfTimeError where that is too few."""
    measure = measure_on(place)
    round_seconds = 0.0
    for _ in range(warm_up):
        started = time.monotonic()
        for run in runs.values():
            measure(run)
        round_seconds = time.monotonic() - started
    # interleaved runs a round untimed.
    rounds = min(most, int((place.deadline - time.monotonic()) / round_seconds) - 1)
    if rounds < fewest:
        raise OutOfTimeError
    return interleaved(runs, relative_to, rounds, "tokens", measure)


def measure_on(place: Place) -> Measure:
    return by(_synchronized) if place.device == "cuda" else by(time.process_time)


def _synchronized() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


def measured(
    row: Row, entry: Entry, gpt: Entry | None, variant: Variant, place: Place, ablated: bool = False
) -> Measured:
    """ablated: the weights are those of another variant, so that a loss need not fall nor be checked again."""
    losses = [float(loss) for loss in variant.losses]
    if ablated:
        found = [f"a loss is not finite: {losses}"] if not all(map(_finite, losses)) else []
    else:
        found = problems(variant.state, losses, variant.micro_batches[0])
    memory = peak_memory(variant, place)
    return describe(row, entry, gpt, variant.state.model, variant.state.micro_rows, losses, memory, found, place)


def describe(
    row: Row,
    entry: Entry,
    gpt: Entry | None,
    model: Decoder,
    micro_rows: int,
    losses: list[float],
    memory_gb: float | None,
    found: list[str],
    place: Place,
) -> Measured:
    """model: whose FLOPs are counted; found: problems."""
    assert entry.rate is not None
    peak = peak_flops(place.name, model.compute_dtype or torch.float32)
    mfu, mfu_causal = (
        None if peak is None else model.flops_per_token(row.context, causal) * entry.rate / peak
        for causal in (False, True)
    )
    expected = predicted_ms((row.size, row.context), entry.name, place.name)
    return Measured(
        row=row.name,
        variant=entry.name,
        entry=entry,
        over_gpt=None if gpt is None else entry.median_ms / gpt.median_ms,
        tokens=ROWS_PER_STEP * row.context,
        micro_rows=micro_rows,
        mfu=mfu,
        mfu_causal=mfu_causal,
        memory_gb=memory_gb,
        first_loss=losses[0],
        last_loss=losses[-1],
        predicted_ms=expected,
        gap=None if expected is None else entry.median_ms / expected - 1,
        problems=found,
    )


def peak_memory(run: Run, place: Place) -> float | None:
    if place.device != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats()
    run()
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
    ours, plain = (first_row_loss(state.model, micro_batch, kernels) for kernels in (AUTO, "torch"))
    if not abs(ours - plain) <= LOSS_TOLERANCE:
        found.append(f"the loss is {ours:.4f} by kernels, {plain:.4f} without")
    return found


def first_row_loss(model: Decoder, micro_batch: tuple[Tensor, Tensor], kernels: str) -> float:
    """Per token, of the first row; not compiled, so that nothing is compiled for it."""
    with dispatch.chosen(kernels), torch.compiler.set_stance("force_eager"):
        loss_sum, n_tokens = model.loss(*(part[:1] for part in micro_batch))
    return float(loss_sum / n_tokens)


def _finite(value: float) -> bool:
    return abs(value) < float("inf")
