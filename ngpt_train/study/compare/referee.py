"""The referee finds every difference between arms. Each is under test, follows from it, or is a confound."""

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ngpt_train.config.keys import AUTO
from ngpt_train.config.validate import show
from ngpt_train.study.compare.compared_keys import (
    HARDWARE,
    MEANING,
    NO_SUCH_KEY,
    OF_A_STEP,
    OF_NO_SIZE,
    OF_THE_BUDGET,
    PLACES_OF_ROWS,
    PLACES_OF_TEXT,
    UNKNOWN,
    Absent,
    Seen,
    brought,
    compared_keys,
    covers,
    distinct,
    is_own_option,
    is_shared_option,
    ordered,
    plain,
    ratio,
    same,
    value_of,
    without_effect,
)
from ngpt_train.study.compare.phrases import BROUGHT
from ngpt_train.study.compare.runs import Arms, Run, common_budgets

UNDER_TEST, FOLLOWS, CONFOUND = "under_test", "follows", "confound"
ROUNDING = "how the work is done: seconds may differ, losses within rounding alone"
BATCH_NORMS = ("pn", "pn_v", "batch")  # values of model.norm with statistics over the rows of a micro batch
LEAST_SHARE = 0.01  # shares of clipped steps that differ by less count as equal
# Properties of Run, which follow from its config.
QUANTITIES = ("n_params", "n_params_without_embeddings", "flops_per_token", "tokens_per_step")


@dataclass
class Difference:
    """A difference between arms, or, with `within`, between the runs of one arm."""

    key: str
    values: dict[str, list[Any]]  # values[arm]: distinct
    within: bool = False
    note: str = ""
    kind: str = CONFOUND

    def as_dict(self) -> dict[str, Any]:
        """The entry in `referee` of report.json."""
        found = list(self.values.values())
        values = ordered(found[0]) if self.within else [of[0] if len(of) == 1 else ordered(of) for of in found]
        return {
            "arms": list(self.values),
            "key": self.key,
            "values": [plain(value) for value in values],
            "kind": self.kind,
            "size": ratio(itertools.chain.from_iterable(self.values.values())),
            "note": self.note,
        }


def examine(
    arms: Arms,
    tuned: Mapping[str, Collection[str]] | None = None,
    under_test: Collection[str] = (),
    best: Arms | None = None,
) -> list[dict[str, Any]]:
    """`referee` of report.json: the differences between arms, and between the runs of an arm, confounds first.

    arms: the runs of each arm by its name. tuned: the keys of which several values were tried in an arm, by its name.
    under_test: keys, sections (`optim`) or groups (`model`, `recipe`) in question; by default the architecture and its
    options that differ, else differences in optim.* and schedule.*. best: the runs of each arm whose losses are
    compared. Only these count for tuned keys and what follows from them, such as the share of clipped steps: a value
    that was tried and not taken is in no loss.

    An entry has `arms`, `key`, `values` (one for each arm, a list if its runs differ; with one arm, the values of its
    runs), `kind`, `size` (the largest value over the smallest, or None) and `note`, a sentence.
    """
    tuned, best = tuned or {}, best or arms
    causes = [*_of_config(arms, best, tuned, under_test), *_of_facts(arms, under_test)]
    found = [*causes, *_of_size(best, causes), *_of_clipping(best, causes), *_of_data(arms, under_test)]
    order = {CONFOUND: 0, UNDER_TEST: 1, FOLLOWS: 2}
    return [difference.as_dict() for difference in sorted(found, key=lambda x: order[x.kind])]


def looked_at(arms: Arms) -> dict[str, Any]:
    """`looked_at` of report.json: the number of compared keys, the compared facts of run.json, and the options that one
    arm lacks and the others have at their architecture's value."""
    seen = _keys(arms)
    options = [x.key for x in seen if x.key.startswith("model.") and _only_by_name(x)]
    return {"keys": len(seen), "options": options, "facts": _facts(arms)}


def _keys(arms: Arms, best: Arms | None = None, of_best: Collection[str] = ()) -> list[Seen]:
    """Of the keys `of_best` the values in the runs `best`."""
    compared = compared_keys(run.config for runs in arms.values() for run in runs)
    return [Seen(key, best if best and key in of_best else arms, _of_key) for key in compared]


def _facts(arms: Arms) -> list[str]:
    return list(dict.fromkeys(name for runs in arms.values() for run in runs for name in run.facts_by_name))


