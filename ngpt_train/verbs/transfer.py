"""`transfer`: how the best learning rate changes with width, depth and the length of a run, from a study of its own or
from studies that are finished."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ngpt_train.config.arguments import is_of_study, name_of
from ngpt_train.config.compose import load_config
from ngpt_train.config.model_keys import ModelConfig
from ngpt_train.config.schema import Config
from ngpt_train.config.sections.studies import StudyConfig, TransferConfig
from ngpt_train.config.validate import mistake, show
from ngpt_train.core.secrets import command_of
from ngpt_train.study.definition import Study, config_dir_of, merged, read_study
from ngpt_train.study.drift import Optima, axes_of, read_optima
from ngpt_train.study.points import Point, Result
from ngpt_train.study.runner import ended, make
from ngpt_train.study.transfer_report import left_out, report_of, table_entries, write_report


def main(config: Config, overrides: Sequence[str], options: Sequence[str] = ()) -> int:
    """Prints a sentence for each axis and the rates, and writes transfer.json and the figures; returns the study's exit
    code, or 0. Where the study was interrupted it writes nothing: the same command goes on.

    overrides: of the command line, without directories. The study's runs get the ones that are not for the study.
    options: as of `study`. Raises ConfigError for a mistake in the arguments, DataError for runs that cannot be read.
    """
    transfer = config.transfer
    if transfer.studies:
        check_reading(transfer, transfer.studies, overrides)
        confidence = config.study.confidence if any(name_of(x) == "study.confidence" for x in overrides) else None
        optima = read_optima([Path(path).expanduser() for path in transfer.studies], confidence)
        say_and_write(optima, transfer, transfer.out, [*transfer.studies, *overrides, *options])
        return 0

    def then(config: Config, study: Study, results: Mapping[Point, Result]) -> int:
        _, code = ended(study, results)
        out = transfer.out or str(study.path / "transfer")
        say_and_write(read_optima([study.path]), transfer, out, [*overrides, *options])
        return code

    config = replace(config, study=study_of_sizes(config.study, transfer, overrides, options))
    return make("transfer", config, overrides, options, then)


def say_and_write(optima: Optima, transfer: TransferConfig, out: str | None, arguments: Sequence[str]) -> None:
    """Prints a sentence for each axis, what was left out and the rates; writes transfer.json and figures into `out`.

    arguments: of the command line, which the report has."""
    axes = axes_of(optima, transfer.within)
    report = report_of(optima, axes, transfer.within, [command_of("transfer", arguments)])
    for line in [axis.sentence for axis in axes] or ["no axis: no two optima differ in one size alone"]:
        print(line)
    for line in [*left_out(optima), *table_entries(optima)]:
        print(line)
    if out is not None:
        write_report(report, axes, Path(out).expanduser())
        print(f"written to {out}")


def check_reading(transfer: TransferConfig, studies: Sequence[str], overrides: Sequence[str]) -> None:
    """Raises ConfigError for an argument that makes a study, beside `studies`, which are finished."""
    sizes = [f"transfer.{name}" for name in ("widths", "depths") if getattr(transfer, name)]
    made = [name_of(x) for x in overrides if not is_of_study(x) or (x.startswith("study") and "confidence" not in x)]
    if wrong := [*sizes, *made]:
        problem = f"{wrong[0]}: {studies[0]} is looked at, and no run is made"
        raise mistake(problem, "Leave it out, or the directories")


def study_of_sizes(
    chosen: StudyConfig, transfer: TransferConfig, overrides: Sequence[str], options: Sequence[str]
) -> StudyConfig:
    """The section `study` with an arm of each size: of the arms of study=NAME, else of what the other arguments say.
    Without study.budgets the runs are as long as their configuration says. Raises ConfigError."""
    rest, directory = [x for x in overrides if not is_of_study(x)], config_dir_of(options)
    given = {name_of(x): x.partition("=")[2].strip() for x in overrides}
    name = chosen.name
    if not chosen.arms:
        plain = load_config(rest, directory, world_size=1)
        arm = given.get("recipe", plain.model.name)
        chosen = replace(chosen, arms={arm: {}}, shared={"logging.wandb.mode": "disabled"} | chosen.shared)
        name = name or f"transfer-{arm}-{plain.scale.name}"
    else:
        name = name or f"transfer-{given['study']}"
    study = read_study(replace(chosen, name=name, budgets=chosen.budgets or [1]), overrides, options)
    configs = {arm: load_config(merged(study.shared, row), directory, world_size=1) for arm, row in study.arms.items()}
    models = {arm: config.model for arm, config in configs.items()}
    arms = arms_of_sizes(chosen.arms, models, transfer.widths, transfer.depths)
    if len(arms) == len(models) and len(set(chosen.budgets)) < 2:  # one size of each, such as its own width again
        example = "For example: ngpt-train transfer model=ngpt scale=tiny transfer.widths=[64,128,256]"
        raise mistake("transfer: two sizes or more are compared, of transfer.widths, depths, or study.budgets", example)
    lengths = {one.train.steps * one.train.rows_per_step * one.model.context for one in configs.values()}
    return replace(chosen, name=name, arms=arms, baseline=None, budgets=chosen.budgets or sorted(lengths))


def arms_of_sizes(
    arms: Mapping[str, Mapping[str, Any]],
    models: Mapping[str, ModelConfig],
    widths: Sequence[int],
    depths: Sequence[int],
) -> dict[str, dict[str, Any]]:
    """Each arm at each width with its own depth, and at each depth with its own width, named `ngpt-d256-L4`.

    arms: keys and values of each. models: resolved keys of each. Heads keep their width, and the MLP its share of
    d_model. Raises ConfigError for a width without a whole number of such heads.
    """
    found = {}
    for arm, row in arms.items():
        model = models[arm]
        sizes = [(width, model.n_layers) for width in widths] + [(model.d_model, depth) for depth in depths]
        for width, depth in sizes or [(model.d_model, model.n_layers)]:
            deep = {} if depth == model.n_layers else {"model.n_layers": depth}
            found[f"{arm}-d{width}-L{depth}"] = {**row, **_at_width(model, width), **deep}
    return found


def _at_width(model: ModelConfig, width: int) -> dict[str, int]:
    if width == model.d_model:
        return {}
    keys = {"model.d_model": width, "model.n_heads": _scaled(model, "n_heads", width)}
    if model.n_kv_heads not in (None, model.n_heads):
        keys["model.n_kv_heads"] = _scaled(model, "n_kv_heads", width)
    if model.d_mlp not in (None, 4 * model.d_model):
        keys["model.d_mlp"] = _scaled(model, "d_mlp", width)
    return keys


def _scaled(model: ModelConfig, name: str, width: int) -> int:
    value = int(getattr(model, name))
    if value * width % model.d_model:
        problem = f"model.{name}={value} of model.d_model={model.d_model} is no whole number at {width}"
        fix = f"Choose multiples of the width of a head, {model.d_head}, or set model.{name}"
        raise mistake(f"transfer.widths={show([width])}: {problem}", fix)
    return value * width // model.d_model
