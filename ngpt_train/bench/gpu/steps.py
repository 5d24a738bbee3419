"""Times optimizer steps of GPT and nGPT at the paper's sizes, in turn in one process, beside predicted times.

A step is forward, backward, clipping, optimizer and projection over 8 rows, which is the paper's batch of 512 over 64
GPUs. MFU = FLOPs per token * tokens/s / peak of dense bf16 products, where the FLOPs per token are 6 weights + 12 L d T
(`mfu`, PaLM's convention) or, without the masked half of attention, 6 weights + 6 L d T (`mfu_causal`).
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
TOTAL_STEPS = 1000  # of the schedule; only the first of them are taken
UNIT_TOLERANCE = 1e-3  # of a row's length, which is 1
LOSS_TOLERANCE = 1e-2  # nats per token, between two ways to compute a loss

# d_model, n_layers, n_heads, d_mlp, vocabulary
SIZES = {
    "0.5b": (1024, 24, 16, 4096, 32_000),
    "1b": (1280, 36, 20, 5120, 32_000),
    "debug": (64, 2, 2, 256, 512),
}
# Learning rates, by d_model, with which both losses fall within a few steps. A step of nGPT turns a row by about
# lr * sqrt(d_model) radians.
RATES: dict[str, Callable[[int], float]] = {"gpt": lambda d: 1e-3, "ngpt": lambda d: 0.25 / d**0.5}
PAIR = ("gpt", "ngpt")

Result = TypeVar("Result")


@dataclass(frozen=True)
class Row:
    """A row of the table: models of `size`, a key of SIZES, on rows of `context` tokens."""

    size: str
    context: int

    @property
    def name(self) -> str:
        return f"{self.size}, {self.context} tokens"


class OutOfTimeError(Exception):
    """Too little time is left before the deadline."""


@dataclass
class Place:
    """The device, and the time that is left on it."""

    device: str  # cuda or cpu
    name: str  # as torch.cuda reports it
    deadline: float  # of time.monotonic()
    preparation: float  # seconds to initialise and compile GPT and nGPT; a guess until a pair has been prepared

    def check_time_for(self, row: Row, steps: int, share_of_preparation: float = 1.0) -> None:
        """Raises OutOfTimeError where a preparation, and as many steps as long as GPT's, would pass the deadline."""
        needed = share_of_preparation * self.preparation + steps * expected_seconds((row.size, row.context), self.name)
        if time.monotonic() + needed > self.deadline:
            raise OutOfTimeError


@dataclass
class Measured:
    """The result of a variant on a row."""

    row: str
    variant: str
    entry: Entry  # of `interleaved`
    over_gpt: float | None  # median time over GPT's median time in the same rounds
    tokens: int
    micro_rows: int
    mfu: float | None
    mfu_causal: float | None
    memory_gb: float | None  # peak during a step, including the weights of the other variants
    first_loss: float
    last_loss: float
    predicted_ms: float | None
    gap: float | None  # measured time over predicted time, minus 1
    problems: list[str] = field(default_factory=list)

    def json(self) -> dict[str, Any]:
        """All fields, and those of the entry, by name, for bench.json."""
        own = {key: value for key, value in asdict(self).items() if key != "entry"}
        names = {"name": f"{self.row}: {self.variant}", "relative_to": f"{self.row}: {self.entry.relative_to}"}
        return self.entry.json() | own | names


class Variant:
    """A training state that takes steps on the same tokens each time; a call is a step and returns its tokens.

    kernels, without: as for `dispatch.chosen`. losses: of the steps so far, 0-dim, nats per token.
    """

    def __init__(self, state: TrainState, kernels: str = AUTO, without: str | None = None) -> None:
        self.state, self.kernels, self.without = state, kernels, without
        self.micro_batches = tokens_of(state)
        self.losses: list[Tensor] = []
        self.shares_weights = False  # whether another variant, whose steps this optimizer does not see, moves them too

    def __call__(self) -> float:
        with dispatch.chosen(self.kernels, self.without):
            result = train_step(self.state, self.micro_batches, untouched=not self.shares_weights)
        self.losses.append(result.loss)
        config = self.state.config
        return float(config.train.rows_per_step * config.model.context)

    def changed(self, kernels: str = AUTO, without: str | None = None) -> Variant:
        """The same weights with other kernels; its own optimizer if that one's kernel changes."""
        state = self.state
        if kernels == "torch" or without == "adam":  # build_optimizer chooses the optimizer's kernel
            with dispatch.chosen(kernels, without):
                optimizer = build_optimizer(state.model, state.model.parameter_groups(), state.config.optim)
            state = replace(state, optimizer=optimizer)
        other = Variant(state, kernels, without)
        self.shares_weights = other.shares_weights = True
        return other


