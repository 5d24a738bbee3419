"""Runs tasks on a model, and reports their metrics."""

import contextlib
import io
import json
import logging
import math
import os
import re
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import lm_eval.api.metrics
import numpy as np
from lm_eval.evaluator import evaluate

from ngpt_train.config.model_keys import ModelConfig
from ngpt_train.config.sections.records import EvalConfig
from ngpt_train.config.validate import mistake
from ngpt_train.core.errors import DataError
from ngpt_train.core.files import write_atomically
from ngpt_train.core.recorded import finite
from ngpt_train.data.tokenizers.tokenizer import Tokenizer
from ngpt_train.distributed.world import World
from ngpt_train.evaluation.tasks.adapter import Adapter
from ngpt_train.evaluation.tasks.task_files import load_tasks
from ngpt_train.models.decoder import Decoder

logger = logging.getLogger(__name__)

# Bootstrap samples for the standard error of metrics such as perplexity. The harness's default is 100,000, in a process
# on each core.
BOOTSTRAP = 1_000


@dataclass(frozen=True)
class TaskResults:
    """tasks[name][metric], for tasks and groups. It includes standard errors as NAME_stderr, `chance` (the accuracy of
    guessing, if it is known) and `n` (the number of documents). items[task]: the harness's record of each document.
    left_out[task]: the reason."""

    tasks: dict[str, dict[str, float]]
    items: dict[str, list[dict[str, Any]]]
    left_out: dict[str, str] = field(default_factory=dict)

    def mean(self) -> dict[str, float]:
        """The papers' mean of `acc` over tasks, and of `acc_norm` (else `acc`), each with the standard error of
        independent tasks, sqrt(sum of se^2) / n. The mean of `chance`, if every task with `acc` has one. Empty if no
        task has an accuracy.
        """
        found: dict[str, float] = {}
        for name, metrics in (("mean", ("acc",)), ("mean_acc_norm", ("acc_norm", "acc"))):
            chosen = [next((m for m in metrics if m in task), None) for task in self.tasks.values()]
            pairs = [(task, m) for task, m in zip(self.tasks.values(), chosen, strict=True) if m is not None]
            if pairs:
                found[name] = fmean(task[m] for task, m in pairs)
                errors = [task.get(f"{m}_stderr", math.nan) for task, m in pairs]
                found[f"{name}_stderr"] = math.sqrt(math.fsum(error**2 for error in errors)) / len(pairs)
        chances = [task.get("chance", math.nan) for task in self.tasks.values() if "acc" in task]
        if chances and not math.isnan(mean := fmean(chances)):
            found["mean_chance"] = mean
        return found

    def metrics(self) -> dict[str, float]:
        """All numbers as TASK/METRIC, for a record of metrics.jsonl."""
        flat = {f"{task}/{name}": value for task, of_task in self.tasks.items() for name, value in of_task.items()}
        return {**self.mean(), **flat}

    def as_json(self) -> dict[str, Any]:
        """For evaluate.out. A number that is not finite becomes null."""
        left_out = {"left_out": self.left_out} if self.left_out else {}
        return dict(finite({**self.mean(), "tasks": self.tasks, "harness": version("lm_eval"), **left_out}))

    def lines(self) -> list[str]:
        """A line for each task, and one for the mean."""
        n_means, rows = sum("acc" in task for task in self.tasks.values()), dict(self.tasks)
        if n_means > 1:
            # The mean is shown as `acc`, and `mean_NAME` as NAME.
            names = {name: re.sub("^mean(?=$|_stderr)", "acc", name).removeprefix("mean_") for name in self.mean()}
            rows[f"mean of {n_means} tasks"] = {names[name]: value for name, value in self.mean().items()}
        width = max(map(len, rows), default=0)
        found = []
        for task, of_task in rows.items():
            values = []
            for name in (name for name in of_task if name != "n" and not name.endswith("_stderr")):
                error = f" ± {_short(of_task[f'{name}_stderr'])}" if f"{name}_stderr" in of_task else ""
                values.append(f"{name} {_short(of_task[name])}{error}")
            n = f"  ({of_task['n']:.0f} documents)" if "n" in of_task else ""
            found.append(f"{task:<{width}}  {'  '.join(values)}{n}")
        return found

    def write_items(self, path: Path) -> None:
        """Writes a line of JSON for each document: its task and number, the requests, the answers, and its metrics."""
        kept = ("doc_id", "filter", "target", "arguments", "resps")
        lines = []
        for task, items in self.items.items():
            for item in items:
                line = {"task": task, **{name: item[name] for name in (*kept, *item["metrics"])}}
                lines.append(json.dumps(line, ensure_ascii=False, default=str) + "\n")
        write_atomically(path, "".join(lines).encode())


