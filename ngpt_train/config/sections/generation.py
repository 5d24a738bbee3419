"""The keys generate.*: sampling from a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Union

from ngpt_train.config.keys import COUNT, COUNT_OR_0, ROWS, SEED, CheckpointKeys, Conflict, key
from ngpt_train.config.validate import mistake

if TYPE_CHECKING:
    from ngpt_train.config.schema import Config


@dataclass
class GenerateConfig(CheckpointKeys):
    """Sampling from a checkpoint (`generate`)."""

    verb = "generate"

    prompt: str = key("", "Text to continue; empty starts a document.")
    prompts: Union[str, None] = key(
        None,
        "File of prompts: a .jsonl file, whose lines are objects with a `prompt`, or a text file, each line a prompt. "
        "Each gives a line of JSON.",
    )
    interactive: bool = key(False, "Read prompts from the terminal or from stdin, a line each, until it ends.")
    samples: int = key(1, "Texts for each prompt; sample j = 0, 1, ... has the seed generate.seed + j.", **COUNT)
    max_new_tokens: int = key(200, "Tokens to sample at most.", **COUNT)
    min_new_tokens: int = key(0, "Tokens before which the text does not end.", **COUNT_OR_0)
    temperature: float = key(0.8, "Divides the logits; 0 takes the most likely token.", minimum=0, maximum=1000)
    top_k: Union[int, None] = key(None, "Sample among the k most likely tokens; null: all.", **COUNT)
    top_p: Union[float, None] = key(
        None, "Sample among the fewest tokens whose probability reaches p; null: all.", above=0, maximum=1
    )
    min_p: Union[float, None] = key(
        None,
        "Sample among the tokens at least this times as probable as the most probable one; null: all.",
        minimum=0,
        maximum=1,
    )
    repetition_penalty: float = key(
        1.0,
        "Divides the positive logits of tokens that were read, prompt included, and multiplies the negative; 1: none.",
        above=0,
        maximum=1000,
    )
    no_repeat_ngram_size: int = key(
        0, "No n tokens in a row come twice, prompt included; 0: they may.", minimum=0, maximum=1_000_000
    )
    stop: Union[list[str], None] = key(
        None,
        'Strings before which the text ends, as in \'["\\n\\n","User:"]\', where \\n is a new line, \\t a tab '
        "and \\\\ a backslash. null: none.",
    )
    seed: int = key(0, "Seed of the sampling, the same for each prompt.", **SEED)
    cache: bool = key(
        True, "Keep the keys and values of earlier tokens; false computes the whole text again for each token."
    )
    overflow: str = key(
        "slide",
        "Where a text outgrows model.context. slide: the model sees the last model.context tokens, which are computed "
        "again for each token; refuse: such prompts are refused.",
        choices=("slide", "refuse"),
    )
    batch_rows: int = key(8, "Texts that are generated beside each other.", **ROWS)
    logprobs: bool = key(
        False, "Also give the natural log of the model's probability of each token, before temperature and the like."
    )
    out: Union[str, None] = key(None, "JSONL file for the texts, a line each, which must not exist; null prints.")

    def refused(self, config: Config) -> Iterator[Conflict]:
        yield from super().refused(config)
        self.check_texts()

    def check_texts(self) -> None:
        """Raises ConfigError for keys that exclude each other, and for files that cannot be used."""
        asked = {
            "generate.prompt": bool(self.prompt),
            "generate.prompts": self.prompts is not None,
            "generate.interactive": self.interactive,
        }
        given = [name for name, is_given in asked.items() if is_given]
        prompts, out = (None if file is None else Path(file).expanduser() for file in (self.prompts, self.out))
        if len(given) > 1:
            raise mistake(f"{', '.join(given)}: prompts from several places", "Keep one of them")
        if self.interactive and out is not None:
            shown = f"generate.interactive=true, generate.out={self.out}"
            raise mistake(f"{shown}: the texts are printed", "Keep one of them")
        if self.min_new_tokens > self.max_new_tokens:
            problem = f"generate.min_new_tokens={self.min_new_tokens}: more than generate.max_new_tokens"
            raise mistake(problem, f"Set it to {self.max_new_tokens} or less")
        if "" in (self.stop or []):
            problem = "generate.stop: an empty string stops every text at once"
            raise mistake(problem, "Leave it out, for example generate.stop='[\"\\n\\n\"]'")
        if prompts is not None and not prompts.is_file():
            problem = f"generate.prompts={self.prompts}: {'it is no file' if prompts.exists() else 'no such file'}"
            raise mistake(problem, "Name a text file with a prompt a line, or a .jsonl file of objects with a `prompt`")
        if out is not None and out.is_file():
            raise mistake(f"generate.out={self.out}: the file exists already", "Remove it, or name another")
