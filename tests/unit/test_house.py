"""The house stays in order: imports point one way, and the core needs torch alone."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

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
    {"evaluation", "observe", "report", "interop", "bench"},
    {"verbs", "__main__"},
]
FLOOR = {part: level for level, parts in enumerate(FLOORS) for part in parts}
OPTIONAL = ["datasets", "wandb", "hydra", "omegaconf", "yaml", "sentencepiece", "tiktoken", "pyarrow", "rich"]
OPTIONAL += ["matplotlib", "tensorboard", "zstandard", "triton", "flash_attn", "lm_eval"]


def imports(path: Path) -> set[str]:
    """Parts of ngpt_train that a module imports, at its top or inside a function."""
    parts = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import, which hides from where it comes"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        if (
            path.parent.name == "config"
        ):  # which finds the architectures by their folders; their keys import nothing heavy
            names = [name for name in names if name != "ngpt_train.models" and ".keys." not in name]
        parts |= {name.split(".")[1] for name in names if name.startswith("ngpt_train.")}
    return parts & set(FLOOR)


def test_imports_point_one_way() -> None:
    upward = []
    for path in PACKAGE.rglob("*.py"):
        part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if part in FLOOR:
            upward += [f"{path.name} imports {other}" for other in imports(path) if FLOOR[other] > FLOOR[part]]
    assert not upward
    assert "models" in imports(PACKAGE / "training/state.py"), "the walk sees nothing"


@pytest.mark.parametrize(
    "module", ["ngpt_train.models", "ngpt_train.training", "ngpt_train.bench.gpu", "scripts.gpu_smoke"]
)
def test_torch_alone(module: str) -> None:
    # What torch itself imports where it happens to be installed does not count.
    program = (
        f"import sys, torch, torch._dynamo, torch.distributed.checkpoint; before = set(sys.modules); import {module}; "
        f"print(sorted((set(sys.modules) - before) & set({OPTIONAL})))"
    )
    found = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_files_are_short() -> None:
    long = {path.name: n for path in PACKAGE.rglob("*.py") if (n := len(path.read_text().splitlines())) > 350}
    assert not long
