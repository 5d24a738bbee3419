"""All looks of a rank in their order, and what rank 0 makes of them."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ngpt_train.config.keys import AUTO
from ngpt_train.config.schema import Config
from ngpt_train.doctor.bounded import Check, Report, first_line
from ngpt_train.doctor.checks import (
    compiler,
    devices,
    disks,
    environment,
    kernels,
    links,
    steps,
    text,
    tracking,
    versions,
)
from ngpt_train.doctor.exchange import Exchange
from ngpt_train.doctor.findings import (
    WARNING,
    WRONG,
    Answer,
    Finding,
    Place,
    merged,
    unchecked,
    with_host_names,
)
from ngpt_train.report.plan import make_plan

# Seconds that each look may take, and all of them. What waits goes on side by side, and compiling beside all the rest;
# disks, links and steps are measured one after the other.
SECONDS = {
    "versions": 15.0, "environment": 5.0, "devices": 25.0, "text": 25.0, "wandb": 12.0, "compiler": 60.0,
    "plan": 15.0, "kernels": 40.0, "disks": 20.0, "links": 20.0, "steps": 40.0,
}  # fmt: skip
ALL_SECONDS, LEAST_SECONDS = 80.0, 8.0
HELLO_SECONDS, MEETING_SECONDS, LAST_SECONDS = 30.0, 10.0, 5.0
OF_A_HOST = ("versions", "compiler", "kernels", "disks", "data", "wandb")  # rows about hosts, not about ranks
ONE_OF_EACH_HOST = ("versions", "text", "compiler", "kernels", "disks")
TOGETHER = ("links", "steps")  # looks that all ranks have at the same time
ASSUMED_VOCABULARY = 32_000  # where the tokenizer cannot be had
SKEW, SIGNED_REQUESTS_FAIL = 1.0, 300.0  # seconds by which clocks may differ


@dataclass
class Examination:
    """What has become known. answers: by the name of the look, in order of ranks."""

    places: list[Place]
    answers: dict[str, list[Answer]] = field(default_factory=dict)
    absent: list[int] = field(default_factory=list)
    clocks: dict[int, dict[str, float]] = field(default_factory=dict)
    seconds: float = 0.0

    def of(self, name: str) -> list[Answer]:
        return self.answers.get(name, [])

    def fact(self, look: str, name: str) -> Any:
        """A fact of the first rank that knows it."""
        return next((answer.facts[name] for answer in self.of(look) if name in answer.facts), None)


def examine(config: Config, place: Place, exchange: Exchange) -> Examination | None:
    """Looks at everything; the examination of all ranks on rank 0, None on the others. Collective."""
    begin = time.monotonic()
    left = lambda name: max(LEAST_SECONDS, min(SECONDS[name], begin + ALL_SECONDS - time.monotonic()))  # noqa: E731
    token = uuid.uuid4().hex[:12]
    exchange.post("hello", {"place": vars(place), "token": token})
    hello = exchange.gather("hello", HELLO_SECONDS, None if place.rank == 0 else [0, place.rank])
    token = hello[0]["token"] if 0 in hello else token
    examination = Examination(with_host_names([Place(**said["place"]) for said in hello.values()]))
    examination.absent = [rank for rank in range(place.size) if rank not in hello] if place.rank == 0 else []
    first_ranks = [other.rank for other in examination.places if other.speaks_for_host]
    exchange.post("leaders", first_ranks)

    looks: dict[str, Callable[[Report], None]] = {
        "versions": lambda report: versions.look(config, report),
        "environment": lambda report: environment.look(config, report),
        "devices": lambda report: devices.look(config, place.local_rank, report),
        "text": lambda report: text.look(config, report),
        "wandb": lambda report: tracking.look(config, report),
        "compiler": lambda report: compiler.look(config, place.local_rank, report),
    }
    mine = [name for name in looks if is_asked(name, place)]
    under_way = {name: Check(looks[name], left(name)) for name in mine}
    if place.rank == 0 and len(first_ranks) > 1:
        exchange.answer_clocks([rank for rank in first_ranks if rank != 0], MEETING_SECONDS)
    elif place.speaks_for_host and place.rank != 0:
        exchange.post("clock", exchange.ask_clock(MEETING_SECONDS))
    # Compiling may go on beside all the rest.
    found = {name: _answer(place, check) for name, check in under_way.items() if name != "compiler"}
    size = {"bytes": 0}
    if place.rank == 0:
        found["plan"] = _answer(place, Check(lambda report: plan(config, place, found, report), left("plan")))
        size["bytes"] = found["plan"].facts.get("checkpoint_bytes", 0)
    known = found["text"].facts.get("tokenizer", {}).get("size") if "text" in found else None
    vocabulary = known or ASSUMED_VOCABULARY if config.model.vocab_size == AUTO else int(config.model.vocab_size)
    off: dict[str, str] = {}
    later: dict[str, Callable[[Report], None]] = {
        "kernels": lambda report: kernels.look(config, place.size, place.local_rank, vocabulary, report),
        "disks": lambda report: disks.look(config, place, token, size["bytes"], report),
        "links": lambda report: links.look(config, place, left("links"), report),
        "steps": lambda report: steps.look(config, place, left("steps"), off, found["links"].problem, report),
    }
    for name, look in later.items():
        if name == "links" and place.size == 1:
            found[name] = Answer(place, {})
        elif missing := exchange.meet(name, MEETING_SECONDS + SECONDS["kernels"]) if name in TOGETHER else []:
            ranks = ", ".join(map(str, missing[:8]))
            found[name] = Answer(place, {}, f"rank {ranks} did not come to it")
        elif is_asked(name, place):
            found[name] = _answer(place, Check(look, left(name)))
        if name == "kernels" and place.speaks_for_host:
            exchange.post("kernels that are off", found[name].facts.get("off", {}))
        if name == "links":  # to which the first ranks of all hosts have come, after they had told
            for of_host in exchange.gather("kernels that are off", 0.0).values():
                off |= of_host
    if "compiler" in under_way:
        found["compiler"] = _answer(place, under_way["compiler"])
    for name, answer in found.items():
        exchange.post(f"answer/{name}", [answer.facts, answer.problem, answer.seconds])
    if place.rank != 0:
        return None
    _gather(examination, exchange, list(found))
    examination.seconds = time.monotonic() - begin
    return examination


def is_asked(name: str, place: Place) -> bool:
    """Whether the rank has that look. Only rank 0 logs to wandb."""
    if name == "wandb":
        return place.rank == 0
    return place.speaks_for_host or name not in ONE_OF_EACH_HOST


def _answer(place: Place, check: Check) -> Answer:
    return Answer(place, *check.result())


def _gather(examination: Examination, exchange: Exchange, names: Sequence[str]) -> None:
    deadline = time.monotonic() + LAST_SECONDS
    for name in names:
        asked = [place for place in examination.places if is_asked(name, place)]
        if name == "plan":
            asked = examination.places[:1]
        left = max(0.0, deadline - time.monotonic())
        told = exchange.gather(f"answer/{name}", left, [place.rank for place in asked])
        silent = "no answer came from it"
        examination.answers[name] = [Answer(place, *told.get(place.rank, ({}, silent, 0.0))) for place in asked]
    leaders = [place.rank for place in examination.places if place.speaks_for_host and place.rank]
    if leaders:
        asked_clocks = exchange.gather("clock", LAST_SECONDS, leaders)
        examination.clocks = {rank: found for rank, found in asked_clocks.items() if found}


def plan(config: Config, place: Place, found: dict[str, Answer], report: Report) -> None:
    """Memory of a rank and bytes of a checkpoint, as `plan` counts them, with the tokenizer's vocabulary."""
    known = found["text"].facts.get("tokenizer", {}).get("size")
    vocabulary = config.model.vocab_size
    if vocabulary == AUTO:
        vocabulary = known or ASSUMED_VOCABULARY
    device = "cuda" if str(found["devices"].facts.get("device", "")).startswith("cuda") else "cpu"
    made = make_plan(
        replace(
            config,
            model=replace(config.model, vocab_size=vocabulary),
            train=replace(config.train, device=device),
            plan=replace(config.plan, world_size=place.size, ranks_per_host=place.local_size),
        )
    )
    weights = made["parameters"]["total"]
    factor = disks.LARGEST_FACTOR + (0 if config.optim.ema_decay is None else 4)
    report(parameters=weights, vocabulary=vocabulary, vocabulary_is_known=vocabulary != AUTO and known is not None)
    report(checkpoint_bytes=factor * weights, memory_of_a_rank=made["memory_per_rank"]["total"])


