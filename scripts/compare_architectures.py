"""Trains every architecture, or other rows, on one text and prints one table: losses, differences, step time, memory.

    python scripts/compare_architectures.py > table.md
    python scripts/compare_architectures.py --name web data=local data.path='web/*.parquet' > table.md
    python scripts/compare_architectures.py --name t8 --scale debug --table paper/normformer_table8 --base r14 ...
    python scripts/compare_architectures.py --row 'GPT: model=gpt' --row 'QK-norm: model=gpt model.qk_norm=true'

Each row runs once per seed through `python -m ngpt_train train`; runs that are finished are not run again. Differences
from the base are paired: of the same seed, row by row of the validation set. Step times are then measured in one
process, row by row in turn, and memory in a process of its own for each. The architectures have the learning rates of
their recipes and take some four minutes a run on one core. Arguments that are no options are overrides of every run;
without any, the text is the embedded corpus.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from lr_stability import rows_of

from ngpt_train.config import load_config
from ngpt_train.core.checkout import git_commit
from ngpt_train.data import TrainLoader, open_dataset, reader_of
from ngpt_train.training import TrainState, build_state, train_step
from ngpt_train.training.feed import Feed
from ngpt_train.verbs.train import with_vocabulary

ROOT = Path(__file__).resolve().parent.parent
DECODERS = {
    "GPT": ["model=gpt"],
    "GPT, QK-norm": ["model=gpt", "model.qk_norm=true"],
    "nGPT": ["model=ngpt"],
    "NormFormer": ["model=normformer"],
    "NormFormer without its operations": [
        "model=normformer",
        "model.post_attn_norm=false",
        "model.ffn_norm=false",
        "model.head_scale=none",
    ],
    "PowerNorm": ["model=powernorm"],
}
ENCODER_DECODERS = {
    "GPT encoder-decoder": ["model=gpt_encoder_decoder"],
    "N-Transformer": ["model=ntransformer"],
}
UNTIMED_STEPS = 3


class Runs(NamedTuple):
    """What the runs have in common, and what they do not. text, and each row: overrides. base: of a row, the one it is
    compared with, which is compared with none."""

    name: str
    scale: str
    text: list[str]
    rows: dict[str, list[str]]
    base: dict[str, str]

    def overrides(self, row: str, seed: int) -> list[str]:
        name = row.lower().replace(", ", "-").replace(" ", "-")
        return [
            *self.rows[row],
            f"scale={self.scale}",
            "eval.every=0",
            "eval.tokens=4000000",  # or all of the held-out text
            "checkpoint.every=0",
            "logging.wandb.mode=disabled",
            *self.text,
            f"run.seed={seed}",
            f"run.name=compare/{self.name}-{self.scale}-{name}-{seed}",
        ]

    def directory(self, row: str, seed: int) -> Path:
        config = load_config(self.overrides(row, seed))
        return ROOT / config.run.root / str(config.run.name)


def trained(runs: Runs, row: str, seed: int, threads: int) -> dict[str, Any]:
    """The last evaluation of the run, which is trained first unless it is finished."""
    arguments = runs.overrides(row, seed)
    finished = subprocess.run(
        [sys.executable, "-m", "ngpt_train", "train", *arguments],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": str(threads)},
        check=False,
        capture_output=True,
        text=True,
    )
    if finished.returncode:
        raise SystemExit(f"{' '.join(arguments)}: exit code {finished.returncode}\n{finished.stderr[-2000:]}")
    metrics = (runs.directory(row, seed) / "metrics.jsonl").read_text()
    last = [record for record in map(json.loads, metrics.splitlines()) if record["kind"] == "eval"][-1]
    print(f"{row}, seed {seed}: {last['bits_per_byte']:.4f} bits per byte", file=sys.stderr, flush=True)
    return last


def paired(runs: Runs, row: str, seeds: int) -> str:
    """Loss minus the base's, in nats: the mean over seeds and, in brackets, the standard error of that mean over
    validation rows and that over seeds."""
    differences, errors = [], []
    for seed in range(seeds):
        a, b = (
            np.load(max((runs.directory(name, seed) / "evals").glob("step_*.npz"))) for name in (row, runs.base[row])
        )
        assert a["rows_hash"] == b["rows_hash"], f"{row} and {runs.base[row]} were validated on other rows"
        n, d = a["n_targets"], a["loss_sum"] - b["loss_sum"]
        difference = d.sum() / n.sum()
        differences.append(float(difference))
        errors.append(float(np.sqrt(((d - difference * n) ** 2).sum() * len(n) / (len(n) - 1)) / n.sum()))
    over_rows = statistics.fmean(errors)
    over_seeds = f", {statistics.stdev(differences) / seeds**0.5:.3f}" if seeds > 1 else ""
    return f"{statistics.fmean(differences):+.3f} ({over_rows:.3f}{over_seeds})"


def steps_of(runs: Runs, row: str) -> Iterator[TrainState]:
    """The state after each training step on the run's own batches, from the first on."""
    config = load_config(runs.overrides(row, seed=0))
    data = open_dataset(config)
    state = build_state(with_vocabulary(config, data))
    loader = TrainLoader(reader_of(data, state.config), config.train.rows_per_step, state.micro_rows)
    feed = Feed(loader, state.model, state.world.device)
    while True:
        micro_batches, _ = next(feed)
        train_step(state, micro_batches)
        yield state


