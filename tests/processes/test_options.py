"""Options that save memory or time must not change the run."""

from pathlib import Path

import pytest
import torch

from ngpt_train.config import load_config
from ngpt_train.training import build_state, train_step
from tests.processes.runs import Numbers, arguments, assert_near, numbers, records, train


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Numbers:
    directory = tmp_path_factory.mktemp("plain")
    train(arguments(directory, corpus, "train.steps=6"))
    return numbers(directory / "runs/test")


def test_z_loss(tmp_path: Path, corpus: Path, plain: Numbers) -> None:
    """Caught: a column that is missing, or is there where the option is off; losses that contain it."""
    train(arguments(tmp_path, corpus, "train.steps=6", "optim.z_loss=0.01"))
    found = records(tmp_path / "runs/test")
    assert found[1]["loss"] == plain[1][0]
    assert found[6]["loss"] == pytest.approx(plain[6][0], rel=0.1)
    assert found[6]["loss"] != plain[6][0]
    assert all(0.01 < record["z_loss"] < 1 for record in found.values())
    assert all("z_loss" not in record for record in records(tmp_path / "runs/test", "eval").values())


@pytest.mark.exhaustive
@pytest.mark.parametrize(("layout", "recompute"), [("single", "none"), ("ddp", "full"), ("fsdp", "selective")])
def test_compile(tmp_path: Path, corpus: Path, plain: Numbers, layout: str, recompute: str) -> None:
    options = ["train.compile=true", f"train.activation_checkpointing={recompute}", f"parallel={layout}"]
    train(arguments(tmp_path, corpus, "train.steps=6", *options), ranks=1 if layout == "single" else 2)
    assert_near(numbers(tmp_path / "runs/test"), plain, 1e-5)


@pytest.mark.exhaustive
def test_the_next_start_compiles_nothing(tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On two ranks that share a cache. Caught: a directory that is named too late, or by what changes from one process
    to the next, such as a path of the run."""
    for variable in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.delenv(variable, raising=False)
    found = []
    for name in ("first", "second"):
        options = ["model=gpt", "train.steps=2", "train.compile=true", "parallel=ddp", f"run.name={name}"]
        train(arguments(tmp_path, corpus, *options), ranks=2)
        compiled = tmp_path.glob("cache/compiled/*/inductor/fxgraph/**/*")
        found.append({path: path.stat().st_mtime_ns for path in compiled if path.is_file()})
    assert len(found[0]) >= 2  # forward and backward
    assert found[1] == found[0]


@pytest.mark.exhaustive
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_blocks_are_really_compiled(recompute: str) -> None:
    """torch.compile gives up in silence on a function that it does not like: one graph for all blocks, not none, and
    one more without gradients."""
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    options = ["train.compile=true", f"train.activation_checkpointing={recompute}", "train.device=cpu"]
    state = build_state(load_config(["model=ngpt", "scale=debug", "model.vocab_size=97", *options]))
    rows = torch.randint(0, 97, (2, 65))
    train_step(state, [(rows[:, :-1], rows[:, 1:])])
    assert counters["stats"]["unique_graphs"] == 1
    with torch.no_grad():
        state.model(rows[:, :-1])
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]


@pytest.mark.slow
def test_dropout_is_the_same_under_all_of_them(tmp_path: Path, corpus: Path) -> None:
    """Compiled, recomputed and sharded over two ranks. Caught: a mask that one of them draws anew."""
    dropout = [f"model.{place}_dropout=0.1" for place in ("embedding", "residual", "attention")]
    options = ["train.compile=true", "train.activation_checkpointing=full", "parallel=fsdp"]
    train(arguments(tmp_path / "plain", corpus, "train.steps=4", *dropout))
    train(arguments(tmp_path / "all", corpus, "train.steps=4", *dropout, *options), ranks=2)
    assert_near(numbers(tmp_path / "all/runs/test"), numbers(tmp_path / "plain/runs/test"), 1e-5)


def test_deterministic_algorithms(tmp_path: Path, corpus: Path, plain: Numbers) -> None:
    """On a CPU it changes nothing but what torch may choose from."""
    fills = torch.utils.deterministic.fill_uninitialized_memory
    try:
        build_state(load_config(["model=ngpt", "scale=debug", "train.deterministic=true", "model.vocab_size=64"]))
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = fills
    train(arguments(tmp_path, corpus, "train.steps=6", "train.deterministic=true"))
    assert numbers(tmp_path / "runs/test") == plain
