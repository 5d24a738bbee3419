"""train.cuda_graphs without a GPU: where it is refused, what reaches torch, and that a step stays what it was."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ngpt_train.config import load_config
from ngpt_train.config.schema import Config
from ngpt_train.core.errors import ConfigError
from ngpt_train.data.dataset import Tokens
from ngpt_train.data.rows import NextToken, RowFormat
from ngpt_train.distributed import layouts
from ngpt_train.distributed.compilation import check_cuda_graphs
from ngpt_train.evaluation.validation import Validation
from ngpt_train.models import export_weights
from ngpt_train.training import build_state, train_step
from ngpt_train.training.checkpoint import Checkpoints, load_state
from ngpt_train.training.state import TrainState
from tests.properties.architectures import SMALL
from tests.properties.runs import micro_batches, run_config
from tests.reference.training import Recipe
from tests.stored import save_state
from tests.unit.training.test_waits import Waits

ROWS, T, MICRO_BATCHES = 6, 16, 3
RECIPE = Recipe(20, 1e-2, 0.9, 0.95, 1e-8, weight_decay=0.0, clip_norm=1.0, warmup_steps=0)
NAMES = ["gpt", "ngpt", "gpt_encoder_decoder", "ntransformer"]
Calls = list[dict[str, Any]]


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """What blocks are compiled with, which they are not; the device passes for a GPU."""
    calls: Calls = []
    monkeypatch.setattr(nn.Module, "compile", lambda _, **kwargs: calls.append(kwargs))
    monkeypatch.setattr(layouts, "check_cuda_graphs", lambda _: None)
    return calls


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """One entry for each step of torch's graphs that is begun."""
    begun: list[None] = []
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: begun.append(None))
    return begun


def config(name: str, compiled: bool = False, cuda_graphs: bool = False) -> Config:
    """On the CPU, which a user could not ask for. A name may end in " with dropout"."""
    micro_rows = ROWS // MICRO_BATCHES
    name, _, dropout = name.partition(" with ")
    options = [f"model.{place}_dropout=0.1" for place in ("embedding", "residual", "attention")] if dropout else []
    given = run_config(
        name, SMALL, RECIPE, rows=ROWS, context=T, micro_rows=micro_rows, parallel="single", options=options
    )
    return replace(given, train=replace(given.train, compile=compiled, cuda_graphs=cuda_graphs))


def with_graphs(name: str) -> TrainState:
    return build_state(config(name, compiled=True, cuda_graphs=True))


def batches(name: str, step: int) -> list[tuple[Tensor, ...]]:
    return micro_batches(name.partition(" with ")[0], SMALL, ROWS, T, step, MICRO_BATCHES)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["train.device=cpu"], ["train.device=cpu", "CPUs have no CUDA graphs", "train.device=cuda"]),
        (["train.compile=false"], ["train.compile=false", "only compiled blocks", "train.compile=true"]),
        (["parallel=fsdp"], ["parallel.kind=fsdp", "one process", "parallel=single"]),
        (["parallel=ddp"], ["parallel.kind=ddp", "one process", "parallel=single"]),
        (["model=powernorm"], ["model.norm=pn", "statistics", "model.norm=layer"]),
    ],
    ids=lambda value: value[0],
)
def test_where_it_does_not_fit(options: list[str], says: list[str]) -> None:
    """Caught: a key without an effect, and layouts whose memory graphs would write over."""
    with pytest.raises(ConfigError) as error:
        load_config(["train.cuda_graphs=true", *options])
    for words in ("train.cuda_graphs=true", "train.cuda_graphs=false", *says):
        assert words in str(error.value)


def test_where_it_fits() -> None:
    """Caught: a refusal too many; parallel=auto, which is ddp or fsdp on several ranks; a run that is slow in silence,
    because the GPU was not found."""
    for options in ([], ["model=powernorm", "model.norm=layer"], ["train.activation_checkpointing=full"]):
        load_config(["train.cuda_graphs=true", *options])
    with pytest.raises(ConfigError, match=r"train\.cuda_graphs=true, parallel\.kind=auto: only one.*there are 2"):
        load_config(["train.cuda_graphs=true"], world_size=2)
    with pytest.raises(ConfigError, match=r"train\.cuda_graphs=true: the device is cpu.*\n.*train\.cuda_graphs=false"):
        with_graphs("gpt")
    check_cuda_graphs(torch.device("cuda"))