def step_seconds(runs: Runs, rounds: int) -> dict[str, list[float]]:
    """Seconds of one step of each row, in turn, `rounds` times."""
    running = {row: steps_of(runs, row) for row in runs.rows}
    for run in running.values():
        for _ in range(UNTIMED_STEPS):
            next(run)
    seconds: dict[str, list[float]] = {row: [] for row in running}
    for _ in range(rounds):
        for row, run in running.items():
            started = time.perf_counter()
            next(run)
            seconds[row].append(time.perf_counter() - started)
    return seconds


def print_memory(runs: Runs, row: str) -> None:
    """Prints how far this process grew over three steps, in bytes; null where there is no /proc."""

    def resident(key: str) -> int | None:
        status = Path("/proc/self/status")
        lines = status.read_text().splitlines() if status.exists() else []
        return next((1024 * int(line.split()[1]) for line in lines if line.startswith(key)), None)

    before = resident("VmRSS:")
    for _ in zip(range(3), steps_of(runs, row), strict=False):
        peak = resident("VmHWM:")
    print(json.dumps(None if before is None or peak is None else peak - before))


def memory(row: str) -> str:
    command = [sys.executable, __file__, *sys.argv[1:], "--memory-of", row]
    grown = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
    return "n/a" if grown is None else f"{grown / 1e6:.0f}"


def n_params(runs: Runs, row: str) -> int:
    started = json.loads((runs.directory(row, seed=0) / "run.json").read_text())["starts"]
    return int(started[0]["n_params"])


def table(runs: Runs, losses: dict[str, list[dict[str, Any]]], seconds: dict[str, list[float]]) -> Iterator[str]:
    """The lines of the table; without seconds, it has no step times and no memory."""
    columns = ["row", "parameters", "bits per byte", "validation loss", "loss - base"]
    columns += ["step time / base", "ms", "MB"] if seconds else []
    yield f"| {' | '.join(columns)} |"
    yield "|---" * len(columns) + "|"
    for row, evaluations in losses.items():
        bits, loss = (with_spread([each[key] for each in evaluations]) for key in ("bits_per_byte", "loss"))
        difference = "base" if runs.base[row] == row else paired(runs, row, len(evaluations))
        cells = [row, f"{n_params(runs, row):,}", bits, loss, difference]
        if seconds:
            ratios = sorted(a / b for a, b in zip(seconds[row], seconds[runs.base[row]], strict=True))
            quartiles = f"{ratios[len(ratios) // 4]:.2f} to {ratios[-1 - len(ratios) // 4]:.2f}"
            cells.append("1" if runs.base[row] == row else f"{statistics.median(ratios):.2f} ({quartiles})")
            cells += [f"{1e3 * statistics.median(seconds[row]):.0f}", memory(row)]
        yield f"| {' | '.join(cells)} |"


def with_spread(values: list[float]) -> str:
    mean = statistics.fmean(values)
    return f"{mean:.3f} ({max(abs(x - mean) for x in values):.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", help="an experiment table, whose rows are run in the place of the architectures")
    parser.add_argument("--row", action="append", default=[], help="'NAME: OVERRIDES', once for each row")
    parser.add_argument("--base", help="the row with which the others are compared (default: the first)")
    parser.add_argument("--scale", default="tiny")
    parser.add_argument("--name", default="embedded", help="part of the runs' names (default: embedded)")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each row (default: 3)")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, sharing the cores (default: 1)")
    parser.add_argument("--rounds", type=int, default=20, help="timed steps of each row, 0 for none (default: 20)")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    arguments, text = parser.parse_known_args()
    if arguments.table or arguments.row:
        rows = rows_of(arguments)
        base = dict.fromkeys(rows, arguments.base or next(iter(rows)))
        if arguments.base not in (None, *rows):
            parser.error(f"--base {arguments.base}: no row of this name; there are {', '.join(rows)}")
    else:
        rows = DECODERS | ENCODER_DECODERS
        base = dict.fromkeys(DECODERS, "GPT") | dict.fromkeys(ENCODER_DECODERS, "GPT encoder-decoder")
    runs = Runs(arguments.name, arguments.scale, text or ["data=embedded"], rows, base)
    if arguments.memory_of:
        print_memory(runs, arguments.memory_of)
        return
    threads = max(1, (os.cpu_count() or 1) // arguments.jobs)
    with ThreadPoolExecutor(arguments.jobs) as pool:
        started = {
            row: [pool.submit(trained, runs, row, seed, threads) for seed in range(arguments.seeds)] for row in rows
        }
        losses = {row: [run.result() for run in futures] for row, futures in started.items()}
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    print(f"{versions}, {os.cpu_count()} cores, commit {git_commit()}\n")
    of_first = next(iter(losses.values()))[0]
    print(f"{of_first['n_targets']:,} targets of {of_first['rows']:,} validation rows\n")
    seconds = step_seconds(runs, arguments.rounds) if arguments.rounds else {}
    print("\n".join(table(runs, losses, seconds)))


if __name__ == "__main__":
    main()
