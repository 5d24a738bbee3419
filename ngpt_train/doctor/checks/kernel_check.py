"""Checks the run's kernels on the model's own shapes, as `train` does before its first step."""

from collections.abc import Iterator
from dataclasses import replace

import torch

from ngpt_train.config.schema import Config
from ngpt_train.distributed.first_contact import first_contact
from ngpt_train.distributed.world import World, resolve_device
from ngpt_train.doctor.bounded import Report
from ngpt_train.doctor.findings import CONFIG, WARNING, WRONG, Answer, Finding, unchecked
from ngpt_train.training.feed import resolve_micro_rows

REMEDY = "update torch, triton or the driver, and tell the authors; until then plain PyTorch runs in its place"


def look(config: Config, size: int, local_rank: int, vocabulary: int, report: Report) -> None:
    """On the first rank of each host. `train` reuses the result, from data.cache."""
    device = resolve_device(config.train.device, local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    micro_rows = resolve_micro_rows(config.train.rows_per_step, config.train.micro_rows, config.model.context, size)
    config = replace(config, model=replace(config.model, vocab_size=vocabulary))
    contact = first_contact(config, World(0, 1, local_rank, device), micro_rows)
    if contact is not None:
        report(off=contact.off, slower=contact.slower, calls=len(contact.calls), name=contact.device)


def judge(answer: Answer) -> Iterator[Finding]:
    """The kernels of one host. A kernel that is off here is off on all hosts."""
    facts = answer.facts
    if answer.refusal:
        yield Finding("kernels", answer.refusal, WRONG, "choose what runs here, as it says", code=CONFIG)
    elif answer.problem:
        yield unchecked("kernels", answer.problem, "`train` checks them again; kernels=torch does without them")
    for name, problem in facts.get("off", {}).items():
        yield Finding("kernels", f"{name} is off: {problem}", WARNING, REMEDY)
    if "off" in facts and not facts["off"]:
        slower = f"; plain PyTorch is faster than {', '.join(facts['slower'])}" if facts["slower"] else ""
        yield Finding("kernels", f"right on {facts['name']}, in {facts['calls']} calls of this model{slower}")
