"""Without a GPU, Triton runs kernels in its interpreter, if it is told to before they are imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
