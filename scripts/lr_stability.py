"""How many steps a model survives while its learning rate grows: the LR stability test of the NormFormer paper.

    python scripts/lr_stability.py --table paper/normformer_table8 scale=debug data=embedded tokenizer=sentencepiece
    python scripts/lr_stability.py --row "GPT: model=gpt" --row "nGPT: model=ngpt" scale=debug

The learning rate grows from 0 by the slope at each step (figure 5: 5e-5; Table 8: 1e-4) until the loss explodes. A line
of the result has the steps that the model survived, for each seed, and their median. Other arguments are overrides of
every row. Steps, slope and seeds are options: `--help`.
"""

import argparse
import math
import platform
import statistics
import sys
from collections.abc import Iterable, Iterator

import torch

from ngpt_train.config import list_experiments, load_config
from ngpt_train.config.schema import Config
from ngpt_train.core.checkout import git_commit
from ngpt_train.core.errors import ConfigError, DataError
from ngpt_train.data import Dataset, TrainLoader, open_dataset, reader_of
from ngpt_train.training import build_state, train_step
from ngpt_train.training.feed import Feed
from ngpt_train.verbs.train import with_vocabulary

# The paper does not say when a loss has exploded. Here: when it is not finite, or has been so many times the smallest
# loss so far for so many steps in a row. A single bad batch does not count.
TIMES_THE_SMALLEST = 1.5
STEPS_IN_A_ROW = 5


def losses(config: Config, data: Dataset) -> Iterator[float]:
    """The loss of each training step in nats, NaN where a gradient is not finite. Leaves no run directory."""
    state = build_state(with_vocabulary(config, data))
    loader = TrainLoader(reader_of(data, state.config), config.train.rows_per_step, state.micro_rows)
    feed = Feed(loader, state.model, state.world.device)
    try:
        while state.step < config.train.steps:
            micro_batches, _ = next(feed)
            result = train_step(state, micro_batches, untouched=True)
            yield math.nan if result.skipped else float(result.loss)
    finally:
        feed.close()


def survived(run: Iterable[float]) -> tuple[int, bool]:
    """The number of steps before the loss explodes, and whether it does."""
    smallest, above, step = math.inf, 0, 0
    for step, loss in enumerate(run, start=1):
        if not math.isfinite(loss):
            return step - 1 - above, True
        smallest = min(smallest, loss)
        above = above + 1 if loss > TIMES_THE_SMALLEST * smallest else 0
        if above == STEPS_IN_A_ROW:
            return step - above, True
    return step, False


def rows_of(arguments: argparse.Namespace) -> dict[str, list[str]]:
    """The overrides of each row by its name."""
    table = f"{arguments.table}/"
    rows = {name.removeprefix(table): [f"experiment={name}"] for name in list_experiments() if name.startswith(table)}
    if arguments.table and not rows:
        raise ConfigError(f"--table {arguments.table}: no table of this name, see `ngpt-train train --help`")
    for row in arguments.row:
        name, _, overrides = row.partition(":")
        rows[name.strip()] = overrides.split()
    if not rows:
        raise ConfigError("no rows: name a table with --table, or rows with --row 'NAME: OVERRIDES'")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", help="an experiment table, whose rows are all run")
    parser.add_argument("--row", action="append", default=[], help="'NAME: OVERRIDES', once for each row")
    parser.add_argument("--slope", type=float, default=1e-4, help="growth of the rate at each step (default: 1e-4)")
    parser.add_argument("--steps", type=int, default=1000, help="steps at most (default: 1000)")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each row (default: 3)")
    arguments, overrides = parser.parse_known_args()
    ramp = ["schedule.kind=ramp", f"train.steps={arguments.steps}", f"optim.lr={arguments.slope * arguments.steps:g}"]
    opened: dict[str, Dataset] = {}
    print(f"Python {platform.python_version()}, torch {torch.__version__}, commit {git_commit()}\n")
    seeds = range(arguments.seeds)
    print(f"| row | {' | '.join(f'seed {seed}' for seed in seeds)} | median |\n|---|{'---|' * len(seeds)}---|")
    for name, row in rows_of(arguments).items():
        counts, shown = [], []
        for seed in seeds:
            config = load_config([*row, *overrides, *ramp, f"run.seed={seed}"])
            text = str((config.data, config.tokenizer))
            data = opened[text] = opened.get(text) or open_dataset(config)
            steps, exploded = survived(losses(config, data))
            counts.append(steps)
            shown.append(f"{steps}" if exploded else f"{steps}, no explosion")
        print(f"| {name} | {' | '.join(shown)} | {statistics.median(counts):g} |", flush=True)


if __name__ == "__main__":
    try:
        main()
    except (ConfigError, DataError) as error:
        sys.exit(str(error))
