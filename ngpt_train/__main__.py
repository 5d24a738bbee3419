"""The command line: `ngpt-train VERB [overrides]`, the same as `python -m ngpt_train VERB [overrides]`.

Nothing heavy is imported before the configuration is known to be right.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import importlib
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import NoReturn

from ngpt_train.config.architectures import use_plugins
from ngpt_train.config.arguments import (
    STUDY_VERBS,
    arguments_of,
    check_arguments,
    check_verb,
    name_of,
    put_directories,
    without_directories,
)
from ngpt_train.config.compose import load_config
from ngpt_train.config.schema import Config, check
from ngpt_train.config.stored import to_yaml
from ngpt_train.config.validate import did_you_mean, mistake
from ngpt_train.core.errors import ConfigError, is_told_here, same_on_host
from ngpt_train.core.launcher import check_ranks, remember_end, remembered_end
from ngpt_train.core.secrets import guard_streams, without_variables

VERBS = {
    "train": "Train a model; continues the run if its directory holds a checkpoint.",
    "finetune": "Train a trained model on a task with labels: `finetune run.init_from=runs/NAME task=rte`.",
    "prepare": "Tokenize a corpus into shards that train reads.",
    "evaluate": "Validation loss of a checkpoint; or its answers to tasks, or its loss by context and position.",
    "generate": "Sample text from a checkpoint.",
    "analyze": "The papers' measurements and figures of checkpoints: `analyze analyze.checkpoints=[runs/a,runs/b]`.",
    "probe": "Where the loss of one or two checkpoints is: by frequency, position, source and type of token; by row.",
    "export": "Write a checkpoint for other programs: transformers, or any reader of safetensors.",
    "import": "Make a run of a model that `export` wrote, or of a Llama-like model of the hub.",
    "doctor": "Whether a training run would work here: machine, network, disks, data; with the overrides of train.",
    "plan": "Parameters, memory, FLOPs and hours of a run, without running it.",
    "audit": "Train parts of a run again and compare: whether its records are what config, code and data give.",
    "study": "Train arms that are to be compared, each tuned, at several budgets and seeds: `study study=gpt_vs_ngpt`.",
    "compare": "Which arm is better, by how much, how sure, from any runs: `compare runs/a runs/b compare.out=report`.",
    "transfer": "How the best lr changes with width, depth and length: `transfer transfer.widths=[64,128,256]`.",
}
RANK_0_ALONE = ("compare", "plan", "export", "import", "generate")  # verbs that one of torchrun's processes does
ENDS_FOR_GOOD = (2, 3, 4)  # exit codes that would come again if torchrun started the processes again
# What is wrong with the machine and not with us, and the remedy.
FAULTS_OF_THE_SYSTEM = {
    errno.ENOSPC: "Make room",
    errno.EDQUOT: "Make room",
    errno.EROFS: "Choose a place that can be written",
    errno.ELOOP: "Remove this link",
    errno.ENXIO: "Remove this pipe",
    errno.ENAMETOOLONG: "Choose a shorter name",
    errno.EIO: "Look at the disk, or at the network that it is on",
    errno.ESTALE: "Mount the file system again",
}
SECONDS_FOR_THE_TELLER = 10.0  # so long the other ranks wait for the one that tells an error of all
LONGEST_LINE = 2000  # characters of a message
# What a shell reports of a tool that ends because nobody reads its output any more: 128 + SIGPIPE.
NO_READER = 141
USAGE = """\
Usage: ngpt-train VERB [GROUP=OPTION ...] [KEY=VALUE ...] [options]

