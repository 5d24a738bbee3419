"""Runs all looks of a rank in their order, and judges their facts on rank 0."""

import time
import uuid
from collections import ChainMap, Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch.distributed as dist

from ngpt_train.config.keys import AUTO
from ngpt_train.config.schema import Config
from ngpt_train.core.errors import in_one_line
from ngpt_train.doctor.bounded import Check, Look, Report
from ngpt_train.doctor.checks import (
    compiler,
    devices,
    disks,
    environment,
    links,
    training_text,
    trial_steps,
    versions,
    wandb_server,
)
from ngpt_train.doctor.findings import WARNING, WRONG, Answer, Finding, Place, merged, of_each, unchecked
from ngpt_train.doctor.rank_store import absent, ask_clocks, places_told, tell, tell_clock, told
from ngpt_train.report.launch_plan import make_plan

# The ranks that run each look, and its time limit in seconds. Facts of HOST and MAIN hold for all ranks of the host.
# Looks that mostly wait run at the same time. The measurements run one by one: kernels, disks, links, steps. The
# compiler runs beside all others.
RANK, HOST, MAIN = "every rank", "the first rank of each host", "rank 0"
LOOKS = {
    "versions": (HOST, 15.0), "environment": (RANK, 5.0), "devices": (RANK, 25.0), "text": (HOST, 25.0),
    "wandb": (MAIN, 12.0), "compiler": (HOST, 60.0), "plan": (MAIN, 15.0), "kernels": (HOST, 40.0),
    "disks": (HOST, 20.0), "links": (RANK, 20.0), "steps": (RANK, 40.0),
}  # fmt: skip
ALL_SECONDS, LEAST_SECONDS = 80.0, 8.0
HELLO_SECONDS, MEETING_SECONDS, LAST_SECONDS = 30.0, 10.0, 5.0
ASSUMED_VOCABULARY = 32_000  # without a tokenizer
SKEW, SIGNED_REQUESTS_FAIL = 1.0, 300.0  # seconds between two clocks: a warning, and wrong


@dataclass
class Examination:
    """The facts of all ranks. answers: by the name of the look, in the order of ranks."""

    places: list[Place]
    answers: dict[str, list[Answer]] = field(default_factory=dict)
    absent: list[int] = field(default_factory=list)
    clocks: dict[int, dict[str, float]] = field(default_factory=dict)
    seconds: float = 0.0

    def of(self, name: str) -> list[Answer]:
        return self.answers.get(name, [])

    def fact(self, look: str, name: str) -> Any:
        """A fact of the first rank that has it; None if no rank has."""
        return next((answer.facts[name] for answer in self.of(look) if name in answer.facts), None)


def examine(config: Config, place: Place, store: dist.Store) -> Examination | None:
    """Runs all looks. Returns the examination on rank 0, None on other ranks. A collective call."""
    begin = time.monotonic()
    token = store.compare_set("token", "", uuid.uuid4().hex[:12]).decode()  # the first rank's, on all ranks
    tell(store, place, "place", vars(place))
    places = places_told(store, place.size, HELLO_SECONDS)
    first_ranks = [other.rank for other in places if other.speaks_for_host]
    found: dict[str, Answer] = {}

    def left(name: str) -> float:
        return max(LEAST_SECONDS, min(LOOKS[name][1], begin + ALL_SECONDS - time.monotonic()))

    def answer(name: str, look: Look, together: bool = False) -> Answer:
        """together: waits for all ranks first."""
        missing = absent(store, place, name, MEETING_SECONDS + LOOKS["kernels"][1]) if together else []
        if missing:
            found[name] = Answer(place, {}, f"rank {', '.join(map(str, missing[:8]))} did not come to it")
        else:
            found[name] = Answer(place, *Check(look, left(name)).result())
        return found[name]

    looks: dict[str, Look] = {
        "versions": lambda report: versions.look(config, report),
        "environment": environment.look,
        "devices": lambda report: devices.look(config, place.local_rank, report),
        "text": lambda report: training_text.look(config, report),
        "wandb": lambda report: wandb_server.look(config, report),
        "compiler": lambda report: compiler.look(config, place.local_rank, report),
    }
    under_way = {name: Check(look, left(name)) for name, look in looks.items() if is_asked(name, place)}
    clocks = ask_clocks(store, place, first_ranks[1:], MEETING_SECONDS) if place.rank == 0 else {}
    if place.rank != 0 and place.speaks_for_host:
        tell_clock(store, place, MEETING_SECONDS)
    compiling = under_way.pop("compiler", None)
    found |= {name: Answer(place, *check.result()) for name, check in under_way.items()}
    checkpoint_bytes = 0
    if place.rank == 0:
        planned = answer("plan", lambda report: plan(config, place, found, report))
        checkpoint_bytes = planned.facts.get("checkpoint_bytes", 0)
    if place.speaks_for_host:
        vocabulary = vocabulary_of(config, found) or ASSUMED_VOCABULARY
        checked = answer("kernels", lambda report: devices.look_at_kernels(config, place, vocabulary, report))
        tell(store, place, "kernels that are off", checked.facts.get("off", {}))
        answer("disks", lambda report: disks.look(config, place, token, checkpoint_bytes, report))
    answer("links", lambda report: links.look(config, place, left("links"), report), together=True)
    # No wait: the first ranks told theirs before the links.
    off = dict(ChainMap(*told(store, "kernels that are off", first_ranks, 0.0).values()))
    apart = found["links"].problem
    answer("steps", lambda report: trial_steps.look(config, place, left("steps"), off, apart, report), together=True)
    if compiling is not None:
        found["compiler"] = Answer(place, *compiling.result())
    tell(store, place, "answers", {name: [each.facts, each.problem, each.seconds] for name, each in found.items()})
    if place.rank != 0:
        return None
    answers = told(store, "answers", [other.rank for other in places], LAST_SECONDS)
    nothing: list[Any] = [{}, "no answer came from it", 0.0]
    by_look: dict[str, list[Answer]] = {}
    for name in found:
        asked = [other for other in places if is_asked(name, other)]
        by_look[name] = [Answer(other, *answers.get(other.rank, {}).get(name, nothing)) for other in asked]
    missing = sorted(set(range(place.size)) - {other.rank for other in places})
    return Examination(with_host_names(places), by_look, missing, clocks, time.monotonic() - begin)


