"""Are the kernels right on this GPU, and does the check notice one that is not? Needs torch and triton alone.

    python scripts/first_contact.py                             # nGPT and GPT at 125m and 0.5b in bf16, one GPU
    TRITON_INTERPRET=1 python scripts/first_contact.py --device cpu     # a rehearsal in Triton's interpreter, tiny

First the check that a run makes before its first step, cold and then warm, with a table. Then, in copies of this code,
kernels that are broken on purpose, each of which must be switched off by name while the others stay on. Exit code 1
where something is not as it should be.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# (d_model, n_layers, n_heads, d_mlp, context, vocabulary, rows of a micro batch). Blocks are alike: two tell as much.
SCALES = {
    "125m": (768, 2, 12, 2048, 1024, 32000, 16),
    "0.5b": (1024, 2, 16, 4096, 4096, 32000, 4),
    "debug": (32, 1, 2, 48, 16, 48, 2),
}
AT_ONCE = 4  # broken copies that are checked at once on a GPU
KERNELS = ["sphere_step", "swiglu", "rotary", "linear_cross_entropy", "adam"]  # of nGPT, all there are

# A defect: the kernel that must be off, a text of its file in kernels/gpu, and what stands in its place.
Defect = tuple[str, str, str]
DEFECTS: dict[str, Defect] = {
    "wrong value of swiglu": ("swiglu", "u * v * tl.sigmoid(v)", "u * v * tl.sigmoid(1.2 * v)"),
    "wrong gradient of sphere_step": ("sphere_step", "dalpha += du * away", "dalpha += 1.01 * du * away"),
    "unwritten rows of rotary": (
        "rotary",
        "for token in range(tl.program_id(1), N, tl.num_programs(1)):",
        "for token in range(tl.program_id(1), N - 1, tl.num_programs(1)):",
    ),
    "wrong moment of adam": ("adam", "m += share1 * (g - m)", "m += 1.001 * share1 * (g - m)"),
    "unwritten losses of linear_cross_entropy": (
        "linear_cross_entropy",
        "tl.store(losses_ptr + row, tl.where(counts, loss, 0.0))",
        "tl.store(losses_ptr + row, tl.where(counts, loss, 0.0), mask=row % 7 != 3)",
    ),
    "swiglu does not compile": ("swiglu", "u * v * tl.sigmoid(v)", "u * v * tl.no_such_function(v)"),
    # In the function that launches: the process itself ends, or never does.
    "the process dies in linear_cross_entropy": (
        "linear_cross_entropy",
        "    n_rows, n_vocab = logits.shape\n",
        "    n_rows, n_vocab = logits.shape\n    import os\n    os.kill(os.getpid(), 9)\n",
    ),
    "adam hangs": (
        "adam",
        "    rows_each, columns, num_warps = geometry(d)\n",
        "    rows_each, columns, num_warps = geometry(d)\n    import time\n    time.sleep(1000)\n",
    ),
}
# What a CPU cannot play.
ON_GPU: dict[str, Defect] = {
    "sphere_step writes outside of its memory": (
        "sphere_step",
        "tl.store(r_x_ptr + row, r_x)",
        "tl.store(r_x_ptr + row + (1 << 40), r_x)",
    ),
    "a device assertion in rotary": (
        "rotary",
        "        x = x_ptr + batch * x_batch + place * x_token\n",
        "        tl.device_assert(place < 0, 'on purpose')\n        x = x_ptr + batch * x_batch + place * x_token\n",
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--check", nargs=4, metavar=("MODEL", "SCALE", "CHOOSE", "CACHE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.check:
        return checked(arguments.device, *arguments.check)
    scales = ["125m", "0.5b"] if arguments.device == "cuda" else ["debug"]
    failed: list[str] = []
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        compiled = Path(directory, "compiled")  # shared, so that what is not broken is compiled once
        os.environ |= {"TORCHINDUCTOR_CACHE_DIR": str(compiled), "TRITON_CACHE_DIR": str(compiled / "triton")}
        for scale in scales:
            for model in ("ngpt", "gpt"):
                failed += table(arguments.device, model, scale, Path(directory, "cache"))
        defects = DEFECTS | (ON_GPU if arguments.device == "cuda" else {})
        with ThreadPoolExecutor(AT_ONCE if arguments.device == "cuda" else 1) as pool:
            places = [Path(directory, name.replace(" ", "_")) for name in defects]
            jobs = [
                pool.submit(broken, arguments.device, name, defect, scales[0], place)
                for (name, defect), place in zip(defects.items(), places, strict=True)
            ]
            for job in jobs:
                text, problems = job.result()
                print(text, flush=True)
                failed += problems
    print(f"{time.monotonic() - started:.0f} s in all")
    for problem in failed:
        print(f"FAILED: {problem}")
    print("FAILED" if failed else "all as it should be")
    return int(bool(failed))


def table(device: str, model: str, scale: str, cache: Path) -> list[str]:
    """Checks twice, prints what was found, returns the problems."""
    cold, seconds = contact(ROOT, device, model, scale, "measured", cache)
    warm, again = contact(ROOT, device, model, scale, "measured", cache)
    recheck, recheck_seconds = contact(ROOT, device, model, scale, "checked", cache.with_name(f"again_{model}_{scale}"))
    work = sum(found["seconds"] for found in recheck["calls"])
    print(
        f"\n{model} {scale} on {cold['device']}: {seconds:.1f} s the first time, {again:.2f} s the second. With "
        f"compiled code at hand the check alone takes {recheck_seconds:.1f} s with its process, {work:.1f} s without"
    )
    print(f"{'kernel':24}{'verdict':10}{'error':>9}{'ours us':>11}{'plain us':>11}  runs")
    for found in cold["calls"]:
        kernel = (
            found["call"].partition(" ")[0] if not found["call"].startswith("attention of") else "attention, documents"
        )
        runs = "plain PyTorch" if kernel in cold["off"] or kernel in cold["slower"] else "kernel"
        verdict = "right" if "problem" not in found else "OFF"
        numbers = [f"{found[name]:.1f}" if name in found else "-" for name in ("us", "plain_us")]
        error = f"{found['error']:.1e}" if "error" in found else "-"
        print(f"{kernel:24}{verdict:10}{error:>9}{numbers[0]:>11}{numbers[1]:>11}  {runs:15}{found['call']}")
        for word in ("problem", "untimed"):
            if word in found:
                print(f"    {word}: {found[word]}")
    problems = [f"{model} {scale}: {name} is off: {why}" for name, why in cold["off"].items()]
    problems += [f"{model} {scale}: {f['call']} has no times: {f['untimed']}" for f in cold["calls"] if "untimed" in f]
    if (warm["off"], warm["slower"]) != (cold["off"], cold["slower"]):
        problems.append(f"{model} {scale}: the second start chose otherwise")
    if again > 2:
        problems.append(f"{model} {scale}: the second start took {again:.1f} s")
    expected = {kernel for kernel in KERNELS if model == "ngpt" or kernel != "sphere_step"}
    seen = {found["call"].partition(" ")[0] for found in cold["calls"]}
    if missing := sorted((expected | {"attention"}) - seen):
        problems.append(f"{model} {scale}: not checked: {', '.join(missing)}")
    return problems


def broken(device: str, name: str, defect: Defect, scale: str, directory: Path) -> tuple[str, list[str]]:
    """Breaks a copy of this code and checks there: lines to print, and the problems, a defect that is not noticed."""
    kernel, old, new = defect
    shutil.copytree(ROOT / "ngpt_train", directory / "ngpt_train", ignore=shutil.ignore_patterns("__pycache__"))
    (directory / "scripts").mkdir()
    shutil.copy(Path(__file__), directory / "scripts")
    path = directory / f"ngpt_train/kernels/gpu/{kernel.removeprefix('linear_')}.py"
    source = path.read_text()
    if old not in source:
        return "", [f"{name}: {path.name} has no `{old.strip()}`"]
    path.write_text(source.replace(old, new))
    findings = directory / "ngpt_train/kernels/check/kernel_findings.py"
    if "hangs" in name:  # for less than two minutes
        limit = 'WORK_SECONDS = {"check": 30.0'
        findings.write_text(findings.read_text().replace('WORK_SECONDS = {"check": 120.0', limit))
    debug = {"TRITON_DEBUG": "1"} if "assertion" in name else {}
    found, seconds = contact(directory, device, "ngpt", scale, "checked", directory / "cache", debug)
    right = set(found["off"]) == {kernel}
    off = ", ".join(found["off"]) or "nothing"
    lines = [f"\n{name}: {seconds:.1f} s, off: {off}{'' if right else '   NOT AS IT SHOULD BE'}"]
    lines += [f"    {why}" for why in found["off"].values()]
    return "\n".join(lines), [] if right else [f"{name}: off is {sorted(found['off'])}, not {kernel} alone"]


def contact(
    root: Path, device: str, model: str, scale: str, choose: str, cache: Path, variables: dict[str, str] | None = None
) -> tuple[dict[str, Any], float]:
    """What the check of the code in `root` finds, in a process of its own, and its seconds there."""
    check = ["--device", device, "--check", model, scale, choose, cache]
    command = [sys.executable, root / "scripts/first_contact.py", *check]
    found = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | (variables or {}))
    if found.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))} failed:\n{found.stdout}{found.stderr}")
    answer = json.loads(found.stdout.splitlines()[-1])
    return answer["contact"], answer["seconds"]


def checked(device: str, model: str, scale: str, choose: str, cache: str) -> int:
    """Prints what the check finds, as the last line of the output: what a run does before its first step."""
    sys.path.insert(0, str(ROOT))
    import torch

    from ngpt_train.config.architectures import architectures
    from ngpt_train.config.schema import Config
    from ngpt_train.distributed.first_contact import first_contact
    from ngpt_train.distributed.world import World

    if device == "cpu":
        first_contact.__globals__["on_gpu"] = lambda _: True  # the interpreter plays it
    d_model, n_layers, n_heads, d_mlp, context, vocab_size, rows = SCALES[scale]
    keys = architectures()[model](model, d_model, n_layers, n_heads, None, d_mlp, vocab_size, context)
    config = Config(model=keys)
    config.train.device, config.train.precision, config.train.batch_rows = device, "bf16", rows
    config.train.compile = device == "cuda"
    config.optim.weight_decay, config.kernels.choose, config.data.cache = 0.0, choose, cache
    world = World(0, 1, 0, torch.device(device, 0) if device == "cuda" else torch.device(device))
    torch.zeros(1, device=world.device)  # the GPU's own start does not count
    started = time.monotonic()
    found = first_contact(config, world, rows)
    assert found is not None
    print(json.dumps({"contact": vars(found), "seconds": time.monotonic() - started}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
