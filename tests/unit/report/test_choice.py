"""What `plan` chooses for a card: the first in its order that fits, what the user said kept, and configs/hardware."""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ngpt_train.config import Config, ConfigError, load_config
from ngpt_train.config.yaml_files import config_dir
from ngpt_train.core.log import saying_nothing
from ngpt_train.models import build_model
from ngpt_train.report.choice import choose, planned_layout
from ngpt_train.report.launch_plan import describe_plan, make_plan
from ngpt_train.report.memory import memory_per_rank
from scripts.hardware_configs import DEVICES, SCALES, text

LIMITS = {"a100_40gb": 0.9 * 37 * 2**30, "a100_80gb": 0.9 * 77 * 2**30, "h100_80gb": 0.9 * 77 * 2**30}
FILES = [f"{device}/{name}" for device, name in itertools.product(DEVICES, SCALES)]


def of(*overrides: str, ranks: int = 64) -> Config:
    return load_config([f"plan.world_size={ranks}", "model.vocab_size=32000", "optim.lr=1e-3", *overrides])


def needed(config: Config, recompute: str, kind: str, micro_rows: int) -> int:
    """Bytes of a rank by the prediction itself."""
    train = replace(config.train, activation_checkpointing=recompute, micro_rows=micro_rows)
    config = replace(config, train=train, parallel=replace(config.parallel, kind=kind))
    with torch.device("meta"):
        model = build_model(config.model)
    with saying_nothing():
        return sum(item.bytes for item in memory_per_rank(config, model, planned_layout(config)))


@pytest.mark.parametrize(
    ("device", "ranks", "overrides"),
    [
        ("a100_80gb", 64, ["scale=0.5b"]),  # the first of all
        pytest.param("a100_40gb", 64, ["scale=2.7b"], marks=pytest.mark.slow),  # shards of a host
        pytest.param("h100_80gb", 8, ["scale=2.7b", "model.context=16384"], marks=pytest.mark.exhaustive),  # selective
        ("a100_40gb", 1, ["scale=1b", "model.context=65536", "train.batch_rows=4"]),  # full
    ],
)
def test_takes_the_first_that_fits(device: str, ranks: int, overrides: list[str]) -> None:
    """Against every candidate in the documented order. Caught: recomputation, shards or fewer rows without need; what
    does not fit; more than tens of predictions."""
    config = of("model=gpt", *overrides, f"plan.device={device}", ranks=ranks)
    kinds = ["single"] if ranks == 1 else ["ddp", "hsdp" if ranks > 8 else "fsdp"]
    rank_rows = config.train.rows_per_step // ranks
    rows = [n for n in range(rank_rows, 0, -1) if rank_rows % n == 0]
    every = itertools.product(("none", "selective", "full"), kinds, rows)
    recompute, kind, micro_rows = next(one for one in every if needed(config, *one) <= LIMITS[device])
    choice = choose(config)
    assert choice.overrides == [
        f"train.micro_rows={micro_rows}", f"train.activation_checkpointing={recompute}", f"parallel={kind}",
    ]  # fmt: skip
    assert choice.predicted == needed(config, recompute, kind, micro_rows)
    assert choice.limit == pytest.approx(LIMITS[device])


def test_keeps_what_the_user_said() -> None:
    """Caught: a choice over the user's, a key twice in the launch line."""
    said = ["model=ngpt", "scale=1b", "parallel=fsdp", "train.micro_rows=2"]
    made = make_plan(of(*said, "plan.device=a100_80gb"), said)
    assert made["choice"]["overrides"] == ["train.activation_checkpointing=none"]
    assert (made["parallel"], made["micro_rows"]) == ("fsdp", 2)
    every = [*said, "train.activation_checkpointing=full"]
    assert make_plan(of(*every, "plan.device=a100_80gb"), every)["choice"]["overrides"] == []
    gather = of("model=gpt", "scale=0.5b", "parallel.gather=step", "plan.device=a100_80gb")
    assert choose(gather).overrides[-1] == "parallel=hsdp"  # ddp refuses the key


def test_the_plan_says_the_choice_and_starts_it() -> None:
    """Caught: a launch line without the choice, a plan of something else, a choice that nobody asked for."""
    said = ["model=gpt", "scale=2.7b", "train.batch_rows=128"]
    made = make_plan(of(*said, "plan.device=a100_40gb"), said)
    assert made["choice"]["overrides"][-1] == "parallel=hsdp"
    assert f"train.sh {' '.join([*said, *made['choice']['overrides']])}" in made["launch"]
    assert made["parallel"] == "hsdp"
    assert made["memory_per_rank"]["total"] == made["choice"]["predicted"]
    assert json.loads(json.dumps(made)) == made
    assert all(f"  {one}" in describe_plan(made) for one in made["choice"]["overrides"])
    assert "choice" not in make_plan(of(*said), said)
    line = made["launch"].partition("train.sh ")[2].split()
    assert load_config([word for word in [*line[:-2], "optim.lr=1e-3"] if word != "data=..."], None, 64)


def test_what_fits_nowhere_is_refused() -> None:
    """Caught: a plan that cannot run; a sentence without the number that is needed."""
    config = of("model=gpt", "scale=2.7b", "train.batch_rows=2", "plan.device=a100_40gb", ranks=1)
    with pytest.raises(ConfigError) as refused:
        choose(config)
    said = str(refused.value)
    assert "train.micro_rows=1 train.activation_checkpointing=full parallel=single" in said
    assert f"needs {needed(config, 'full', 'single', 1) / 2**30:.1f} GiB a rank, and 33.3 GiB" in said
    with pytest.raises(ConfigError, match=r"train\.device=cpu uses no GPU"):
        choose(of("plan.device=a100_40gb", "train.device=cpu"))


@pytest.mark.slow
def test_hardware_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each composes, gives way to the command line, and is in the list. Caught: a file nobody chooses; a layout that
    another scale takes without a word; one that a scale built upon its own is warned of."""
    folder = config_dir() / "hardware"
    assert {path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.yaml")} == set(FILES)
    for name in FILES:
        overrides = [f"hardware={name}", *SCALES[name.partition("/")[2]], "optim.lr=1e-3"]
        config = load_config(overrides, None, 64)
        assert config.train.activation_checkpointing == "none"
        assert config.parallel.kind in ("ddp", "hsdp")
    config = load_config([*overrides, "parallel=fsdp", "train.micro_rows=1"], None, 64)
    assert (config.parallel.kind, config.train.micro_rows) == ("fsdp", 1)
    assert load_config(["hardware=null"]) == load_config([])
    (tmp_path / "scale").mkdir()
    (tmp_path / "scale/my.yaml").write_text("# @package _global_\ndefaults: [1b]\nmodel: {context: 512}\n")
    load_config(["hardware=a100_80gb/1b_4k", "scale=my"], str(tmp_path), 64)
    assert capsys.readouterr().err == ""
    for _ in range(2):
        load_config(["hardware=a100_80gb/1b_4k", "train.batch_rows=256"], None, 64)
    assert capsys.readouterr().err == (
        "warning: hardware=a100_80gb/1b_4k is a layout for scale=1b, not tiny; choose scale=1b, or leave hardware out\n"
    )


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name == "a100_40gb/1b_8k" else pytest.mark.exhaustive)
        for name in FILES
    ],
)
def test_hardware_is_what_plan_chooses(name: str) -> None:
    device, _, scale = name.partition("/")
    assert (config_dir() / "hardware" / f"{name}.yaml").read_text() == text(device, scale)
