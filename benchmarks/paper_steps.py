"""Times optimizer steps of GPT and nGPT at the paper's sizes on a GPU, and of nGPT without its kernels.

    python -m benchmarks.paper_steps [--out FILE]          # one GPU with 80 GB, with torch and Triton alone
    python -m benchmarks.paper_steps --rows debug:64 --compared debug:64 --device cpu          # tries the same on a CPU

For each of `--rows`, GPT and nGPT take turns. At that of `--compared` full nGPT then takes turns with nGPT as public
code has it, and with nGPT without any kernel, and without one after the other; "" leaves this out.

A step is forward, backward, clipping, optimizer and projection over 8 rows, which is the paper's batch of 512 over 64
GPUs, of the same random tokens each time. Exit code 4: losses do not fall or are not finite, rows are off the sphere,
or the loss is another without kernels. MFU = FLOPs per token * tokens/s / peak of dense bf16 products, where the FLOPs
per token are 6 weights + 12 L d T or, without the masked half of attention (causal), 6 weights + 6 L d T.
"""

from __future__ import annotations

import contextlib
import gc
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.common import (
    Entry,
    WrongResultError,
    default_device,
    elapsed,
    interleaved,
    main,
    peak_memory_gb,
    utilization,
)
from benchmarks.public_style import PublicSteps, PublicStyle, as_public
from ngpt_train.config.architectures import architectures
from ngpt_train.config.keys import AUTO
from ngpt_train.config.schema import Config
from ngpt_train.kernels import dispatch
from ngpt_train.models import Decoder, weights
from ngpt_train.models.weights import export_weights
from ngpt_train.optim.optimizer import build_optimizer
from ngpt_train.study.random_steps import tokens_of
from ngpt_train.training import TrainState, build_state, train_step

ROWS_PER_STEP = 8
WARM_UP, ROUNDS, PUBLIC_ROUNDS, ABLATION_ROUNDS = 3, 10, 3, 5
TOTAL_STEPS = 1000  # of the schedule; only the first of them are taken
UNIT_TOLERANCE = 1e-3  # of a row's length, which is 1
LOSS_TOLERANCE = 1e-2  # nats per token, between two ways to compute a loss

# d_model, n_layers, n_heads, d_mlp, vocabulary
SIZES = {
    "125m": (768, 12, 12, 2048, 32_000),
    "0.5b": (1024, 24, 16, 4096, 32_000),
    "1b": (1280, 36, 20, 5120, 32_000),
    "debug": (64, 2, 2, 256, 512),
}
# Learning rates, by d_model, with which both losses fall within a few steps. A step of nGPT turns a row by about
# lr * sqrt(d_model) radians.
RATES: dict[str, Callable[[int], float]] = {"gpt": lambda d: 1e-3, "ngpt": lambda d: 0.25 / d**0.5}
# Operations that can run without their kernel, by their names in `kernels.dispatch`.
OPERATIONS = ("swiglu", "sphere_step", "rotary", "adam", "linear_cross_entropy")
PUBLIC_STYLE = "ngpt as public code has it"
# Each comparison compiles the blocks again. At torch's default limit of recompilations a block would go on in eager
# mode, at another speed and without a word.
COMPILING: dict[str, Any] = {"recompile_limit": 64, "fail_on_recompile_limit_hit": True}


