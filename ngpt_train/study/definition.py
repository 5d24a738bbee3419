"""The definition of a study: arms, budgets, seeds and tuned keys, from the section `study` of the configuration, and
its file, study.yaml. No heavy import stands here, so mistakes are reported at once."""

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from ngpt_train.config.architectures import all_keys
from ngpt_train.config.arguments import is_of_study, name_of
from ngpt_train.config.sections.studies import StudyConfig
from ngpt_train.config.validate import check_leaf, did_you_mean, mistake, nearest, show, unknown_key
from ngpt_train.config.yaml_files import Files, parse_row
from ngpt_train.core.errors import DataError
from ngpt_train.core.files import write_atomically, yaml_tree
from ngpt_train.core.secrets import command_of, redacted

Value = float | int | str | bool | tuple[Any, ...] | None  # of a tuned key

FILE = "study.yaml"
LR = "optim.lr"
SAME_BUDGET = 0.02  # budgets within this share are one: rounding to whole steps moves them apart
# Keys that the study sets for each run, each with the reason.
_DECIDED = {
    "run.name": "the study names its runs",
    "run.root": "the runs are in the study's directory; study.root sets where that is",
    "run.seed": "study.seeds has the seeds",
    "run.resume": "the study resumes its runs",
    "run.resume_step": "the study resumes its runs",
    "run.overwrite": "the study resumes its runs; delete a run's directory to have it done again",
    "run.allow_change": "the runs of an arm have one configuration",
    "run.max_time": "each run goes to its end; stop the study with Ctrl-C, and start it again",
    "train.steps": "study.budgets has the tokens of each run",
    "train.stop_at": "each run goes to the end of its schedule",
}
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True)
class Study:
    """A comparison of arms. Arms and `shared` are arguments of `train`."""

    name: str
    root: Path
    baseline: str
    arms: dict[str, tuple[str, ...]]
    shared: tuple[str, ...]
    budgets: tuple[int, ...]  # tokens, ascending
    # optim.lr first: the factor between neighbours. A further key: such a factor, or the tuple of its values. An arm:
    # the mapping of further keys that it alone is tuned for.
    tune: dict[str, Any]
    seeds: tuple[int, ...]
    metric: str = "loss"  # one of METRICS
    confidence: float = 0.95
    max_points: int = 9  # values of a key at most, for an arm and budget
    refine: bool = True  # also rates of the factor's root, around the best one
    descent_budget: int | None = None  # where the further keys are tuned; None: at each budget
    descent_runs: int | None = None  # of an arm at a budget, after which no further key is tried
    interactions: dict[str, tuple[str, ...]] = field(default_factory=dict)  # four arms each
    options: tuple[str, ...] = ()  # --config-dir DIR, --plugin DIR: of the study and of its runs
    command: str = ""  # the command that started the study

    @property
    def path(self) -> Path:
        return self.root / self.name

    @property
    def runs(self) -> Path:
        return self.path / "runs"

    @property
    def search_order(self) -> tuple[int, ...]:
        """The budgets in the order in which an arm is tuned at them."""
        first = () if self.descent_budget is None else (self.descent_budget,)
        return (*first, *(budget for budget in self.budgets if budget not in first))

    def keys_of(self, arm: str) -> dict[str, Any]:
        """The further keys that the arm is tuned for, each with its factor or the tuple of its values."""
        own = self.tune.get(arm, {})
        return {key: grid for key, grid in {**self.tune, **own}.items() if key != LR and not isinstance(grid, dict)}

    @property
    def tuned_keys(self) -> list[str]:
        """The keys that any arm is tuned for."""
        return list(dict.fromkeys([LR, *(key for arm in self.arms for key in self.keys_of(arm))]))


def config_dir_of(options: Sequence[str]) -> str | None:
    """The directory of the user's own YAML files, in `--config-dir DIR`."""
    found = [value for option, value in pairwise(options) if option == "--config-dir"]
    return found[-1] if found else None


def merged(*lists: Iterable[str]) -> tuple[str, ...]:
    """The arguments of all lists, in order; the last one for each key."""
    return tuple({name_of(argument): argument for some in lists for argument in some}.values())


