"""How long the ranks wait in a collective for one whose text is late."""

from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from ngpt_train.config import load_config
from ngpt_train.distributed.world import join_world


@pytest.mark.parametrize(
    ("data", "seconds"),
    [
        (["data=embedded"], 7),
        (["data=local", "data.path=/text", "data.streaming=true"], 7),
        (["data=hf", "data.repo=OWNER/NAME"], 7 + 180),
        (["data=openwebtext"], 7 + 180),
        (["data=openwebtext", "data.streaming=false"], 7),
        (["data=mixture", "data.mixture='a 1 local /text; b 2 hf OWNER/NAME'"], 7 + 180),
        (["data=mixture", "data.mixture='a 1 local /text; b 2 tokens /ids'"], 7),
    ],
)
def test_a_collective_outlasts_the_fetch_of_a_shard(
    data: list[str], seconds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Caught: ranks that give up in the step's first collective while another fetches its next shard of the hub, which
    data.fetch_minutes allow it."""
    asked: list[timedelta] = []

    def init(*_: Any, timeout: timedelta, **__: Any) -> None:
        asked.append(timeout)

    monkeypatch.setattr(dist, "init_process_group", init)  # no group begins, so the world is one of one
    settings = ["scale=debug", "train.device=cpu", "parallel=ddp", "parallel.timeout=7", "data.fetch_minutes=3"]
    join_world(load_config([*settings, *data]))
    assert asked == [timedelta(seconds=seconds)]
