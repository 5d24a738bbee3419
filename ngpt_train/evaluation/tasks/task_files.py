"""Finds tasks by name, first in the user's directory, then in lm-evaluation-harness.

In the directory, `NAME.jsonl` is the task NAME, unless a YAML file of the harness's form defines NAME. All lines of a
file have one of these forms:

    {"query": "...", "choices": ["...", "..."], "gold": 0}                  which choice continues the query
    {"context_options": ["...", "..."], "continuation": "...", "gold": 0}   which context the continuation follows
    {"context": "...", "continuation": "..."}                               whether the continuation is the likeliest
    {"text": "..."}                                                         how likely the text is

One space separates a continuation from the text before it.
"""

import functools
import glob
import json
import logging
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lm_eval.tasks
from lm_eval.api.group import Group
from lm_eval.api.task import Task
from lm_eval.tasks import TaskManager
from lm_eval.tasks._factory import TaskFactory
from lm_eval.tasks._index import Entry

from ngpt_train.config.validate import did_you_mean, mistake, nearest
from ngpt_train.core.errors import DataError, in_one_line
from ngpt_train.core.files import json_lines

logger = logging.getLogger(__name__)

# Tasks whose data only their authors hand out, and the address. Without a copy a list of tasks leaves them out.
BY_APPLICATION = dict.fromkeys(("storycloze_2016", "storycloze_2018"), "https://cs.rochester.edu/nlp/rocstories")


def load_tasks(names: Sequence[str], directory: str | None) -> tuple[dict[str, Any], dict[str, str]]:
    """The tasks with their data, for lm_eval.evaluator.evaluate; and of each name that is left out the reason.

    directory: the user's task files, or None. Raises ConfigError for an unknown task, DataError for faulty files, and
    for data that cannot be fetched.
    """
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it logs each task and its every default
    for library in ("huggingface_hub", "datasets"):  # the root logger prints their messages too
        logging.getLogger(library).handlers.clear()
    found: list[Task | Group] = []
    left_out: dict[str, str] = {}
    own = OwnTasks(Path(directory).expanduser()) if directory is not None else None
    own_names, harness = [] if own is None else own.names, Harness()
    # Refuses unknown names before it fetches data.
    managers = {name: harness.manager_of(name) for name in names if name not in own_names}
    for name, manager in managers.items():
        if manager is None:
            known = [*harness.folders_by_name, *own_names]
            where = f", nor is there a file of that name in {directory}" if own is not None else ""
            near = did_you_mean(nearest(name, known))
            problem = f"tasks=[{','.join(names)}]: lm-evaluation-harness has no {name}{where}{near}"
            raise mistake(problem, "`lm-eval ls tasks` lists its tasks")
    for name in names:
        if (theirs := managers.get(name)) is None:
            assert own is not None
            found += _built(own.manager, own.task(name), f"{directory}, task {name}: ", "")
            continue
        offline = (
            "On a machine with a network run the same command once and copy its HF_HOME here; or name a directory of "
            "task files with eval.tasks_path=DIR (docs/evaluation.md)"
        )
        try:
            found += _built(theirs, name, f"tasks=[{','.join(names)}]: the data of {name} cannot be had: ", offline)
        except DataError as error:
            if name not in BY_APPLICATION or len(names) == 1:
                raise
            left_out[name] = f"its authors hand it out on application ({BY_APPLICATION[name]})"
            logger.warning("%s is left out: %s; there is no copy here: %s", name, left_out[name], error)
    try:
        loaded = TaskManager(include_defaults=False).load(found)
    except ValueError as error:  # such as a group and a task of it
        raise mistake(f"tasks=[{','.join(names)}]: {error}", "Leave one of them out") from None
    for task in loaded["tasks"].values():
        # As simple_evaluate does; that sets the seeds of the whole process, too.
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=1234)
    return dict(loaded), left_out


