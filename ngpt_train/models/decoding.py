"""The logits of the next token, from a prompt and the tokens generated so far.

`Recomputed` computes the whole text again for each token. `Cached` reads each token once and keeps its keys and values:
it gives each attention of the decoder a `Cache` and takes it away. Both see the last `context` tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ngpt_train.models.decoder import Decoder, uncompiled
from ngpt_train.models.encoder_decoder import EncoderDecoder, source_of
from ngpt_train.models.layers.attention import Attention
from ngpt_train.models.layers.documents import Mask
from ngpt_train.models.layers.rope import Rope


def cached(model: Decoder, compiled: bool = False) -> Cached:
    """Decodes several texts at once and computes each token once. compiled: with compiled blocks."""
    return CachedEncoderDecoder(model, compiled) if isinstance(model, EncoderDecoder) else Cached(model, compiled)


class Recomputed:
    """The logits of the next token of B texts. For each token the whole text is computed again."""

    def __init__(self, model: Decoder) -> None:
        self.model = model
        self.prompts: list[Tensor] = []
        self.new: list[list[int]] = []  # the tokens after each prompt

    @torch.no_grad()
    def begin(self, prompts: Sequence[Tensor]) -> Tensor:
        """Logits `(B, V)` of the tokens that follow the prompts, each `(P,)`, P >= 1, on the model's device."""
        self.prompts, self.new = list(prompts), [[] for _ in prompts]
        return self.first()

    @torch.no_grad()
    def next(self, tokens: Mapping[int, int]) -> Tensor:
        """Logits `(B, V)` after one more token of one row or more: row -> token. Other rows' logits mean nothing."""
        for row, token in tokens.items():
            self.new[row].append(token)
        by_row = self.after(list(tokens))
        any_row = next(iter(by_row.values()))
        return torch.stack([by_row.get(row, any_row) for row in range(len(self.new))])

    def first(self) -> Tensor:
        """Logits `(B, V)` after the prompts."""
        return torch.stack(list(self.after(range(len(self.prompts))).values()))

    def after(self, rows: Iterable[int]) -> dict[int, Tensor]:
        """Logits `(V,)` after the last token of each of the rows."""
        with uncompiled(self.model):
            texts = {row: (self.prompts[row], self.prompts[row].new_tensor(self.new[row])) for row in rows}
            return {row: self.model.next_token_logits(*text) for row, text in texts.items()}


class Slots:
    """Where the keys and values of the next tokens go, for all caches of a stack. Slot s belongs to the token at s."""

    def __init__(self) -> None:
        self.of_tokens: Tensor | None = None  # (B, T); None: the first tokens of a text, whose slots are 0 to T - 1
        self.n_seen = 0  # the tokens after the first see slots 0 to n_seen - 1, as far as their mask lets them


class Cache:
    """Keys and values of one attention, each `(B, n_kv_heads, n_slots, d_head)`. Grouped heads are kept once. grows:
    memory doubles when it is full, up to n_slots. Else it has n_slots from the first, so that a step, whose shapes
    never change, is compiled once."""

    def __init__(self, n_slots: int, slots: Slots, grows: bool) -> None:
        self.n_slots, self.slots, self.grows = n_slots, slots, grows
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
        if k.shape[1]:  # else cross-attention, which reads nothing new
            # A row that is not asked for writes to the slot after its last token.
            while self.k.shape[2] < min(self.slots.n_seen + 1, self.n_slots):
                more = (0, 0, 0, min(self.k.shape[2], self.n_slots - self.k.shape[2]))
                self.k, self.v = F.pad(self.k, more), F.pad(self.v, more)
            rows = torch.arange(len(k), device=k.device)[:, None]
            self.k[rows, :, of_tokens] = k
            self.v[rows, :, of_tokens] = v
        seen = slice(0, self.slots.n_seen)
        return self.k[:, :, seen].transpose(1, 2), self.v[:, :, seen].transpose(1, 2)

    def begin(self, k: Tensor, v: Tensor) -> None:
        """Keeps k and v of the first tokens, in the memory of an earlier text if that had as many rows."""
        B, T, n_kv_heads, d_head = k.shape
        if self.k is None or self.v is None or len(self.k) != B or self.k.shape[2] < T:
            n_slots = T if self.grows else self.n_slots
            self.k, self.v = (x.new_zeros(B, n_kv_heads, n_slots, d_head) for x in (k, v))
        self.k[:, :, :T] = k.transpose(1, 2)
        self.v[:, :, :T] = v.transpose(1, 2)


