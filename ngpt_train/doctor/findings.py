"""What a check says of a machine, and who says it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

OK, WARNING, WRONG = "ok", "warning", "wrong"
VERDICTS = (OK, WARNING, WRONG)  # from harmless to grave
# Exit codes of a run that meets a fault: of a ConfigError, and of everything else that is wrong with a machine.
CONFIG, MACHINE = 2, 3
EVERYWHERE = ""


@dataclass(frozen=True)
class Place:
    """Where a rank is. node: the number of its torchrun, because two containers may have the same host name."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node: int = 0
    host: str = "localhost"

    @property
    def speaks_for_host(self) -> bool:
        return self.local_rank == 0


@dataclass(frozen=True)
class Answer:
    """What one rank has found of one group of checks. problem: why the rest of it is not known."""

    place: Place
    facts: dict[str, Any]
    problem: str | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class Finding:
    """A row of the table. found: in words. code: the exit code of `train` where the verdict is `wrong`. where: ranks
    that it is true of; none: all. checked: False where the check itself failed."""

    check: str
    found: str
    verdict: str = OK
    remedy: str = ""
    where: tuple[Place, ...] = ()
    code: int = MACHINE
    checked: bool = True


def in_words(places: Sequence[Place], everybody: Sequence[Place]) -> str:
    """The hosts, or single ranks of hosts, that `places` are; EVERYWHERE if they are all."""
    if not places or {place.rank for place in places} == {place.rank for place in everybody}:
        return EVERYWHERE
    parts = []
    for node in sorted({place.node for place in places}):
        of_node = [place for place in places if place.node == node]
        ranks = sorted(place.rank for place in of_node)
        if len(ranks) == len([place for place in everybody if place.node == node]) and _several_nodes(everybody):
            parts.append(of_node[0].host)
        else:
            numbers = ", ".join(map(str, ranks))
            parts.append(f"{of_node[0].host} rank{'s' if len(ranks) > 1 else ''} {numbers}")
    return "; ".join(parts)


def _several_nodes(places: Sequence[Place]) -> bool:
    return len({place.node for place in places}) > 1


def with_host_names(places: Sequence[Place]) -> list[Place]:
    """The same places, with the number of the node where several nodes have one host name."""
    nodes = {host: {place.node for place in places if place.host == host} for host in {p.host for p in places}}
    return [
        replace(place, host=f"{place.host} (node {place.node})") if len(nodes[place.host]) > 1 else place
        for place in places
    ]


def of_each(answers: Iterable[Answer], judge: Callable[[Answer], Iterable[Finding]]) -> Iterator[Finding]:
    """The findings of each answer by itself, with where it is from."""
    for answer in answers:
        for finding in judge(answer):
            yield replace(finding, where=(answer.place,))


def different(answers: Iterable[Answer], name: str) -> tuple[Any, dict[str, list[Place]]]:
    """The value of a fact that most ranks have, and which ranks have which other value (as text).

    Without a majority the value of rank 0 counts.
    """
    having = [(answer.place, answer.facts[name]) for answer in answers if name in answer.facts]
    counts = Counter(str(value) for _, value in having)
    if not counts:
        return None, {}
    most = max(counts.values())
    usual = next(value for _, value in having if counts[str(value)] == most)
    others: dict[str, list[Place]] = {}
    for place, value in having:
        if str(value) != str(usual):
            others.setdefault(str(value), []).append(place)
    return usual, others


def merged(findings: Iterable[Finding], everybody: Sequence[Place]) -> list[Finding]:
    """One row for what several ranks have in common, and one for everything that is well with a check."""
    rows: dict[tuple[Any, ...], Finding] = {}
    for finding in findings:
        # What is well differs in numbers alone, and the first of them speaks for the others.
        words = ("",) if finding.verdict == OK else (finding.found, finding.remedy)
        same = (finding.check, finding.verdict, *words)
        if same not in rows:
            rows[same] = finding
        elif rows[same].where and finding.where:
            rows[same] = replace(rows[same], where=(*rows[same].where, *finding.where))
        else:
            rows[same] = replace(rows[same], where=())
    order = list(dict.fromkeys(row.check for row in rows.values()))
    found = [
        replace(row, where=() if in_words(row.where, everybody) == EVERYWHERE else row.where) for row in rows.values()
    ]
    faulty = [row for row in found if row.verdict != OK]
    # That the rest of a check is well says nothing where something is amiss with it.
    found = [row for row in found if row.verdict != OK or not any(_covers(other, row) for other in faulty)]
    return sorted(found, key=lambda row: (order.index(row.check), -VERDICTS.index(row.verdict)))


def _covers(finding: Finding, other: Finding) -> bool:
    """Whether a finding is of the same check, and of all the ranks of another."""
    ranks, others = ({place.rank for place in row.where} for row in (finding, other))
    return finding.check == other.check and (not ranks or (bool(others) and others <= ranks))


def unchecked(check: str, problem: str, remedy: str, verdict: str = WARNING) -> Finding:
    """The row of a check that crashed or hung itself."""
    return Finding(check, f"could not be checked: {problem}", verdict, remedy, checked=False)


def gb(n_bytes: float) -> str:
    """Bytes in words."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n_bytes >= size:
            return f"{n_bytes / size:.3g} {unit}"
    return f"{n_bytes:.0f} bytes"
