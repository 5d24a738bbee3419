"""Trains every architecture on one text and prints one table: bits per byte, differences, step time, memory.

    python scripts/compare_architectures.py > table.md
    python scripts/compare_architectures.py --name web data=local data.path='web/*.parquet' > table.md

Each architecture runs once per seed through `python -m ngpt_train train`, at the learning rate of its recipe; runs that
are finished are not run again. Differences from GPT are paired: of the same seed, row by row of the validation set.
Step times are then measured in one process, architecture by architecture in turn, and memory in a process of its own
for each. About five minutes a run on one core. Arguments that are no options are overrides of every run; without any,
the text is the embedded corpus.
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

from ngpt_train.config import load_config
from ngpt_train.data import TrainLoader, open_dataset, reader_of
from ngpt_train.training import TrainState, build_state, train_step
from ngpt_train.training.feed import Feed
from ngpt_train.training.provenance import git_commit
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
ARCHITECTURES = DECODERS | ENCODER_DECODERS
UNTIMED_STEPS = 3


class Runs(NamedTuple):
    """What the runs have in common. text: overrides."""

    name: str
    scale: str
    text: list[str]

    def overrides(self, architecture: str, seed: int) -> list[str]:
        name = architecture.lower().replace(", ", "-").replace(" ", "-")
        return [
            *ARCHITECTURES[architecture],
            f"scale={self.scale}",
            "eval.every=0",
            "eval.tokens=4000000",  # or all of the held-out text
            "checkpoint.every=0",
            "logging.wandb.mode=disabled",
            *self.text,
            f"run.seed={seed}",
            f"run.name=compare/{self.name}-{self.scale}-{name}-{seed}",
        ]

    def directory(self, architecture: str, seed: int) -> Path:
        config = load_config(self.overrides(architecture, seed))
        return ROOT / config.run.root / str(config.run.name)


def trained(runs: Runs, architecture: str, seed: int, threads: int) -> dict[str, Any]:
    """The last evaluation of the run, which is trained first unless it is finished."""
    arguments = runs.overrides(architecture, seed)
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
    metrics = (runs.directory(architecture, seed) / "metrics.jsonl").read_text()
    last = [record for record in map(json.loads, metrics.splitlines()) if record["kind"] == "eval"][-1]
    print(f"{architecture}, seed {seed}: {last['bits_per_byte']:.4f} bits per byte", file=sys.stderr, flush=True)
    return last


def paired(runs: Runs, architecture: str, base: str, seeds: int) -> str:
    """Loss minus the base's, in nats: the mean over seeds and, in brackets, the standard error of that mean over rows
    and that over seeds."""
    differences, errors = [], []
    for seed in range(seeds):
        rows = [
            np.load(max((runs.directory(model, seed) / "evals").glob("step_*.npz"))) for model in (architecture, base)
        ]
        a, b = rows
        assert a["rows_hash"] == b["rows_hash"], f"{architecture} and {base} were validated on other rows"
        n, d = a["n_targets"], a["loss_sum"] - b["loss_sum"]
        difference = d.sum() / n.sum()
        differences.append(float(difference))
        errors.append(float(np.sqrt(((d - difference * n) ** 2).sum() * len(n) / (len(n) - 1)) / n.sum()))
    over_rows = statistics.fmean(errors)
    over_seeds = f", {statistics.stdev(differences) / seeds**0.5:.3f}" if seeds > 1 else ""
    return f"{statistics.fmean(differences):+.3f} ({over_rows:.3f}{over_seeds})"


def steps_of(runs: Runs, architecture: str) -> Iterator[TrainState]:
    """The state after each training step on the run's own batches, from the first on."""
    config = load_config(runs.overrides(architecture, seed=0))
    data = open_dataset(config)
    state = build_state(with_vocabulary(config, data))
    loader = TrainLoader(reader_of(data, state.config), config.train.rows_per_step, state.micro_rows)
    feed = Feed(loader, state.model, state.world.device)
    while True:
        micro_batches, _ = next(feed)
        train_step(state, micro_batches)
        yield state


