"""Before a run's first step: which kernels are checked, which are off, and that all starts and ranks agree."""

from __future__ import annotations

import copy
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ngpt_train.__main__ import main
from ngpt_train.config.schema import Config
from ngpt_train.core.errors import ConfigError
from ngpt_train.distributed.first_contact import first_contact
from ngpt_train.distributed.world import World
from ngpt_train.kernels import dispatch
from ngpt_train.kernels.check.calls import Call, recorded
from ngpt_train.kernels.check.kernel_findings import Finding
from ngpt_train.kernels.gpu import swiglu
from ngpt_train.models import build_model
from ngpt_train.training import build_state, check_kernels, train_step
from tests.processes.runs import arguments, write_corpus
from tests.properties.architectures import Size
from tests.properties.runs import run_config
from tests.reference.training import Recipe

TINY = Size(d_model=16, n_layers=2, n_heads=2, vocab_size=24, n_kv_heads=1, d_mlp=24, source_context=4)
RECIPE = Recipe(20, 1e-2, 0.9, 0.95, 1e-8, weight_decay=0.0, clip_norm=1.0, warmup_steps=0)
WORLD = World(0, 1, 0, torch.device("cpu"))
module = first_contact.__globals__
RIGHT = Finding(error=1e-6, problem=None, lasting=True, us=10.0, plain_us=20.0)
SLOWER = replace(RIGHT, plain_us=5.0)
WRONG = replace(RIGHT, problem="it is wrong")


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    with dispatch.chosen("auto"):
        yield
    dispatch.switch_off({})


def config_of(name: str, cache: Path, *options: str, kernels: str = "triton", context: int = 6) -> Config:
    config = run_config(name, TINY, RECIPE, rows=2, context=context, micro_rows=2, options=options)
    config.kernels.kind, config.data.cache = kernels, str(cache)
    return config


def playing(monkeypatch: pytest.MonkeyPatch, by_name: dict[str, Finding]) -> list[str]:
    """Has the CPU play a GPU on which a check finds this; returns the names of what is checked, as they are."""
    seen: list[str] = []

    def findings(calls: list[Call], request: Any) -> list[Finding]:
        seen.extend(call.kernel for call in calls)
        return [copy.copy(by_name.get(call.kernel, RIGHT)) for call in calls]

    monkeypatch.setitem(module, "on_gpu", lambda _: True)
    monkeypatch.setitem(module, "findings", findings)
    return seen


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("name", "documents"),
    [("ngpt", False), ("ngpt", True), ("gpt", True), ("composed", False), ("normformer", False), ("powernorm", True)],
)
def test_calls_are_those_of_a_step(name: str, documents: bool, tmp_path: Path) -> None:
    """Of the meta device and of a real step. Caught: a shape, dtype or option that is not the model's."""
    options = ["optim.z_loss=1e-3", *(["data.document_mask=true"] if documents else [])]
    config = config_of(name, tmp_path, *options, context=2)
    calls = module["calls_of"](config, WORLD, 2, torch.bfloat16)
    model = build_model(config.model)
    model.compute_dtype, model.z_loss = torch.bfloat16, 1e-3
    tokens = torch.zeros(2, 2, dtype=torch.int64)
    with dispatch.chosen("triton"), recorded(documents=True) as real:
        model(tokens, tokens, tokens if documents else None)
    of_adam = Counter({call: n for call, n in calls.items() if call.kernel == "adam"})
    assert calls - of_adam == real
    assert any(call.kernel == "attention of documents" for call in calls) == documents
    assert {call.shape[1] for call in of_adam} == {16}
    with dispatch.chosen("torch"):
        assert not calls - module["calls_of"](replace(config), WORLD, 2, torch.bfloat16)


def test_fp32_is_that_of_a_gpu(tmp_path: Path) -> None:
    """Caught: nGPT's MLP recorded as a CPU computes it in fp32, with the scales in the matrix."""
    calls = module["calls_of"](config_of("ngpt", tmp_path), WORLD, 2, torch.float32)
    assert [call["scaled"] for call in calls if call.kernel == "swiglu"] == [True]


@pytest.mark.slow
def test_what_is_wrong_is_off_and_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught: a kernel that runs although it is off, another loss than without it, another kernel that is off too."""
    rows = torch.arange(6).view(2, 3)
    batch = [(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())]

    def losses() -> list[float]:
        state = build_state(config)
        return [float(train_step(state, batch).loss) for _ in range(2)]

    config = config_of("ngpt", tmp_path, context=2)
    with dispatch.chosen("triton", without="swiglu"):
        expected = losses()
    playing(monkeypatch, {"swiglu": WRONG})
    config.kernels.kind = "auto"
    found = check_kernels(config, WORLD)["kernels"]
    monkeypatch.setattr(swiglu, "swiglu_forward", lambda *_: pytest.fail("ran"))
    assert list(found["off"]) == ["swiglu"]
    assert found["off"]["swiglu"].startswith("it is wrong (swiglu 2x2x48 float32")
    assert any(note.startswith("warning: KERNEL swiglu IS OFF") for note in found["notes"])
    config.kernels.kind = "triton"  # auto would take plain PyTorch on a CPU
    assert losses() == expected
    with dispatch.chosen("triton"):
        assert "without swiglu" in dispatch.described(torch.device("cpu"))
        assert dispatch.runs_on_triton("rotary", torch.zeros(1))
        assert not dispatch.runs_on_triton("swiglu", torch.zeros(1))


def test_the_second_start_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught: a check at each start; one that is left out for another shape."""
    seen = playing(monkeypatch, {"swiglu": SLOWER})
    config = config_of("ngpt", tmp_path, kernels="auto")
    first = check_kernels(config, WORLD)
    assert {"sphere_step", "swiglu", "rotary", "linear_cross_entropy", "adam", "attention"} == set(seen)
    seen.clear()
    assert check_kernels(config, WORLD) == first
    assert seen == []
    check_kernels(config_of("ngpt", tmp_path, kernels="auto", context=7), WORLD)
    assert set(seen) == {"sphere_step", "swiglu", "rotary", "linear_cross_entropy", "attention"}


