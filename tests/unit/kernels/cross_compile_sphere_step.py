"""Compiles the step on the sphere for GPUs that are not there: registers and spills.

TRITON_INTERPRET=0 python -m tests.unit.kernels.cross_compile_sphere_step
"""

import triton

from tests.unit.kernels.cross_compile_swiglu import CAPABILITIES, compiled_for


def main() -> None:
    from ngpt_train.kernels.gpu import sphere_step

    for d, dtype in ((1024, "bf16"), (1280, "bf16"), (2560, "bf16"), (1024, "fp32"), (77, "bf16")):
        x, block = f"*{dtype}", triton.next_power_of_2(d)
        forward = [x, x, "*fp32", x, "*fp32", "*fp32", d, d, d]
        backward = [x, x, x, x, "*fp32", "*fp32", "*fp32", x, x, "*fp32", d, d, d, d, 32768, d, 528]
        for capability in CAPABILITIES:
            for kernel, arguments, constants in (
                (sphere_step._forward, forward, {"SHORTEST": 1e-12}),
                (sphere_step._backward, backward, {"TWO": True}),
            ):
                said = compiled_for(
                    capability, kernel, arguments, constants | {"BLOCK": block}, sphere_step.warps(block)
                )
                print(f"sm_{capability} {kernel.__name__} d={d} {dtype}: {said}")


if __name__ == "__main__":
    main()
