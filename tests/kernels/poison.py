"""New tensors full of NaN, so that whatever a kernel does not write is seen."""

import pytest
import torch
from torch import Tensor


def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.empty, empty_like and new_empty give NaN from now on."""
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, _filled(getattr(owner, name)))


def _filled(make):  # type: ignore[no-untyped-def]
    def new(*arguments, **keywords):  # type: ignore[no-untyped-def]
        tensor = make(*arguments, **keywords)
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    return new
