"""Without a GPU, Triton's kernels run in its interpreter. They look when they are imported, which is later than this."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
