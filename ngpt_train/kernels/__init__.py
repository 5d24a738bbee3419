"""Fused operations: the formulas in plain PyTorch, with gradients by hand; the Triton kernels are in `gpu/`."""
