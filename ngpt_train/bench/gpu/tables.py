"""The lines that `bench gpu` prints when something is measured, and the tables that it prints at the end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ngpt_train.bench.gpu.steps import Measured
from ngpt_train.bench.interleaved import Entry


def print_tables(found: dict[str, Any], steps: Sequence[Measured]) -> None:
    """found: the content of bench.json, which lacks the later parts where the run was cut off."""
    print(f"\n{found['device']}, torch {torch.__version__}" + ("" if found["is_gpu"] else ": NOT A GPU"))
    pairs = [one for one in steps if one.entry.relative_to == "gpt"]
    others = [one for one in steps if one.entry.relative_to != "gpt"]
    tables = attention_table(found["entries"]), kernel_table(found["entries"]), comparison_table(others)
    for table in (*tables, step_table(pairs)):
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        print()
        for line in table:
            print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
    for what in found["skipped"]:
        print(f"{what}: skipped (budget)")
    for what in found["cut_off"]:
        print(f"{what}: cut off (budget)")
    for text in found["problems"]:
        print(f"FAILED: {text}")


def attention_table(entries: Sequence[dict[str, Any]]) -> list[list[str]]:
    """A row for each implementation of attention, pass and number of tokens, below a row of headings."""
    lines = [["attention", "us", "TFLOP/s", "/ as torch picks"]]
    for entry in entries:
        if entry["name"].startswith("attention, "):
            numbers = [f"{1e3 * entry['median_ms']:.0f}", f"{entry['rate'] / 1e12:.3g}", f"{entry['ratio']:.2f}"]
            lines.append([entry["name"].removeprefix("attention, "), *numbers])
    return lines


def kernel_table(entries: Sequence[dict[str, Any]]) -> list[list[str]]:
    """A row for each operation and pass: our time, and its ratios to plain PyTorch's in eager mode and compiled."""
    times = {entry["name"]: entry["median_ms"] for entry in entries}
    lines = [["operation", "error", "us", "GB/s", "of a copy's", "/ eager", "/ compiled"]]
    for entry in entries:
        what, _, who = entry["name"].rpartition(": ")
        if who != "ours":
            continue
        compiled = times.get(f"{what}: compiled")
        numbers = [f"{entry['error']:.1e}", f"{1e3 * entry['median_ms']:.0f}", shown(entry["gb_per_s"], ".0f")]
        numbers += [shown(entry["of_ceiling"], ".0%"), f"{entry['ratio']:.2f}"]
        lines.append([what, *numbers, shown(None if compiled is None else entry["median_ms"] / compiled, ".2f")])
    return lines


def step_table(steps: Sequence[Measured]) -> list[list[str]]:
    """A row for each size, context and architecture."""
    head = ["variant", "row", "tokens", "step ms", "tokens/s", "MFU causal", "MFU", "peak GB", "/ GPT", "predicted ms"]
    lines = [[*head, "gap"]]
    for one in steps:
        entry = one.entry
        numbers = [f"{one.tokens}", f"{entry.median_ms:.1f}", f"{entry.rate:.0f}"]
        numbers += [shown(one.mfu_causal, ".1%"), shown(one.mfu, ".1%"), shown(one.memory_gb, ".1f")]
        numbers += [f"{entry.ratio:.3f}", shown(one.predicted_ms, ".0f"), shown(one.gap, "+.0%")]
        lines.append([one.variant, one.row, *numbers])
    return lines


def comparison_table(steps: Sequence[Measured]) -> list[list[str]]:
    """A row for each other way to take nGPT's step. The quartiles are those of the ratio to full nGPT's time."""
    lines = [["instead of nGPT", "row", "step ms", "tokens/s", "/ nGPT", "quartiles", "/ GPT", "predicted ms", "gap"]]
    for one in steps:
        entry = one.entry
        numbers = [f"{entry.median_ms:.1f}", f"{entry.rate:.0f}", f"{entry.ratio:.3f}"]
        numbers += [f"{entry.spread[0]:.3f} to {entry.spread[1]:.3f}", shown(one.over_gpt, ".3f")]
        lines.append([one.variant, one.row, *numbers, shown(one.predicted_ms, ".0f"), shown(one.gap, "+.0%")])
    return lines


def kernel_line(entry: Entry) -> str:
    """An entry of `bench.kernels` in words."""
    text = f"{entry.name}: {1e3 * entry.median_ms:.0f} us, {entry.ratio:.2f} of eager's time"
    if entry.gb_per_s is not None:
        text += f", {entry.gb_per_s:.0f} GB/s"
    return text if entry.of_ceiling is None else f"{text}, {entry.of_ceiling:.0%} of a copy's"


def step_line(one: Measured) -> str:
    """The result of a variant in words."""
    text = f"{one.row}, {one.variant}: {one.entry.median_ms:.1f} ms, {one.entry.rate:.0f} tokens/s, "
    other = {"gpt": "GPT", "ngpt": "nGPT"}[one.entry.relative_to]
    text += f"{one.entry.ratio:.3f} of {other}'s time ({one.entry.spread[0]:.3f} to {one.entry.spread[1]:.3f})"
    return f"{text}, loss {one.first_loss:.3f} -> {one.last_loss:.3f}"


def shown(value: float | None, format_spec: str) -> str:
    return "-" if value is None else format(value, format_spec)
