"""Keys and values that attention keeps while a text is generated, so that no token is computed twice.

models/decoding.py gives each attention of a decoder its `Cache` and takes it away; in training there is none.
"""

import torch
from torch import Tensor


class Slots:
    """Where the keys and values of the next tokens go; the caches of a stack share it.

    Slot s of a row belongs to its token at position s.
    """

    def __init__(self) -> None:
        self.of_tokens: Tensor | None = None  # (B, T); None: the first tokens of a text, whose slots are 0 to T - 1
        self.n_seen = 0  # the tokens after the first see slots 0 to n_seen - 1, as far as their mask lets them


class Cache:
    """Keys and values of one attention, each `(B, n_kv_heads, n_slots, d_head)`.

    The shape never changes, so that a step is compiled once. Grouped heads are kept once.
    """

    def __init__(self, n_slots: int, slots: Slots) -> None:
        self.n_slots, self.slots = n_slots, slots
        self.k: Tensor | None = None
        self.v: Tensor | None = None

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keeps k and v of new tokens, `(B, T, n_kv_heads, d_head)`; returns their visible keys and values, `(B, S,
        n_kv_heads, d_head)`. The first tokens see each other. A mask hides a row's slots beyond its tokens."""
        of_tokens = self.slots.of_tokens
        if of_tokens is None:
            self.begin(k, v)
            return k, v
        assert self.k is not None
        assert self.v is not None
        rows = torch.arange(len(k), device=k.device)[:, None]
        self.k[rows, :, of_tokens] = k
        self.v[rows, :, of_tokens] = v
        seen = slice(0, self.slots.n_seen)
        return self.k[:, :, seen].transpose(1, 2), self.v[:, :, seen].transpose(1, 2)

    def begin(self, k: Tensor, v: Tensor) -> None:
        """Keeps k and v of the first tokens, in the memory of an earlier text if that had as many rows."""
        B, T, n_kv_heads, d_head = k.shape
        if self.k is None or self.v is None or len(self.k) != B:
            self.k, self.v = (x.new_zeros(B, n_kv_heads, self.n_slots, d_head) for x in (k, v))
        self.k[:, :, :T] = k.transpose(1, 2)
        self.v[:, :, :T] = v.transpose(1, 2)
