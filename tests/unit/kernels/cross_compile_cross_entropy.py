"""Registers and spills of the cross-entropy kernel on GPUs that need not be there.

TRITON_INTERPRET=0 python -m tests.unit.kernels.cross_compile_cross_entropy
"""

import re
import subprocess
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ngpt_train.core.constants import IGNORED
from ngpt_train.kernels.cross_entropy import ALIGNMENT
from ngpt_train.kernels.gpu.cross_entropy import BLOCK, NUM_WARPS, cross_entropy_kernel


def cross_compile(capability: int, dtype: str, n_vocab: int, gradient: bool, with_options: bool) -> str:
    """What the kernel takes, for logits of `dtype` ("bf16") and a vocabulary."""
    kernel, names = cross_entropy_kernel, cross_entropy_kernel.arg_names
    constants = {"ignored": IGNORED, "gradient": gradient, "block": BLOCK}
    types = {"logits_ptr": f"*{dtype}", "targets_ptr": "*i64", "losses_ptr": "*fp32"}
    types |= {"z_terms_ptr": "*fp32", "smoothing_ptr": "*fp32", "n_vocab": "i32", "stride": "i32"}
    types |= {"z_loss": "fp32", "label_smoothing": "fp32"}
    if not with_options:
        constants |= {"z_terms_ptr": None, "smoothing_ptr": None}
    types |= dict.fromkeys(constants, "constexpr")
    # As Triton finds out at a launch: what torch allocates is aligned, and so is a multiple of 16.
    multiples = ["logits_ptr", "targets_ptr", "losses_ptr", "stride"] + ["n_vocab"] * (n_vocab % 16 == 0)
    multiples += ["z_terms_ptr", "smoothing_ptr"] * with_options
    assert ALIGNMENT % 16 == 0
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in multiples}
    source = ASTSource(kernel, {name: types[name] for name in names}, constants, attributes)
    compiled = triton.compile(source, GPUTarget("cuda", capability, 32), {"num_warps": NUM_WARPS})
    ptx = compiled.asm["ptx"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        cuobjdump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        said = subprocess.run([cuobjdump, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    used = re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", said)
    assert used, said
    wide = len(re.findall(r"(?:ld|st)\.global[.\w]*\.v4\.b32", ptx))
    narrow = len(re.findall(r"(?:ld|st)\.global[.\w]*\.b16", ptx))
    stack = int(used[2]) + int(used[3])  # where spilled registers would lie
    return f"{used[1]} registers, {stack} bytes of stack, {wide} accesses of 16 bytes, {narrow} of 2"


if __name__ == "__main__":
    for capability in (80, 90):
        for dtype, n_vocab in (("bf16", 32000), ("bf16", 50257), ("bf16", 131072), ("fp32", 32000)):
            for gradient, with_options in ((True, True), (True, False), (False, False)):
                said = cross_compile(capability, dtype, n_vocab, gradient, with_options)
                print(f"sm_{capability} {dtype} V={n_vocab} gradient={gradient} options={with_options}: {said}")
