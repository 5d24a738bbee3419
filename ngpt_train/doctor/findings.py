"""Findings about a machine, and their ranks."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

OK, WARNING, WRONG = "ok", "warning", "wrong"
VERDICTS = (OK, WARNING, WRONG)  # from harmless to grave
CONFIG, MACHINE = 2, 3  # exit codes of a run: the configuration is wrong, or the data or the machine is
MOST_NAMED = 4  # ranks in the list of a row about a difference; more are "the others"
NUMBER = re.compile(r"\d[\d.,]*(e[+-]?\d+)?( [TGMk]?B\b| bytes)?")


@dataclass(frozen=True)
class Place:
    """The host and the numbers of a rank. node: the number of its torchrun; two containers may share a host name."""

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
    """The facts of one rank from one look. problem: the reason if the look ended early."""

    place: Place
    facts: dict[str, Any]
    problem: str | None = None
    seconds: float = 0.0

    @property
    def timed_out(self) -> bool:
        return self.problem is not None and "longer than" in self.problem

    @property
    def refusal(self) -> str | None:
        """The message of the look's ConfigError: `train` would stop with it. None without one."""
        before, is_refused, words = (self.problem or "").partition("ConfigError: ")
        return words if is_refused and not before else None


@dataclass(frozen=True)
class Finding:
    """A row of the table.

    remedy: shown unless the verdict is `ok`. code: the exit code of `train`, used if the verdict is `wrong`. where: the
    ranks; empty means all. checked: False if the check itself failed.
    """

    check: str
    found: str
    verdict: str = OK
    remedy: str = ""
    where: tuple[Place, ...] = ()
    code: int = MACHINE
    checked: bool = True


def in_words(places: Sequence[Place], everybody: Sequence[Place]) -> str:
    """Names the hosts, or single ranks of hosts, of `places`; empty if that is everybody."""
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


def of_each(answers: Iterable[Answer], judge: Callable[[Answer], Iterable[Finding]]) -> Iterator[Finding]:
    """Judges each answer alone, and adds its place to the findings."""
    for answer in answers:
        for finding in judge(answer):
            yield replace(finding, where=(answer.place,))


def different(answers: Iterable[Answer], name: str) -> tuple[Any, dict[str, list[Place]]]:
    """The most frequent value of a fact, and the ranks of every other value, by its text.

    Among equally frequent values the lowest rank's is taken.
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
    """A row for each unusual value of the fact `name`."""
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
    """Merges equal rows of several ranks. Rows that are `ok` may differ in their numbers: the first one is shown."""
    rows: dict[tuple[str, ...], Finding] = {}
    for finding in findings:
        words = NUMBER.sub("", finding.found) if finding.verdict == OK else finding.found
        same = (finding.check, finding.verdict, words, finding.remedy if finding.verdict != OK else "")
        if same not in rows:
            rows[same] = finding
        else:
            together = (*rows[same].where, *finding.where) if rows[same].where and finding.where else ()
            rows[same] = replace(rows[same], where=together)
    order = list(dict.fromkeys(row.check for row in rows.values()))
    found = [row if in_words(row.where, everybody) else replace(row, where=()) for row in rows.values()]
    faulty = [row for row in found if row.verdict != OK]
    # A fault hides the `ok` of the same check on the same ranks.
    found = [row for row in found if row.verdict != OK or not any(_covers(fault, row) for fault in faulty)]
    return sorted(found, key=lambda row: (order.index(row.check), -VERDICTS.index(row.verdict)))


def _covers(finding: Finding, other: Finding) -> bool:
    """True if both are of one check, and `finding` includes every rank of `other`."""
    ranks, others = ({place.rank for place in row.where} for row in (finding, other))
    return finding.check == other.check and (not ranks or (bool(others) and others <= ranks))


def unchecked(check: str, problem: str, remedy: str, verdict: str = WARNING, where: tuple[Place, ...] = ()) -> Finding:
    """The row of a check that crashed or hung."""
    return Finding(check, f"could not be checked: {problem}", verdict, remedy, where, checked=False)


def gb(n_bytes: float) -> str:
    """Bytes in words."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n_bytes >= size:
            return f"{n_bytes / size:.3g} {unit}"
    return f"{n_bytes:.0f} bytes"