Options:
  --help, -h        without a verb: this text; with one: all groups and keys with their meaning
  --cfg job         print the configuration and exit
  --config-dir DIR  directory of your own YAML files, by group: DIR/model/my.yaml is model=my
  --plugin DIR      folder of an architecture of your own, which is then model=NAME, the folder's name; repeatable
  --multirun, -m    run every combination of comma-separated values (optim.lr=1e-3,3e-3), one after the other"""


@dataclass
class CommandLine:
    """The arguments after the verb, options apart from overrides."""

    overrides: list[str] = field(default_factory=list)
    help: bool = False
    print_config: bool = False
    config_dir: str | None = None
    plugins: list[str] = field(default_factory=list)
    multirun: bool = False


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one verb and returns the exit code: 0 done, 2 configuration, 3 data or checkpoint, 4 numerical stop."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    rank = os.environ.get("RANK", "0")
    if (end := remembered_end()) is not None:
        print(f"rank {rank}: not started again, because it would end as before: {end.message}", file=sys.stderr)
        return end.code
    try:
        with same_on_host():
            command = _command(arguments)
        return command()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except OSError as error:
        if error.errno not in FAULTS_OF_THE_SYSTEM:
            raise
        where = f"{_shortened(str(error.filename))}: " if error.filename else ""
        remedy = FAULTS_OF_THE_SYSTEM[error.errno]
        print(f"error: {where}{error.strerror}. {remedy}; the same command starts again", file=sys.stderr)
        return 2 if error.errno == errno.ENAMETOOLONG else 3
    except Exception as error:
        # Errors that name their exit code are addressed to the user; anything else is ours, with its traceback.
        if (code := getattr(error, "exit_code", None)) is None:
            raise
        if code in ENDS_FOR_GOOD:
            remember_end(code, without_variables(str(error)))
        if is_told_here(error):
            by = "" if rank == "0" else f" (rank {rank}, {socket.gethostname()})"
            print(f"error{by}: {_shortened(without_variables(str(error)))}", file=sys.stderr)
        else:
            # torchrun ends the other ranks as soon as one has failed: the one that tells the error must be the first.
            time.sleep(SECONDS_FOR_THE_TELLER)
        return int(code)


def _shortened(message: str) -> str:
    """The message without the middle of its lines that nobody could read, such as a value of a million digits."""
    half = LONGEST_LINE // 2
    lines = (x if len(x) <= LONGEST_LINE else f"{x[:half]} ... {x[-half:]}" for x in message.split("\n"))
    return "\n".join(lines)


def _command(arguments: list[str]) -> Callable[[], int]:
    """The command of these arguments. Everything is checked that needs neither devices nor files."""
    check_ranks()
    if not arguments or arguments[0] in ("--help", "-h"):
        return partial(_show, _overview())
    verb, *rest = arguments
    if verb not in VERBS:
        raise _unknown_verb(verb)
    line = _parse(rest)
    line.overrides, directories = without_directories(verb, line.overrides)
    use_plugins(line.plugins)
    if line.help:
        from ngpt_train.config.help import help_text

        text = help_text(line.overrides, line.config_dir)
        return partial(_show, f"{VERBS[verb]}\n\n{USAGE.replace('VERB', verb, 1)}\n\n{text}")
    if line.multirun:
        if verb in STUDY_VERBS:
            raise mistake("--multirun: a study has arms and budgets instead", "Leave -m out")
        if directories:
            raise mistake(f"--multirun: {verb} takes its runs at once", "Leave -m out")
        if int(os.environ.get("WORLD_SIZE", "1")) > 1 or "TORCHELASTIC_RUN_ID" in os.environ:
            problem = "--multirun: not under torchrun, where every rank would run the sweep by itself"
            raise mistake(problem, "Start one torchrun for each combination")
        return partial(_multirun, verb, line)
    check_arguments(verb, line.overrides)
    line.overrides = _whole(verb, line.overrides)
    # Only training, and the look at what it would find, share a batch among the ranks of torchrun.
    of_verb, world_size = arguments_of(verb, line.overrides), None if verb in ("train", "finetune", "doctor") else 1
    config = load_config(of_verb, line.config_dir, world_size)
    if directories:
        put_directories(config, verb, directories)
    check_verb(config, verb)
    if line.print_config:
        return partial(_show, to_yaml(config).rstrip())
    options = {"options": _options(line)} if verb in (*STUDY_VERBS, "plan") else {}  # what they start needs them
    return partial(_run, verb, config, line.overrides, **options)


def _whole(verb: str, overrides: list[str]) -> list[str]:
    """The overrides, and of `finetune` before them the model that it goes on with."""
    if verb != "finetune":
        return overrides
    from ngpt_train.verbs import finetune

    return finetune.arguments(overrides)


def _run(verb: str, config: Config, overrides: list[str], **more: object) -> int:
    # What a slow preparation reports; the other ranks do the same or wait for it.
    level = logging.INFO if os.environ.get("RANK", "0") == "0" else logging.WARNING
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("ngpt_train").setLevel(level)
    if verb in RANK_0_ALONE and os.environ.get("RANK", "0") != "0":
        return 0
    module = "import_run" if verb == "import" else verb  # `import` is a word of Python
    return int(importlib.import_module(f"ngpt_train.verbs.{module}").main(config, overrides, **more))


def _parse(arguments: list[str]) -> CommandLine:
    line = CommandLine()
    rest = iter(arguments)
    for argument in rest:
        option, _, value = argument.partition("=")
        if argument in ("--help", "-h"):
            line.help = True
        elif argument in ("--multirun", "-m"):
            line.multirun = True
        elif option == "--cfg":
            if (what := value or next(rest, "nothing")) != "job":
                raise mistake(f"--cfg {what}: it takes job", "--cfg job prints the configuration of the run")
            line.print_config = True
        elif option in ("--config-dir", "--plugin"):
            if (folder := value or next(rest, None)) is None:
                raise mistake(f"{option}: no directory given", f"Write {option} DIR")
            if option == "--plugin":
                line.plugins.append(folder)
            else:
                line.config_dir = folder
        else:
            line.overrides.append(argument)
    return line


def _options(line: CommandLine) -> list[str]:
    """The options for another process that is to read the same config files."""
    of_plugins = [word for folder in line.plugins for word in ("--plugin", folder)]
    return [*(["--config-dir", line.config_dir] if line.config_dir else []), *of_plugins]


def _multirun(verb: str, line: CommandLine) -> int:
    """Runs the jobs of a sweep one after the other, each in a process of its own, so that neither a crash nor a
    process group reaches the next, and says of trainings how they ended. The exit code is the first that is not 0."""
    from ngpt_train.config.overrides import expand

    jobs, configs = [], []
    for number, overrides in enumerate(expand(line.overrides)):
        config = load_config(_whole(verb, overrides), line.config_dir)
        config.run.name = f"{config.run.name}/{number}"
        check(config)
        others = [argument for argument in overrides if name_of(argument) != "run.name"]
        jobs.append([*others, f"run.name={config.run.name}"])
        configs.append(config)
    if line.print_config:
        return _show("---\n".join(map(to_yaml, configs)).rstrip())

    codes: list[int] = []
    for number, job in enumerate(jobs):
        print(f"job {number} of {len(jobs)}: {' '.join(job)}", flush=True)
        code, interrupted = _run_job([sys.executable, "-m", "ngpt_train", verb, *job, *_options(line)])
        codes.append(code)
        if interrupted:
            print(f"interrupted: {len(jobs) - len(codes)} of {len(jobs)} jobs not started", file=sys.stderr)
            break
    if verb in ("train", "finetune"):
        from ngpt_train.report.ended_runs import results

        runs = [Path(config.run.root).expanduser() / config.run.name for config in configs]
        print(results(jobs, runs, codes), flush=True)
    if failed := [number for number, code in enumerate(codes) if code]:
        print(f"error: jobs {failed} of {len(jobs)} failed", file=sys.stderr)
    return next((code if code > 0 else 1 for code in codes if code), 0)


def _run_job(command: list[str]) -> tuple[int, bool]:
    """Runs a job to its end; (exit code, whether a signal asked to stop)."""
    early: list[int] = []  # before the job had begun
    received: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        received.append(number)
        job.send_signal(number)

    previous = {
        number: signal.signal(number, lambda n, _: early.append(n)) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        # In a process group of its own, so that Ctrl-C reaches the job once, through us: a second one would stop it
        # before it has saved.
        job = subprocess.Popen(command, process_group=0)
        for number in previous:
            signal.signal(number, forward)
        for waiting in early:
            forward(waiting, None)
        return job.wait(), bool(received)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _show(text: str) -> int:
    try:
        print(text, flush=True)
    except BrokenPipeError:  # `| head` has read enough
        _discard_stdout()
    return 0


def _discard_stdout() -> None:
    """Sends what is still to be written to nowhere: the interpreter's end writes it, and would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _flushed() -> bool:
    """Writes what the streams still hold; whether stdout's reader took it."""
    if sys.stderr is not None:  # a stream is None where the shell has closed it: `>&-`
        with contextlib.suppress(BrokenPipeError):
            sys.stderr.flush()
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        _discard_stdout()
        return False
    return True


