"""Triton kernels. Imported only where they run, so that all else needs torch alone."""
