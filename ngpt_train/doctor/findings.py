"""Findings about a machine, and the ranks that they are true of."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

OK, WARNING, WRONG = "ok", "warning", "wrong"
VERDICTS = (OK, WARNING, WRONG)  # from harmless to grave
# Exit codes of a run that meets a fault: of a ConfigError, and of everything else that is wrong with a machine.
CONFIG, MACHINE = 2, 3
MOST_NAMED = 4  # places that a row about a difference names


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
    """The facts that one rank found in one look. problem: why the rest is not known."""

    place: Place
    facts: dict[str, Any]
    problem: str | None = None
    seconds: float = 0.0

    @property
    def timed_out(self) -> bool:
        return self.problem is not None and "longer than" in self.problem

    @property
    def refusal(self) -> str | None:
        """The words of the ConfigError by which `train` would refuse what was looked at."""
        before, is_refused, words = (self.problem or "").partition("ConfigError: ")
        return words if is_refused and not before else None


@dataclass(frozen=True)
class Finding:
    """A row of the table. found: in words. remedy: shown unless the verdict is `ok`. code: the exit code of `train`
    where the verdict is `wrong`. where: the ranks that it is true of; none: all. checked: False where the check itself
    failed."""

    check: str
    found: str
    verdict: str = OK
    remedy: str = ""
    where: tuple[Place, ...] = ()
    code: int = MACHINE
    checked: bool = True


def in_words(places: Sequence[Place], everybody: Sequence[Place]) -> str:
    """The hosts, or single ranks of hosts, that `places` are; empty if they are all."""
    if not places or {place.rank for place in places} == {place.rank for place in everybody}:
        return ""
    several_nodes = len({place.node for place in everybody}) > 1
    parts = []
    for node in sorted({place.node for place in places}):
        of_node = [place for place in places if place.node == node]
        host = of_node[0].host
        if several_nodes and len(of_node) == sum(place.node == node for place in everybody):
            parts.append(host)
        else:
            numbers = ", ".join(str(rank) for rank in sorted(place.rank for place in of_node))
            parts.append(f"{host} rank{'s' if len(of_node) > 1 else ''} {numbers}")
    return "; ".join(parts)


def with_host_names(places: Sequence[Place]) -> list[Place]:
    """The same places, with the number of the node where several nodes have one host name."""
    nodes = {place.host: {other.node for other in places if other.host == place.host} for place in places}
    return [
        replace(place, host=f"{place.host} (node {place.node})") if len(nodes[place.host]) > 1 else place
        for place in places
    ]


def of_each(answers: Iterable[Answer], judge: Callable[[Answer], Iterable[Finding]]) -> Iterator[Finding]:
    """The findings of each answer by itself, with its place."""
    for answer in answers:
        for finding in judge(answer):
            yield replace(finding, where=(answer.place,))


def different(answers: Iterable[Answer], name: str) -> tuple[Any, dict[str, list[Place]]]:
    """The value of a fact that most ranks have, and for each other value, as text, the ranks that have it.

    Without a majority the value of rank 0 counts.
    """
    having = [(answer.place, answer.facts[name]) for answer in answers if name in answer.facts]
    counts = Counter(str(value) for _, value in having)
    if not counts:
        return None, {}
    usual = next(value for _, value in having if counts[str(value)] == max(counts.values()))
    others: dict[str, list[Place]] = {}
    for place, value in having:
        if str(value) != str(usual):
            others.setdefault(str(value), []).append(place)
    return usual, others


def differences(answers: Sequence[Answer], name: str, check: str, verdict: str, remedy: str) -> Iterator[Finding]:
    """A row for each value of the fact `name` that differs from the usual one."""
    usual, others = different(answers, name)
    everybody = [answer.place for answer in answers]
    for value, places in others.items():
        rest = [place for place in everybody if place not in places]
        on = in_words(rest, everybody) if len(rest) <= MOST_NAMED else "the others"
        found = f"{name} is {_short(value)} here, and {_short(usual)} on {on}"
        yield Finding(check, found, verdict, remedy, tuple(places))


def _short(value: Any) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def merged(findings: Iterable[Finding], everybody: Sequence[Place]) -> list[Finding]:
    """One row for what several ranks have in common, and one for everything that is well with a check."""
    rows: dict[tuple[str, ...], Finding] = {}
    for finding in findings:
        # Rows that are `ok` differ in numbers alone, and the first of them speaks for the others.
        words = () if finding.verdict == OK else (finding.found, finding.remedy)
        same = (finding.check, finding.verdict, *words)
        if same not in rows:
            rows[same] = finding
        else:
            together = (*rows[same].where, *finding.where) if rows[same].where and finding.where else ()
            rows[same] = replace(rows[same], where=together)
    order = list(dict.fromkeys(row.check for row in rows.values()))
    found = [row if in_words(row.where, everybody) else replace(row, where=()) for row in rows.values()]
    faulty = [row for row in found if row.verdict != OK]
    # An `ok` says nothing where a fault of the same check covers its ranks.
    found = [row for row in found if row.verdict != OK or not any(_covers(fault, row) for fault in faulty)]
    return sorted(found, key=lambda row: (order.index(row.check), -VERDICTS.index(row.verdict)))


def _covers(finding: Finding, other: Finding) -> bool:
    """A finding is of the same check as another, and of all its ranks."""
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