class Cached(Recomputed):
    """The logits of the next token of B texts, by a decoder whose attention keeps keys and values.

    The logits of a row depend on the other rows by the rounding of sums alone. A text that outgrows the context is
    computed again for each token, as without a cache: the window slides, so that every position in it changes.

    compiled: the blocks are compiled, so all passes but the first of a text have the same shapes. Else attention looks
    at no more slots than the longest text has tokens.
    """

    def __init__(self, model: Decoder, compiled: bool = False) -> None:
        super().__init__(model)
        self.compiled = compiled
        self.dtype = model.compute_dtype or model.embedding.dtype
        self.window = self.most_tokens()
        self.slots = Slots()
        self.n_kept: list[int] = []  # by text: tokens whose keys and values are in the caches
        places = torch.arange(self.window, device=model.embedding.device)
        self.rope = model.rope(places[None], torch.promote_types(self.dtype, torch.float32))
        nothing = model.embedding.new_zeros(1, self.window, model.config.d_model)
        added = model.add_positions(nothing, places).detach()
        self.added = None if added is nothing else added[0]  # (window, d_model): added to the embedding
        attentions = [x for block in model.layers for x in block.modules() if isinstance(x, Attention)]
        self.caches = [(attention, self.cache_of(attention)) for attention in attentions]

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Inside a `with`, the decoder's attentions have their caches."""
        for attention, cache in self.caches:
            attention.cache = cache
        try:
            yield
        finally:
            for attention, _ in self.caches:
                attention.cache = None

    def first(self) -> Tensor:
        with uncompiled(self.model):
            texts = self.first_tokens()
            self.n_kept = [len(text) for text in texts]
            self.slots.of_tokens = None
            tokens = pad_sequence(texts, batch_first=True)  # at the end, where no token sees the padding
            T = tokens.shape[1]
            rope = None if self.rope is None else Rope(self.rope.cos[:T], self.rope.sin[:T], self.rope.interleaved)
            with self.attached():
                h = self.stack(self.embed(tokens, torch.arange(T, device=tokens.device)), rope, None)
        last = torch.tensor(self.n_kept, device=h.device) - 1
        return self.logits(h[torch.arange(len(texts), device=h.device), last])

    def after(self, rows: Iterable[int]) -> dict[int, Tensor]:
        rows = list(rows)
        kept = [row for row in rows if self.n_kept[row] < self.window]
        by_row = dict(zip(kept, self.step(kept), strict=True)) if kept else {}
        outgrown = [row for row in rows if row not in by_row]
        return by_row | super().after(outgrown) if outgrown else by_row

    def step(self, rows: Sequence[int]) -> Tensor:
        """Logits `(n, V)` after the last token of n of the rows. The other rows are computed too, so that the shapes
        stay; their next token takes the same slot again."""
        device = self.model.embedding.device
        tokens = torch.tensor([[new[-1] if new else 0] for new in self.new], device=device)  # (B, 1)
        positions = torch.tensor([[min(n, self.window - 1)] for n in self.n_kept], device=device)  # (B, 1)
        for row in rows:
            self.n_kept[row] += 1
        self.slots.of_tokens = positions
        self.slots.n_seen = self.window if self.compiled else max(self.n_kept)
        visible = torch.arange(self.slots.n_seen, device=device) <= positions  # (B, S)
        rope = None if self.rope is None else self.rope.at(positions)
        with self.attached():
            h = self.stack(self.embed(tokens, positions), rope, visible[:, None, None])
        return self.logits(h[torch.tensor(rows, device=device), 0])

    def reorder(self, parents: Sequence[int]) -> None:
        """From now on row r goes on as row parents[r] would have; the prompts of both are the same, so what
        cross-attention keeps stays."""
        self.new, self.n_kept = [list(self.new[p]) for p in parents], [self.n_kept[p] for p in parents]
        for attention, cache in self.caches:
            if attention.causal:
                assert cache.k is not None
                assert cache.v is not None
                cache.k, cache.v = cache.k[list(parents)], cache.v[list(parents)]

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """The first hidden state `(B, T, d_model)` of tokens `(B, T)` at positions `(T,)` or `(B, T)`."""
        h = self.model.embed(tokens, self.model.embedding)
        if self.added is not None:
            h = h + self.added[positions]
        return self.model.drop_embedding(self.model.norm_first(h).to(self.dtype))

    def logits(self, h: Tensor) -> Tensor:
        """Logits `(n, V)` of the last hidden states h `(n, d_model)`."""
        return self.model.head(h[:, None]).logits()[:, 0]

    # What differs in an encoder-decoder.

    def most_tokens(self) -> int:
        """Tokens of a text that the decoder sees."""
        return self.model.config.context

    def cache_of(self, attention: Attention) -> Cache:
        return Cache(self.window, self.slots, not self.compiled)

    def first_tokens(self) -> list[Tensor]:
        """From each prompt, the decoder's tokens."""
        return [prompt[-self.window :] for prompt in self.prompts]

    def stack(self, h: Tensor, rope: Rope | None, mask: Mask) -> Tensor:
        """The decoder's blocks: h `(B, T, d_model)` -> the same shape."""
        return self.model.stack(h, rope, mask, None)


