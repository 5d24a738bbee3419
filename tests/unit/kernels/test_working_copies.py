"""The optimizer's bf16 copies change nothing but the time: training is as with masters that are cast at each use."""

import copy
import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ngpt_train.data.loader import Position
from ngpt_train.kernels import dispatch
from ngpt_train.models import export_weights, load_weights
from ngpt_train.models.layers.linear import FusedLinear, cast_linears
from ngpt_train.optim.row_adam import RowAdam
from ngpt_train.training import build_state, train_step
from ngpt_train.training.checkpoint import Checkpoints, load_state
from ngpt_train.training.hooks import TrainingRun
from ngpt_train.training.hooks.stopping import StopRequest
from ngpt_train.training.loop import train as train_loop
from ngpt_train.training.state import TrainState
from tests.properties.architectures import ARCHITECTURES, VARIANTS, Size, jittered
from tests.properties.runs import held, rows_of, run_config, text_like_rows
from tests.reference.training import Recipe
from tests.stored import save_state, stored_tensors

pytestmark = pytest.mark.skipif(not dispatch.interpreted(), reason="models are on the CPU, as the interpreter")
ROWS, T = 4, 16
TINY = Size(32, n_layers=2, n_heads=2, vocab_size=48, n_kv_heads=1, d_mlp=40, n_encoder_layers=1, source_context=4)
RECIPE = Recipe(20, 2e-2, 0.9, 0.95, 1e-8, weight_decay=0.0, clip_norm=0.5, warmup_steps=0)
# Products by themselves, as nGPT's gate, cross-attention's and MLPs with biases; blocks that are computed again.
RUNS = [("ngpt", []), ("ntransformer", []), ("normformer", []), ("gpt", ["train.activation_checkpointing=full"])]


@pytest.fixture(autouse=True)
def exact() -> Iterator[None]:
    """The steps of RowAdam in PyTorch: Triton's interpreter cuts bf16 off where GPUs round."""
    with dispatch.chosen("torch"):
        yield
    if dist.is_initialized():
        dist.destroy_process_group()


def built(
    name: str, *options: str, copies: bool = True, parallel: str = "single", kernel: str = "triton", dtype: str = "bf16"
) -> TrainState:
    """Two micro batches a step."""
    given = run_config(
        name, TINY, RECIPE, rows=ROWS, context=T, micro_rows=ROWS // 2, parallel=parallel, options=options
    )
    given.kernels.kind, given.train.precision = kernel, dtype
    with dispatch.chosen(kernel):
        # Of Triton's kernels Adam's alone: DDP's first pass would take its time in the interpreter.
        dispatch.switch_off(dict.fromkeys(["sphere_step", "swiglu", "rotary", "linear_cross_entropy"], "a test"))
        state = build_state(given)
    if not copies:
        state.optimizer.copies.linears.clear()
    return state