class Tasks:
    """The tasks of eval.tasks with their data.

    Raises ConfigError for a task that is unknown or impossible for an encoder-decoder, DataError if its data cannot
    be fetched. A collective call: rank 0 fetches the data before other ranks read it.
    """

    def __init__(self, config: EvalConfig, model: ModelConfig, world: World) -> None:
        names = list(dict.fromkeys(config.tasks or []))

        def load() -> list[str]:
            self._loaded, self.left_out = load_tasks(names, config.tasks_path)
            return list(self._loaded["tasks"])

        world.on_main_without_timeout(load)
        if not world.is_main:
            load()
        tasks = self._loaded["tasks"].items()
        whole = [name for name, task in tasks if task.OUTPUT_TYPE == "loglikelihood_rolling"]
        if problem := model.refuses_text():
            raise mistake(f"tasks: {problem}", "Leave eval.tasks out, or choose another checkpoint")
        if model.source_length(model.context) and whole:
            problem = f"{', '.join(sorted(whole))} wants the probability of whole texts. An encoder-decoder gives none"
            raise mistake(f"tasks: {problem} to the beginning of a text, which its encoder reads", "Leave it out")
        for name in whole:
            task = self._loaded["tasks"][name]
            if not any(map(task.doc_to_target, task.eval_docs)):
                raise DataError(f"tasks: all texts of {name} are empty; give it text, or leave it out")

    def notes(self) -> list[str]:
        """Sentences for the log."""
        n_documents = sum(len(task.eval_docs) for task in self._loaded["tasks"].values())
        found = [f"tasks: {', '.join(self._loaded['tasks'])}; {n_documents:,} documents"]
        return found + [f"{name} is left out: {why}" for name, why in self.left_out.items()]

    def __call__(self, model: Decoder, tokenizer: Tokenizer, world: World) -> TaskResults:
        """Evaluates `model`. The results are the same on every rank. A collective call."""
        os.environ["DISABLE_MULTIPROC"] = "1"  # processes of the harness would copy this one with its GPU and threads
        out, err, adapter = _OtherThreads(sys.stdout), _OtherThreads(sys.stderr), Adapter(model, tokenizer, world)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), _infinite_perplexities():
            raw = evaluate(
                adapter, self._loaded, bootstrap_iters=BOOTSTRAP, log_samples=True, confirm_run_unsafe_code=False
            )
        members = {child for children in self._loaded["group_map"].values() for child in children}
        top = [name for name in [*self._loaded["groups"], *self._loaded["tasks"]] if name not in members]
        tasks = {name: _numbers(raw["results"][name]) for name in top if name in raw["results"]}
        for name, of_task in tasks.items():
            if "acc" in of_task and (chance := self._chance(name)) is not None:
                of_task["chance"] = chance
            if name in raw["n-samples"]:
                of_task["n"] = raw["n-samples"][name]["effective"]
        return TaskResults(tasks, raw["samples"], self.left_out)

    def _chance(self, name: str) -> float | None:
        """The accuracy of guessing in a task or a group; None if it is unknown."""
        group = self._loaded["groups"].get(name)
        by_task = list(map(_chances, [self._loaded["tasks"][name]] if group is None else group.get_all_tasks()))
        if not by_task or not all(by_task):
            return None
        metrics = [] if group is None else group.aggregate_metric_list or []
        if group is None or any(each.metric == "acc" and each.weight_by_size for each in metrics):
            return fmean(x for task in by_task for x in task)
        return fmean(sum(task) / len(task) for task in by_task)


def _chances(task: Any) -> list[float]:
    """The probability of a right guess for each document: 1 / n of n choices. Empty for a task without choices, with
    several right answers, or with its own accuracy."""
    if task.OUTPUT_TYPE != "multiple_choice" or getattr(task, "multiple_target", 1) or task.config.process_results:
        return []
    return [1 / len(task.doc_to_choice(document)) for document in task.eval_docs]


def _numbers(results: Mapping[str, Any]) -> dict[str, float]:
    """Renames the harness's `acc,none` to acc, `exact_match,strict` to exact_match_strict. Keeps numbers alone."""
    found = {}
    for name, value in results.items():
        metric, _, chosen = name.partition(",")
        if chosen and isinstance(value, (int, float)) and not isinstance(value, bool):
            base, error = metric.removesuffix("_stderr"), "_stderr" * metric.endswith("_stderr")
            found[f"{base}{'' if chosen == 'none' else f'_{chosen}'}{error}"] = float(value)
    return found


def _short(value: float) -> str:
    """Four decimals; four digits for huge perplexities."""
    return f"{value:.4f}" if abs(value) < 1e6 else f"{value:.4g}"


class _OtherThreads(io.TextIOBase):
    """Drops the output of this thread. Other threads, such as the watchdog, still write."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._thread = stream, threading.get_ident()

    def write(self, text: str) -> int:
        return len(text) if threading.get_ident() == self._thread else self._stream.write(text)


@contextlib.contextmanager
def _infinite_perplexities() -> Iterator[None]:
    """Inside, a perplexity that overflows is infinite, and its standard error NaN.

    Python's math.exp, and the square of a large float, raise OverflowError. One text without spaces, a single word to
    the harness, would end the evaluation, and with it the training.
    """

    def exp(x: float) -> np.float64:
        try:
            return np.float64(math.exp(x))
        except OverflowError:
            return np.float64(math.inf)

    module: Any = lm_eval.api.metrics
    before = module.math
    module.math = SimpleNamespace(**{**vars(math), "exp": exp})
    try:
        with np.errstate(over="ignore", invalid="ignore"):
            yield
    finally:
        module.math = before