class CachedEncoderDecoder(Cached):
    """`Cached` for an encoder-decoder: the source is encoded once, and cross-attention keeps its keys and values."""

    model: EncoderDecoder

    def __init__(self, model: EncoderDecoder, compiled: bool = False) -> None:
        self.source_slots = Slots()
        super().__init__(model, compiled)
        self.memory = self.memory_mask = torch.empty(0)

    def most_tokens(self) -> int:
        return self.model.config.context - self.model.source_context

    def cache_of(self, attention: Attention) -> Cache:
        if attention.causal:
            return super().cache_of(attention)
        return Cache(self.model.source_context, self.source_slots, not self.compiled)

    def first_tokens(self) -> list[Tensor]:
        """The last token of each prompt; the encoder reads the others."""
        S = self.model.source_context
        if not self.compiled:
            S = min(S, max(1, *(len(prompt) - 1 for prompt in self.prompts)))
        source, valid = (torch.stack(x) for x in zip(*(source_of(p, S) for p in self.prompts), strict=True))  # (B, S)
        places = torch.arange(S, device=source.device)
        model, self.memory_mask = self.model, valid[:, None, None]
        h = model.first_hidden_state(source, model.source_table, places)
        rope = model.rope(source, torch.promote_types(self.dtype, torch.float32))
        self.memory = model.encode(h, rope, self.memory_mask, valid)
        self.source_slots.of_tokens, self.source_slots.n_seen = None, S
        return [prompt[-1:] for prompt in self.prompts]

    def stack(self, h: Tensor, rope: Rope | None, mask: Mask) -> Tensor:
        h = self.model.decode(h, rope, mask, self.memory, self.memory_mask, None)
        # From now on cross-attention reads nothing new, and sees its cache.
        self.memory = self.memory[:, :0]
        self.source_slots.of_tokens = torch.empty(self.memory.shape[:2], dtype=torch.long, device=h.device)
        return h
