"""Compiles the kernels of rotary positions for GPUs that are not there: registers and spills.

TRITON_INTERPRET=0 python -m tests.unit.kernels.cross_compile_rotary
"""

from tests.unit.kernels.cross_compile_swiglu import CAPABILITIES, compiled_for

# n_heads, n_kv_heads, D, dtype, interleaved, normalized with a scale
CASES = [
    (16, 16, 64, "bf16", False, True),
    (20, 20, 64, "bf16", False, True),
    (16, 16, 64, "bf16", False, False),
    (16, 16, 64, "bf16", True, True),
    (16, 4, 80, "bf16", False, True),
    (8, 8, 128, "bf16", False, True),
    (4, 4, 256, "bf16", True, True),
    (16, 16, 64, "fp32", False, True),
]


def main() -> None:
    from ngpt_train.kernels.gpu import rotary

    T = 4096
    for n_heads, n_kv_heads, D, dtype, interleaved, normalized in CASES:
        x, s, angles = f"*{dtype}", "*fp32" if normalized else None, ["*fp32", "*fp32"]
        columns = (n_heads + 2 * n_kv_heads) * D
        tiles, num_warps, *_ = rotary.blocks_of(n_heads, n_kv_heads, D)
        # As attention leaves them: (B, H, T, D), seen as (B, T, H, D).
        strides = [stride for H in (n_heads, n_kv_heads, n_kv_heads) for stride in (H * T * D, D, T * D, 1)]
        forward = [x, *angles, s, x, x, 32768, T, T * columns, columns, 0]
        backward = [x, x, x, x, *angles, s, x, "*fp32", 32768, T, *strides, T * columns, columns, 0]
        constants = {"Q": n_heads, "KV": n_kv_heads, "D": D, "INTERLEAVED": interleaved, "NORMALIZED": normalized}
        for capability in CAPABILITIES:
            for kernel, arguments in ((rotary.forward_kernel, forward), (rotary.backward_kernel, backward)):
                said = compiled_for(capability, kernel, arguments, constants | tiles, num_warps)
                case = f"{n_heads}+{n_kv_heads} heads of {D} {dtype} interleaved={interleaved} normalized={normalized}"
                print(f"sm_{capability} {kernel.__name__} {case}, {num_warps} warps: {said}")


if __name__ == "__main__":
    main()
