"""Times of steps on GPUs, predicted from bytes moved and rates of matrix products before anything ran on a GPU."""

from __future__ import annotations

import re

Size = tuple[str, int]  # name of the model's size, tokens of a row

# Operations that an ablation runs without a kernel, by their names in `kernels.dispatch`.
OPERATIONS = ("swiglu", "sphere_step", "rotary", "adam", "linear_cross_entropy")
COMPILE_ONLY = "ngpt, kernels=torch"
PUBLIC_STYLE = "ngpt as public code has it"

# GPT's ms per step; nGPT's time over GPT's; nGPT's time with kernels=torch over GPT's.
STEPS: dict[str, dict[Size, tuple[float, float, float]]] = {
    "H100": {
        ("0.5b", 1024): (53, 1.012, 1.20),
        ("0.5b", 4096): (239, 1.010, 1.15),
        ("0.5b", 8192): (582, 1.009, 1.12),
        ("1b", 1024): (111, 1.010, 1.13),
        ("1b", 4096): (486, 1.010, 1.08),
        ("1b", 8192): (1166, 1.008, 1.06),
    },
    "A100": {
        ("0.5b", 1024): (128, 1.007, 1.13),
        ("0.5b", 4096): (597, 1.006, 1.09),
        ("0.5b", 8192): (1474, 1.005, 1.07),
        ("1b", 1024): (268, 1.007, 1.08),
        ("1b", 4096): (1226, 1.006, 1.05),
        ("1b", 8192): (2975, 1.005, 1.04),
    },
}
# nGPT's time over GPT's without one kernel, at 0.5B and 4096 tokens. What a kernel is worth is the difference of two
# neighbouring columns of the second table of predictions in docs/benchmarks/gpu.md.
WITHOUT: dict[str, dict[str, float]] = {
    "H100": {"swiglu": 1.07, "sphere_step": 1.07, "rotary": 1.02, "adam": 1.02, "linear_cross_entropy": 1.02},
    "A100": {"swiglu": 1.05, "sphere_step": 1.04, "rotary": 1.02, "adam": 1.01, "linear_cross_entropy": 1.01},
}
PUBLIC_MS = {"H100": 819.0}  # of a step of public code's way: 40,000 tokens/s
ABLATED: Size = ("0.5b", 4096)  # the size of WITHOUT and PUBLIC_MS
# Names that torch.cuda reports.
KNOWN = [(r"NVIDIA H100 80GB HBM3", "H100"), (r"(NVIDIA )?A100-SXM4-80GB", "A100")]
NO_SLOWER_THAN_H100 = r"NVIDIA (H100 80GB HBM3|G?H200.*|G?B[23]00.*)"


def without(operation: str) -> str:
    """The name of the variant of nGPT without the operation's kernel."""
    return f"ngpt without {operation}"


def predicted_for(device_name: str) -> str | None:
    """The device's key in STEPS; None where nothing was predicted for it."""
    return next((key for name, key in KNOWN if re.fullmatch(name, device_name)), None)


def predicted_ms(size: Size, variant: str, device_name: str) -> float | None:
    """Predicted milliseconds of a step of `variant`; None where nothing was predicted."""
    key = predicted_for(device_name)
    if key is None or size not in STEPS[key]:
        return None
    gpt, with_kernels, compile_only = STEPS[key][size]
    ratios = {"gpt": 1.0, "ngpt": with_kernels, COMPILE_ONLY: compile_only}
    if size == ABLATED:
        ratios |= {without(operation): ratio for operation, ratio in WITHOUT[key].items()}
        if variant == PUBLIC_STYLE:
            return PUBLIC_MS.get(key)
    return gpt * ratios[variant] if variant in ratios else None


def expected_seconds(size: Size, device_name: str) -> float:
    """A guess, for planning, of the seconds of GPT's step; unknown devices count as an A100. 0 for other sizes."""
    key = "H100" if re.fullmatch(NO_SLOWER_THAN_H100, device_name) else "A100"
    return STEPS[key].get(size, (0.0, 0.0, 0.0))[0] / 1e3