def _of_config(
    arms: Arms, best: Arms, tuned: Mapping[str, Collection[str]], under_test: Collection[str]
) -> list[Difference]:
    varied = set(itertools.chain.from_iterable(tuned.values()))
    follow = OF_THE_BUDGET - {"optim.lr"} if varied & OF_A_STEP else set()  # the steps and the warm-up of a batch
    seen = _keys(arms, best, varied | follow)
    among = [within for of_key in seen for within in _within(of_key, OF_THE_BUDGET)]
    found = [x for x in among if not any(x.key in tuned.get(arm, ()) for arm in x.values)]
    differing = [x for x in seen if len(arms) > 1 and x.arms_differ and not _only_by_name(x)]
    brought_by_arm = {x.key for x in differing if _is_brought(x)}
    tested = under_test or _in_question([x.key for x in differing], brought_by_arm, varied)
    for of_key in differing:
        kind, note = _judge(of_key, best if of_key.key in follow else arms, tested, tuned, brought_by_arm)
        values, where = of_key.shown()
        found.append(Difference(of_key.key, values, note="; ".join(filter(None, [where, note])), kind=kind))
    for difference in found:
        if difference.within and covers(HARDWARE, difference.key):
            difference.kind = _kind_of_hardware(arms)
            difference.note = f"{difference.note}; {ROUNDING}" if difference.kind == FOLLOWS else difference.note
    return found


def _of_key(run: Run, key: str) -> list[Any]:
    return [value_of(run.config, key)]


def _of_fact(run: Run, name: str) -> list[Any]:
    return run.facts_by_name.get(name, [UNKNOWN])


def _measured(run: Run, quantity: str) -> list[Any]:
    return [] if (found := getattr(run, quantity)) is None else [found]


def _judge(
    seen: Seen,
    arms: Arms,
    tested: Collection[str],
    tuned: Mapping[str, Collection[str]],
    brought_by_arm: Collection[str],
) -> tuple[str, str]:
    """The kind of a differing key, and the note."""
    key = seen.key
    silent = [arm for arm in arms if UNKNOWN in seen.of(arm)]
    lacking = [arm for arm in arms if NO_SUCH_KEY in seen.of(arm)]
    says = f"{', '.join(silent)}: config.yaml {UNKNOWN.why}" if silent else ""
    says = f"{', '.join(lacking)} {'has' if len(lacking) == 1 else 'have'} {NO_SUCH_KEY.why}" if lacking else says
    runs = list(itertools.chain.from_iterable(arms.values()))
    untuned = [arm for arm in arms if key not in tuned.get(arm, ())]
    if not untuned:
        return FOLLOWS, "tuned for each arm by itself"
    if len(untuned) < len(arms):
        idle = [arm for arm in untuned if all(key in without_effect(run.config) for run in arms[arm])]
        without = f"in {', '.join(idle)} it has no effect" if idle else ""
        if set(untuned) <= {*lacking, *idle}:
            return FOLLOWS, "; ".join(filter(None, ["tuned", says, without]))
    if covers(tested, key):
        return UNDER_TEST, says
    if key == "run.seed":
        return CONFOUND, "other weights at the start and other rows: a seed that an arm lacks pairs with none"
    if covers(HARDWARE, key):
        kind = _kind_of_hardware(arms)
        return kind, ROUNDING if kind == FOLLOWS else "its norms take statistics over a micro batch of a rank"
    if key in PLACES_OF_TEXT and _all_same(run.facts.get("data_fingerprint") for run in runs):
        return FOLLOWS, "another place; the text and its tokens are the same by their fingerprint"
    if key in PLACES_OF_ROWS and _all_same(run.rows_hash for run in runs):
        return FOLLOWS, "the rows of the last validation are the same by their rows_hash"
    if key in brought_by_arm:
        return FOLLOWS, BROUGHT
    if key == "train.steps":
        return _of_steps(arms)
    if len(untuned) < len(arms):
        return CONFOUND, f"tuned, but not in {', '.join(untuned)}, where one value was tried"
    return CONFOUND, says or _deviations(key, arms)


def _all_same(values: Iterable[Any]) -> bool:
    found = set(values)
    return len(found) == 1 and None not in found


