"""The host does not wait for the device between log points."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ngpt_train.kernels import dispatch
from ngpt_train.observe.telemetry.collector import Telemetry
from ngpt_train.training import build_state, train_step
from ngpt_train.training.step import NOBODY
from tests.properties.architectures import ARCHITECTURES, Size
from tests.properties.runs import micro_batches, run_config
from tests.reference.training import Recipe

ROWS, T = 2, 8
TINY = Size(32, n_layers=1, n_heads=2, vocab_size=48, n_kv_heads=1, d_mlp=40, n_encoder_layers=1, source_context=4)
RECIPE = Recipe(20, 1e-2, 0.9, 0.95, 1e-8, weight_decay=0.0, clip_norm=1.0, warmup_steps=0)
# What on a GPU ends in a copy to the host: a number of it, or a size that depends on values.
WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "unique", "_unique2", "item"}


class Waits(TorchDispatchMode):
    """Counts them by name. Only tensors that would be on the device count; here all are."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        by_mask = name.startswith("index") and any(
            isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)
            for index in (args[1] if isinstance(args[1], (list, tuple)) else [])
        )
        if name in WAITS or by_mask:
            self.seen.append(name)
        return func(*args, **kwargs)


@pytest.fixture(autouse=True)
def chosen_anew() -> Iterator[None]:
    """What a run chooses, later tests do not find."""
    with dispatch.chosen("auto"):
        yield


OPTIONS = [("torch", 0.0), ("torch", 1e-2), ("triton", 1e-2)]
# The interpreter is slow. These two launch all kernels that the others launch.
INTERPRETED = {"gpt": [], "ntransformer": [pytest.mark.slow]}


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("name", "kernels", "z_loss"),
    [
        pytest.param(
            name, *options, marks=INTERPRETED.get(name, [pytest.mark.exhaustive]) if options[0] == "triton" else []
        )
        for name in ARCHITECTURES
        if "+" not in name
        for options in OPTIONS
    ],
)
def test_a_step_waits_for_nothing(name: str, kernels: str, z_loss: float) -> None:
    """Forward, backward, clipping, optimizer, projection and telemetry. Caught: .item(), a branch on a tensor, a
    boolean index, a tensor where torch wants a number."""
    options = [f"optim.z_loss={z_loss}", f"kernels={kernels}"]
    if z_loss:
        options += [f"model.{place}_dropout=0.1" for place in ("embedding", "residual", "attention")]
        options += ["optim.label_smoothing=0.1"]
    if z_loss and name == "ngpt":
        options += ["model.logit_preconditioning=0.5", "optim.gate_power=0.5", "optim.angle_cap=0.01"]
    config = run_config(
        name, TINY, RECIPE, rows=ROWS, context=T, micro_rows=ROWS // 2, parallel="single", options=options
    )
    state = build_state(config)
    telemetry = Telemetry(state)
    # The first step also makes the moments.
    observers = [NOBODY, telemetry] if kernels == "triton" else [NOBODY, NOBODY, telemetry]
    for step, observer in enumerate(observers):
        batches = micro_batches(name, TINY, ROWS, T, step)
        with Waits() as waits:
            result = train_step(state, batches, observer=observer)
        assert waits.seen == []
    with Waits() as waits:  # that the counter sees something
        assert result.loss.item() > 0
        result.loss[None][result.loss[None] > 0].sum()
    assert waits.seen == ["_local_scalar_dense", "index"]


@pytest.mark.parametrize("optimizer", ["normuon", "adamh", "muonh"])
def test_a_matrix_optimizer_waits_for_nothing(optimizer: str) -> None:
    """Caught: a length, a count of steps or a skipped step that the host reads."""
    options = [f"optim.name={optimizer}"]
    state = build_state(run_config("gpt", TINY, RECIPE, rows=ROWS, context=T, micro_rows=ROWS, options=options))
    for step in range(2):
        batches = micro_batches("gpt", TINY, ROWS, T, step)
        with Waits() as waits:
            train_step(state, batches)
        assert waits.seen == []
