"""schedule.final_share: the schedule's end as a share of a rate that is tuned, or from a table."""

import pytest

from ngpt_train.config import ConfigError, load_config
from ngpt_train.config.stored import check_resume, with_first_values


def test_the_end_follows_the_rate() -> None:
    assert load_config(["model=ngpt", "schedule.final_share=0.1", "optim.lr=2e-2"]).schedule.final_lr == 2e-3
    config = load_config(["model=ngpt", "schedule.final_share=0.25"])  # a rate of the table
    assert config.schedule.final_lr == float(config.optim.lr) / 4


def test_the_later_of_two_counts() -> None:
    """A recipe sets final_share, the command line final_lr. Caught: a share that outlives what replaced it."""
    schedule = load_config(["model=ngpt", "recipe=nugpt", "optim.lr=1e-2", "schedule.final_lr=3e-4"]).schedule
    assert (schedule.final_lr, schedule.final_share) == (3e-4, None)
    with pytest.raises(ConfigError, match=r"schedule\.final_lr=0\.001, schedule\.final_share=0\.1: both"):
        load_config(["schedule.final_share=0.1", "schedule.final_lr=1e-3"])
    with pytest.raises(ConfigError, match=r"Set schedule\.final_share=0"):
        load_config(["schedule.final_share=0.1", "schedule.kind=constant"])


def test_a_longer_run_keeps_rate_and_end() -> None:
    """Where the table has another rate for more steps. Caught: an end of the new rate, or a refusal."""
    common = ["model=ngpt", "scale=0.5b", "schedule.final_share=0.1"]
    stored, longer = load_config([*common, "train.steps=10000"]), load_config([*common, "train.steps=100000"])
    assert stored.optim.lr != longer.optim.lr
    check_resume(stored, longer)
    assert with_first_values(longer, stored).schedule.final_lr == stored.schedule.final_lr
    with pytest.raises(ConfigError, match=r"schedule\.final_share: 0\.1 -> 0\.2"):
        check_resume(stored, load_config([*common[:2], "schedule.final_share=0.2", "train.steps=10000"]))