def bench(rows: str, compared: str, device: str) -> Iterator[Entry]:
    """rows, compared: SIZE:TOKENS, of `rows` several with commas. Raises WrongResultError."""
    with torch._dynamo.config.patch({key: x for key, x in COMPILING.items() if hasattr(torch._dynamo.config, key)}):
        for row in rows.split(","):
            variants: dict[str, Variant] = {}
            try:
                variants |= {name: build(name, row, device) for name in ("gpt", "ngpt")}
                entries = times(row, variants, "gpt", ROUNDS)
            except torch.OutOfMemoryError as error:  # the rows after it may be smaller
                print(f"{row}: not measured: {error}", file=sys.stderr)
                continue
            finally:
                variants.clear()
            yield from entries
        if compared:
            ngpt = build("ngpt", compared, device)
            public = public_steps(ngpt, max(1, ngpt.state.micro_rows // 2))
            yield times(compared, {"ngpt": ngpt, PUBLIC_STYLE: public}, "ngpt", PUBLIC_ROUNDS)[1]
            del public
            ablations: list[tuple[str, str, str | None]] = [("ngpt, kernels=torch", "torch", None)]
            ablations += [(f"ngpt without {operation}", AUTO, operation) for operation in OPERATIONS]
            for name, kernels, without in ablations:
                runs = {"ngpt": ngpt, name: ngpt.changed(kernels, without)}
                yield times(compared, runs, "ngpt", ABLATION_ROUNDS)[1]


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

    def check(self) -> None:
        """Raises WrongResultError for losses that are not finite, and, but where another variant moves the weights,
        for those that do not fall, rows off the sphere, and a loss that is another without kernels."""
        losses = [float(loss) for loss in self.losses]
        if not all(map(math.isfinite, losses)):
            raise WrongResultError(f"a loss is not finite: {losses}")
        if self.shares_weights:
            return
        if not losses[-1] < losses[0]:
            raise WrongResultError(f"the loss did not fall: {losses[0]:.4f} -> {losses[-1]:.4f}")
        model = self.state.model
        if model.constraint == "sphere":
            off = max(float((p.detach().norm(dim=-1) - 1).abs().max()) for p in model.parameters() if p.ndim == 2)
            if not off <= UNIT_TOLERANCE:
                raise WrongResultError(f"rows are off the sphere by {off:.1e}")
        ours, plain = (first_row_loss(model, self.micro_batches[0], kernels) for kernels in (AUTO, "torch"))
        if not abs(ours - plain) <= LOSS_TOLERANCE:
            raise WrongResultError(f"the loss is {ours:.4f} by kernels, {plain:.4f} without")


def times(row: str, runs: Mapping[str, Variant | PublicSteps], relative_to: str, rounds: int) -> list[Entry]:
    """An entry for each of `runs` in turn, of which one is called `relative_to`, after checks of what it computes."""
    found = []
    for _ in range(WARM_UP):  # the first one compiles
        for run in runs.values():
            run()
    base, of = runs[relative_to], row.replace(":", ", ") + " tokens: "
    assert isinstance(base, Variant)
    device = base.state.world.device
    for entry in interleaved(runs, relative_to, rounds, "tokens", elapsed(device), of):
        run = runs[entry.name.removeprefix(of)]
        run.check()
        model = run.state.model if isinstance(run, Variant) else base.state.model
        assert entry.rate is not None
        more: dict[str, Any] = {
            "mfu": utilization(model, entry.rate, device),
            "mfu_causal": utilization(model, entry.rate, device, causal=True),
            "memory_gb": peak_memory_gb(run, device),
        }
        more |= {"micro_rows": len(run.micro_batches[0][0]), "losses": [float(run.losses[n]) for n in (0, -1)]}
        found.append(replace(entry, more=more))
    return found


def build(architecture: str, row: str, device: str) -> Variant:
    """An architecture with initial weights, which has taken no step. Frees what others before it have left."""
    gc.collect()
    torch._dynamo.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    with drawn_on(torch.device(device)):
        return Variant(build_state(make_config(architecture, row, device)))


def make_config(architecture: str, row: str, device: str) -> Config:
    """A config without Hydra, which may not be installed. row: SIZE:TOKENS."""
    size, _, context = row.partition(":")
    d_model, n_layers, n_heads, d_mlp, vocab_size = SIZES[size]
    model = architectures()[architecture]
    config = Config(model=model(architecture, d_model, n_layers, n_heads, None, d_mlp, vocab_size, int(context)))
    config.train.steps, config.train.batch_rows = TOTAL_STEPS, ROWS_PER_STEP
    config.train.device = device
    config.optim.name = "adamw" if architecture == "gpt" else "adam"
    config.optim.lr, config.optim.weight_decay = RATES[architecture](d_model), 0.0
    config.schedule.warmup_steps = 0
    return config


@contextlib.contextmanager
def drawn_on(device: torch.device) -> Iterator[None]:
    """While the body runs, initial weights are drawn on the device, from the distributions of training.

    Training draws the same weights for every device, on the CPU. That takes seconds for each model.
    """
    generator = torch.Generator(device).manual_seed(0)

    def drawn(seed: int, path: str, shape: tuple[int, ...], std: float) -> Tensor:
        return torch.empty(shape, device=device).normal_(std=std, generator=generator)

    with mock.patch.object(weights, "by_path", drawn):
        yield


def public_steps(ngpt: Variant, micro_rows: int) -> PublicSteps:
    """Public code's steps from nGPT's weights, which have taken no step, on nGPT's tokens.

    Raises WrongResultError where the loss is not nGPT's.
    """
    state = ngpt.state
    config = state.config.model
    with state.world.device:
        model = PublicStyle(config, state.model.compute_dtype or torch.float32)
    model.load_state_dict(as_public(export_weights(state.model)))
    tokens, targets = (torch.cat(parts) for parts in zip(*ngpt.micro_batches, strict=True))
    batches = list(zip(tokens.split(micro_rows), targets.split(micro_rows), strict=True))
    public = PublicSteps(model, RATES["ngpt"](config.d_model), batches)
    with torch.no_grad():
        theirs = float(public.loss(tokens[:1], targets[:1]))
    ours = first_row_loss(state.model, (tokens, targets), "torch")
    if not abs(ours - theirs) <= LOSS_TOLERANCE:
        raise WrongResultError(f"the loss of public code's way is {theirs:.4f}, ours {ours:.4f}")
    return public


@torch.no_grad()
def first_row_loss(model: Decoder, micro_batch: tuple[Tensor, Tensor], kernels: str) -> float:
    """The loss, nats per token, of the first row of a micro batch, in eager mode, which spares a compilation."""
    with dispatch.chosen(kernels), torch.compiler.set_stance("force_eager"):
        loss_sum, n_tokens = model.loss(*(part[:1] for part in micro_batch))
    return float(loss_sum / n_tokens)


if __name__ == "__main__":
    rows = "0.5b:4096,1b:4096,0.5b:1024,0.5b:8192,1b:1024,1b:8192"
    sys.exit(main(__doc__, bench, overrides=False, rows=rows, compared="0.5b:4096", device=default_device()))
