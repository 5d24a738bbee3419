"""Beam search: the likeliest translations, by log-probability over a power of the length.

The score of a hypothesis of n tokens, eos included, is sum log p / n^length_penalty. Each step looks at the 2 K
likeliest continuations of the K running hypotheses of a text. Those that end with eos and are among the first K are
kept, the K best ones so far; the K likeliest others run on. A text is done when no running hypothesis, ended now, would
beat the worst of K kept ones. These are the rules of `transformers` (early_stopping=False).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ngpt_train.models.decoding import CachedEncoderDecoder
from ngpt_train.models.encoder_decoder import EncoderDecoder
from ngpt_train.training.guards import NumericalError


class Hypothesis(NamedTuple):
    score: float
    ids: list[int]  # without eos


@dataclass
class Search:
    """The search of one text. kept: the best ended hypotheses, best first."""

    n_beams: int
    length_penalty: float
    kept: list[Hypothesis] = field(default_factory=list)
    is_done: bool = False

    def keep(self, log_p: float, ids: list[int], n_tokens: int) -> None:
        """n_tokens: of the hypothesis, eos included."""
        self.kept.append(Hypothesis(log_p / n_tokens**self.length_penalty, ids))
        self.kept = sorted(self.kept, key=lambda one: -one.score)[: self.n_beams]

    def finish_unless(self, best_log_p: float, n_tokens: int) -> None:
        """best_log_p: of the running hypotheses, which have n_tokens."""
        full = len(self.kept) == self.n_beams
        self.is_done = full and self.kept[-1].score >= best_log_p / n_tokens**self.length_penalty


@torch.no_grad()
def translate(
    model: EncoderDecoder,
    sources: Sequence[Tensor],
    eos: int,
    vocab_size: int,
    n_beams: int = 5,
    length_penalty: float = 1.0,
    max_new_tokens: int | None = None,
) -> list[list[Hypothesis]]:
    """The kept hypotheses of each source, best first; one beam is greedy decoding.

    sources: each `(S,)` int64 on the model's device, with eos at its end. vocab_size: of the tokenizer; the model may
    have more ids, which no translation has. max_new_tokens: eos included; at most, and by
    default, what fits into half a row. The longest hypotheses end there without eos. The model is in evaluation mode.
    Raises NumericalError for logits that are not finite.
    """
    decoder = CachedEncoderDecoder(model)
    limit = min(max_new_tokens or decoder.window, decoder.window)
    start = sources[0].new_tensor([eos])
    n, device = len(sources), sources[0].device
    searches = [Search(n_beams, length_penalty) for _ in sources]
    logits = decoder.begin([torch.cat([source, start]) for source in sources for _ in range(n_beams)])
    log_p = torch.full((n, n_beams), -torch.inf, dtype=torch.float64, device=device)
    log_p[:, 0] = 0  # at first all beams are the same
    running: list[list[list[int]]] = [[[] for _ in range(n_beams)] for _ in sources]
    for n_tokens in range(1, limit + 1):
        if not logits.isfinite().all():
            raise NumericalError("the model's logits are not finite: its weights are NaN or far too large")
        of_model = logits.double().log_softmax(-1)[:, :vocab_size]
        of_next = of_model.reshape(n, n_beams, -1) + log_p[:, :, None]  # (n, K, V)
        best, places = of_next.flatten(1).topk(min(2 * n_beams, of_next[0].numel()))  # (n, 2 K)
        parents, tokens = (places // of_next.shape[2]).tolist(), (places % of_next.shape[2]).tolist()
        rows: list[int] = []  # of the beams that go on, among the n K rows of the decoder
        following: list[int] = []
        for text, (search, *of_text) in enumerate(zip(searches, best.tolist(), parents, tokens, strict=True)):
            beams: list[tuple[float, int, int]] = []
            for rank, (value, parent, token) in enumerate(zip(*of_text, strict=True)):
                if token == eos or n_tokens == limit:
                    if rank < n_beams and not search.is_done and value > -torch.inf:
                        ids = running[text][parent]
                        search.keep(value, ids if token == eos else [*ids, token], n_tokens)
                elif len(beams) < n_beams:
                    beams.append((value, parent, token))
            if not search.is_done and beams:
                search.finish_unless(beams[0][0], n_tokens)
            beams += [(-torch.inf, 0, eos)] * (n_beams - len(beams))
            log_p[text] = log_p.new_tensor([value for value, _, _ in beams])
            running[text] = [[*running[text][parent], token] for _, parent, token in beams]
            rows += [text * n_beams + parent for _, parent, _ in beams]
            following += [token for _, _, token in beams]
        if n_tokens == limit or all(search.is_done for search in searches):
            break
        decoder.reorder(rows)
        logits = decoder.next(dict(enumerate(following)))
    return [search.kept for search in searches]