# Lines of a YAML file that may name a task, group or tag: values of these keys, and items of lists.
NAMING = re.compile(
    rb"""^[ \t]*(?:(?:-[ \t]+)?["']?(?:task|group|tag)["']?[ \t]*:(.*)|-[ \t]+(\S+)[ \t]*(?:\#.*)?)$""", re.MULTILINE
)
NAME = re.compile(r"""[^\s,"'\[\]]+""")


class Harness:
    """The tasks of lm-evaluation-harness. Its index takes half a minute, so only a group or a tag makes it."""

    root = Path(lm_eval.tasks.__file__).parent

    def manager_of(self, name: str) -> TaskManager | None:
        """A manager that knows the task, group or tag; None for an unknown name."""
        file = glob.escape(name)
        near = self._manager({path.parent for path in [*self.root.rglob(f"{file}.yaml"), *self.root.glob(f"{file}/*")]})
        if name not in near.all_subtasks:
            if name not in self.folders_by_name:
                return None
            near = self._manager(self.folders_by_name[name])
        if name in near.all_subtasks:
            return near
        return self._of_all if name in self._of_all.all_tasks else None

    @functools.cached_property
    def folders_by_name(self) -> dict[str, set[Path]]:
        """The folders of each task, group or tag, by its name; some words in it are no names. Takes two seconds."""
        found: dict[str, set[Path]] = {}
        # Templates have tags, too. Their names have no ending, or one such as template_yaml.
        for folder, _, files in os.walk(self.root):
            for file in files:
                if file.endswith("yaml") or "." not in file:
                    for line in NAMING.findall(Path(folder, file).read_bytes()):
                        for name in NAME.findall(b"".join(line).decode(errors="replace")):
                            found.setdefault(name, set()).add(Path(folder))
        return found

    @functools.cached_property
    def _of_all(self) -> TaskManager:
        logger.info("reading all tasks of lm-evaluation-harness")
        return TaskManager()

    @staticmethod
    def _manager(folders: Iterable[Path]) -> TaskManager:
        return TaskManager(include_path=sorted(map(str, folders)), include_defaults=False)


class OwnTasks:
    """The tasks of a directory of YAML and JSONL files. Raises DataError for a missing or faulty directory."""

    def __init__(self, directory: Path) -> None:
        if not directory.is_dir():
            raise DataError(f"eval.tasks_path={directory}: no such directory")
        for path in directory.rglob("*"):
            if path.exists() and not (path.is_file() or path.is_dir()):
                problem = f"{path} is a pipe, a socket or a device, and reading it may hang"
                raise DataError(f"eval.tasks_path={directory}: {problem}; remove it, or name another directory")
        try:
            self.manager = TaskManager(include_path=str(directory), include_defaults=False)
        except Exception as error:  # a YAML file can cause any error in the harness
            raise DataError(f"eval.tasks_path={directory}: {in_one_line(error)}") from None
        self.manager._factory = _FromOwnDirectory()
        self._files = {path.stem: path for path in sorted(directory.rglob("*.jsonl"))}
        self.names = [*self.manager.all_tasks, *self._files]

    def task(self, name: str) -> str | dict[str, Any]:
        """The task as an argument for the manager: a name, or a configuration."""
        return name if name in self.manager.all_tasks else from_jsonl(name, self._files[name])


class _FromOwnDirectory(TaskFactory):
    """Builds tasks, also of groups and tags. Paths of data files are relative to the YAML file."""

    def _load_full_config(self, entry: Entry, overrides: dict[str, Any] | None = None) -> dict[str, Any]:
        task = super()._load_full_config(entry, overrides)
        return task if entry.yaml_path is None else _with_own_files(task, Path(entry.yaml_path).parent)


def _with_own_files(task: dict[str, Any], directory: Path) -> dict[str, Any]:
    """The task, with paths of data files relative to the YAML file, or else to the current directory."""

    def found(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: found(inner) for name, inner in value.items()}
        if isinstance(value, list):
            return [found(inner) for inner in value]
        beside = directory / str(value)
        return str(beside) if isinstance(value, str) and beside.exists() else value

    more = task.get("dataset_kwargs") or {}
    files = {name: found(value) for name, value in more.items() if name in ("data_files", "data_dir")}
    return {**task, "dataset_kwargs": {**more, **files}} if files else task


