"""Errors that end a run: gradients that are not finite, and memory that is too small."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

# A run survives a single bad batch. After this many skipped steps in a row it does not recover.
MAX_SKIPPED_IN_A_ROW = 10


class NumericalError(RuntimeError):
    """Training has become numerically meaningless; the weights are those of the last good step."""

    exit_code = 4


class DeviceMemoryError(RuntimeError):
    """The device has too little memory for the micro batch."""

    exit_code = 1


@contextmanager
def explain_out_of_memory(micro_rows: int) -> Iterator[None]:
    """Turns torch's out-of-memory errors, of GPUs and CPUs, into a DeviceMemoryError that says which keys to change."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # torch.OutOfMemoryError is a RuntimeError
        text = str(error)
        if not isinstance(error, (torch.OutOfMemoryError, MemoryError)) and "can't allocate memory" not in text:
            raise
        smaller = f"train.micro_rows={max(1, micro_rows // 2)}" if micro_rows > 1 else "train.micro_rows is 1 already"
        raise DeviceMemoryError(
            f"train.micro_rows={micro_rows}: out of memory ({text.splitlines()[0]}). Try {smaller}; the batch and "
            "the result stay the same. Further: train.activation_checkpointing=full, parallel=fsdp on more ranks, "
            "or a shorter model.context."
        ) from error
