"""Which losses spike, that a guard forgets nothing on a resume, and what is said of too little memory."""

import json
import math
from typing import Any

import pytest
import torch

from ngpt_train.config.sections.records import GuardsConfig
from ngpt_train.training import StepResult
from ngpt_train.training.guards import MAX_SKIPPED_IN_A_ROW, DeviceMemoryError, Guards, explain_out_of_memory

CPU = torch.device("cpu")
ON = GuardsConfig(rollback=True, spike_window=16, spike_height=10)


def result(loss: float) -> StepResult:
    """Of a step with that loss; one that is not finite was skipped."""
    value = torch.tensor(loss, dtype=torch.float64)
    number, skipped = torch.tensor(1), ~value.isfinite()
    return StepResult(value, value, number, skipped, 0.1, None, value)


def noise(n: int) -> list[float]:
    """Losses of a model that learns: from 6 to 2, with a deviation of 0.05."""
    draws = torch.randn(n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return [2 + 4 * math.exp(-step / 20) + 0.05 * draw for step, draw in enumerate(draws.tolist())]


def bad_step(losses: list[float], config: GuardsConfig = ON) -> int:
    guards = Guards(config, CPU)
    for step, loss in enumerate(losses, start=1):
        guards.add(result(loss), step)
    return guards.bad_step()


def test_what_a_spike_is() -> None:
    """Caught: losses that fall, noise, or the first few taken for spikes; a spike that is part of its own median, one
    that a fall before it hides, a rise of less than 10 deviations of at least 1 %."""
    losses = noise(200)
    assert bad_step(losses) == 0
    assert bad_step([*losses[:3], 50.0]) == 0, "too few to judge by"
    for step in (30, 90, 200):
        median = sorted(losses[step - 17 : step - 1])[8]
        assert bad_step([*losses[: step - 1], median + 2.0, *losses[step:]]) == step
    assert bad_step([*[2.0] * 20, 2.19, 2.21]) == 22
    assert bad_step([*[2.0] * 20, 2.21], GuardsConfig(rollback=False, spike_window=16)) == 0


def test_ten_skipped_steps() -> None:
    skipped = [math.nan] * (MAX_SKIPPED_IN_A_ROW - 1)
    assert bad_step([*noise(20), *skipped, 2.0, *skipped]) == 0
    assert bad_step([*noise(20), *skipped, math.inf, math.nan]) == 20 + MAX_SKIPPED_IN_A_ROW
    guards = Guards(ON, CPU)
    for step, loss in enumerate([*noise(20), *skipped, math.nan], start=1):
        guards.add(result(loss), step)
    assert guards.why().startswith("10 steps in a row, up to step 30,")
    assert guards.facts()["loss"] is None


@pytest.mark.parametrize(
    "end", [[*[math.nan] * 6, *noise(40)[34:], 5.5], [math.nan] * 10], ids=["a spike", "ten skipped steps"]
)
@pytest.mark.parametrize("resumed_at", range(1, 34, 2))
def test_a_resume_forgets_nothing(resumed_at: int, end: list[float]) -> None:
    """After any step, through JSON, to the bit. Caught: losses or skipped steps that a resume forgets or rounds."""
    losses = [*noise(24), *end]

    def run(parts: list[list[float]]) -> tuple[Any, ...]:
        stored, step = {}, 0
        for part in parts:
            guards = Guards(ON, CPU)
            guards.load_state_dict(json.loads(json.dumps(stored)))
            for loss in part:
                step += 1
                guards.add(result(loss), step)
            stored = guards.state_dict()
        return guards.bad_step(), stored

    assert run([losses[:resumed_at], losses[resumed_at:]]) == run([losses])
    assert run([losses])[0] == len(losses)


def test_a_checkpoint_of_before_has_none() -> None:
    guards = Guards(ON, CPU)
    guards.load_state_dict({})
    assert guards.state_dict() == {"skipped_in_a_row": 0, "losses": []}
    short = Guards(GuardsConfig(rollback=True, spike_window=4), CPU)
    short.load_state_dict({"losses": [1.0, 2.0, 3.0, 4.0, 5.0]})
    assert short.state_dict()["losses"] == [2.0, 3.0, 4.0, 5.0]


def test_out_of_memory_names_the_key() -> None:
    message = r"train.micro_rows=8: out of memory.*Try train.micro_rows=4"
    with pytest.raises(DeviceMemoryError, match=message), explain_out_of_memory(8):
        torch.empty(1 << 60)  # what the CPU allocator says for real
    with pytest.raises(DeviceMemoryError, match="micro_rows is 1 already"), explain_out_of_memory(1):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    with pytest.raises(RuntimeError, match=r"^shapes differ$"), explain_out_of_memory(8):
        raise RuntimeError("shapes differ")
