"""Answers the requests of lm-evaluation-harness with a model of ours.

The harness builds requests and computes metrics. It encodes context and continuation together, and takes the ids after
those of the context alone for the continuation (TemplateLM._encode_pair).

A continuation is cut into windows. A window of a decoder has at most `context` targets, and reads at most `context` ids
before its last target; earlier ids are cut off. A window of an encoder-decoder has at most `context - source_context`
targets. Its decoder begins with the id before the first target, and its encoder reads the `source_context` ids before
that, as in training (data/rows.py: PrefixContinuation).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from numpy.typing import NDArray
from torch import Tensor

from ngpt_train.config.validate import mistake
from ngpt_train.core.constants import PADDING
from ngpt_train.data.tokenizers.tokenizer import Tokenizer
from ngpt_train.distributed.world import World
from ngpt_train.evaluation.validation import CHUNK_TOKENS, evaluating, longest_first, shares
from ngpt_train.models.decoder import Decoder

MOST_NEW_TOKENS = 256  # the harness's own default
MOST_LOGITS = 1 << 27  # numbers among the logits of one forward pass
Ids = list[int]


class Adapter(TemplateLM):
    """Answers every request on every rank, like a single process; the ranks share the forward passes. All answers are
    collective calls.

    A decoder reads an eos before each text, as in training; the harness calls it BOS. An encoder reads none. The
    answers equal those of the harness's adapter for Hugging Face's models (HFLM), with the same weights and a tokenizer
    that adds eos in front.
    """

    def __init__(self, model: Decoder, tokenizer: Tokenizer, world: World) -> None:
        super().__init__()
        self.model, self.world, self._tokenizer = model, world, tokenizer
        self._source = model.config.source_length(model.config.context)

    @property
    def eot_token_id(self) -> int:
        return self._tokenizer.eos

    @property
    def max_length(self) -> int:
        """The context of a decoder."""
        return self.model.config.context

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> Ids:
        """The ids of a text. add_special_tokens: adds an eos in front; None: for a decoder alone."""
        eos_in_front = not self._source if add_special_tokens is None else add_special_tokens
        return [self.eot_token_id] * eos_in_front + self._tokenizer.encode(string).tolist()

    def _encode_pair(self, context: str, continuation: str) -> tuple[Ids, Ids]:
        """The ids of context and continuation. If the tokenizer joins them into no more ids than the context has, the
        continuation begins at the first id that differs."""
        before, after = super()._encode_pair(context, continuation)
        if not after:
            whole = self.tok_encode(context + continuation)
            same = next((i for i, (a, b) in enumerate(zip(whole, before, strict=False)) if a != b), len(whole) - 1)
            before, after = whole[:same] or [self.eot_token_id], whole[same:]
        return before, after

    def _loglikelihood_tokens(self, requests: list[tuple[Any, Ids, Ids]], **kwargs: Any) -> list[tuple[float, bool]]:
        scored = [Scored([*context, *continuation], len(continuation)) for _, context, continuation in requests]
        log_p, greedy = log_likelihoods(self.model, scored, self.world)
        return list(zip(log_p.tolist(), greedy.tolist(), strict=True))

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = True) -> list[float]:
        """log p of whole texts, in the harness's windows of max_length ids. The last window overlaps the one before it.

        As in the harness, the eos in front of a text is a target too, after another eos.
        """
        assert not self._source, "`Tasks` refuses such tasks for an encoder-decoder"
        of_texts = []
        for request in requests:
            ids = self.tok_encode(request.args[0])
            cut = get_rolling_token_windows(ids, self.eot_token_id, max_seq_len=self.max_length, context_len=1)
            of_texts.append([make_disjoint_window(window) for window in cut])
        scored = [Scored([*before, *after], len(after)) for text in of_texts for before, after in text]
        log_p, _ = log_likelihoods(self.model, scored, self.world)
        found, first = [], 0
        for text in of_texts:
            found.append(float(log_p[first : first + len(text)].sum()))
            first += len(text)
        return found

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """Greedy continuations, each up to a stop string, eos or its most tokens."""
        found: list[str] = []
        with evaluating(self.model, self.world):
            for index, counts in shares(len(requests), self.world):
                found += self.world.gather(self._continue(requests[index], counts))
        return found[: len(requests)]

    def _continue(self, request: Instance, counts: bool) -> str:
        """The continuation of one context. counts: False for a rank without a request; it waits for the others.

        Every rank makes forward passes until all are done, because FSDP2 gathers weights in each.
        """
        context, asked = request.args
        options = normalize_gen_kwargs(asked, MOST_NEW_TOKENS)
        if options["do_sample"]:
            problem = f"{request.task_name} samples, and here the most likely token is taken"
            raise mistake(f"tasks: {problem}", "Leave it out")
        stops = handle_stop_sequences(options["until"], eos=None)
        room = MOST_NEW_TOKENS if self._source else self.max_length - options["max_gen_toks"]
        if room < 1:
            problem = f"{request.task_name} generates {options['max_gen_toks']} tokens, and the model's context has"
            raise mistake(f"tasks: {problem} {self.max_length}: none is left for the prompt", "Leave the task out")
        ids = self.tok_encode(context) or [self.eot_token_id]
        prompt = torch.tensor(ids if self._source else ids[-room:], device=self.world.device)
        new = prompt[:0]
        text, done = "", not counts
        while not all(self.world.gather(done)):
            token = self.model.next_token_logits(prompt, new)[: self._tokenizer.vocab_size].argmax()
            done = done or bool(token == self.eot_token_id)
            if not done:
                new = torch.cat([new, token[None]])
                text = self._tokenizer.decode(new.tolist())
                done = len(new) == options["max_gen_toks"] or any(stop in text for stop in stops if stop)
        return postprocess_generated_text(text, stops, None)


class Scored(NamedTuple):
    """A text to score. ids: of the context and the continuation. n_targets: ids of the continuation."""

    ids: Sequence[int]
    n_targets: int


class Window(NamedTuple):
    """A row of one forward pass. ids: the model reads all but the last one. source: the number of ids for the encoder,
    the first ones. n_targets: the number of scored ids, the last ones. of: the number of the continuation."""

    ids: Sequence[int]
    source: int
    n_targets: int
    of: int


def windows(model: Decoder, scored: Sequence[Scored]) -> list[Window]:
    """The windows of all continuations, in order."""
    context, source = model.config.context, model.config.source_length(model.config.context)
    at_once = context - source
    found = []
    for number, (ids, n_targets) in enumerate(scored):
        for start in range(len(ids) - n_targets, len(ids), at_once):
            end = min(start + at_once, len(ids))
            first = max(0, start - 1 - source if source else end - 1 - context)
            n_source = start - 1 - first if source else 0
            found.append(Window(ids[first:end], n_source, end - start, number))
    return found


def log_likelihoods(
    model: Decoder, scored: Sequence[Scored], world: World
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """log p(continuation | context) in nats, and True if each id of the continuation is the most likely one.

    Both are `(N,)`, and the same on every rank. A collective call.

    Padding is on the right, where no scored position sees it. Log-probabilities are computed in fp32 (fp64 for an fp64
    model) and summed in fp64. The number of ranks changes no bit of a replicated model's result. Raises ValueError for
    a continuation without a context.
    """
    if any(len(ids) <= n_targets for ids, n_targets in scored):
        raise ValueError("a continuation needs a context of one id or more")
    cut = windows(model, scored)
    source, vocab_size = model.config.source_length(model.config.context), model.embedding.shape[0]
    lengths = [_length(window, source) for window in cut]
    batches = list(longest_first(lengths, lambda n: min(CHUNK_TOKENS // n, MOST_LOGITS // (n * vocab_size))))
    found = torch.zeros(2, len(cut), dtype=torch.float64, device=world.device)
    with evaluating(model, world):
        for index, counts in shares(len(batches), world):
            log_p, is_best = _score(model, [cut[i] for i in batches[index]], world.device)
            if counts:
                found[0, batches[index]], found[1, batches[index]] = log_p, is_best
    # One rank has a window's values and the others have 0, so the sums over ranks are exact.
    log_p_of_windows, all_best = world.sum_(found).cpu().numpy()
    sums, greedy = np.zeros(len(scored)), np.ones(len(scored), np.bool_)
    of = np.array([window.of for window in cut], np.int64)
    np.add.at(sums, of, log_p_of_windows)
    np.logical_and.at(greedy, of, all_best > 0)
    return sums, greedy


def _length(window: Window, source: int) -> int:
    """The number of ids that the model reads, including a short source's padding."""
    return len(window.ids) - 1 - window.source + source