def _of_steps(arms: Arms) -> tuple[str, str]:
    budgets = common_budgets(arms)
    of_arm = {arm: {budgets[run.path] for run in runs} for arm, runs in arms.items()}
    apart = [pair for pair in itertools.combinations(arms, 2) if not of_arm[pair[0]] & of_arm[pair[1]]]
    if apart:
        pairs = ", ".join(" and ".join(pair) for pair in apart)
        return CONFOUND, f"{pairs} share no budget; losses at one budget are no comparison"
    trained: dict[int, set[int]] = {}  # trained[budget]: tokens of its runs
    for run in itertools.chain.from_iterable(arms.values()):
        trained.setdefault(budgets[run.path], set()).add(run.steps * (run.tokens_per_step or 1))
    if more := max(max(tokens) / min(tokens) - 1 for tokens in trained.values()):
        return CONFOUND, f"up to {100 * more:.2g} % more tokens at what counts as one budget"
    return FOLLOWS, "as many tokens, in steps of another size"


def _deviations(key: str, arms: Arms) -> str:
    """Names the arms whose value is not their architecture's and recipe's, and that value."""
    usual = {arm: (value_of(runs[0].config, key), brought(runs[0].config, key)) for arm, runs in arms.items()}
    return "; ".join(
        f"the recipe of {arm} brings {show(expected)}"
        for arm, (value, expected) in usual.items()
        if not isinstance(expected, Absent) and expected != AUTO and not same(value, expected)
    )


def _in_question(differing: Sequence[str], brought_by_arm: Collection[str], tuned: Collection[str]) -> list[str]:
    """The keys under test by default."""
    options = [key for key in differing if is_own_option(key) and key not in brought_by_arm]
    architecture = [key for key in differing if key == "model.name"] + options
    shared = [key for key in differing if is_shared_option(key) and key not in brought_by_arm]
    how = [key for key in differing if key.startswith(("optim.", "schedule.")) and key not in tuned]
    return architecture or shared or how


def _of_facts(arms: Arms, under_test: Collection[str]) -> list[Difference]:
    """Differences of code, versions, machine and data, by run.json."""
    found = []
    for name in _facts(arms):
        seen = Seen(name, arms, _of_fact)
        hardware = covers(HARDWARE, name)
        kind = _kind_of_hardware(arms) if hardware else UNDER_TEST if covers(under_test, name) else CONFOUND
        note = ROUNDING if hardware and kind == FOLLOWS else ""
        for within in _within(seen, ()):
            within.kind, within.note = kind, f"{within.note}; {note}" if note else within.note
            found.append(within)
        if len(arms) > 1 and seen.arms_differ:
            note = note or MEANING.get(name, "") if seen.known else "run.json of some runs does not say it"
            found.append(Difference(name, seen.all(), note=note, kind=kind))
    return found


def _of_size(arms: Arms, causes: Sequence[Difference]) -> list[Difference]:
    """Differences in parameters, FLOPs and tokens of a step."""
    found = []
    for name in QUANTITIES:
        seen = Seen(name, arms, _measured)
        if len(arms) < 2 or not all(seen.of(arm) for arm in arms) or not seen.arms_differ:
            continue
        keys = [x for x in causes if not x.within]
        if name == "tokens_per_step":
            because = [x for x in keys if x.key in ("train.batch_rows", "train.batch_tokens", "model.context")]
        else:
            because = [x for x in keys if x.key.startswith(("model.", "tokenizer."))]
            because = [x for x in because if not OF_NO_SIZE & set(x.key.split("."))]
        confounds = [x.key for x in because if x.kind == CONFOUND]
        if confounds:
            note = f"through {', '.join(confounds)}"
        else:
            note = f"from {', '.join(x.key for x in because[:3])}" if because else "no key of the config explains it"
        kind = CONFOUND if confounds or not because else FOLLOWS
        found.append(Difference(name, seen.all(), note=note, kind=kind))
    return found


def _of_clipping(best: Arms, causes: Sequence[Difference]) -> list[Difference]:
    """A difference in the share of clipped steps. It is the mean over an arm's best runs, because single runs are
    clipped more or less by chance."""
    seen = Seen("clipped_share", best, _measured)
    if len(best) < 2 or not all(seen.of(arm) for arm in best):
        return []
    shared = set.intersection(*map(set, seen.by_arm.values()))
    shares = {}
    for arm, by_budget in seen.by_arm.items():
        of_runs = [x for budget, of in by_budget.items() if budget in shared or not shared for x in of]
        shares[arm] = round(sum(of_runs) / len(of_runs), 4)
    if max(shares.values()) - min(shares.values()) < LEAST_SHARE:
        return []
    sections = ("optim.", "schedule.", "model.", "train.")
    because = {x.key: x.kind for x in causes if not x.within and x.key.startswith(sections)}
    kind = CONFOUND if not because or because.get("optim.clip_norm") == CONFOUND else FOLLOWS
    note = "share of the steps, of the runs that are compared, whose gradient was clipped"
    return [Difference("clipped_share", {arm: [share] for arm, share in shares.items()}, note=note, kind=kind)]


