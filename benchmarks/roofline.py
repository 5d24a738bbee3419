"""Times an optimizer step on a CPU beside its own matrix products and attention, which are its lower bound.

    python -m benchmarks.roofline [GROUP=OPTION ...] [KEY=VALUE ...] [--out FILE]

torch.profiler records the products and attention of one step, forward and backward. They are replayed on random numbers
of the same shapes, strides and dtypes, each call on memory of its own, in turn with the step. Then come the
operators that take most of the rest.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.common import Entry, Part, Run, elapsed, interleaved, main
from ngpt_train.config import load_config
from ngpt_train.study.random_steps import steps_of, with_vocabulary
from ngpt_train.training import build_state

ROUNDS = 10
WARM_UP = 3
OPERATORS = 8  # of the rest, that are printed
REPLAYED = (
    *("mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_"),
    *("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward"),
)


def bench(overrides: Sequence[str]) -> Iterator[Entry | Part]:
    """The replayed calls, the step as a multiple of their time, and operators of the rest."""
    config = load_config([*overrides, "train.device=cpu"], world_size=1)
    state = build_state(with_vocabulary(config))
    step = steps_of(state)
    for _ in range(WARM_UP):
        step()
    profiled = profile_of(step)
    calls = [Call(event) for event in events_of(profiled) if is_replayed(event.name)]
    tokens = step()

    def replay() -> float:
        for call in calls:
            call()
        return tokens

    runs = {"products and attention": replay, "step": step}
    yield from interleaved(runs, "products and attention", ROUNDS, "tokens", elapsed(state.world.device))
    totals = profiled.key_averages()
    whole = sum(total.self_cpu_time_total for total in totals)
    rest = [total for total in totals if not is_replayed(total.key)]
    for total in sorted(rest, key=lambda total: -total.self_cpu_time_total)[:OPERATORS]:
        microseconds = total.self_cpu_time_total
        yield Part(total.key, microseconds / 1e3, microseconds / whole, total.count)


def profile_of(run: Run) -> profile:
    """`run` once, with the shapes of the arguments of its operators."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
        run()
    return profiled


def events_of(profiled: profile) -> Iterator[Any]:
    """All events in the order of their starts, an operator before those that it calls."""
    assert profiled.profiler is not None
    assert profiled.profiler.kineto_results is not None
    waiting = list(reversed(profiled.profiler.kineto_results.experimental_event_tree()))
    while waiting:
        event = waiting.pop()
        yield event
        waiting += reversed(event.children)


def is_replayed(name: str) -> bool:
    return name.removeprefix("aten::") in REPLAYED


class Call:
    """A recorded call on new tensors of the same shapes, strides and dtypes."""

    def __init__(self, event: Any) -> None:
        given = [memory_like(one) if hasattr(one, "sizes") else one for one in event.extra_fields.inputs]
        packet = getattr(torch.ops.aten, event.name.removeprefix("aten::"))
        # Only a call that writes into a given tensor has an argument more.
        into = len(given) > len(packet.default._schema.arguments)
        self.operator = packet.out if into else packet.default
        named = list(zip(self.operator._schema.arguments, given, strict=True))
        self.positional = [value for argument, value in named if not argument.kwarg_only]
        self._by_name = {argument.name: value for argument, value in named if argument.kwarg_only}

    def __call__(self) -> None:
        self.operator(*self.positional, **self._by_name)


def memory_like(recorded: Any) -> torch.Tensor:
    """Small random numbers: exp of their products overflows nowhere."""
    return torch.empty_strided(recorded.sizes, recorded.strides, dtype=recorded.dtype).normal_(0, 0.02)


if __name__ == "__main__":
    sys.exit(main(__doc__, bench))
