"""Puts defects into copies of the tree, one at a time, and checks that a test fails on each.

    python scripts/mutants.py [--only TEXT] [--jobs N]

The defects are in tests/mutants/*.toml:

    [[mutant]]
    name = "alpha-without-its-sign"
    says = "What is wrong, in one sentence."
    file = "ngpt_train/models/ngpt/model.py"
    old = '''text that occurs there exactly once'''
    new = '''text that takes its place'''
    test = "tests/unit/models/test_models.py::test_alpha[ngpt]"  # which has to fail, fast or slow

First the tests run on the tree as it is, where they must pass. The exit code is 1 where a mutant survives: where its
test passes, cannot be collected, or does not end.
"""

from __future__ import annotations

import argparse
import compileall
import os
import py_compile
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 600  # a test that takes longer hangs
PASSED, FAILED = 0, 1  # pytest's exit codes
CRASHES = {-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGFPE, -signal.SIGBUS}  # of a test that took pytest down with it


@dataclass(frozen=True)
class Mutant:
    """One defect: `old` becomes `new` in `file`, and `test` must fail."""

    name: str
    says: str
    file: str
    old: str
    new: str
    test: str


def read(only: str = "") -> list[Mutant]:
    """The mutants whose FILE/NAME contains `only`; each text is checked to occur once."""
    found = []
    for path in sorted((ROOT / "tests/mutants").glob("*.toml")):
        entries = tomllib.loads(path.read_text())["mutant"]
        found += [Mutant(**entry | {"name": f"{path.stem}/{entry['name']}"}) for entry in entries]
    for mutant in found:
        file = ROOT / mutant.file
        if (times := file.read_text().count(mutant.old) if file.is_file() else 0) != 1:
            sys.exit(f"{mutant.name}: old occurs {times} times in {mutant.file}, not once")
    return [mutant for mutant in found if only in mutant.name]


def copy_tree(to: Path) -> None:
    """The files that git tracks or would track, compiled so that a changed source is always compiled anew."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout.splitlines():
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)
    by_content = py_compile.PycInvalidationMode.CHECKED_HASH
    for package in ("ngpt_train", "benchmarks", "tests"):
        compileall.compile_dir(str(to / package), quiet=2, invalidation_mode=by_content)


def run_tests(tree: Path, tests: Sequence[str], seconds: float | None = SECONDS) -> tuple[int | None, str]:
    """pytest's exit code, None where it does not end, and the end of its output."""
    options = ["-x", "-n", "0", "-m", "not exhaustive", "-p", "no:cacheprovider", f"--basetemp={tree}.pytest"]
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, *tests],
            cwd=tree, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            code = process.wait() and None
        log.seek(0)
        return code, log.read()[-3000:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="mutants whose FILE/NAME contains this text")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one a core)")
    given = parser.parse_args()
    mutants = read(given.only)
    if not mutants:
        sys.exit("no such mutant")
    with tempfile.TemporaryDirectory(prefix="mutants") as directory:
        trees: Queue[Path] = Queue()
        for job in range(given.jobs):
            copy_tree(tree := Path(directory, str(job)))
            trees.put(tree)
        code, said = run_tests(tree, sorted({mutant.test for mutant in mutants}), seconds=None)
        if code != PASSED:
            sys.exit(f"{said}\nthese tests do not pass on the tree as it is")

        def is_caught(mutant: Mutant) -> bool:
            tree = trees.get()
            path = tree / mutant.file
            text = path.read_text()
            try:
                path.write_text(text.replace(mutant.old, mutant.new))
                code, said = run_tests(tree, [mutant.test])
            finally:
                path.write_text(text)
                trees.put(tree)
            caught = code == FAILED or code in CRASHES
            print(f"{'caught' if caught else 'SURVIVES'}  {mutant.name}", flush=True)
            if not caught:
                why = {PASSED: "its test passes", None: f"no end after {SECONDS} s:\n{said}"}
                print(mutant.says, why.get(code, f"pytest ended with {code}:\n{said}"))
            return caught

        with ThreadPoolExecutor(given.jobs) as pool:
            caught = sum(pool.map(is_caught, mutants))
    print(f"{caught} caught / {len(mutants)}")
    return 0 if caught == len(mutants) else 1


if __name__ == "__main__":
    sys.exit(main())
