"""The memory of training steps on this GPU beside what `plan` predicts. Needs torch alone.

    python scripts/memory_of_steps.py --seconds 110 --out memory.json

GPT and nGPT in bf16, 8 rows of 1024 tokens, with each kind of activation checkpointing, uncompiled and compiled, on a
single device and under FSDP2 on one rank. Cases come in the order of what they tell; those for which there is no time
are left out and named. Measured is torch.cuda.max_memory_allocated of the second step.
"""

import argparse
import gc
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # from a checkout, without installing

from benchmarks.paper_steps import SIZES, drawn_on, make_config
from ngpt_train.config.schema import Config
from ngpt_train.models import build_model
from ngpt_train.report.memory import Layout, memory_per_rank
from ngpt_train.study.random_steps import tokens_of
from ngpt_train.training import build_state, train_step

CONTEXT = 1024
MODELS = ("gpt", "ngpt")
KINDS = ("none", "selective", "full")
GIB = 2**30


@dataclass(frozen=True)
class Case:
    model: str
    scale: str
    layout: str
    compiled: bool
    recompute: str
    micro_batches: int = 1


def cases() -> Iterator[Case]:
    """In the order of what they tell: uncompiled ones take a second or two, compiled ones some ten."""
    for compiled in (False, True):
        for model in MODELS:
            for kind in KINDS:
                yield Case(model, "0.5b", "single", compiled, kind)
    for model, kind in (("gpt", "none"), ("ngpt", "selective"), ("gpt", "full")):
        yield Case(model, "0.5b", "fsdp", False, kind)
        yield Case(model, "0.5b", "fsdp", True, kind)
    yield Case("gpt", "0.5b", "single", True, "none", micro_batches=2)
    for compiled in (False, True):
        for model in MODELS:
            for kind in KINDS:
                yield Case(model, "125m", "single", compiled, kind)
                yield Case(model, "125m", "fsdp", compiled, kind)


def config_of(case: Case, arguments: argparse.Namespace) -> Config:
    config = make_config(case.model, f"{arguments.scale or case.scale}:{CONTEXT}", arguments.device)
    config.train.precision, config.train.batch_rows = "bf16", arguments.rows * case.micro_batches
    config.train.micro_rows, config.train.compile = arguments.rows, case.compiled
    config.train.activation_checkpointing, config.parallel.kind = case.recompute, case.layout
    return config


def predicted(config: Config, case: Case, arguments: argparse.Namespace) -> dict[str, int]:
    """The items of `plan`, in bytes."""
    with torch.device("meta"):
        model = build_model(config.model)
    on_gpu = arguments.device == "cuda"
    n_shards = 1 if case.layout == "fsdp" else 0
    layout = Layout(
        case.layout, n_shards, torch.bfloat16, case.compiled, arguments.rows, case.micro_batches, on_gpu, on_gpu
    )
    return {item.name: item.bytes for item in memory_per_rank(config, model, layout)}


def measured(config: Config, arguments: argparse.Namespace) -> int | None:
    """Bytes at the peak of the second step, beyond what was there before the case; None without a GPU."""
    device = torch.device(arguments.device)
    on_gpu = device.type == "cuda"
    before = torch.cuda.memory_allocated() if on_gpu else 0
    torch.compiler.reset()
    with drawn_on(device):
        state = build_state(config)
    micro_batches = tokens_of(state)
    train_step(state, micro_batches, untouched=True)
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    loss = train_step(state, micro_batches, untouched=True).loss.item()
    assert loss == loss, "the loss is NaN"
    return torch.cuda.max_memory_allocated() - before if on_gpu else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=110.0, help="no case begins later")
    parser.add_argument("--out", help="JSON file for all cases, with every item of the prediction")
    parser.add_argument("--rows", type=int, default=8, help="rows of a micro batch")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--scale", choices=list(SIZES), help="one scale for all cases, to try the script")
    arguments = parser.parse_args()
    started, found, left_out = time.monotonic(), [], []
    print(
        f"{'model':5} {'scale':5} {'layout':6} {'':8} {'recompute':9} predicted  measured  ratio  seconds", flush=True
    )
    for case in cases():
        if time.monotonic() - started > arguments.seconds:
            left_out.append(case)
            continue
        begun = time.monotonic()
        config = config_of(case, arguments)
        row: dict[str, Any] = vars(case) | {"items": predicted(config, case, arguments)}
        total = sum(row["items"].values())
        try:
            row["measured"] = measured(config, arguments)
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {error}"[:500]
        gc.collect()
        if arguments.device == "cuda":
            torch.cuda.empty_cache()
        row |= {"predicted": total, "seconds": round(time.monotonic() - begun, 1)}
        found.append(row)
        real = row.get("measured")
        result = "" if real is None else f"{real / GIB:9.2f} {total / real:6.3f}"
        print(
            f"{case.model:5} {case.scale:5} {case.layout:6} {'compiled' if case.compiled else 'eager':8} "
            f"{case.recompute:9} {total / GIB:9.2f} {result:>16} {row['seconds']:8} "
            f"{'x2 ' if case.micro_batches > 1 else ''}{row.get('error', '')}",
            flush=True,
        )
        if arguments.out is not None:  # after each: a later failure loses nothing
            Path(arguments.out).write_text(json.dumps({"torch": torch.__version__, "cases": found}, indent=1))
    print(f"{len(left_out)} cases left out for lack of time" + "".join(f"\n  {case}" for case in left_out))


if __name__ == "__main__":
    main()
