"""The text of tokens as they come: whole characters, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from ngpt_train.data.tokenizers.tokenizer import Tokenizer

# What `Tokenizer.decode` puts for bytes that are no character; at the end of a text for one that is not complete yet.
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class ComingText:
    """The continuation of a prompt: `add` and `end` return pieces whose sum is `text`.

    Decoding the tokens together gives the prompt's text and then `text`, if nothing stops it.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stops: Sequence[str]) -> None:
        self.tokenizer, self.stops = tokenizer, stops
        self.ids = list(prompt)
        # Tokens before `whole` are whole characters, which `text` and the prompt have. A token's text may depend on the
        # one before it, so decoding begins at `begin`, an earlier end of whole characters.
        self.begin, self.whole = 0, len(self.ids)
        self.text = ""  # up to the stop string, if there is one
        self.stopped = False
        self.n_given = 0  # characters of it that add and end have returned

    def add(self, token: int) -> str:
        """The characters that this token has made certain."""
        self.ids.append(token)
        more = self.undecided()
        if more and not more.endswith(REPLACEMENT):
            self.begin, self.whole = self.whole, len(self.ids)
            self.append(more)
        return self.give(len(self.text) - (0 if self.stopped else self.held_back()))

    def end(self) -> str:
        """The rest of the text, as no token follows."""
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
        """The number of characters at the end of the text that may begin a stop string."""
        lengths = [n for stop in self.stops for n in range(1, len(stop)) if self.text.endswith(stop[:n])]
        return max(lengths, default=0)

    def give(self, end: int) -> str:
        """The text up to `end`, without what was given."""
        end = max(end, self.n_given)
        given = self.text[self.n_given : end]
        self.n_given = end
        return given