def _stdout_has_no_reader() -> bool:
    """Whether stdout is a pipe whose reader has gone. A BrokenPipeError alone may come from any other pipe."""
    if sys.stdout is None:
        return False
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return bool(poll.poll(0))


def _overview() -> str:
    verbs = "\n".join(f"  {verb:<10}{doc}" for verb, doc in VERBS.items())
    return f"{USAGE}\n\nVerbs:\n{verbs}\n\n`ngpt-train train --help` lists every group and key."


def _unknown_verb(verb: str) -> ConfigError:
    if verb == "bench":
        problem = "no verb any more; in a clone of the repository each benchmark is `python -m benchmarks.NAME`"
    elif "=" in verb or verb.startswith("-"):
        problem = "the verb comes first, for example: ngpt-train train " + verb
    else:
        problem = "no such verb" + did_you_mean(difflib.get_close_matches(verb, VERBS, n=1))
    return mistake(f"{verb}: {problem}", f"Verbs: {', '.join(VERBS)}")


def run() -> NoReturn:
    """The process of the command line: `main`, then the exit with its code."""
    code = 1
    guard_streams()
    try:
        code = main()
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _stdout_has_no_reader():
            code = NO_READER
        else:
            traceback.print_exc()
    if not _flushed():
        code = code or NO_READER
    if (distributed := sys.modules.get("torch.distributed")) and distributed.is_initialized():
        # Not by way of the interpreter's end, which gloo's threads may hang or abort: see distributed/world.py.
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    run()
