"""nGPT's step beside the same step without kernels, and beside public code's way to do it.

Ratios are to full nGPT's time. Public code's way takes turns with full nGPT. A step without a kernel, an ablation,
takes turns with full nGPT and GPT; it moves full nGPT's own weights, so that these are drawn and held once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from ngpt_train.bench.gpu.predictions import COMPILE_ONLY, OPERATIONS, PUBLIC_STYLE, without
from ngpt_train.bench.gpu.steps import (
    LOSS_TOLERANCE,
    RATES,
    ROWS_PER_STEP,
    Measured,
    Place,
    Row,
    Variant,
    build,
    compiled_pair,
    describe,
    first_row_loss,
    halving_rows,
    measured,
    peak_memory,
    timed,
)
from ngpt_train.bench.interleaved import Run
from ngpt_train.bench.public_style import PublicSteps, PublicStyle, as_public
from ngpt_train.config.keys import AUTO
from ngpt_train.models.weights import export_weights
from ngpt_train.training.batch import resolve_micro_rows

WARM_UP = 2  # the first compiles
PUBLIC_ROUNDS, ABLATION_ROUNDS, FEWEST_ROUNDS = 3, 5, 2

Ablation = tuple[str, str, str | None]  # name, `kernels.kind`, and the operation whose kernel is left out
# The most important first, because time may run out.
ABLATIONS: list[Ablation] = [
    (COMPILE_ONLY, "torch", None),
    *((without(operation), AUTO, operation) for operation in OPERATIONS),
]


def run_public_style(row: Row, place: Place, say: Callable[[str], None]) -> list[Measured]:
    """nGPT as public code has it. Raises OutOfTimeError, and DeviceMemoryError where one row of tokens is too much."""
    place.check_time_for(
        row, 4 * (WARM_UP + PUBLIC_ROUNDS)
    )  # a step of ours, and one predicted to take three times that
    ours = resolve_micro_rows(ROWS_PER_STEP, AUTO, row.context, 1)

    def measure(micro_rows: int | str) -> list[Measured]:
        assert isinstance(micro_rows, int)
        ngpt = build("ngpt", row, place, min(ours, 2 * micro_rows))
        public, problems = public_steps(ngpt, micro_rows, row)
        runs: dict[str, Run] = {"ngpt": ngpt, PUBLIC_STYLE: public}
        _, entry = timed(runs, "ngpt", place, WARM_UP, PUBLIC_ROUNDS, 1)
        losses, memory = [float(loss) for loss in public.losses], peak_memory(public, place)
        if not losses[-1] < losses[0]:
            problems.append(f"the loss did not fall: {losses[0]:.4f} -> {losses[-1]:.4f}")
        return [describe(row, entry, None, ngpt.state.model, micro_rows, losses, memory, problems, place)]

    return halving_rows(
        row, max(1, ours // 2), measure, say
    )  # half, because eager mode keeps more for the backward pass


def public_steps(ngpt: Variant, micro_rows: int, row: Row) -> tuple[PublicSteps, list[str]]:
    """Public code's steps from nGPT's weights on nGPT's tokens, and the problems: a loss that differs from nGPT's."""
    state = ngpt.state
    config = state.config.model
    dtype = state.model.compute_dtype or torch.float32
    with state.world.device:
        model = PublicStyle(config, dtype)
    model.load_state_dict(as_public(export_weights(state.model)))
    tokens, targets = (torch.cat(parts) for parts in zip(*ngpt.micro_batches, strict=True))
    batches = list(zip(tokens.split(micro_rows), targets.split(micro_rows), strict=True))
    public = PublicSteps(model, RATES["ngpt"](config.d_model), batches)
    with torch.no_grad():
        theirs = float(public.loss(tokens[:1], targets[:1]))
        ours = first_row_loss(state.model, (tokens, targets), "torch")
    wrong = not abs(ours - theirs) <= LOSS_TOLERANCE
    return public, [f"the loss is {theirs:.4f}, ours {ours:.4f}"] if wrong else []


def ablation_pair(row: Row, place: Place, say: Callable[[str], None]) -> dict[str, Variant]:
    """GPT and nGPT, beside which ablations are timed. Raises what `run_public_style` raises."""
    place.check_time_for(row, 2 * WARM_UP)
    return halving_rows(row, AUTO, lambda micro_rows: compiled_pair(row, place, micro_rows), say)


def run_ablation(ablation: Ablation, pair: Mapping[str, Variant], row: Row, place: Place) -> Measured:
    """One ablation beside `pair`, from `ablation_pair`. Raises OutOfTimeError."""
    # Half of a pair's preparation: one model is compiled, none is initialised.
    place.check_time_for(row, 3 * (WARM_UP + FEWEST_ROUNDS), share_of_preparation=0.5)
    name, kernels, operation = ablation
    variant = pair["ngpt"].changed(kernels, operation)
    runs = {**pair, name: variant}
    gpt, _, entry = timed(runs, "ngpt", place, WARM_UP, ABLATION_ROUNDS, FEWEST_ROUNDS)
    return measured(row, entry, gpt, variant, place, ablated=True)
