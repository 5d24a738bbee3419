"""The house stays in order: imports point one way, and the core needs torch alone."""

import ast
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

from scripts.mutants import read

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "ngpt_train"
MOST_FLOORS = 14
# Files that share a name. The keys and the model of an architecture are the form of a room.
SHARED_NAMES = {"__init__", "__main__", "keys", "model"}
# An operation's kernel has the name of its formula.
TWINS = {"adam", "attention", "cross_entropy", "dropout", "rotary", "sphere_step", "swiglu"}
# A part may import from parts of its own floor and of those below.
FLOORS = [
    {"core"},
    {"config"},
    {"kernels"},
    {"models", "data", "optim"},
    {"distributed"},
    {"training"},
    {"evaluation", "observe", "report", "interop", "analysis"},
    {"doctor", "study"},
    {"verbs", "__main__"},
]
FLOOR = {part: level for level, parts in enumerate(FLOORS) for part in parts}
OPTIONAL = ["datasets", "wandb", "hydra", "omegaconf", "yaml", "sentencepiece", "tiktoken", "pyarrow", "rich"]
OPTIONAL += ["matplotlib", "submitit", "tensorboard", "zstandard", "triton", "flash_attn", "lm_eval"]
OPTIONAL += ["transformers", "safetensors"]
# Copied into exports, where they lie beside each other, in no package.
COPIED = {PACKAGE / f"interop/layouts/ngpt/{name}_ngpt.py" for name in ("configuration", "modeling")}


def imported(path: Path, nodes: Iterable[ast.AST]) -> list[str]:
    """The names that `nodes` of the module import, in full."""
    names = []
    for node in nodes:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 or path in COPIED, f"{path}: a relative import, which hides from where it comes"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def imports(path: Path) -> set[str]:
    """Parts of ngpt_train that a module imports, at its top or inside a function."""
    names = imported(path, ast.walk(ast.parse(path.read_text())))
    if path.parent.name == "config":  # which finds the architectures by their folders; their keys import nothing heavy
        names = [name for name in names if name != "ngpt_train.models" and ".keys." not in name]
    return {name.split(".")[1] for name in names if name.startswith("ngpt_train.")} & set(FLOOR)


def test_imports_point_one_way() -> None:
    upward = []
    for path in PACKAGE.rglob("*.py"):
        part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if part in FLOOR:
            upward += [f"{path.name} imports {other}" for other in imports(path) if FLOOR[other] > FLOOR[part]]
        if "benchmarks" in path.read_text():
            names = imported(path, ast.walk(ast.parse(path.read_text())))
            upward += [f"{path.name} imports {name}" for name in names if name.startswith("benchmarks")]
    assert not upward
    assert "models" in imports(PACKAGE / "training/state.py"), "the walk sees nothing"


def imported_files() -> dict[str, set[str]]:
    """The files of the package that each of its files imports, by the names of their modules. Imports of types alone do
    not count, nor does `import ngpt_train`, for the version."""
    paths = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}
    paths = {name.removesuffix(".__init__"): path for name, path in paths.items()}
    found = {}
    for name, path in paths.items():
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.If)
                and "TYPE_CHECKING" in ast.unparse(node.test)
                and not isinstance(node.test, ast.UnaryOp)
            ):
                node.body = []
        names = imported(path, ast.walk(tree))
        files = {each if each in paths else each.rpartition(".")[0] for each in names}
        found[name] = files & paths.keys() - {name, PACKAGE.name}
    return found


def floors(imports: Mapping[str, set[str]]) -> list[list[str]]:
    """The longest chain of imports, from the top; files that import each other are one floor of it."""

    @cache
    def reached(name: str) -> frozenset[str]:
        seen, left = set(), [name]
        while left:
            seen |= (new := imports[left.pop()] - seen)
            left += new
        return frozenset(seen)

    def circle(name: str) -> frozenset[str]:
        return frozenset({name} | {other for other in reached(name) if name in reached(other)})

    @cache
    def chain(circle_: frozenset[str]) -> tuple[frozenset[str], ...]:
        below = {circle(other) for name in circle_ for other in imports[name]} - {circle_}
        return (circle_, *max(map(chain, below), key=len, default=()))

    return [sorted(each) for each in max((chain(circle(name)) for name in imports), key=len)]


def test_floors() -> None:
    """Caught: a file that joins two rooms, so that whoever follows an import has further to go."""
    assert floors({"a": {"b", "d"}, "b": {"c"}, "c": {"b", "d"}, "d": set()}) == [["a"], ["b", "c"], ["d"]]
    found = floors(imported_files())
    assert len(found) <= MOST_FLOORS, found


def test_a_file_name_is_there_once() -> None:
    """Caught: two files of one name, of which a reader opens the wrong one."""
    paths = defaultdict(list)
    for path in PACKAGE.rglob("*.py"):
        if path not in COPIED and path.stem not in SHARED_NAMES:
            paths[path.stem].append(str(path.relative_to(PACKAGE)))
    twice = {name: found for name, found in paths.items() if len(found) > 1}
    assert not twice.keys() - TWINS, twice


def test_torch_alone() -> None:
    # What torch itself imports where it happens to be installed does not count.
    modules = ["ngpt_train.models", "ngpt_train.training", "ngpt_train.interop.layouts.ngpt"]
    modules += [f"benchmarks.{name}" for name in ("attention", "kernels", "paper_steps", "products")]
    program = (
        "import importlib, sys, torch, torch._dynamo, torch.distributed.checkpoint; before = set(sys.modules)\n"
        f"for module in {modules}:\n"
        "    importlib.import_module(module)\n"
        f"    print(module, sorted((set(sys.modules) - before) & set({OPTIONAL})))"
    )
    found = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.stdout.splitlines() == [f"{module} []" for module in modules], found.stderr


def test_files_are_short() -> None:
    long = {path.name: n for path in PACKAGE.rglob("*.py") if (n := len(path.read_text().splitlines())) > 400}
    assert not long


def test_mutants_are_of_this_code() -> None:
    """Caught: code that has moved away from the defects which scripts/mutants.py puts into it; a test that is gone."""
    mutants = read()  # ends the process where a text does not occur once
    assert 0 < len({mutant.name for mutant in mutants}) == len(mutants) <= 100
    missing = []
    for test in {mutant.test for mutant in mutants}:
        file, _, name = test.partition("[")[0].partition("::")
        is_there = (ROOT / file).is_file() and f"def {name}(" in (ROOT / file).read_text()
        missing += [] if is_there else [test]
    assert not missing
