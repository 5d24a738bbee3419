"""Batches on their way to a GPU, which is made up here: what is asked of it, and in which order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ngpt_train.config.sections.training import TrainConfig
from ngpt_train.core.errors import DataError
from ngpt_train.kernels import attention
from ngpt_train.models import build_model
from ngpt_train.models.layers import documents
from ngpt_train.training import feed
from ngpt_train.training.feed import Feed
from tests.properties.architectures import ARCHITECTURES, SMALL, config

GPU = torch.device("cuda")
T = 128  # room for 64 documents in a row


class Loader:
    """Steps of one micro batch of one row; the number of a step is its position and its tokens."""

    def __init__(self, log: list[str], documents: int = 1) -> None:
        self.log, self.step = log, 0
        self.doc_ids = np.minimum(np.arange(T), documents - 1)[None]

    def __next__(self) -> Any:
        self.step += 1
        self.log.append(f"read {self.step}")
        tokens = np.full((1, T), self.step)
        return [(tokens, tokens, self.doc_ids)], self.step


class FakeTensor:
    def __init__(self, gpu: FakeGPU, name: str, pinned: bool = False, device: str = "cpu") -> None:
        self.gpu, self.name, self.pinned, self.device = gpu, name, pinned, torch.device(device)

    def pin_memory(self) -> FakeTensor:
        return FakeTensor(self.gpu, self.name, pinned=True)

    def to(self, device: torch.device, non_blocking: bool) -> FakeTensor:
        assert device == GPU
        how = f"{'pinned' if self.pinned else 'pageable'}{', without waiting' if non_blocking else ''}"
        self.gpu.log.append(f"copy {self.name} on {self.gpu.stream.name}, {how}")
        return FakeTensor(self.gpu, self.name, device="cuda")

    def record_stream(self, stream: FakeStream) -> None:
        self.gpu.log.append(f"{self.name} used on {stream.name}")


class FakeStream:
    def __init__(self, gpu: FakeGPU, name: str) -> None:
        self.gpu, self.name, self.events = gpu, name, 0

    def record_event(self) -> str:
        self.events += 1
        self.gpu.log.append(f"event {self.events} on {self.name}")
        return f"event {self.events}"

    def wait_event(self, event: str) -> None:
        self.gpu.log.append(f"{self.name} waits for {event}")


class FakeGPU:
    """Stands for `torch` in feed.py; `log` is what the device was asked for."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.stream = self.compute = FakeStream(self, "compute")
        self.cuda = SimpleNamespace(
            Stream=lambda device: FakeStream(self, "side"), stream=self.on, current_stream=lambda device: self.stream
        )

    @contextmanager
    def on(self, stream: FakeStream) -> Iterator[None]:
        self.stream = stream
        yield
        self.stream = self.compute

    def from_numpy(self, array: Any) -> FakeTensor:
        return FakeTensor(self, f"batch {array[0, 0]}")