def _score(model: Decoder, batch: Sequence[Window], device: torch.device) -> tuple[Tensor, Tensor]:
    """The summed log-probability of each window's targets, and 1 if all are the most likely ids, else 0: two `(B,)`
    fp64."""
    source = model.config.source_length(model.config.context)
    length = max(_length(window, source) for window in batch)
    tokens = torch.zeros(len(batch), length, dtype=torch.int64)
    doc_ids = torch.full_like(tokens, PADDING)
    rows: list[int] = []
    columns: list[int] = []
    targets: list[int] = []
    for row, window in enumerate(batch):
        ids = torch.as_tensor(window.ids)
        read = ids[:-1]
        tokens[row, : window.source], doc_ids[row, : window.source] = read[: window.source], 0
        end = source + len(read) - window.source
        tokens[row, source:end], doc_ids[row, source:end] = read[window.source :], 0
        if source and not window.source:
            doc_ids[row, 0] = 0  # the source is all padding: one token of it counts, so that attention has a key
        rows += [row] * window.n_targets
        columns += range(end - source - window.n_targets, end - source)  # of logits, which begin behind the source
        targets += window.ids[-window.n_targets :]
    # A decoder needs no mask: it does not see the padding on the right.
    masks = {"doc_ids": doc_ids.to(device)} if source else {}
    chosen = model(tokens.to(device), **masks)[rows, columns]  # (targets, V)
    of, wanted = torch.tensor(rows, device=device), torch.tensor(targets, device=device)
    log_p = chosen.log_softmax(-1).gather(1, wanted[:, None])[:, 0].double()
    misses = (chosen.argmax(-1) != wanted).double()
    zeros = torch.zeros(len(batch), dtype=torch.float64, device=device)
    return zeros.index_add(0, of, log_p), (zeros.index_add(0, of, misses) == 0).double()
