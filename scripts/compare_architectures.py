"""Trains every architecture on the embedded corpus and prints one table: bits per byte, step time, memory.

    python scripts/compare_architectures.py > table.md

Each architecture runs once per seed through `python -m ngpt_train train`, at the learning rate of its recipe; runs that
are finished are not run again. Step times are then measured in one process, architecture by architecture in turn, and
memory in a process of its own for each. About five minutes a run on one core.
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
from typing import Any

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


def overrides(architecture: str, scale: str, seed: int) -> list[str]:
    name = architecture.lower().replace(", ", "-").replace(" ", "-")
    return [
        *ARCHITECTURES[architecture],
        f"scale={scale}",
        "data=embedded",
        "eval.every=0",
        "eval.rows=170",
        "checkpoint.every=0",
        "logging.wandb.mode=disabled",
        f"run.seed={seed}",
        f"run.name=compare/{scale}-{name}-{seed}",
    ]


def trained(architecture: str, scale: str, seed: int, threads: int) -> dict[str, float]:
    """The last evaluation of the run, which is trained first unless it is finished."""
    arguments = overrides(architecture, scale, seed)
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
    config = load_config(arguments)
    metrics = (ROOT / config.run.root / str(config.run.name) / "metrics.jsonl").read_text()
    last = [record for record in map(json.loads, metrics.splitlines()) if record["kind"] == "eval"][-1]
    print(f"{architecture}, seed {seed}: {last['bits_per_byte']:.4f} bits per byte", file=sys.stderr, flush=True)
    return last


def steps_of(architecture: str, scale: str) -> Iterator[TrainState]:
    """The state after each training step on the run's own batches, from the first on."""
    config = load_config(overrides(architecture, scale, seed=0))
    data = open_dataset(config)
    state = build_state(with_vocabulary(config, data))
    loader = TrainLoader(reader_of(data, state.config), config.train.rows_per_step, state.micro_rows)
    feed = Feed(loader, state.model, state.world.device)
    while True:
        micro_batches, _ = next(feed)
        train_step(state, micro_batches)
        yield state


def step_seconds(scale: str, rounds: int) -> dict[str, list[float]]:
    """Seconds of one step of each architecture, in turn, `rounds` times."""
    runs = {architecture: steps_of(architecture, scale) for architecture in ARCHITECTURES}
    for run in runs.values():
        for _ in range(UNTIMED_STEPS):
            next(run)
    seconds: dict[str, list[float]] = {architecture: [] for architecture in runs}
    for _ in range(rounds):
        for architecture, run in runs.items():
            started = time.perf_counter()
            next(run)
            seconds[architecture].append(time.perf_counter() - started)
    return seconds


def print_memory(architecture: str, scale: str) -> None:
    """Prints parameters, and how far this process grew over three steps, in bytes; null where there is no /proc."""

    def resident(key: str) -> int | None:
        status = Path("/proc/self/status")
        lines = status.read_text().splitlines() if status.exists() else []
        return next((1024 * int(line.split()[1]) for line in lines if line.startswith(key)), None)

    before = resident("VmRSS:")
    state = [state for state, _ in zip(steps_of(architecture, scale), range(3), strict=False)][-1]
    peak = resident("VmHWM:")
    grown = None if before is None or peak is None else peak - before
    print(json.dumps({"n_params": state.model.n_params(), "bytes": grown}))


def memory(architecture: str, scale: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--memory-of", architecture, "--scale", scale]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def table(losses: dict[str, list[dict[str, float]]], seconds: dict[str, list[float]], scale: str) -> list[str]:
    lines = [
        "| architecture | parameters | bits per byte | validation loss | step time / GPT | ms per step | memory, MB |",
        "|---|---|---|---|---|---|---|",
    ]
    for architecture, runs in losses.items():
        base = "GPT" if architecture in DECODERS else "GPT encoder-decoder"
        ratios = sorted(a / b for a, b in zip(seconds[architecture], seconds[base], strict=True))
        quartiles = f"{ratios[len(ratios) // 4]:.2f} to {ratios[-1 - len(ratios) // 4]:.2f}"
        ratio = "1" if base == architecture else f"{statistics.median(ratios):.2f} ({quartiles})"
        used = memory(architecture, scale)
        grown = "n/a" if used["bytes"] is None else f"{used['bytes'] / 1e6:.0f}"
        bits, loss = (with_spread([run[key] for run in runs]) for key in ("bits_per_byte", "loss"))
        time_ms = 1e3 * statistics.median(seconds[architecture])
        lines.append(f"| {architecture} | {used['n_params']:,} | {bits} | {loss} | {ratio} | {time_ms:.0f} | {grown} |")
    return lines


def with_spread(values: list[float]) -> str:
    mean = statistics.fmean(values)
    return f"{mean:.3f} ({max(abs(x - mean) for x in values):.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", default="tiny")
    parser.add_argument("--seeds", type=int, default=3, help="runs per architecture (default: 3)")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, sharing the cores (default: 1)")
    parser.add_argument("--rounds", type=int, default=20, help="timed steps per architecture (default: 20)")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    scale = arguments.scale
    if arguments.memory_of:
        print_memory(arguments.memory_of, scale)
        return
    threads = max(1, (os.cpu_count() or 1) // arguments.jobs)
    with ThreadPoolExecutor(arguments.jobs) as pool:
        runs = {
            architecture: [pool.submit(trained, architecture, scale, seed, threads) for seed in range(arguments.seeds)]
            for architecture in ARCHITECTURES
        }
        losses = {architecture: [run.result() for run in futures] for architecture, futures in runs.items()}
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    print(f"{versions}, {os.cpu_count()} cores, commit {git_commit()}\n")
    print("\n".join(table(losses, step_seconds(scale, arguments.rounds), scale)))


if __name__ == "__main__":
    main()
