"""The scores of attention: the largest logit, and the share of softmax rows that are saturated.

Fused kernels of attention keep no scores. So one row of the step's batch goes through the model once more, in
evaluation mode and without compiled code, and each attention's scores are computed from its q and k.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from ngpt_train.kernels.attention import watched
from ngpt_train.models.decoder import Decoder, uncompiled
from ngpt_train.models.weights import canonical
from ngpt_train.observe.telemetry import Numbers, Record, ratio, stacked

SATURATED = 0.99  # a softmax row is saturated if its largest probability is above this
MOST_SCORES = 2**24  # scores in memory at a time: 64 MB in fp32


class AttentionScores:
    """Scores of the first row of this rank's first micro batch, by the weights and statistics before the step."""

    def __init__(self, model: Decoder, device: torch.device) -> None:
        self.model, self.device = model, device
        self.places = {module: canonical(place) for place, module in model.named_modules()}
        self._inside: list[nn.Module] = []  # the modules that are being called, the innermost last
        self._doc_ids: Tensor | None = None
        self._found: dict[str, tuple[Tensor, Tensor, Tensor]] = {}  # by place, see `scores_of`

    @torch.no_grad()
    def before_step(self, micro_batch: Sequence[Tensor]) -> None:
        """The forward pass; collective under FSDP2. micro_batch: tokens, targets and optionally document ids."""
        row = [part[:1] for part in micro_batch]
        self._doc_ids = row[2] if len(row) > 2 else None
        self._found = {}
        was_training = self.model.training
        self.model.eval()
        with uncompiled(self.model), self._places_known(), watched(self._look):
            self.model(*row)
        self.model.train(was_training)

    @contextlib.contextmanager
    def _places_known(self) -> Iterator[None]:
        """Inside, `_inside` follows the calls of modules."""

        def enter(module: nn.Module, arguments: Any) -> None:
            self._inside.append(module)

        def leave(module: nn.Module, arguments: Any, result: Any) -> None:
            self._inside.pop()

        entering, leaving = register_module_forward_pre_hook(enter), register_module_forward_hook(leave)
        try:
            yield
        finally:
            entering.remove()
            leaving.remove()
            self._inside.clear()

    def _look(self, q: Tensor, k: Tensor, scale: float, causal: bool, mask: Tensor | None) -> None:
        """Arguments as for `kernels.attention`, for one row: q `(1, T, H, D)`, k `(1, S, H_kv, D)`."""
        place = self.places[self._inside[-1]]
        T, H = q.shape[1:3]
        asked = torch.ones(T, dtype=torch.bool, device=q.device)
        if self._doc_ids is not None:  # not padding. The rows of an encoder are the first tokens, a decoder's the last
            asked = (self._doc_ids[0, :T] if place.startswith("encoder") else self._doc_ids[0, -T:]) >= 0
        found = []
        step = max(1, MOST_SCORES // (H * k.shape[1]))
        for first in range(0, T, step):
            queries = slice(first, first + step)
            found.append(scores_of(q[:, queries], k, scale, visible(mask, causal, queries, q, k), asked[queries]))
        largest, saturated, n_rows = (torch.stack(each) for each in zip(*found, strict=True))
        self._found[place] = largest.amax(), saturated.sum(), n_rows.sum()

    def after_update(self) -> Numbers:
        counts = [count for _, *both in self._found.values() for count in both]
        return Numbers(stacked(counts, self.device), stacked([of[0] for of in self._found.values()], self.device))

    def record(self, summed: Sequence[float], largest: Sequence[float]) -> Record:
        found = {f"attention_max_logit/{place}": logit for place, logit in zip(self._found, largest, strict=True)}
        for place, saturated, n_rows in zip(self._found, summed[::2], summed[1::2], strict=True):
            found[f"attention_saturated/{place}"] = ratio(saturated, n_rows)
        return found


def visible(mask: Tensor | None, causal: bool, queries: slice, q: Tensor, k: Tensor) -> Tensor:
    """True for each key in the sight of a query; broadcasts to `(1, H, queries, S)`."""
    T, S = q.shape[1], k.shape[1]
    if mask is not None:
        return mask.expand(*mask.shape[:2], T, S)[:, :, queries]
    everything = torch.ones(T, S, dtype=torch.bool, device=q.device)
    return (everything.tril() if causal else everything)[None, None, queries]


def scores_of(q: Tensor, k: Tensor, scale: float, seen: Tensor, asked: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The largest logit, the number of saturated rows, and the number of rows, each 0-dim.

    The logits are scale q k^T where the key is seen, in at least fp32. A row belongs to one query and head. asked
    `(T,)`: the queries that count. Rows with a single visible key do not count: their softmax is always 1.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    k = k.to(dtype).repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    logits = scale * torch.einsum("bthd,bshd->bhts", q.to(dtype), k)  # (1, H, T, S)
    logits = logits.masked_fill(~(seen & asked[:, None]), -torch.inf)
    largest = logits.amax(-1)  # (1, H, T)
    probability = (largest - logits.logsumexp(-1)).exp()
    rows = (asked & (seen.sum(-1) > 1)).expand_as(largest)
    return largest.amax(), ((probability > SATURATED) & rows).sum(), rows.sum()