def judge(config: Config, examination: Examination) -> list[Finding]:
    """The rows of the table, in the order in which a run would meet them."""
    on_gpus = str(examination.fact("devices", "device")).startswith("cuda")
    memory = examination.fact("plan", "memory_of_a_rank")
    size = examination.fact("plan", "checkpoint_bytes") or 0
    parts: dict[str, Callable[[], Iterator[Finding]]] = {
        "ranks": lambda: _ranks(examination),
        "versions": lambda: versions.judge(examination.of("versions")),
        "clock": lambda: _clocks(examination),
        "devices": lambda: devices.judge(config, examination.of("devices"), memory if on_gpus else None),
        "kernels": lambda: kernels.judge(examination.of("kernels")),
        "environment": lambda: environment.judge(config, examination.of("environment"), on_gpus, memory),
        "compiler": lambda: compiler.judge(examination.of("compiler")),
        "disks": lambda: disks.judge(config, examination.of("disks"), size, _checkpoint_in_words(examination)),
        "data": lambda: text.judge(config, examination.of("text")),
        "wandb": lambda: tracking.judge(config, examination.of("wandb")),
        "links": lambda: links.judge(examination.of("links")),
        "steps": lambda: steps.judge(examination.of("steps")),
    }
    findings: list[Finding] = []
    for name, part in parts.items():
        try:
            findings += [_of_host(finding, examination) if name in OF_A_HOST else finding for finding in list(part())]
        except Exception as error:  # a mistake of ours must not hide the other rows
            problem = f"{type(error).__name__}: {first_line(error)}"
            findings.append(unchecked(name, problem, "report this as a fault of ngpt-train"))
    return merged([_with_names(finding, examination) for finding in findings], examination.places)