def read_study(
    config: StudyConfig, arguments: Sequence[str], options: Sequence[str] = (), verb: str = "study"
) -> Study:
    """The study of the section `config`, started by `verb` with these `arguments` and `options`. Raises ConfigError,
    but not for values of keys: `points.Runs` checks them when it composes the arms' configurations."""
    groups = Files(config_dir_of(options)).options
    chosen = next((a.partition("=")[2].strip() for a in arguments if name_of(a) == "study"), "null")
    name = config.name or chosen.replace("/", "-")
    if not config.arms:
        known = ", ".join(option for option in groups["study"] if option != "null")
        raise mistake(f"study={chosen}: it has no arms", f"Name a study with study=NAME: {known}")
    if not _PART.fullmatch(name):
        rule = "Letters, digits, '.', '_' and '-', at most 100, not beginning with '.' or '-'"
        raise mistake(f"study.name={name}: not a directory name", rule)
    arms = {arm: _row(row, groups, f"in arm {arm} of study={chosen}") for arm, row in config.arms.items()}
    baseline = config.baseline or next(iter(arms))
    check_arm(f"study.baseline={baseline}", baseline, arms)
    given = [argument for argument in arguments if not is_of_study(argument)]
    tune = _tuned(config.tune, arms)
    shared = _row(config.shared, groups, f"in shared of study={chosen}")
    for place, row in {"": given, "in shared": shared, **{f"in arm {arm}": row for arm, row in arms.items()}}.items():
        for argument in row:
            if why := _DECIDED.get(name_of(argument)):
                raise mistake(f"{argument}: not for the runs of a study: {why}", "Leave it out", place=place)
    of_arms = [grid for grid in tune.values() if isinstance(grid, dict)]
    for argument in given:
        if name_of(argument) in tune or any(name_of(argument) in keys for keys in of_arms):
            raise mistake(f"{argument}: it is tuned", "Leave it out; study.tune, in a YAML file, says how it is tuned")
        for arm, row in arms.items():
            if own := [said for said in row if name_of(said) == name_of(argument)]:
                fix = "Leave it out, or write a study of your own, DIR/study/my.yaml, chosen with --config-dir DIR"
                raise mistake(f"{argument}: arm {arm} has {own[0]}; the arms differ in it", fix)
    for key, values, example in (("budgets", config.budgets, "[409600,819200]"), ("seeds", config.seeds, "[0,1,2]")):
        if not values:
            raise mistake(f"study.{key}=[]: empty, and no run is asked for", f"For example study.{key}={example}")
        if len(set(values)) < len(values):
            raise mistake(f"study.{key}={show(values)}: one of them is there twice", "Name each once")
    _check_descent(config, tune)
    for interaction, four in config.interactions.items():
        for arm in four:
            check_arm(f"study.interactions: {interaction}: {arm}", arm, arms)
    return Study(
        name=name,
        root=Path(config.root).expanduser(),
        baseline=baseline,
        arms=arms,
        shared=merged(shared, given),
        budgets=tuple(sorted(config.budgets)),
        tune=tune,
        seeds=tuple(config.seeds),
        metric=config.metric,
        confidence=config.confidence,
        max_points=config.max_points,
        refine=_as_begun(Path(config.root).expanduser() / name) if config.refine is None else config.refine,
        descent_budget=config.descent_budget,
        descent_runs=config.descent_runs,
        interactions={name: tuple(four) for name, four in config.interactions.items()},
        options=tuple(options),
        command=command_of(verb, [*arguments, *options]),
    )


def _as_begun(path: Path) -> bool:
    """Whether the study in `path` refines its rates: a new one does. `check_stored` reports a damaged file."""
    with suppress(DataError):
        return not (path / FILE).exists() or read_stored(path).refine
    return True


def _row(content: Any, groups: Mapping[str, Sequence[str]], place: str) -> tuple[str, ...]:
    """A mapping of groups to options and of keys to values, as arguments. Raises ConfigError."""
    said = parse_row(content, groups, place)
    row = tuple(f"{name}={show(value)}" for name, value in {**said.choices, **said.values}.items())
    for argument in filter(is_of_study, row):
        raise mistake(f"{argument}: a key of the study, not of its runs", "Leave it out", place=place)
    return row


def check_arm(setting: str, name: str, arms: Collection[str]) -> None:
    """Raises ConfigError unless `name` is one of `arms`."""
    if name not in arms:
        near = did_you_mean(nearest(name, arms))
        raise mistake(f"{setting}: no arm of that name{near}", f"Arms: {', '.join(arms)}")


