"""Tensor and context parallelism are refused in words."""

import pytest

from ngpt_train.config import ConfigError, load_config


@pytest.mark.parametrize(
    "asked",
    ["parallel=tp", "parallel=cp", "parallel.tensor=2", "parallel.context=4", "parallel.tensor_parallel_size=2"],
)
def test_refused_in_words(asked: str) -> None:
    """Caught: `no such option` without a reason, or the nearest key for an answer."""
    with pytest.raises(
        ConfigError, match=r"no tensor and no context parallelism(.|\n)*parallel=fsdp or hsdp"
    ) as refused:
        load_config([asked])
    assert str(refused.value).startswith(asked)
    assert "did you mean" not in str(refused.value)