def _of_host(finding: Finding, examination: Examination) -> Finding:
    """What the first rank of a host says is true of all ranks of the host."""
    nodes = {place.node for place in finding.where}
    return replace(finding, where=tuple(place for place in examination.places if place.node in nodes))


def _with_names(finding: Finding, examination: Examination) -> Finding:
    named = {place.rank: place for place in examination.places}
    return replace(finding, where=tuple(named.get(place.rank, place) for place in finding.where))


def _ranks(examination: Examination) -> Iterator[Finding]:
    places = examination.places
    hosts = list(dict.fromkeys(place.host for place in places))
    named = ", ".join(hosts[:8]) + (", ..." if len(hosts) > 8 else "")
    found = f"{len(places)} on {len(hosts)} host{'s' if len(hosts) > 1 else ''}: {named}"
    if examination.absent:
        missing = ", ".join(map(str, examination.absent[:16]))
        remedy = "look at the output of torchrun on their hosts"
        yield Finding("ranks", f"{found}; no sign of rank {missing}", WRONG, remedy)
    else:
        yield Finding("ranks", found)
    counts = {place.node: place.local_size for place in places}
    if len(set(counts.values())) > 1:
        yield Finding("ranks", f"{sorted(counts.values())} ranks on the hosts", WARNING, "start as many on each host")


def _clocks(examination: Examination) -> Iterator[Finding]:
    if not examination.clocks:
        return
    named = {place.rank: place for place in examination.places}
    for rank, clock in examination.clocks.items():
        ahead, uncertain = clock["ahead"], clock["uncertain"]
        if abs(ahead) - uncertain < SKEW:
            found = f"{abs(ahead):.2g} s from rank 0's, within {uncertain:.2g} s"
            yield Finding("clock", found, where=(named[rank],))
            continue
        found = f"{abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} rank 0's"
        grave = abs(ahead) > SIGNED_REQUESTS_FAIL
        found += ": requests that are signed by time (Kerberos, S3, TLS) fail" if grave else ""
        remedy = "run NTP on all hosts (chronyc tracking, timedatectl)"
        yield Finding("clock", found, WRONG if grave else WARNING, remedy, (named[rank],))


def _checkpoint_in_words(examination: Examination) -> str:
    size = examination.fact("plan", "checkpoint_bytes")
    if size is None:
        return "unknown size"
    assumed = "" if examination.fact("plan", "vocabulary_is_known") else ", if the vocabulary has 32,000 ids"
    return f"{size / 1e6:,.0f} MB{assumed}"


def exit_code(findings: Sequence[Finding]) -> int:
    """0 if a run would work; else the code of the first mistake that `train` would end with."""
    return min((finding.code for finding in findings if finding.verdict == WRONG), default=0)
