"""Compiles the Adam kernel for A100 and H100 without a GPU: registers, spills, bytes. Run as a program: D..."""

import json
import os
import re
import subprocess
import sys
import tempfile
from typing import NamedTuple

os.environ["TRITON_INTERPRET"] = "0"

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from ngpt_train.kernels.gpu.adam import adam_rows_kernel, geometry

POINTERS = {"weight": "*fp32", "exp_avg": "*fp32", "exp_avg_sq": "*fp32", "step": "*fp32"}
NUMBERS = ("beta2", "share1", "share2", "log_beta1", "log_beta2", "eps", "weight_decay")


class Compiled(NamedTuple):
    registers: int
    spills: int  # bytes stored and loaded
    wide: int  # accesses of 16 bytes a thread
    read: float  # bytes per parameter
    written: float


def compile_adam(d: int, capability: int, gradient: str = "fp32", copy: bool = True) -> Compiled:
    """With a projection, a gradient scale and found_inf, as in training."""
    rows, columns, num_warps = geometry(d)
    signature = dict.fromkeys(adam_rows_kernel.arg_names, "constexpr")
    signature |= POINTERS | dict.fromkeys(NUMBERS, "fp32") | {"gradient": f"*{gradient}", "lr": "fp32"}
    signature |= {"grad_scale": "*fp32", "found_inf": "*fp32", "rows": "i32", "d": "i32", "gradient_row": "i32"}
    signature |= {"copy": "*bf16"} if copy else {}
    constants = {"gradient_column": 1, "LR_ON_DEVICE": False, "UNIT_ROWS": True, "ROWS": rows, "COLUMNS": columns}
    constants |= {} if copy else {"copy": None}
    # What the launcher finds out by itself: addresses, and lengths that are multiples of 16.
    aligned = [name for name, kind in signature.items() if kind.startswith("*")]
    aligned += ["d", "gradient_row"] if d % 16 == 0 else []
    index = adam_rows_kernel.arg_names.index
    attrs = {(index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(adam_rows_kernel, signature, constexprs=constants, attrs=attrs)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": num_warps})
    ptx = compiled.asm["ptx"]
    registers, spills = assembled(ptx, capability)
    ttir = compiled.asm["ttir"]
    tile = f"{rows}x{columns}x"
    loads = re.findall(rf"tt\.load .* : tensor<{tile}!tt\.ptr<(\w+)>>", ttir)
    stores = re.findall(rf"tt\.store .* : tensor<{tile}!tt\.ptr<(\w+)>>", ttir)
    size = {"f32": 4, "bf16": 2}
    wide = len(re.findall(r"(?:ld|st)\.global\S*\.v4\.b32", ptx))
    return Compiled(registers, spills, wide, sum(size[x] for x in loads), sum(size[x] for x in stores))


def assembled(ptx: str, capability: int) -> tuple[int, int]:
    """Registers of a thread, and bytes spilled, as ptxas tells."""
    ptxas = get_ptxas(capability).path
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        arch = re.search(r"\.target (\w+)", ptx)[1]
        told = subprocess.run(
            [ptxas, "-v", f"--gpu-name={arch}", file.name, "-o", os.devnull], capture_output=True, text=True, check=True
        ).stderr
    return int(re.search(r"Used (\d+) registers", told)[1]), sum(map(int, re.findall(r"(\d+) bytes spill", told)))


if __name__ == "__main__":
    for capability in (80, 90):
        for d in map(int, sys.argv[1:]):
            for gradient in ("fp32", "bf16"):
                case = {"capability": capability, "d": d, "gradient": gradient}
                print(json.dumps(case | compile_adam(**case)._asdict()))
