"""Three training steps in each possible layout. Their losses must be equal."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ngpt_train.config.schema import Config
from ngpt_train.core.constants import IGNORED
from ngpt_train.distributed.layouts import resolve_kind, resolve_precision
from ngpt_train.distributed.world import World, resolve_device
from ngpt_train.doctor.bounded import Report, first_line
from ngpt_train.doctor.findings import OK, WARNING, WRONG, Answer, Finding, Place, unchecked
from ngpt_train.doctor.rank_store import join
from ngpt_train.kernels import dispatch
from ngpt_train.report.enough_memory import check_state_fits
from ngpt_train.training.state import build_state
from ngpt_train.training.step import train_step

STEPS, CONTEXT, ROWS_OF_A_RANK, VOCABULARY = 3, 32, 2, 512
NARROW = 512  # the trial of a model up to this width has two blocks, of a wider one a single block
TOLERANCE = 1e-5  # relative; for fp32 sums in another order
TOLERANCE_OF_HALF = 0.02  # relative; for losses in bf16 or fp16
LR = 1e-3


def look(
    config: Config, place: Place, seconds: float, off: Mapping[str, str], apart: str | None, report: Report
) -> None:
    """Trains a cut of the model in each layout. A collective call.

    An error in one layout ends the look, because the other ranks may be in another collective by then. off: the wrong
    kernels, which `train` leaves out too. apart: the problem of the links, if there was one.
    """
    device = resolve_device(config.train.device, place.local_rank)
    precision = str(resolve_precision(config.train.precision, device.type)).removeprefix("torch.")
    own = resolve_kind(config.parallel.kind, place.size, device.type, place.local_size)
    names = ["single", "ddp", "fsdp", *(["hsdp"] if group_size(config, place.size) else [])]
    report(own=own, layouts=names, precision=precision)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dispatch.switch_off(off)
    report(begun="single")
    report(single=run(cut(config, place.size, "single"), World(0, 1, 0, device)))
    report(begun="joining the ranks")
    if apart is not None:
        raise RuntimeError(apart)
    join(place, "steps", device, seconds / 2)
    world = World(place.rank, place.size, place.local_rank, device, place.local_size)
    for name in names[1:]:
        report(begun=name)
        report(**{name: run(cut(config, place.size, name), world)})
    if precision != "float32":
        report(begun=f"{own} in {precision}")
        alone = own == "single"
        report(as_it_runs=run(cut(config, place.size, own, exact=False), World(0, 1, 0, device) if alone else world))
    report(begun="")


def group_size(config: Config, size: int) -> int | None:
    """The ranks of a group of hsdp; None if two groups of two ranks are impossible."""
    wanted = config.parallel.shard
    if isinstance(wanted, int) and size % wanted == 0 and wanted < size:
        return wanted
    return next((n for n in range(2, size // 2 + 1) if size % n == 0), None)


def cut(config: Config, size: int, kind: str, exact: bool = True) -> Config:
    """The config with few blocks, ids and tokens, for the layout `kind`, not compiled. exact: in fp32."""
    model = config.model
    blocks = min(model.n_layers, 2 if model.d_model <= NARROW else 1)
    changes: dict[str, Any] = {"n_layers": blocks, "vocab_size": VOCABULARY, "context": CONTEXT}
    # Keys of some architectures. Synchronised statistics are equal in all layouts.
    others = {"n_encoder_layers": blocks, "source_context": CONTEXT // 2, "statistics": "synchronised"}
    changes |= {name: value for name, value in others.items() if name in vars(model)}
    rows = ROWS_OF_A_RANK * size
    train = replace(
        config.train,
        steps=1000,
        stop_at=None,
        batch_rows=rows,
        batch_tokens=None,
        # Statistics advance with each micro batch, so all layouts have one micro batch a step.
        micro_rows=rows if kind == "single" else ROWS_OF_A_RANK,
        compile=False,
        cuda_graphs=False,
        precision="fp32" if exact else config.train.precision,
    )
    kernels = replace(config.kernels, attention="auto") if exact else config.kernels
    return replace(
        config,
        model=replace(model, **changes),
        train=train,
        kernels=kernels,
        optim=replace(config.optim, lr=LR, ema_decay=None),
        schedule=replace(config.schedule, kind="constant", warmup_steps=0, warmup_tokens=None),
        parallel=replace(config.parallel, kind=kind, shard=group_size(config, size) or 2 if kind == "hsdp" else "auto"),
    )


def run(config: Config, world: World) -> dict[str, list[float]]:
    """The loss and the norm of the gradient of each step."""
    check_state_fits(config, world)
    state = build_state(config, world)
    losses, norms = [], []
    for step in range(STEPS):
        mine = tuple(part.chunk(world.size)[world.rank] for part in batch(config, step))
        result = train_step(state, [mine])
        losses.append(result.loss.item())
        norms.append(result.grad_norm.item())
    return {"losses": losses, "norms": norms}


def batch(config: Config, step: int) -> tuple[Tensor, Tensor]:
    """Random tokens and targets of all ranks: two `(rows, CONTEXT)` int64."""
    generator = torch.Generator().manual_seed(step)
    rows = config.train.rows_per_step
    row = torch.randint(VOCABULARY, (rows, CONTEXT + 1), generator=generator)
    tokens, targets = row[:, :-1].clone(), row[:, 1:].clone()
    targets[:, : config.model.source_length(CONTEXT)] = IGNORED  # the encoder's tokens are not predicted
    targets[:, config.model.predicted(CONTEXT) :] = IGNORED  # with masks few are
    if config.model.n_classes:
        targets = torch.where(targets == IGNORED, IGNORED, targets % config.model.n_classes)
    return tokens, targets


def judge(answers: Sequence[Answer]) -> Iterator[Finding]:
    """Compares every layout on every rank with one process on rank 0."""
    if not answers:
        return
    reference = answers[0].facts.get("single")
    for name in answers[0].facts.get("layouts", ["single"]):
        yield from _layout(name, answers, reference)
    if "layouts" in answers[0].facts and "hsdp" not in answers[0].facts["layouts"]:
        yield Finding("steps, hsdp", "not possible here: it needs 4 ranks or more, and not a prime number")
    for answer in answers:
        if "as_it_runs" in answer.facts and reference is not None:
            losses, expected = answer.facts["as_it_runs"]["losses"], reference["losses"]
            verdict, found = OK, f"losses {_shown(losses)}, as in fp32"
            if not _close(losses, expected, TOLERANCE_OF_HALF):
                verdict, found = WRONG, f"losses {_shown(losses)} here, in fp32 {_shown(expected)}"
            remedy = "try train.precision=fp32 and kernels=torch: they tell the fault of a product from a kernel's"
            check = f"steps, {answer.facts['own']} in {answer.facts['precision']}"
            yield Finding(check, found, verdict, remedy, (answer.place,))


def _layout(name: str, answers: Sequence[Answer], reference: dict[str, list[float]] | None) -> Iterator[Finding]:
    check, own = f"steps, {name}", answers[0].facts.get("own")
    if failed := [answer for answer in answers if name not in answer.facts and answer.problem]:
        # The cause is a rank that failed by itself; the others waited for it until their time was up.
        reached = [answer for answer in failed if answer.facts.get("begun", name) == name]
        cause = min(reached or failed, key=lambda answer: _waited(answer.problem or ""))
        grave = WRONG if name in (own, "single") else WARNING
        found = cause.problem or ""
        where = tuple(answer.place for answer in reached or failed if _waited(answer.problem or "") == _waited(found))
        if not reached:
            found = f"{cause.facts.get('begun')} failed before: {found}"
        remedy = "look at the rows above: devices, links, versions" if grave == WRONG else f"do not use parallel={name}"
        yield unchecked(check, first_line(found), remedy, grave, where)
        return
    for answer in answers:
        if name not in answer.facts or reference is None:
            continue
        found, verdict = answer.facts[name], OK
        said = f"losses {_shown(found['losses'])}" + ("" if name == "single" else ", equal to one process's")
        for what, tolerance in (("norms", 10 * TOLERANCE), ("losses", TOLERANCE)):
            if not _close(found[what], reference[what], tolerance):
                said = f"{what} {_shown(found[what])} here, in one process of rank 0 {_shown(reference[what])}"
                verdict = WRONG
        remedy = "a device is faulty, or torch differs: leave this rank's host out, and look at versions"
        yield Finding(check, said, verdict, remedy, (answer.place,))


def _waited(problem: str) -> bool:
    """True if the rank failed because another one did not answer."""
    return any(words in problem for words in ("longer than", "imed out", "imeout", "Connection closed", "reset by"))


def _close(found: Sequence[float], expected: Sequence[float], tolerance: float) -> bool:
    return all(math.isclose(a, b, rel_tol=tolerance) for a, b in zip(found, expected, strict=True))


def _shown(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.6g}" for value in values)