def from_jsonl(name: str, path: Path) -> dict[str, Any]:
    """The harness's configuration for a JSONL file. Raises DataError for lines without one of the forms above."""
    records = [(number, record) for number, (line, record) in enumerate(json_lines(path), 1) if line.strip()]
    first = next((record for _, record in records), None)
    fields = set(first) if isinstance(first, dict) else set()
    form = next((form for form in FORMS if set(form) <= fields), None)
    if form is None:
        has = ", ".join(sorted(fields)) or "of no JSON object"
        said = f"its first line has the fields {has}" if records else "empty"
        raise DataError(
            f"{path}: {said}. A line of a task has query, choices and gold; or context_options, continuation and gold; "
            f"or context and continuation; or text. Other files need a {name}.yaml beside them in the form of "
            "lm-evaluation-harness"
        )
    for number, record in records:
        if problem := _problem(record, form):
            raise DataError(f"{path}, line {number}: {problem}. Write it as docs/evaluation.md has it, or leave it out")
    files = {"data_files": {"test": str(path)}}
    return {"task": name, "dataset_path": "json", "dataset_kwargs": files, "test_split": "test", **FORMS[form]}


def _problem(record: Any, form: Sequence[str]) -> str:
    """The mistake of a line that should have the fields of `form`; empty for a correct line."""
    if not isinstance(record, dict):
        return "it is no JSON object"
    if missing := [field for field in form if field not in record]:
        return f"it lacks {' and '.join(missing)}, which the first line has"
    choices: Any = []
    for field in form:
        value = record[field]
        if field in ("choices", "context_options"):
            choices = value
            if not isinstance(value, list) or not value or not all(isinstance(each, str) for each in value):
                return f"{field} is no list of texts"
            if field == "choices" and "" in value:
                return "one of choices is empty"
        elif field == "gold":
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < len(choices):
                return f"gold={json.dumps(value)} is no number of a choice, 0 to {len(choices) - 1}"
        elif not isinstance(value, str):
            return f"{field}={json.dumps(value)[:80]} is no text"
    return ""


def _metrics(*names: str) -> list[dict[str, Any]]:
    return [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in names]


# The configuration of each form. Among its fields the choices come before the number of one.
FORMS: dict[tuple[str, ...], dict[str, Any]] = {
    ("query", "choices", "gold"): {
        "output_type": "multiple_choice",
        "doc_to_text": "query",
        "doc_to_choice": "choices",
        "doc_to_target": "gold",
        "metric_list": _metrics("acc", "acc_norm"),
    },
    ("context_options", "continuation", "gold"): {
        "output_type": "multiple_choice",
        "doc_to_text": "gold",
        "doc_to_choice": "context_options",
        "doc_to_target": "continuation",
        "metric_list": _metrics("acc"),
    },
    ("context", "continuation"): {
        "output_type": "loglikelihood",
        "doc_to_text": "context",
        "doc_to_target": "{{' ' + continuation}}",
        "metric_list": [
            {"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False},
            *_metrics("acc"),
        ],
    },
    ("text",): {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "text",
        "metric_list": [{"metric": name} for name in ("word_perplexity", "byte_perplexity", "bits_per_byte")],
    },
}


def _built(manager: TaskManager, spec: str | dict[str, Any], where: str, fix: str) -> list[Task | Group]:
    """The task, the tasks of a tag, or the group. Raises DataError that begins with `where` and ends with `fix`."""
    try:
        built = manager._load_spec(spec)
    except Exception as error:  # from the data set's own code, the network or YAML
        raise DataError(f"{where}{in_one_line(error)}{fix and '. '}{fix}") from None
    return list(built) if isinstance(built, list) else [built]