def make_config(architecture: str, row: Row, device: str, micro_rows: int | str = AUTO) -> Config:
    """A config without Hydra, which may not be installed."""
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
    """GPT and nGPT, compiled: each has taken one step."""
    started = time.monotonic()
    variants = {name: build(name, row, place, micro_rows) for name in PAIR}
    for variant in variants.values():
        variant()
    place.preparation = time.monotonic() - started
    return variants


def build(architecture: str, row: Row, place: Place, micro_rows: int | str) -> Variant:
    """An architecture with initial weights, which has taken no step."""
    with drawn_on(torch.device(place.device)):
        return Variant(build_state(make_config(architecture, row, place.device, micro_rows)))


@contextlib.contextmanager
def drawn_on(device: torch.device) -> Iterator[None]:
    """While the body runs, initial weights are drawn on the device, from the distributions of training.

    Training draws the same weights for every device, on the CPU. That takes seconds for each model, an eighth of the
    default budget in all.
    """
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
    """The result of `work(micro_rows)`; where the device's memory is too small, of half as many rows, and so on.

    Frees memory before each attempt. Raises DeviceMemoryError where one row is too much.
    """
    while True:
        free_memory()
        try:
            with dispatch.chosen(AUTO):  # restores the choice of kernels, which each `build_state` changes
                return work(micro_rows)
        except (torch.OutOfMemoryError, DeviceMemoryError) as error:
            used = resolve_micro_rows(ROWS_PER_STEP, micro_rows, row.context, 1)
            if used == 1:
                raise DeviceMemoryError(f"{row.name}: out of memory with one row at a time") from error
        # Outside of `except`, because the traceback holds the tensors of the failed attempt.
        micro_rows = used // 2
        say(f"{row.name}: out of memory with {used} rows at a time; again with {micro_rows}")


def free_memory() -> None:
    """Gives up compiled code and unused memory of the GPU."""
    gc.collect()
    torch._dynamo.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def timed(runs: Mapping[str, Run], relative_to: str, place: Place, warm_up: int, most: int, fewest: int) -> list[Entry]:
    """Entries of `interleaved` over `most` rounds, or as many as the deadline allows.

    warm_up: rounds before, at least one. Raises OutOfTimeError where fewer than `fewest` rounds are possible.
    """
    measure = measure_on(place)
    round_seconds = 0.0
    for _ in range(warm_up):
        started = time.monotonic()
        for run in runs.values():
            measure(run)
        round_seconds = time.monotonic() - started
    # One less, because `interleaved` runs one more round than it counts.
    rounds = min(most, int((place.deadline - time.monotonic()) / round_seconds) - 1)
    if rounds < fewest:
        raise OutOfTimeError
    return interleaved(runs, relative_to, rounds, "tokens", measure)


def measure_on(place: Place) -> Measure:
    """Wall-clock time with the device synchronized on a GPU, CPU time elsewhere."""
    return by(_synchronized) if place.device == "cuda" else by(time.process_time)


def _synchronized() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


def measured(
    row: Row, entry: Entry, gpt: Entry | None, variant: Variant, place: Place, ablated: bool = False
) -> Measured:
    """The result of a variant whose times are in `entry`, with its problems and peak memory.

    gpt: GPT's entry, if it was timed. ablated: the weights are another, checked variant's; losses need only be finite.
    """
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
    """The result from its parts. model: its FLOPs are counted. found: the problems."""
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
    """The most GB of tensors on the GPU during one more run; None on a CPU."""
    if place.device != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats()
    run()
    return torch.cuda.max_memory_allocated() / 1e9


@torch.no_grad()
def problems(state: TrainState, losses: list[float], micro_batch: tuple[Tensor, Tensor]) -> list[str]:
    """What is wrong with a variant's steps, in words: losses that are not finite or do not fall, rows off the sphere, a
    loss that is another without kernels."""
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
    """The loss, nats per token, of the first row of a micro batch, in eager mode, which spares a compilation."""
    with dispatch.chosen(kernels), torch.compiler.set_stance("force_eager"):
        loss_sum, n_tokens = model.loss(*(part[:1] for part in micro_batch))
    return float(loss_sum / n_tokens)


def _finite(value: float) -> bool:
    return abs(value) < float("inf")
