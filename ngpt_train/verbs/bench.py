"""`bench`: times, and other costs, of the parts of a run, each as a ratio to something that does the same."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ngpt_train.bench.interleaved import Entry
from ngpt_train.config import load_config
from ngpt_train.config.schema import Config
from ngpt_train.core.checkout import git_commit
from ngpt_train.core.files import write_json

if TYPE_CHECKING:
    from ngpt_train.bench.communication import Communication


def main(config: Config, overrides: Sequence[str]) -> int:
    """Runs the benchmark bench.what, prints an entry a line and writes all to bench.out as JSON; returns 0.

    Raises KernelError (exit code 4) where `bench kernels` finds a wrong result.
    """
    if config.bench.what == "communication":
        return of_communication(config)
    entries: list[dict[str, Any]] = []
    machine = {"python": platform.python_version(), "machine": platform.machine(), "commit": git_commit()}
    print(f"{'':<58} {'ratio':>6}  {'spread':>15}  {'median':>12}  rate", flush=True)
    for entry in entries_of(config, overrides):
        print(line(entry), flush=True)
        entries.append(entry.json())
        if config.bench.out is not None:  # after each: a later failure loses nothing
            write_json(Path(config.bench.out).expanduser(), {"what": config.bench.what, **machine, "entries": entries})
    return 0


def of_communication(config: Config) -> int:
    """Runs `bench communication` on every rank; the first prints what it sends and writes bench.out."""
    from ngpt_train.bench import communication

    main_rank = os.environ.get("RANK", "0") == "0"
    found: list[dict[str, Any]] = []
    if main_rank:
        print(row_of("layout", "micro batches", "collective", "ranks", "calls", "MB", "MB sent"), flush=True)
    for step in communication.bench(config):
        if main_rank:
            print("\n".join(lines_of(step)), flush=True)
        found.append(step.json())
        if main_rank and config.bench.out is not None:
            content = {"what": "communication", "commit": git_commit(), "entries": found}
            write_json(Path(config.bench.out).expanduser(), content)
    return 0


def lines_of(step: Communication) -> Iterator[str]:
    """The lines of the table for one layout: a line for each kind of collective, and the sum."""
    for x in step.collectives:
        size, sent = f"{x.bytes / 1e6:.3f}", f"{x.sent / 1e6:.3f}"
        yield row_of(step.layout, step.micro_batches, x.kind, x.ranks, x.calls, size, sent)
    calls, sent = sum(x.calls for x in step.collectives), f"{step.sent / 1e6:.3f}"
    written = "" if step.written is None else f", {step.written / 1e6:.3f} written"
    yield row_of(step.layout, step.micro_batches, "in all", "", calls, "", sent) + written


def row_of(layout: str, n: Any, kind: str, ranks: Any, calls: Any, size: str, sent: str) -> str:
    return f"{layout:<46} {n:>13}  {kind:<14} {ranks:>5} {calls:>5} {size:>9} {sent:>9}"


def entries_of(config: Config, overrides: Sequence[str]) -> Iterator[Entry]:
    """The entries of the benchmark bench.what, as they are measured."""
    # Imported one by one: most benchmarks do without the packages that the others import.
    if config.bench.what == "step":
        from ngpt_train.bench import step

        # GPT comes first, because the other's time is compared with it. The other is the config's model, or nGPT.
        others = [override for override in overrides if not override.startswith("model=")]
        names = ["gpt", config.model.name if config.model.name != "gpt" else "ngpt"]
        return step.bench({name: load_config([*others, f"model={name}"], world_size=1) for name in names})
    if config.bench.what == "checkpoint":
        from ngpt_train.bench import checkpoint

        return checkpoint.bench(config)
    if config.bench.what == "attention":
        from ngpt_train.bench import attention
        from ngpt_train.distributed import resolve_device

        device = resolve_device(config.train.device, 0)
        return attention.bench(device, attention.ON_GPU if device.type == "cuda" else attention.ON_CPU, rounds=10)
    if config.bench.what == "generation":
        from ngpt_train.bench import generation
        from ngpt_train.bench.step import with_vocabulary
        from ngpt_train.distributed import resolve_device, resolve_precision
        from ngpt_train.distributed.layouts import choose_kernels
        from ngpt_train.interop.exporting import in_transformers

        device = resolve_device(config.train.device, 0)
        precision = resolve_precision(config.train.precision, device.type)
        choose_kernels(config, device, precision)
        return generation.bench(with_vocabulary(config).model, device, precision, in_transformers)
    if config.bench.what == "kernels":
        from ngpt_train.bench import kernels
        from ngpt_train.distributed import resolve_device, resolve_precision
        from ngpt_train.distributed.layouts import choose_kernels

        device = resolve_device(config.train.device, 0)
        choose_kernels(config, device, resolve_precision(config.train.precision, device.type))
        shapes, model = kernels.SHAPES, config.model
        if any(override.startswith(("scale=", "model.d_model=", "experiment=")) for override in overrides):
            shapes = [(model.d_model, model.d_mlp or 4 * model.d_model, model.d_model // model.n_heads)]
        return kernels.bench(device, shapes, kernels.ON_GPU if device.type == "cuda" else kernels.ON_CPU)
    from ngpt_train.bench import data

    return data.bench(config)


def line(entry: Entry) -> str:
    """One line of the table, with those of the entry's numbers that were measured."""
    spread = f"{entry.spread[0]:.4g} to {entry.spread[1]:.4g}"
    rate = ""
    if entry.rate is not None:
        rate = f"{entry.rate / 1e6:.4g} M{entry.unit}" if entry.rate >= 1e6 else f"{entry.rate:.4g} {entry.unit}"
    if entry.mfu is not None:
        rate += f", MFU {entry.mfu:.1%}"
    if entry.memory_gb is not None:
        rate += f", {entry.memory_gb:.1f} GB at the most"
    if entry.gb_per_s is not None:
        rate += f", {entry.gb_per_s:.0f} GB/s"
    if entry.of_ceiling is not None:
        rate += f", {entry.of_ceiling:.0%} of a copy's"
    if entry.activations_mb is not None:
        rate += f", {entry.activations_mb:.0f} MB of activations"
    if entry.error is not None:
        rate += f", error {entry.error:.1e}"
    if entry.memory_mb is not None:
        rate = f"{entry.memory_mb[0]:.0f} MB resident after a tenth, {entry.memory_mb[1]:.0f} MB at the end"
    return f"{entry.name:<58} {entry.ratio:>6.2f}  {spread:>15}  {entry.median_ms:>9.4g} ms  {rate}"
