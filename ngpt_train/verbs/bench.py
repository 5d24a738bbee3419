"""`bench`: what the parts of a run cost, ratios first."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from pathlib import Path

from ngpt_train.bench.interleaved import Entry
from ngpt_train.config.schema import Config
from ngpt_train.training.checkpoint import write_json
from ngpt_train.training.provenance import git_commit


def main(config: Config, overrides: Sequence[str]) -> int:
    """Prints a table of entries; writes them to bench.out as JSON."""
    from ngpt_train.bench.data import bench

    entries = []
    print(f"{'':<44} {'ratio':>6}  {'spread':>15}  {'median':>12}  rate", flush=True)
    for entry in bench(config):
        print(line(entry), flush=True)
        entries.append(entry.json())
    if config.bench.out is not None:
        machine = {"python": platform.python_version(), "machine": platform.machine(), "commit": git_commit()}
        write_json(Path(config.bench.out).expanduser(), {"what": config.bench.what, **machine, "entries": entries})
    return 0


def line(entry: Entry) -> str:
    ratio = "" if entry.ratio is None else f"{entry.ratio:.2f}"
    spread = f"{entry.spread[0]:.4g} to {entry.spread[1]:.4g}"
    rate = "" if entry.rate is None else f"{entry.rate / 1e6:.2f} M{entry.unit}"
    if entry.memory_mb is not None:
        rate = f"{entry.memory_mb[0]:.0f} MB resident after a tenth, {entry.memory_mb[1]:.0f} MB at the end"
    return f"{entry.name:<44} {ratio:>6}  {spread:>15}  {entry.median_ms:>9.4g} ms  {rate}"