def step_seconds(runs: Runs, rounds: int) -> dict[str, list[float]]:
    """Seconds of one step of each architecture, in turn, `rounds` times."""
    running = {architecture: steps_of(runs, architecture) for architecture in ARCHITECTURES}
    for run in running.values():
        for _ in range(UNTIMED_STEPS):
            next(run)
    seconds: dict[str, list[float]] = {architecture: [] for architecture in running}
    for _ in range(rounds):
        for architecture, run in running.items():
            started = time.perf_counter()
            next(run)
            seconds[architecture].append(time.perf_counter() - started)
    return seconds


def print_memory(runs: Runs, architecture: str) -> None:
    """Prints parameters, and how far this process grew over three steps, in bytes; null where there is no /proc."""

    def resident(key: str) -> int | None:
        status = Path("/proc/self/status")
        lines = status.read_text().splitlines() if status.exists() else []
        return next((1024 * int(line.split()[1]) for line in lines if line.startswith(key)), None)

    before = resident("VmRSS:")
    state = [state for state, _ in zip(steps_of(runs, architecture), range(3), strict=False)][-1]
    peak = resident("VmHWM:")
    grown = None if before is None or peak is None else peak - before
    print(json.dumps({"n_params": state.model.n_params(), "bytes": grown}))


def memory(runs: Runs, architecture: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--memory-of", architecture, "--scale", runs.scale, *runs.text]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def table(runs: Runs, losses: dict[str, list[dict[str, Any]]], seconds: dict[str, list[float]]) -> list[str]:
    lines = [
        "| architecture | parameters | bits per byte | validation loss | loss - GPT's | step time / GPT's | ms | MB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for architecture, evaluations in losses.items():
        base = "GPT" if architecture in DECODERS else "GPT encoder-decoder"
        ratios = sorted(a / b for a, b in zip(seconds[architecture], seconds[base], strict=True))
        quartiles = f"{ratios[len(ratios) // 4]:.2f} to {ratios[-1 - len(ratios) // 4]:.2f}"
        ratio = "1" if base == architecture else f"{statistics.median(ratios):.2f} ({quartiles})"
        difference = "0" if base == architecture else paired(runs, architecture, base, len(evaluations))
        used = memory(runs, architecture)
        grown = "n/a" if used["bytes"] is None else f"{used['bytes'] / 1e6:.0f}"
        bits, loss = (with_spread([each[key] for each in evaluations]) for key in ("bits_per_byte", "loss"))
        time_ms = 1e3 * statistics.median(seconds[architecture])
        cells = [architecture, f"{used['n_params']:,}", bits, loss, difference, ratio, f"{time_ms:.0f}", grown]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def with_spread(values: list[float]) -> str:
    mean = statistics.fmean(values)
    return f"{mean:.3f} ({max(abs(x - mean) for x in values):.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", default="tiny")
    parser.add_argument("--name", default="embedded", help="of the text, part of the runs' names (default: embedded)")
    parser.add_argument("--seeds", type=int, default=3, help="runs per architecture (default: 3)")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, sharing the cores (default: 1)")
    parser.add_argument("--rounds", type=int, default=20, help="timed steps per architecture (default: 20)")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    arguments, text = parser.parse_known_args()
    runs = Runs(arguments.name, arguments.scale, text or ["data=embedded"])
    if arguments.memory_of:
        print_memory(runs, arguments.memory_of)
        return
    threads = max(1, (os.cpu_count() or 1) // arguments.jobs)
    with ThreadPoolExecutor(arguments.jobs) as pool:
        started = {
            architecture: [pool.submit(trained, runs, architecture, seed, threads) for seed in range(arguments.seeds)]
            for architecture in ARCHITECTURES
        }
        losses = {architecture: [run.result() for run in futures] for architecture, futures in started.items()}
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    print(f"{versions}, {os.cpu_count()} cores, commit {git_commit()}\n")
    targets = losses["GPT"][0]["n_targets"]
    print(f"{targets:,} targets of {losses['GPT'][0]['rows']:,} validation rows\n")
    print("\n".join(table(runs, losses, step_seconds(runs, arguments.rounds))))


if __name__ == "__main__":
    main()
