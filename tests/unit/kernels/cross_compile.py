"""Compiles the Triton kernels of an operation for A100 and H100, which need not be there. Prints a line of JSON each.

TRITON_INTERPRET=0 python -m tests.unit.kernels.cross_compile sphere_step|swiglu|rotary|cross_entropy|adam
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ngpt_train.core.constants import IGNORED
from ngpt_train.kernels.cross_entropy import ALIGNMENT
from ngpt_train.kernels.gpu import adam, cross_entropy, rotary, sphere_step, swiglu


class Launch(NamedTuple):
    """A kernel and its arguments, in their order, without `constants`.

    An argument is a pointer to aligned memory, such as "*bf16"; "fp32" for a number; None where there is no tensor; or
    an integer, which Triton specializes on: 1 is compiled in, and a multiple of 16 is known as one.
    """

    case: str
    kernel: Any
    arguments: list[Any]
    constants: dict[str, Any]
    num_warps: int


def compiled(launch: Launch, capability: int) -> dict[str, int]:
    """Registers of a thread, bytes of its stack, which hold spilled registers, and accesses of 16 bytes."""
    names = launch.kernel.arg_names
    signature, constants, attributes = {}, dict(launch.constants), {}
    for name, argument in zip([n for n in names if n not in constants], launch.arguments, strict=True):
        if argument is None or argument == 1:
            constants[name] = argument
        signature[name] = "i32" if isinstance(argument, int) else argument
        if str(argument).startswith("*") or (isinstance(argument, int) and argument % 16 == 0):
            attributes[(names.index(name),)] = [["tt.divisibility", 16]]
    signature |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(launch.kernel, {name: signature[name] for name in names}, constants, attributes)
    binary = triton.compile(source, GPUTarget("cuda", capability, 32), {"num_warps": launch.num_warps})
    cuobjdump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile("wb", suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        usage = subprocess.run([cuobjdump, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    used = re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", usage)
    assert used, usage
    wide = len(re.findall(r"(?:ld|st)\.global[.\w]*\.v4\.b32", binary.asm["ptx"]))
    return {"registers": int(used[1]), "stack": int(used[2]) + int(used[3]), "wide": wide}


def of_sphere_step() -> Iterator[Launch]:
    for d, dtype in ((1024, "bf16"), (2560, "bf16"), (1024, "fp32"), (77, "bf16")):
        x, block = f"*{dtype}", triton.next_power_of_2(d)
        forward = [x, x, "*fp32", x, "*fp32", "*fp32", d, d, d]
        backward = [x, x, x, x, "*fp32", "*fp32", "*fp32", x, x, "*fp32", d, d, d, d, 32768, d, 528]
        for kernel, arguments, constants in (
            (sphere_step._forward, forward, {"SHORTEST": 1e-12}),
            (sphere_step._backward, backward, {"TWO": True}),
        ):
            yield Launch(f"d={d} {dtype}", kernel, arguments, constants | {"BLOCK": block}, sphere_step.warps(block))


def of_swiglu() -> Iterator[Launch]:
    for M, dtype, scaled in ((4096, "bf16", True), (4096, "bf16", False), (4096, "fp32", True)):
        block, num_warps, _ = swiglu.blocks_of(M)
        x, s = f"*{dtype}", "*fp32" if scaled else None
        forward = [x, s, s, x, 32768, M, 2 * M]
        backward = [x, x, s, s, x, "*fp32", 32768, M, M, 2 * M]
        for kernel, arguments in ((swiglu.forward_kernel, forward), (swiglu.backward_kernel, backward)):
            yield Launch(f"m={M} {dtype} scaled={scaled}", kernel, arguments, {"BLOCK": block}, num_warps)


def of_rotary() -> Iterator[Launch]:
    T = 4096
    for n_heads, n_kv_heads, D, dtype, interleaved, normalized in (
        (16, 16, 64, "bf16", False, True),
        (16, 16, 64, "bf16", False, False),
        (16, 4, 80, "bf16", False, True),
        (8, 8, 128, "bf16", False, True),
        (4, 4, 256, "bf16", True, True),
        (16, 16, 64, "fp32", False, True),
    ):
        x, s, angles = f"*{dtype}", "*fp32" if normalized else None, ["*fp32", "*fp32"]
        columns = (n_heads + 2 * n_kv_heads) * D
        tiles, num_warps, *_ = rotary.blocks_of(n_heads, n_kv_heads, D)
        # As attention leaves them: (B, H, T, D), seen as (B, T, H, D).
        strides = [stride for H in (n_heads, n_kv_heads, n_kv_heads) for stride in (H * T * D, D, T * D, 1)]
        forward = [x, *angles, s, x, x, 32768, T, T * columns, columns, 0]
        backward = [x, x, x, x, *angles, s, x, "*fp32", 32768, T, *strides, T * columns, columns, 0]
        constants = {"Q": n_heads, "KV": n_kv_heads, "D": D, "INTERLEAVED": interleaved, "NORMALIZED": normalized}
        case = f"{n_heads}+{n_kv_heads} heads of {D} {dtype} interleaved={interleaved} normalized={normalized}"
        for kernel, arguments in ((rotary.forward_kernel, forward), (rotary.backward_kernel, backward)):
            yield Launch(case, kernel, arguments, constants | tiles, num_warps)


def of_cross_entropy() -> Iterator[Launch]:
    for dtype, n_vocab in (("bf16", 32000), ("bf16", 50257), ("fp32", 32000)):
        stride = -(-n_vocab // ALIGNMENT) * ALIGNMENT
        for gradient, with_options in ((True, True), (True, False), (False, False)):
            terms = ["*fp32" if with_options else None] * 2
            arguments = [f"*{dtype}", "*i64", "*fp32", *terms, n_vocab, stride, "fp32", "fp32"]
            constants = {"ignored": IGNORED, "gradient": gradient, "block": cross_entropy.BLOCK}
            case = f"{dtype} V={n_vocab} gradient={gradient} options={with_options}"
            yield Launch(case, cross_entropy.cross_entropy_kernel, arguments, constants, cross_entropy.NUM_WARPS)


def of_adam() -> Iterator[Launch]:
    """With a projection, a copy, a gradient scale and found_inf, as in training."""
    for d in (1024, 1280, 8192):
        rows, columns, num_warps = adam.geometry(d)
        for gradient in ("fp32", "bf16"):
            pointers = ["*fp32", f"*{gradient}", "*fp32", "*fp32", "*bf16", "*fp32", "*fp32", "*fp32"]
            arguments = [*pointers, "fp32", 4096 + 1, d, d, 1, *["fp32"] * 8]
            constants = {"ROWS": rows, "COLUMNS": columns}
            yield Launch(f"d={d} gradient in {gradient}", adam.adam_rows_kernel, arguments, constants, num_warps)


LAUNCHES = {
    "sphere_step": of_sphere_step,
    "swiglu": of_swiglu,
    "rotary": of_rotary,
    "cross_entropy": of_cross_entropy,
    "adam": of_adam,
}


if __name__ == "__main__":
    for capability in (80, 90):
        for launch in LAUNCHES[sys.argv[1]]():
            about = {"capability": capability, "kernel": launch.kernel.__name__, "case": launch.case}
            print(json.dumps(about | compiled(launch, capability)))