def test_the_faster_one_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught: the slower one, a tie that changes numbers, a call that counts as much as twelve."""
    tie = replace(RIGHT, plain_us=9.9)
    playing(monkeypatch, {"swiglu": SLOWER, "rotary": tie, "adam": replace(RIGHT, us=None, untimed="no")})
    found = check_kernels(config_of("ngpt", tmp_path, kernels="auto"), WORLD)["kernels"]
    assert found["slower"] == {"swiglu": "20 us, plain PyTorch 10 us"}  # two layers
    assert dispatch.is_off("swiglu")
    assert not dispatch.is_off("rotary")
    told = "kernel swiglu is right (error 1e-06), 20 us, plain PyTorch 10 us: plain PyTorch runs"
    assert told in found["notes"]
    for options in (["kernels.choose=checked"], []):
        config = config_of("ngpt", tmp_path, *options, kernels="auto" if options else "triton")
        assert check_kernels(config, WORLD)["kernels"]["slower"] == {}
        assert not dispatch.is_off("swiglu")


def test_a_resume_keeps_the_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the command line. Caught: a choice that is not stored, or made anew; one for which a wrong kernel runs;
    another GPU that nobody tells of."""
    playing(monkeypatch, {"swiglu": SLOWER})
    corpus = write_corpus(tmp_path / "corpus.jsonl")
    given = arguments(tmp_path, corpus, "train.steps=2", "train.batch_rows=2", "checkpoint.every=1", "train.stop_at=1")
    assert main(["train", *given]) == 0
    playing(monkeypatch, {"rotary": SLOWER, "sphere_step": WRONG})
    monkeypatch.setitem(module, "device_name", lambda _: "another")
    monkeypatch.setitem(module, "with_cache", lambda calls, request, *_: module["findings"](calls, request))
    assert main(["train", *[key for key in given if not key.startswith("train.stop_at")]]) == 0
    first, second = (start["kernels"] for start in json.loads((tmp_path / "runs/test/run.json").read_text())["starts"])
    assert (list(first["off"]), list(first["slower"])) == ([], ["swiglu"])
    assert (list(second["off"]), list(second["slower"])) == (["sphere_step"], ["swiglu"])
    log = (tmp_path / "runs/test/logs/rank_0.log").read_text()
    assert "warning: kernels were chosen on cpu, and this is another; the run keeps its choice" in log
    assert "warning: KERNEL sphere_step IS OFF" in log


@pytest.mark.parametrize(
    ("key", "value", "name"),
    [("kind", "triton", "swiglu"), ("attention", "flash_attn", "attention"), ("attention", "flex", "attention")],
)
def test_what_is_insisted_on(key: str, value: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught: plain PyTorch in the place of what the config names."""
    playing(monkeypatch, {name: WRONG})
    monkeypatch.setattr(module["layouts"], "choose_kernels", lambda *_: None)
    config = config_of("ngpt", tmp_path, kernels="auto")
    setattr(config.kernels, key, value)
    with pytest.raises(ConfigError, match=rf"kernels.*={value}: on cpu .* must not run: it is wrong .*kernels.*=auto"):
        check_kernels(config, WORLD)


class Hosts:
    """A world of two hosts, of which the other found this."""

    device, local_rank, size, rank, local_size = torch.device("cpu"), 0, 2, 0, 1

    def __init__(self, other: Finding | None) -> None:
        self.other = other

    def on_all_without_timeout(self, function: Callable[[], Any]) -> Any:
        return function()

    def gather(self, item: tuple[str, list[Finding] | None]) -> list[Any]:
        assert item[1] is not None
        theirs = None if self.other is None else [copy.copy(self.other) for _ in item[1]]
        return [item, ("other-host", theirs)]


def test_ranks_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught: ranks of which each goes by its own host's findings; a rank that is not the first of its host."""
    playing(monkeypatch, {})
    config = config_of("ngpt", tmp_path, kernels="auto")
    config.parallel.kind, config.train.batch_rows = "ddp", 4
    found = check_kernels(config, Hosts(WRONG))["kernels"]  # type: ignore[arg-type]
    assert set(found["off"]) == {"sphere_step", "swiglu", "rotary", "linear_cross_entropy", "adam", "attention"}
    assert found["off"]["adam"].startswith("on other-host: it is wrong")
    for other in (SLOWER, None):
        found = check_kernels(config, Hosts(other))["kernels"]  # type: ignore[arg-type]
        assert (found["off"], found["slower"]) == ({}, {})


def test_a_model_that_cannot_be_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught: kernels that run unchecked."""
    playing(monkeypatch, {})

    def fails(*_: Any) -> None:
        raise NotImplementedError("item of a meta tensor")

    monkeypatch.setitem(module, "build_model", fails)
    found = check_kernels(config_of("ngpt", tmp_path, kernels="auto"), WORLD)["kernels"]
    assert set(found["off"]) == {"sphere_step", "swiglu", "rotary", "linear_cross_entropy", "adam"}
    assert "item of a meta tensor" in found["off"]["adam"]


def test_nothing_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Caught: a process that is started where there is no GPU."""
    caplog.set_level(logging.INFO)
    monkeypatch.setitem(module, "findings", lambda *_: pytest.fail("checked"))
    assert check_kernels(config_of("ngpt", tmp_path), WORLD) == {}
    assert not caplog.records
