"""Turns new tokens into text at once: whole characters, and no part of a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from ngpt_train.data.tokenizers.tokenizer import Tokenizer

# `Tokenizer.decode` returns it for bytes that are no character. At the end of a text the character may be incomplete.
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class ComingText:
    """The continuation of a prompt. `add` and `end` return its pieces, which together are `text`.

    Without a stop string the prompt's text and `text` equal the decoded tokens.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stops: Sequence[str]) -> None:
        self.tokenizer, self.stops = tokenizer, stops
        self.ids = list(prompt)
        # The tokens before `whole` are whole characters, in the prompt or in `text`. A token's text may depend on the
        # token before it, so decoding begins at `begin`, an earlier end of whole characters.
        self.begin, self.whole = 0, len(self.ids)
        self.text = ""  # up to a stop string
        self.stopped = False
        self.n_given = 0  # characters of `text` that `add` and `end` have returned

    def add(self, token: int) -> str:
        """Returns the characters that are certain after this token."""
        self.ids.append(token)
        more = self.undecided()
        if more and not more.endswith(REPLACEMENT):
            self.begin, self.whole = self.whole, len(self.ids)
            self.append(more)
        return self.give(len(self.text) - (0 if self.stopped else self.held_back()))

    def end(self) -> str:
        """Returns the rest of the text, after the last token."""
        if not self.stopped:
            self.append(self.undecided())
        return self.give(len(self.text))

    def undecided(self) -> str:
        """The text of the tokens from `whole` on."""
        before = self.tokenizer.decode(self.ids[self.begin : self.whole])
        return self.tokenizer.decode(self.ids[self.begin :])[len(before) :]

    def append(self, more: str) -> None:
        self.text += more
        found = [place for stop in self.stops if (place := self.text.find(stop, self.n_given)) >= 0]
        if found:
            self.text, self.stopped = self.text[: min(found)], True

    def held_back(self) -> int:
        """The number of last characters that may begin a stop string."""
        lengths = [n for stop in self.stops for n in range(1, len(stop)) if self.text.endswith(stop[:n])]
        return max(lengths, default=0)

    def give(self, end: int) -> str:
        """The text from the last return up to `end`."""
        end = max(end, self.n_given)
        given = self.text[self.n_given : end]
        self.n_given = end
        return given
