"""The house stays in order: imports point one way, and the core needs torch alone."""

import ast
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from scripts.mutants import read

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "ngpt_train"
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


def test_torch_alone() -> None:
    # What torch itself imports where it happens to be installed does not count.
    modules = ["ngpt_train.models", "ngpt_train.training", "scripts.gpu_smoke"]
    modules += ["ngpt_train.interop.layouts.ngpt"]
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