@pytest.mark.parametrize(("cuda_graphs", "mode"), [(True, "reduce-overhead"), (False, None)])
def test_what_torch_is_asked_for(pretended: Calls, cuda_graphs: bool, mode: str | None) -> None:
    """Caught: a key that does not reach torch.compile, and graphs that nobody asked for."""
    build_state(config("ngpt", compiled=True, cuda_graphs=cuda_graphs))
    assert pretended == [{"dynamic": False, "mode": mode}] * SMALL.n_layers


@pytest.mark.parametrize("name", [*NAMES, "ntransformer with dropout"])
def test_a_step_is_what_it_was(name: str, pretended: Calls, steps: list[None]) -> None:
    """Bit for bit, with accumulation. Caught: gradients of the step before that are added to, and an optimizer that
    takes zeros for no gradient."""
    plain, graphs = build_state(config(name)), with_graphs(name)
    for step in range(4):
        expected, result = (train_step(state, batches(name, step)) for state in (plain, graphs))
        assert torch.equal(result.loss, expected.loss)
        assert torch.equal(result.grad_norm, expected.grad_norm)
    weights = export_weights(plain.model)
    assert all(torch.equal(x, weights[key]) for key, x in export_weights(graphs.model).items())


@pytest.mark.parametrize("name", NAMES)
def test_gradients_stay_where_they_are(name: str, pretended: Calls, steps: list[None]) -> None:
    """Caught: memory of a graph in .grad, which the next micro batch overwrites: in each backward pass, what arrives is
    added to memory that was there before, and that no graph knows; a beginning, or held gradients, that ask the
    device."""
    state = with_graphs(name)

    def check_held(*_: Any) -> None:
        assert all(parameter.grad is not None for parameter in state.model.parameters())

    first = state.model.register_forward_pre_hook(check_held)
    train_step(state, batches(name, 0))
    first.remove()
    held = {key: parameter.grad.data_ptr() for key, parameter in state.model.named_parameters()}  # type: ignore[union-attr]
    seen = []

    def check(*_: Any) -> None:
        gradients = {key: parameter.grad for key, parameter in state.model.named_parameters()}
        assert {key: x.data_ptr() for key, x in gradients.items() if x is not None} == held
        seen.append(gradients)

    state.model.register_forward_pre_hook(check)  # before each micro batch
    state.optimizer.register_step_pre_hook(check)
    for step in range(1, 3):
        rows = batches(name, step)
        with Waits() as waits:
            train_step(state, rows)
        assert waits.seen == []
    assert len(seen) == 2 * (MICRO_BATCHES + 1)
    assert all((parameter.grad == 0).all() for parameter in state.model.parameters())


def test_every_forward_pass_begins_a_step(pretended: Calls, steps: list[None]) -> None:
    """Caught: a micro batch, or a chunk of a validation, that goes on with the graphs of the one before; a validation
    at step 0 whose every block is a step of its own."""
    state = with_graphs("ngpt")
    ids = np.random.default_rng(0).integers(0, SMALL.vocab_size, 8 * T).astype(np.uint16)
    rows = NextToken(Tokens("validation", Path("tokens"), [ids], eos=0), RowFormat(T, eos=0))
    validation = Validation(rows, np.full(SMALL.vocab_size, 2), np.arange(8))
    validation.chunk = 4
    validation.row_losses(state.model, state.world)
    assert len(steps) == 2
    train_step(state, batches("ngpt", 0))
    assert len(steps) == 2 + MICRO_BATCHES
    build_state(config("ngpt"))
    assert len(steps) == 2 + MICRO_BATCHES


def test_a_checkpoint_goes_in_and_out(tmp_path: Path, pretended: Calls, steps: list[None]) -> None:
    """Caught: gradients that are held too early, for which torch takes the optimizer's state for loaded, and one that
    the held gradients change."""

    def trained(state: TrainState, first: int, last: int) -> TrainState:
        for step in range(first, last):
            train_step(state, batches("gpt", step))
        return state

    whole = trained(with_graphs("gpt"), 0, 4)
    half = trained(with_graphs("gpt"), 0, 2)
    saved = save_state(Checkpoints(tmp_path, half.world, 1, None), half)
    resumed = with_graphs("gpt")
    load_state(saved, resumed)
    weights = export_weights(trained(resumed, 2, 4).model)
    assert all(torch.equal(x, weights[key]) for key, x in export_weights(whole.model).items())


def test_a_bad_step_leaves_no_trace_in_what_is_held(pretended: Calls, steps: list[None]) -> None:
    """Caught: gradients scaled down to zero, where a NaN stays one."""
    state = with_graphs("gpt")
    handle = next(state.model.parameters()).register_hook(lambda gradient: gradient * torch.nan)
    assert train_step(state, batches("gpt", 0)).skipped
    handle.remove()
    assert not train_step(state, batches("gpt", 1)).skipped