def test_copies_ahead_on_a_stream_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught: a copy on the model's stream, from memory that is not pinned, or that the host waits for; a model that
    does not wait for its batch; memory that is reused while the model reads it; a copy that is no step ahead."""
    gpu = FakeGPU()
    model = build_model(config(ARCHITECTURES["gpt"], SMALL))
    monkeypatch.setattr(feed, "torch", gpu)
    monkeypatch.setattr(Feed, "_check", lambda self, micro_batches: None)
    batches = Feed(Loader(gpu.log), model, GPU)  # type: ignore[arg-type]
    copies = {
        step: [f"read {step}", *[f"copy batch {name} on side, pinned, without waiting" for name in (step, step, 0)]]
        for step in (1, 2, 3)
    }
    used = {step: [f"batch {name} used on compute" for name in (step, step, 0)] for step in (1, 2)}
    micro_batches, position = next(batches)
    assert gpu.log == [
        *[*copies[1], "event 1 on side", *copies[2], "event 2 on side"],
        *["compute waits for event 1", *used[1]],
    ]
    assert position == 1, "what is saved is not what was consumed"
    assert {part.device for part in micro_batches[0]} == {GPU}
    gpu.log.clear()
    _, position = next(batches)
    assert gpu.log == [*copies[3], "event 3 on side", "compute waits for event 2", *used[2]]
    assert position == 2


def test_on_a_cpu_nothing_is_ahead() -> None:
    model = build_model(config(ARCHITECTURES["gpt"], SMALL))
    log: list[str] = []
    batches = Feed(Loader(log, documents=T), model, torch.device("cpu"))  # type: ignore[arg-type]
    for step in (1, 2):
        micro_batches, position = next(batches)
        assert position == step  # type: ignore[comparison-overlap]
        assert int(micro_batches[0][0][0, 0]) == step
        assert log[-1] == f"read {step}"


@pytest.mark.parametrize(("kernels", "refused"), [("varlen", True), ("none", False), ("sdpa", False), ("flex", False)])
def test_short_documents_are_refused_where_varlen_runs(
    kernels: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """65 documents in a row with room for 64. Caught: a refusal on every GPU, whatever attention runs there."""
    found = (attention.torch_varlen if kernels == "varlen" else None, kernels, "for this test")
    monkeypatch.setattr(attention, "find_varlen", lambda *_: found)
    monkeypatch.setattr(attention, "_choice", kernels if kernels in ("sdpa", "flex") else "auto")
    doc_ids = torch.arange(T)[None].clamp(max=64)
    documents.check_documents(doc_ids.clamp(max=63), GPU, 64, torch.bfloat16)
    if refused:
        with pytest.raises(ValueError, match="holds 65 documents, and the GPU's kernels have room for 64"):
            documents.check_documents(doc_ids, GPU, 64, torch.bfloat16)
    else:
        documents.check_documents(doc_ids, GPU, 64, torch.bfloat16)


def test_what_is_refused_is_the_datas_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what the model's attention will be given: its device, head and dtype."""
    model = build_model(config(ARCHITECTURES["gpt"], SMALL))
    model.compute_dtype = torch.bfloat16
    asked = []

    def varlen_kernel(*about: Any) -> Any:
        asked.append(about)
        return attention.torch_varlen

    monkeypatch.setattr(documents, "varlen_kernel", varlen_kernel)
    cpu = torch.device("cpu")
    with pytest.raises(DataError, match=r"data.document_mask=true: .* holds 65 documents"):
        next(Feed(Loader([], documents=65), model, cpu))  # type: ignore[arg-type]
    assert asked == [(cpu, SMALL.d_model // SMALL.n_heads, torch.bfloat16)]


def test_an_encoder_decoder_has_room_for_any_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its doc_ids tell padding alone. Caught: a line in the log about a kernel that it never takes, and a refusal."""
    asked: list[Any] = []
    monkeypatch.setattr(documents, "varlen_kernel", lambda *about: asked.append(about) or attention.torch_varlen)
    model = build_model(config(ARCHITECTURES["gpt_encoder_decoder"], SMALL))
    next(Feed(Loader([], documents=65), model, torch.device("cpu")))  # type: ignore[arg-type]
    assert not asked


def asked(batch_rows: int, micro_rows: int | str, context: int) -> Any:
    train = TrainConfig(batch_rows=batch_rows, micro_rows=micro_rows)
    return SimpleNamespace(train=train, model=SimpleNamespace(context=context))


@pytest.mark.parametrize(
    ("batch_rows", "micro_rows", "context", "world_size", "expected"),
    [(512, "auto", 1024, 64, 8), (512, "auto", 8192, 8, 2), (6, 3, 64, 2, 3), (2, "auto", 100_000, 1, 1)],
)
def test_micro_rows(batch_rows: int, micro_rows: int | str, context: int, world_size: int, expected: int) -> None:
    assert feed.resolve_micro_rows(asked(batch_rows, micro_rows, context), world_size) == expected
