"""The small parts of the trainer: batch arithmetic, stopping, explanations."""

import os
import signal
import time

import pytest
import torch

from ngpt_train.core.errors import ConfigError
from ngpt_train.distributed.layouts import resolve_kind
from ngpt_train.training.feed import resolve_micro_rows
from ngpt_train.training.guards import DeviceMemoryError, explain_out_of_memory
from ngpt_train.training.hooks.stopping import StopRequest


@pytest.mark.parametrize(
    ("batch_rows", "micro_rows", "context", "world_size", "expected"),
    [
        (512, "auto", 1024, 64, 8),
        (512, "auto", 1024, 1, 16),
        (512, "auto", 8192, 8, 2),
        (6, 3, 64, 2, 3),
        (2, "auto", 100_000, 1, 1),
        (7, "auto", 1024, 1, 7),
    ],
)
def test_micro_rows(batch_rows: int, micro_rows: int | str, context: int, world_size: int, expected: int) -> None:
    assert resolve_micro_rows(batch_rows, micro_rows, context, world_size) == expected


@pytest.mark.parametrize(
    ("batch_rows", "micro_rows", "world_size", "words"),
    [
        (10, "auto", 4, ["train.batch_rows=10", "4 ranks", "8 or 12"]),
        (12, 4, 2, ["train.micro_rows=4", "6 rows", "1, 2, 3, 6"]),
        (2, "auto", 4, ["train.batch_rows=2", "train.batch_rows=4"]),
    ],
)
def test_batch_that_does_not_divide(batch_rows: int, micro_rows: int | str, world_size: int, words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        resolve_micro_rows(batch_rows, micro_rows, 64, world_size)
    assert all(word in str(error.value) for word in words)


def test_layout() -> None:
    assert resolve_kind("auto", 1, "cuda") == "single"
    assert resolve_kind("auto", 2, "cuda") == "fsdp"
    assert resolve_kind("auto", 2, "cpu") == "ddp"
    assert resolve_kind("auto", 16, "cuda", 8) == "hsdp"
    assert resolve_kind("auto", 8, "cuda", 8) == "fsdp"
    with pytest.raises(ConfigError, match=r"parallel.kind=single.*2 ranks"):
        resolve_kind("single", 2, "cpu")


def test_out_of_memory_names_the_key() -> None:
    message = r"train.micro_rows=8: out of memory.*Try train.micro_rows=4"
    with pytest.raises(DeviceMemoryError, match=message), explain_out_of_memory(8):
        torch.empty(1 << 60)  # what the CPU allocator says for real
    with pytest.raises(DeviceMemoryError, match="micro_rows is 1 already"), explain_out_of_memory(1):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    with pytest.raises(RuntimeError, match=r"^shapes differ$"), explain_out_of_memory(8):
        raise RuntimeError("shapes differ")


def test_stop_request_ignores_the_launchers_echo() -> None:
    """torchrun passes on the Ctrl-C that the terminal has sent to its workers as well."""
    before = signal.getsignal(signal.SIGINT)
    with StopRequest(None) as stop:
        assert stop.reason is None
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.reason == "stopped by SIGINT"
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.reason == "stopped by SIGINT"
    assert signal.getsignal(signal.SIGINT) == before


def test_time_limit() -> None:
    stop = StopRequest(0.05 / 3600)
    assert stop.reason is None
    time.sleep(0.06)
    assert stop.reason == "stopped by run.max_time"
