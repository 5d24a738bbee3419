"""Puts defects into copies of the tree, one at a time, and checks that the fast tests fail.

    python scripts/mutants.py [--room ROOM] [--only NAME] [--jobs N] [--list]

The defects are those that the docstrings of the tests say they catch, in tests/mutants/ROOM.toml:

    [[mutant]]
    name = "alpha-without-its-sign"               # unique in its room
    says = "What is wrong, in one sentence."
    file = "ngpt_train/models/ngpt/model.py"
    old = '''text that occurs there exactly once'''
    new = '''text that takes its place'''
    tests = ["tests/unit/models/test_models.py"]  # ids or files of which one must fail; -k is "only" below
    only = "ngpt and fp64"                        # optional: pytest's -k, where a file would take long

First the tests are run on the tree as it is, where they must pass; then on each mutant. The exit code is 1 where one
survives: where all of its tests pass, where they cannot be collected, or where they do not end.
"""

from __future__ import annotations

import argparse
import compileall
import importlib
import os
import py_compile
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 240  # a mutant that takes longer hangs
# Imported once and inherited by each fork. Nothing of ngpt_train or tests: a fork imports those from its copy.
IMPORTED = ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint", "hydra", "sentencepiece")
IMPORTED += ("rich.progress", "matplotlib.pyplot", "pytest", "xdist", "numpy.random", "yaml", "triton")
PASSED, TIMED_OUT = 0, 1000
NOT_RUN = (2, 3, 4, 5)  # pytest's codes of tests that could not be collected, or are not there


@dataclass(frozen=True)
class Mutant:
    """One defect. `old` becomes `new` in `file`; one of `tests` must fail."""

    room: str
    name: str
    says: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    only: str = ""

    def applied(self, text: str) -> str:
        assert text.count(self.old) == 1
        return text.replace(self.old, self.new)


def read(room: str | None, only: str | None) -> list[Mutant]:
    found, stale = [], []
    for path in sorted((ROOT / "tests/mutants").glob(f"{room or '*'}.toml")):
        for entry in tomllib.loads(path.read_text())["mutant"]:
            mutant = Mutant(path.stem, **entry | {"tests": tuple(entry["tests"])})
            found.append(mutant)
            file = ROOT / mutant.file
            if (times := file.read_text().count(mutant.old) if file.is_file() else 0) != 1:
                stale.append(f"{mutant.room}/{mutant.name}: old occurs {times} times in {mutant.file}, not once")
    if stale:
        sys.exit("\n".join(stale))
    names = [(mutant.room, mutant.name) for mutant in found]
    if len(set(names)) < len(names):
        sys.exit(f"two mutants have one name: {next(name for name in names if names.count(name) > 1)}")
    return [mutant for mutant in found if only is None or only in mutant.name]


def copy_tree(to: Path) -> None:
    """What git tracks or would, compiled so that a changed source is always compiled anew."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True
    )
    for name in listed.stdout.decode().splitlines():
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)
    by_content = py_compile.PycInvalidationMode.CHECKED_HASH
    for package in ("ngpt_train", "benchmarks", "tests"):
        compileall.compile_dir(str(to / package), quiet=2, invalidation_mode=by_content)


def run_tests(tree: Path, tests: Sequence[str], only: str, log: Path) -> int:
    """pytest's exit code in a fork of this process, or TIMED_OUT."""
    pid = os.fork()
    if pid == 0:
        code = 3
        try:
            os.setsid()
            signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background jobs ignore
            out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for target in (1, 2):
                os.dup2(out, target)
            os.chdir(tree)
            os.environ["PYTHONPATH"] = str(tree)
            sys.path[:] = [str(tree), *(entry for entry in sys.path if Path(entry or ".").resolve() != ROOT)]
            sys.dont_write_bytecode = True
            options = ["-x", "-n", "0", "-m", "not slow", "-p", "no:cacheprovider", f"--basetemp={tree}.pytest"]
            code = int(sys.modules["pytest"].main([*options, *(["-k", only] if only else []), *tests]))
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)
    deadline = time.monotonic() + SECONDS
    while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
        if time.monotonic() > deadline:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return TIMED_OUT
        time.sleep(0.05)
    return os.waitstatus_to_exitcode(ended[1])


def is_caught(code: int) -> bool:
    """A test has failed, or has taken pytest down with it."""
    return code not in (PASSED, TIMED_OUT, *NOT_RUN)


def on_each(mutants: Iterable[Mutant], jobs: int, directory: Path) -> list[tuple[Mutant, int, float]]:
    """Each mutant with the exit code of its tests and the seconds that they took."""
    trees: Queue[Path] = Queue()
    for job in range(jobs):
        copy_tree(directory / str(job))
        trees.put(directory / str(job))

    def check(mutant: Mutant) -> tuple[Mutant, int, float]:
        tree, began = trees.get(), time.monotonic()
        path = tree / mutant.file
        text = path.read_text()
        try:
            path.write_text(mutant.applied(text))
            code = run_tests(tree, mutant.tests, mutant.only, log_of(mutant, directory))
        finally:
            path.write_text(text)
            trees.put(tree)
        seconds = time.monotonic() - began
        print(
            f"{'caught' if is_caught(code) else 'SURVIVES'}  {mutant.room}/{mutant.name}  {seconds:.1f} s", flush=True
        )
        return mutant, code, seconds

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(check, mutants))


def log_of(mutant: Mutant, directory: Path) -> Path:
    return directory / f"{mutant.room}-{mutant.name}.log"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--room", help="mutants of tests/mutants/ROOM.toml alone")
    parser.add_argument("--only", help="mutants whose name contains this")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes (default: one a core)")
    parser.add_argument("--list", action="store_true", help="print the mutants and end")
    given = parser.parse_args()
    mutants = read(given.room, given.only)
    if given.list:
        for mutant in mutants:
            print(f"{mutant.room}/{mutant.name}: {mutant.says}")
        print(f"{len(mutants)} mutants")
        return 0
    if not mutants:
        sys.exit("no such mutant")

    # As in tests/conftest.py, but before torch is imported here.
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}
    for module in IMPORTED:
        importlib.import_module(module)
    with tempfile.TemporaryDirectory(prefix="mutants") as name:
        directory = Path(name)
        untouched = directory / "untouched"
        copy_tree(untouched)
        asked = {(mutant.tests, mutant.only) for mutant in mutants}
        logs = {(tests, only): directory / f"untouched-{k}.log" for k, (tests, only) in enumerate(sorted(asked))}
        failing = {key: log for key, log in logs.items() if run_tests(untouched, *key, log) != PASSED}
        for (tests, only), log in failing.items():
            print(f"{log.read_text()[-3000:]}\non the tree as it is: {' '.join(tests)} -k '{only}'")
        if failing:
            return 1
        results = on_each(mutants, given.jobs, directory)
        survivors = [(mutant, code) for mutant, code, _ in results if not is_caught(code)]
        for mutant, code in survivors:
            why = {PASSED: "its tests pass", TIMED_OUT: f"no end after {SECONDS} s"}
            how = why.get(code, f"pytest ended with {code}")
            print(f"\nsurvives: {mutant.room}/{mutant.name} ({how}): {mutant.says}")
            if code != PASSED:
                print(log_of(mutant, directory).read_text()[-2000:])
    print(f"{len(mutants) - len(survivors)} caught / {len(mutants)}")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
