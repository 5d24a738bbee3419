"""Fused operations. Each has its formula in plain PyTorch here, and a Triton kernel of the same name in `gpu/`."""
