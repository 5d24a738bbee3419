"""The arguments of a verb: which of them are directories, which are a study's, and what the verb refuses."""

import os
from collections.abc import Sequence
from pathlib import Path

from ngpt_train.config.keys import VerbKeys
from ngpt_train.config.places import check_directory, check_file
from ngpt_train.config.schema import Config, check
from ngpt_train.config.validate import mistake, report_together

# The verbs that make the runs of a study, and what of their command line is for the study. All else is for its runs.
STUDY_VERBS = ("study", "transfer")
STUDY_SECTIONS = ("study", "compare", "audit", "transfer")
# Verbs whose arguments may be directories, and the key of their section that holds them.
TAKE_DIRECTORIES = {"compare": "runs", "audit": "run", "transfer": "studies"}
# The key that names what a verb reads, and how a path is given to it.
READ = {
    **{verb: f"{verb}.checkpoint={{}}" for verb in ("evaluate", "generate", "export")},
    **{verb: f"{verb}.checkpoints=[{{}}]" for verb in ("analyze", "probe")},
    "import": "import.source={}",
}
# Verbs whose VERB.out is a directory, and those that check it themselves. All others write a file.
WRITE_DIRECTORIES = ("transfer", "analyze", "probe")
CHECK_THEMSELVES = ("compare", "export", "import")


def name_of(argument: str) -> str:
    """The group or key in an argument."""
    return argument.partition("=")[0].strip()


def is_of_study(argument: str) -> bool:
    return name_of(argument).partition(".")[0] in STUDY_SECTIONS


def arguments_of(verb: str, overrides: Sequence[str]) -> list[str]:
    """The arguments that make the config of a verb. Of those that make a study they are the study's. All others
    are for its runs, and are checked with its arms, which choose the models that they belong to."""
    return [override for override in overrides if verb not in STUDY_VERBS or is_of_study(override)]


def without_directories(verb: str, arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments that are overrides, and those that are directories: without a '=', or there all the same."""
    found = [x for x in arguments if verb in TAKE_DIRECTORIES and ("=" not in x or os.path.isdir(x))]
    return [x for x in arguments if x not in found], found


def put_directories(config: Config, verb: str, directories: list[str]) -> None:
    """Sets the key that holds them. Raises ConfigError for several runs of a verb that takes one."""
    if verb == "audit" and len(directories) > 1:
        raise mistake(f"audit {' '.join(directories)}: one run at a time", "For example: ngpt-train audit runs/a")
    setattr(getattr(config, verb), TAKE_DIRECTORIES[verb], directories[0] if verb == "audit" else directories)


def check_arguments(verb: str, overrides: Sequence[str]) -> None:
    """Raises ConfigError for what `verb` never takes. A recipe would be checked against the default model first. A path
    may stand alone, as `audit` and `compare` take it (`evaluate runs/a`), or after the name of the group (`evaluate
    checkpoint=runs/a`): the message has its key."""
    under_torchrun = "TORCHELASTIC_RUN_ID" in os.environ or os.environ.get("WORLD_SIZE", "1") != "1"
    if verb in ("analyze", "probe") and under_torchrun:
        raise mistake(f"{verb}: not under torchrun, it is one process", f"Start it with: ngpt-train {verb} ...")
    if verb in STUDY_VERBS and under_torchrun:
        problem = f"{verb}: not under torchrun, where every rank would start the runs by itself"
        raise mistake(problem, f"Start it with: ngpt-train {verb} ...; study.jobs has runs side by side")
    split = [(override, *(part.strip() for part in override.partition("="))) for override in overrides]
    for override, name, equals, value in split:
        path = value if name == "checkpoint" else "" if equals else name
        if verb in READ and path and Path(path).expanduser().exists():
            raise mistake(f"{override}: a path without its key", f"Write {READ[verb].format(path)}")
    for override, name, _, option in split:
        if verb in ("evaluate", "generate", "analyze", "probe", "export") and name == "recipe":
            raise mistake(f"{override}: how a model was trained, which the checkpoint has decided", "Leave it out")
        if verb not in STUDY_VERBS and name == "study" and option != "null":
            raise mistake(f"{override}: a study is many runs", f"Start it with: ngpt-train study {override}")


def check_verb(config: Config, verb: str) -> None:
    """Raises ConfigError for what `verb` cannot do without, or cannot write to."""
    section = getattr(config, verb, None)
    if isinstance(section, VerbKeys):
        for conflict in section.refused(config):
            raise report_together(config, conflict, {})
    out = getattr(section, "out", None)
    if out is not None and verb in WRITE_DIRECTORIES:
        check_directory(f"{verb}.out={out}", Path(out).expanduser())
    if verb != "evaluate":
        config.data.check_val_range()
        if config.data.val_fraction == 1:
            problem = "data.val_fraction=1: all of the text would validate, and none is left to train on"
            raise mistake(problem, "Set it below 1; `evaluate` alone takes 1, for the loss on all of a text")
    if verb == "prepare" and config.data.kind in ("tokens", "mixture"):
        problem = "nothing to prepare" if config.data.kind == "tokens" else "one source at a time is prepared"
        raise mistake(f"data.kind={config.data.kind}: {problem}", "Choose text: data=embedded, local or hf")
    if verb == "prepare" and (config.data.label_field or config.data.translation_field):
        problem = "prepare: examples and pairs are no running text, and are tokenized as they are read"
        raise mistake(problem, "Train on them at once, or leave data.label_field and data.translation_field out")
    if verb == "plan":
        check(config, config.plan.world_size)
    # What several ranks print is written by the first, whose host alone needs the directory.
    is_file = verb not in (*WRITE_DIRECTORIES, *CHECK_THEMSELVES)
    if out and is_file and os.environ.get("RANK", "0") == "0":
        check_file(f"{verb}.out={out}", Path(out).expanduser())