def train(state: TrainState, steps: int, untouched: bool = True) -> list[float]:
    """Losses; step k has the same batch in every run."""
    losses = []
    for step in range(state.step, state.step + steps):
        batch = rows_of(state.config.model.name, ROWS, T, TINY, step)
        micro_batches = list(zip(*(part.split(ROWS // 2) for part in batch), strict=True))
        losses.append(train_step(state, micro_batches, untouched).loss.item())
    return losses


def assert_same(state: TrainState, other: TrainState) -> None:
    expected = held(other)
    assert held(state).keys() == expected.keys()
    for key, x in held(state).items():
        assert torch.equal(x, expected[key]), key


class Casts(TorchDispatchMode):
    """Counts the casts of each matrix to bf16."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.names = {x.data_ptr(): name for name, x in model.named_parameters() if x.ndim == 2}
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and kwargs.get("dtype") == torch.bfloat16:
            self.seen[self.names.get(args[0].data_ptr(), "")] += 1
        return func(*args, **kwargs)


@pytest.mark.parametrize(
    ("name", "options", "untouched"), [*((*run, False) for run in RUNS), ("ntransformer", [], True)]
)
def test_trains_as_without(name: str, options: list[str], untouched: bool) -> None:
    """To the last bit, a skipped step in between. Caught: a gradient that is rounded or lost on the way to a master, a
    copy of the weights before the step or before the division, a copy left behind by a skipped step."""
    ours, plain = built(name, *options), built(name, *options, copies=False)
    assert ours.optimizer.copies.linears
    for step in range(4):
        hooks = [s.model.embedding.register_hook(lambda gradient: gradient * torch.nan) for s in (ours, plain)]
        for hook in hooks if step != 2 else []:
            hook.remove()
        assert train(ours, 1, untouched) == train(plain, 1)
        for hook in hooks:
            hook.remove()
        assert_same(ours, plain)
        for linear in ours.optimizer.copies.linears:
            assert torch.equal(ours.optimizer.copies.current(linear.matrix), linear.matrix.bfloat16())
    assert {int(ours.optimizer.state[x]["step"]) for x in ours.model.parameters()} == {3}


def test_the_kernel_writes_them() -> None:
    """Caught: copies that the optimizer's kernel is not given."""
    state = built("ngpt")
    step = state.optimizer.step

    def on_triton() -> None:
        with dispatch.chosen("triton"):
            step()

    state.optimizer.step = on_triton
    train(state, 2)
    for linear in state.optimizer.copies.linears:
        written = state.optimizer.copies.current(linear.matrix)
        torch.testing.assert_close(written.float(), linear.matrix.detach(), rtol=2**-7, atol=0)


def test_under_ddp() -> None:
    """Whose buckets were put in order without copies. Caught: a wrapper that hides the model from them."""
    ours, plain = built("ngpt", parallel="ddp"), built("ngpt", copies=False)
    assert ours.forward is not ours.model
    with Casts(ours.model) as casts:
        assert train(ours, 3) == train(plain, 3)
    assert {casts.seen[name] for name in blocks_of(ours)} == {1}
    assert_same(ours, plain)


def blocks_of(state: TrainState) -> set[str]:
    embeddings = {"embedding", "output", "source_embedding", "positions"}
    return {name for name, x in state.model.named_parameters() if x.ndim == 2} - embeddings


@pytest.mark.parametrize(("name", "options"), RUNS)
def test_what_is_cast(name: str, options: list[str]) -> None:
    """Casts of a block's matrix in a step of two micro batches. Caught: a copy that nobody reads, a matrix without one,
    copies made in each forward pass, a recomputed block that casts."""
    state, plain = built(name, *options), built(name, *options, copies=False)
    counts = []
    for one, untouched in ((plain, True), (state, False), (state, False), (state, True)):
        with Casts(one.model) as casts:
            train(one, 1, untouched)
        counts.append({casts.seen[matrix] for matrix in blocks_of(one)})
    assert counts == [{4 if options else 2}, {1}, {1}, {0}]


def test_the_loop_casts_nothing() -> None:
    """After the first forward pass of all. Caught: a loop that does not say that it leaves weights alone."""
    state = built("ngpt", "train.stop_at=3", "logging.every=99")
    batch = text_like_rows(ROWS, T, TINY.vocab_size, seed=0)
    batches = itertools.repeat(([batch], Position(0, 0, {}, {}, {})))
    with Casts(state.model) as casts:
        train_loop(TrainingRun(state, batches, StopRequest(None)))
    assert state.step == 3
    assert {casts.seen[name] for name in blocks_of(state)} == {1}


def test_who_has_copies() -> None:
    """Caught: copies where products are in fp32, where FSDP2 casts, where rows are divided at each use, or for torch's
    optimizers."""
    assert len(built("ngpt").optimizer.copies.linears) == 2 * 4
    for state in (
        built("ngpt", dtype="fp32"),
        built("ngpt", parallel="fsdp"),
        built("ngpt", "model.constraint=parametrization"),
    ):
        assert isinstance(state.optimizer, RowAdam)
        assert not state.optimizer.copies.linears
    assert not isinstance(built("ngpt", kernel="torch").optimizer, RowAdam)
    for architecture in (ARCHITECTURES | VARIANTS).values():
        model, _ = jittered(architecture, TINY, torch.float32)
        inside = {id(p) for block in model.blocks() for p in block.parameters() if p.ndim == 2}
        multiplied = {id(x.matrix) for x in model.modules() if isinstance(x, FusedLinear) and x.gains is not None}
        assert {id(linear.matrix) for linear in cast_linears(model)} in (inside - multiplied, set())


def torchs_adam(state: TrainState) -> None:
    """Moves weights without changing torch's version counts."""
    optimizer = torch.optim.AdamW(state.model.layers.parameters(), lr=0.1, fused=True)
    for x in state.model.layers.parameters():
        x.grad = torch.ones_like(x)
    optimizer.step()
    optimizer.zero_grad()


def in_place(state: TrainState) -> None:
    if os.environ.get("NGPT_TESTS_ROUNDING"):
        pytest.skip("under a dispatch mode torch's _foreach_mul_ does not change the versions of its outputs")
    with torch.no_grad():
        torch._foreach_mul_([x for x in state.model.parameters() if x.ndim == 2], 2.0)


def other_memory(state: TrainState) -> None:
    for x in state.model.parameters():
        x.data = x.data * 2
        x.data = x.data * 2  # which may lie where the first ones were


def loaded(state: TrainState) -> None:
    state.model.load_state_dict({name: 2 * x for name, x in state.model.state_dict().items()})


def imported(state: TrainState) -> None:
    load_weights(state.model, {name: 2 * x for name, x in export_weights(state.model).items()})


def behind(state: TrainState) -> None:
    for x in state.model.parameters():
        x.data.mul_(2)


def projected(state: TrainState) -> None:
    in_place(state)
    state.model.project_()
    state.model.layers[0].mlp.w_down.matrix.detach()[0] = 0.5


COUNTED = [in_place, other_memory, loaded, imported, projected]


@pytest.mark.parametrize(("write", "untouched"), [*((w, True) for w in COUNTED), (behind, False), (torchs_adam, False)])
def test_what_others_write_is_seen(write: Callable[[TrainState], None], untouched: bool) -> None:
    """In the next step and in evaluation. Caught: a loss, or a gradient, at weights that are no longer there."""
    ours, plain = built("ngpt"), built("ngpt", copies=False)
    train(ours, 2)
    before = train(plain, 2)
    for state in (ours, plain):
        write(state)
    batch = text_like_rows(ROWS, T, TINY.vocab_size, seed=9)
    for evaluated in (ours.model, copy.deepcopy(ours.model)):
        with torch.no_grad():
            assert torch.equal(evaluated.loss(*batch)[0], plain.model.loss(*batch)[0])
    losses = train(ours, 1, untouched)
    assert losses == train(plain, 1) != before[-1:]
    assert_same(ours, plain)
    assert train(ours, 1) == train(plain, 1)


def test_a_skipped_step_renews_no_copy() -> None:
    """A training loop of somebody's own. Caught: weights that others wrote, and a copy that seems to be theirs because
    the optimizer passed by."""
    ours, plain = built("gpt"), built("gpt", copies=False)
    for state in (ours, plain):
        train(state, 1)
        in_place(state)
        for x in state.model.parameters():
            x.grad = torch.ones_like(x)
        state.optimizer.found_inf = torch.ones(())
        state.optimizer.step()
        state.optimizer.zero_grad()
    assert train(ours, 2) == train(plain, 2)
    assert_same(ours, plain)


def test_nothing_of_them_outside_of_a_step() -> None:
    """Caught: a model that is copied, saved or evaluated with copies, also after a step that failed."""
    state = built("ngpt")
    seen = []

    def look(*_: Any) -> None:
        seen.append([x.bf16_copy is not None for x in state.optimizer.copies.linears])
        raise MemoryError

    train(state, 1)
    hook = state.model.layers[1].register_forward_hook(look)
    with pytest.raises(MemoryError):
        train(state, 1)
    hook.remove()
    assert all(seen[0])
    assert all(x.bf16_copy is None for x in cast_linears(state.model))


def test_resume(tmp_path: Path) -> None:
    """Caught: copies in a checkpoint, or a run that goes on with copies of the weights before it was loaded."""
    states, stored = [built("ngpt"), built("ngpt", copies=False)], []
    for state in states:
        train(state, 2)
        directory = tmp_path / str(len(stored))
        kept = save_state(Checkpoints(directory, state.world, keep_last=1, keep_every=None), state)
        stored.append({(part, name): x for part, found in stored_tensors(kept).items() for name, x in found.items()})
    assert stored[0].keys() == stored[1].keys()
    assert all(torch.equal(x, stored[1][name]) for name, x in stored[0].items())
    resumed = built("ngpt")
    train(resumed, 1)
    load_state(kept, resumed)
    assert train(resumed, 2) == train(states[0], 2)
    assert_same(resumed, states[0])


def test_gradients_are_those_of_a_cast() -> None:
    """Caught: a gradient that is lost or rounded once more, a copy in another dtype than is wanted."""
    x = torch.randn(5, 8).bfloat16()
    found = []
    for copied in (False, True):
        linear = FusedLinear({"w": 6}, 8)
        nn.init.normal_(linear.matrix, generator=torch.Generator().manual_seed(0))
        if copied:
            linear.bf16_copy = linear.matrix.detach().bfloat16()
            assert torch.equal(linear.weight(torch.float16), linear.matrix.half())
        used = linear.weight(torch.bfloat16)
        (x @ used.T).square().sum().backward()
        found.append((used.detach(), linear.matrix.grad))
    for plain, ours in zip(*found, strict=True):
        assert torch.equal(ours, plain)
        assert (ours.dtype, ours.stride()) == (plain.dtype, plain.stride())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_one_graph_for_all_blocks(recompute: str) -> None:
    """Caught: compiled blocks that take no copies in, or for whose copies the compiler compiles again in each block or
    step."""
    ours, eager = (built("ngpt", f"train.activation_checkpointing={recompute}") for _ in range(2))
    torch.compiler.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    given: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        given.append(sum(x.dtype == torch.bfloat16 and x.ndim == 2 for x in inputs))
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    for block in ours.model.blocks():
        block.compile(dynamic=False, fullgraph=True, backend=backend)
    assert train(ours, 3) == pytest.approx(train(eager, 3), rel=1e-4)
    assert given == [4]  # one graph, with the copies among what goes in
    assert counters["stats"]["unique_graphs"] == 1
