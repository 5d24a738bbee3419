"""Writes configs/hardware: what `plan` chooses for the papers' scales on 64 A100s, 8 of a host.

python scripts/hardware_configs.py
"""

from ngpt_train.config import load_config
from ngpt_train.config.yaml_files import config_dir
from ngpt_train.core.log import saying_nothing
from ngpt_train.report.choice import RECOMPUTATIONS, Choice, choose

DEVICES = ("a100_40gb", "a100_80gb")
# The nGPT paper's runs also have contexts of 4k and 8k.
SCALES = {
    **{scale: [f"scale={scale}"] for scale in ("125m", "355m", "0.5b", "1b", "1.3b", "2.7b")},
    **{f"{scale}_{k}k": [f"scale={scale}", f"model.context={k * 1024}"] for scale in ("0.5b", "1b") for k in (4, 8)},
}
MODELS = ("gpt", "ngpt", "normformer")
# The largest vocabulary of these papers; a rate, because not every model has one for every scale.
COMMON = ["model.vocab_size=51200", "optim.lr=1e-3", "plan.world_size=64", "plan.ranks_per_host=8"]


def most_careful(device: str, name: str) -> Choice:
    """The choice for that of MODELS which needs most."""
    with saying_nothing():
        choices = [
            choose(load_config([*SCALES[name], *COMMON, f"model={model}", f"plan.device={device}"])) for model in MODELS
        ]
    return max(choices, key=_care)


def text(device: str, name: str) -> str:
    """The file configs/hardware/DEVICE/NAME.yaml."""
    chosen = most_careful(device, name)
    train, said = chosen.config.train, " ".join(SCALES[name])
    return (
        "# @package _global_\n"
        f"# {said} on 64 cards, 8 of a host, for {', '.join(MODELS[:-1])} and {MODELS[-1]}: by `plan plan.device="
        f"{device}`,\n# which predicts at most {chosen.predicted / 2**30:.1f} GiB a rank. Written by "
        "scripts/hardware_configs.py.\n"
        "defaults:\n"
        f"  - override /parallel: {chosen.config.parallel.kind}\n\n"
        "train:\n"
        f"  micro_rows: {train.micro_rows}\n"
        f"  activation_checkpointing: {train.activation_checkpointing}\n"
    )


def _care(choice: Choice) -> tuple[int, bool, int, int]:
    """How late in the order of `choose` it comes, and its memory."""
    train = choice.config.train
    sharded = choice.config.parallel.kind != "ddp"
    recompute = RECOMPUTATIONS.index(train.activation_checkpointing)
    return recompute, sharded, -int(train.micro_rows), choice.predicted


if __name__ == "__main__":
    for device in DEVICES:
        for name in SCALES:
            path = config_dir() / "hardware" / device / f"{name}.yaml"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text(device, name))
            print(path)