def _tuned(table: Mapping[str, Any], arms: Collection[str]) -> dict[str, Any]:
    """`study.tune`. optim.lr comes first and is always tuned. Raises ConfigError."""
    tuned: dict[str, Any] = {LR: float(table.get(LR, 2.0))}
    for name, grid in table.items():
        if isinstance(grid, Mapping):
            check_arm(f"study.tune: {name}", name, arms)
            tuned[name] = {key: _grid(key, of_key) for key, of_key in grid.items()}
            if twice := [key for key in tuned[name] if key in table]:
                raise mistake(f"study.tune: {name}: {twice[0]} is tuned for all arms", "Name it once")
        elif name != LR:
            tuned[name] = _grid(name, grid)
    return tuned


def _check_descent(config: StudyConfig, tune: Mapping[str, Any]) -> None:
    """Raises ConfigError for settings of the descent that fit no budget, or have nothing to tune."""
    at = config.descent_budget
    if at is not None and at not in config.budgets:
        raise mistake(f"study.descent_budget={at}: none of study.budgets={show(config.budgets)}", "Name one of them")
    for name, value in (("descent_budget", at), ("descent_runs", config.descent_runs)):
        if value is not None and len(tune) == 1:
            problem = f"study.{name}={value}: no key beside {LR} is tuned"
            raise mistake(problem, "Leave it out, or name further keys in study.tune")


def _grid(name: str, grid: Any) -> Any:
    """The factor of a tuned key, or the tuple of its values. Raises ConfigError."""
    keys = all_keys()
    if why := _DECIDED.get(name):
        raise mistake(f"study.tune: {name}: {why}", "Leave it out")
    if not isinstance(grid, list):
        if name not in keys:
            raise unknown_key(name, show(grid), keys, place="in study.tune")
        return float(grid)
    for value in grid:
        if name not in keys or not keys[name].choices or value not in (keys[name].choices or ()):
            check_leaf(name, value, keys, "in study.tune")
    if len({text_of(value) for value in grid}) < len(grid):
        raise mistake(f"study.tune: {name}: {show(grid)} has a value twice", "Name each once")
    return hashable(grid)


def hashable(value: Any) -> Any:
    """The value with tuples for its lists."""
    return tuple(map(hashable, value)) if isinstance(value, list) else value


def text_of(value: Value) -> str:
    """A tuned value as part of a directory's name."""
    text = f"{value:.6g}" if type(value) in (int, float) else show(value)
    return re.sub(r"[^A-Za-z0-9.+_-]", "_", text).replace("+", "")


def tree_of(study: Study) -> dict[str, Any]:
    """The content of study.yaml, with its secrets."""
    tree = {name: value for name, value in asdict(study).items() if name not in ("name", "root")}
    return dict(json.loads(json.dumps(tree)))  # with lists for tuples


def write_study(study: Study) -> None:
    study.path.mkdir(parents=True, exist_ok=True)
    text = yaml.safe_dump(redacted(tree_of(study)), sort_keys=False, allow_unicode=True)
    write_atomically(study.path / FILE, text.encode())


def read_stored(directory: Path) -> Study:
    """The study of a directory. Raises DataError if its study.yaml is missing or damaged."""
    path = directory / FILE
    try:
        tree = yaml_tree(path)
        return Study(
            name=directory.name,
            root=directory.parent,
            baseline=str(tree["baseline"]),
            arms={str(arm): tuple(map(str, row)) for arm, row in tree["arms"].items()},
            shared=tuple(map(str, tree["shared"])),
            budgets=tuple(map(int, tree["budgets"])),
            tune={
                str(key): {k: hashable(x) for k, x in grid.items()} if isinstance(grid, dict) else hashable(grid)
                for key, grid in tree["tune"].items()
            },
            seeds=tuple(map(int, tree["seeds"])),
            metric=str(tree["metric"]),
            confidence=float(tree["confidence"]),
            max_points=int(tree["max_points"]),
            refine=bool(tree.get("refine", False)),  # older studies kept to the factor
            descent_budget=tree.get("descent_budget"),
            descent_runs=tree.get("descent_runs"),
            interactions={name: tuple(four) for name, four in tree.get("interactions", {}).items()},
            options=tuple(map(str, tree["options"])),
            command=str(tree["command"]),
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError, yaml.YAMLError) as error:
        raise DataError(f"{path} is missing or damaged: {' '.join(str(error).split())}. Restore it.") from None
