"""The CPUs of this process, by affinity and the container's quota."""

import os

import pytest

from ngpt_train.core import cpus


@pytest.mark.parametrize(
    ("quota", "share", "whole"),
    [("", 64, 64), ("max 100000", 64, 64), ("250000 100000", 2.5, 2), ("50000 100000", 0.5, 1)],
)
def test_container_quota(monkeypatch: pytest.MonkeyPatch, quota: str, share: float, whole: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    monkeypatch.setattr(cpus, "text_of", lambda _: quota)
    assert cpus.usable_cpus() == share
    assert cpus.whole_cpus() == whole
