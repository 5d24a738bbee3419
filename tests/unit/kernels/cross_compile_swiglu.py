"""Compiles SwiGLU's kernels for GPUs that are not there: registers and spills.

TRITON_INTERPRET=0 python -m tests.unit.kernels.cross_compile_swiglu
"""

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

CAPABILITIES = (80, 90)


def compiled_for(capability: int, kernel: Any, arguments: list[Any], constants: dict[str, Any], num_warps: int) -> str:
    """What a thread of `kernel` needs: "64 registers, 0 bytes of stack, accesses of [16] bytes".

    arguments: for each that is not in constants "*bf16" and the like, aligned as torch aligns them; None where there
    is no tensor; or a number, which is taken as Triton takes it: 1 is compiled in, multiples of 16 are known as such.
    """
    signature, constexprs, attributes = {}, dict(constants), {}
    names = [name for name in kernel.arg_names if name not in constants]
    for name, argument in zip(names, arguments, strict=True):
        place = (kernel.arg_names.index(name),)
        if argument is None or argument == 1:
            constexprs[name] = argument
        signature[name] = "constexpr" if name in constexprs else "i32" if isinstance(argument, int) else argument
        if isinstance(argument, str) or (isinstance(argument, int) and argument % 16 == 0):
            attributes[place] = [["tt.divisibility", 16]]
    signature |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(kernel, {name: signature[name] for name in kernel.arg_names}, constexprs, attributes)
    options = {"num_warps": num_warps}
    binary = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    ptx = binary.asm["ptx"]
    cuobjdump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile("wb", suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        command = [cuobjdump, "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    used = re.search(r"REG:(\d+) STACK:(\d+)", said)  # what is spilled lies on the stack
    assert used, said
    widths = {int(n or 1) * int(bits) // 8 for n, bits in re.findall(r"(?:ld|st)\.global(?:\.v(\d))?\.b(\d+)", ptx)}
    return f"{used[1]} registers, {used[2]} bytes of stack, accesses of {sorted(widths)} bytes"


def main() -> None:
    from ngpt_train.kernels.gpu import swiglu

    for M, dtype, scaled in ((4096, "bf16", True), (5120, "bf16", True), (4096, "bf16", False), (4096, "fp32", True)):
        block, num_warps, _ = swiglu.blocks_of(M)
        x, s = f"*{dtype}", "*fp32" if scaled else None
        for capability in CAPABILITIES:
            forward = [x, s, s, x, 32768, M, 2 * M]
            backward = [x, x, s, s, x, "*fp32", 32768, M, M, 2 * M]
            for kernel, arguments in ((swiglu.forward_kernel, forward), (swiglu.backward_kernel, backward)):
                said = compiled_for(capability, kernel, arguments, {"BLOCK": block}, num_warps)
                print(f"sm_{capability} {kernel.__name__} m={M} {dtype} {'scaled' if scaled else 'plain'}: {said}")


if __name__ == "__main__":
    main()