def _of_data(arms: Arms, under_test: Collection[str]) -> list[Difference]:
    """Differences in the training rows of a seed, and in the validation rows."""
    kind = UNDER_TEST if covers(under_test, "data.path") else CONFOUND
    found = []
    for arm, runs in arms.items():
        for one, other, tokens, values in _other_rows(itertools.combinations(runs, 2)):
            names = f"{one.path.name} and {other.path.name}"
            note = f"seed {one.seed}: {names} have read other rows up to {tokens:,} tokens"
            found.append(Difference("data_hash", {arm: values}, within=True, note=note, kind=kind))
            break
    for first, second in itertools.combinations(arms, 2):
        for one, _, tokens, values in _other_rows(itertools.product(arms[first], arms[second])):
            note = f"seed {one.seed}: other rows up to {tokens:,} tokens, so that runs of one seed are not paired"
            found.append(Difference("data_hash", {first: values[:1], second: values[1:]}, note=note, kind=kind))
            break
    seen = Seen("rows_hash", arms, lambda run, _: [run.rows_hash] if run.is_annealed else [])
    values = distinct(itertools.chain.from_iterable(seen.all().values()))
    if len(values) > 1:
        note = "validated on other rows of the text: not paired by row, and their noise is not in the interval"
        if len(arms) > 1 and seen.arms_differ:
            found.append(Difference("rows_hash", seen.all(), note=note))
        found += [Difference("rows_hash", {x: seen.of(x)}, within=True, note=note) for x in arms if len(seen.of(x)) > 1]
    return found


def _other_rows(pairs: Iterable[tuple[Run, Run]]) -> Iterator[tuple[Run, Run, int, list[str]]]:
    """The pairs of one seed with different training rows; the tokens and both hashes at the first difference."""
    for one, other in pairs:
        if one.seed != other.seed:
            continue
        a, b = one.data_hashes, other.data_hashes
        if (tokens := next((n for n in sorted(a.keys() & b.keys()) if a[n] != b[n]), None)) is not None:
            yield one, other, tokens, [a[tokens], b[tokens]]


def _within(seen: Seen, of_the_budget: Collection[str]) -> Iterator[Difference]:
    """Differences between the runs of one arm, apart from seeds and budgets."""
    if seen.key in ("run.seed", "n_params", "train.batch_tokens"):
        return
    for arm, by_budget in seen.by_arm.items():
        groups = list(by_budget.values()) if seen.key in of_the_budget else [seen.of(arm)]
        values = next((found for group in groups if len(found := distinct(group)) > 1), None)
        if values and not any(isinstance(value, Absent) for value in values):
            yield Difference(seen.key, {arm: values}, within=True, note=f"the runs of {arm} differ among themselves")


def _only_by_name(seen: Seen) -> bool:
    """True for an option that some arms lack and the others have at their architecture's value: the name of the
    architecture says as much. Also for a batch_tokens that is rows times context."""
    runs = list(itertools.chain.from_iterable(seen.arms.values()))
    if seen.key == "train.batch_tokens":
        return all(run.config.get(seen.key) == run.tokens_per_step for run in runs)
    lacking = any(NO_SUCH_KEY in seen.of(arm) for arm in seen.arms)
    return lacking and all(
        value is NO_SUCH_KEY or same(value, brought(run.config, seen.key))
        for run in runs
        for value in [value_of(run.config, seen.key)]
    )


def _is_brought(seen: Seen) -> bool:
    """True if each run has the value of its architecture and recipe."""
    runs = itertools.chain.from_iterable(seen.arms.values())
    return all(same(value_of(run.config, seen.key), brought(run.config, seen.key)) for run in runs)


def _kind_of_hardware(arms: Arms) -> str:
    norms = [run.config.get("model.norm") for runs in arms.values() for run in runs]
    return CONFOUND if any(norm in BATCH_NORMS for norm in norms) else FOLLOWS