def with_host_names(places: Sequence[Place]) -> list[Place]:
    """Adds the number of the node to a host name that several nodes share."""
    n_nodes = Counter(host for host, _ in {(place.host, place.node) for place in places})
    return [replace(x, host=f"{x.host} (node {x.node})") if n_nodes[x.host] > 1 else x for x in places]


def is_asked(name: str, place: Place) -> bool:
    """True if the rank runs this look."""
    return {RANK: True, HOST: place.speaks_for_host, MAIN: place.rank == 0}[LOOKS[name][0]]


def vocabulary_of(config: Config, found: dict[str, Answer]) -> int | None:
    """model.vocab_size, or the tokenizer's size; None without a tokenizer."""
    if config.model.vocab_size != AUTO:
        return int(config.model.vocab_size)
    return found["text"].facts.get("tokenizer", {}).get("size")


def plan(config: Config, place: Place, found: dict[str, Answer], report: Report) -> None:
    """The memory of a rank and the bytes of a checkpoint, as `plan` counts them."""
    known = vocabulary_of(config, found)
    vocabulary = known or ASSUMED_VOCABULARY
    on_gpu = str(found["devices"].facts.get("device", "")).startswith("cuda")
    config = replace(config, model=replace(config.model, vocab_size=vocabulary))
    config = replace(config, train=replace(config.train, device="cuda" if on_gpu else "cpu"))
    on_ranks = replace(config.plan, world_size=place.size, ranks_per_host=place.local_size)
    made = make_plan(replace(config, plan=on_ranks))
    weights = made["parameters"]["total"]
    factor = disks.LARGEST_FACTOR + (0 if config.optim.ema_decay is None else 4)
    assumed = "" if known else f", if the vocabulary has {vocabulary:,} ids"
    report(parameters=weights, vocabulary=vocabulary, vocabulary_is_known=known is not None)
    report(memory_of_a_rank=made["memory_per_rank"]["total"])
    report(checkpoint_bytes=factor * weights, checkpoint=f"{factor * weights / 1e6:,.0f} MB{assumed}")


def judge(config: Config, examination: Examination) -> list[Finding]:
    """The rows of the table, in the order of a run."""
    of = examination.of
    on_gpus = str(examination.fact("devices", "device")).startswith("cuda")
    memory = examination.fact("plan", "memory_of_a_rank")
    size = examination.fact("plan", "checkpoint_bytes") or 0
    said = examination.fact("plan", "checkpoint") or "unknown size"
    parts: dict[str, Callable[[], Iterable[Finding]]] = {
        "ranks": lambda: _ranks(examination),
        "versions": lambda: versions.judge(of("versions")),
        "clock": lambda: _clocks(examination),
        "devices": lambda: devices.judge(config, of("devices"), memory if on_gpus else None),
        "kernels": lambda: of_each(of("kernels"), devices.judge_kernels),
        "environment": lambda: environment.judge(config, of("environment"), on_gpus, memory),
        "compiler": lambda: of_each(of("compiler"), compiler.judge),
        "disks": lambda: disks.judge(config, of("disks"), size, said),
        "text": lambda: training_text.judge(config, of("text")),
        "wandb": lambda: of_each(of("wandb"), lambda answer: wandb_server.judge(config, answer)),
        "links": lambda: links.judge(of("links")),
        "steps": lambda: trial_steps.judge(of("steps")),
    }
    findings: list[Finding] = []
    for name, part in parts.items():
        try:
            findings += [_placed(finding, examination, name in LOOKS and LOOKS[name][0] != RANK) for finding in part()]
        except Exception as error:  # a bug here must not hide the other rows
            findings.append(unchecked(name, in_one_line(error), "report this bug of ngpt-train"))
    return merged(findings, examination.places)


def _placed(finding: Finding, examination: Examination, of_host: bool) -> Finding:
    """Replaces the places of a finding by the examination's, which have unique host names. of_host: takes all ranks of
    their hosts."""
    nodes, ranks = ({getattr(place, by) for place in finding.where} for by in ("node", "rank"))
    where = [p for p in examination.places if (p.node in nodes if of_host else p.rank in ranks)]
    return replace(finding, where=tuple(where))


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
    named = {place.rank: place for place in examination.places}
    for rank, clock in examination.clocks.items():
        ahead, uncertain = clock["ahead"], clock["uncertain"]
        if abs(ahead) - uncertain < SKEW:
            found = f"{abs(ahead):.2g} s from rank 0's, within {uncertain:.2g} s"
            yield Finding("clock", found, where=(named[rank],))
            continue
        found = f"{abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} rank 0's"
        is_grave = abs(ahead) > SIGNED_REQUESTS_FAIL
        found += ": requests that are signed by time (Kerberos, S3, TLS) fail" if is_grave else ""
        remedy = "run NTP on all hosts (chronyc tracking, timedatectl)"
        yield Finding("clock", found, WRONG if is_grave else WARNING, remedy, (named[rank],))


def exit_code(findings: Sequence[Finding]) -> int:
    """0 if a run would work; else the exit code of `train`."""
    return min((finding.code for finding in findings if finding.verdict == WRONG), default=0)
