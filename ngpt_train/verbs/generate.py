"""`generate`: text from a checkpoint's model."""

import itertools
import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

from ngpt_train.config.arguments import name_of
from ngpt_train.config.schema import Config
from ngpt_train.config.sections.verbs import GenerateConfig
from ngpt_train.config.validate import mistake
from ngpt_train.core.errors import ConfigError, DataError
from ngpt_train.core.files import parse_json, read_whole, write_atomically
from ngpt_train.core.log import saying_nothing
from ngpt_train.data.tokenizers.tokenizer import Tokenizer
from ngpt_train.distributed.compilation import keep_compiled
from ngpt_train.distributed.layouts import resolve_compile
from ngpt_train.distributed.world import World, resolve_device
from ngpt_train.evaluation.continued_prompts import Texts
from ngpt_train.evaluation.restore import Restored, find_trained, restore
from ngpt_train.evaluation.translations import one_line, translations
from ngpt_train.models.encoder_decoder import EncoderDecoder

OF_BEAMS = {"generate.beams", "generate.length_penalty"}
OF_TRANSLATIONS = OF_BEAMS | {
    f"generate.{name}"
    for name in ("checkpoint", "average", "weights", "prompt", "prompts", "interactive", "max_new_tokens", "out")
}
MOST_BYTES = 1 << 30  # of a file of prompts
LINE = 'A line is an object such as {"prompt": "text"}'


def main(config: Config, overrides: Sequence[str]) -> int:
    """Continues generate.prompt, or each line of generate.prompts or of what is typed; returns 0. Prints the texts on
    stdout as they come, or writes them to generate.out.

    Raises ConfigError for an override that contradicts the checkpoint, and for a prompt that generate.overflow refuses;
    DataError where there is no usable checkpoint, or file of prompts.
    """
    wanted = config.generate
    prompts = [wanted.prompt] if wanted.prompts is None else read_prompts(wanted.prompts)
    trained = find_trained("generate", config, overrides, also_used=("train.compile",))
    translates = trained.config.model.objective == "translation"
    if not translates and (problem := trained.config.model.refuses_text()):
        raise mistake(f"generate.checkpoint={wanted.checkpoint}: {problem}", "Choose a causal model's checkpoint")
    given = {name for name in map(name_of, overrides) if name.startswith("generate.")}
    if idle := sorted(given - OF_TRANSLATIONS if translates else given & OF_BEAMS):
        what = "translates, by beam search" if translates else "continues texts, by sampling"
        raise mistake(f"{', '.join(idle)}: without an effect, the model {what}", "Leave it out")
    world = World(rank=0, size=1, local_rank=0, device=resolve_device(config.train.device, local_rank=0))
    restored = restore(trained, config, world)
    if translates:
        write_translations(restored, wanted, typed_prompts() if wanted.interactive else prompts)
        return 0
    compiled = wanted.cache and resolve_compile(config.train.compile, world.device.type)
    if compiled:
        keep_compiled(config)
        for block in restored.model.layers:
            block.compile(dynamic=False)
    texts = Texts(restored.model, restored.tokenizer, wanted, compiled)
    if wanted.interactive:
        converse(texts)
        return 0
    note_spaces(prompts, restored.tokenizer)
    if wanted.out is None and wanted.prompts is None:
        show(texts, prompts[0])
        return 0
    lines = (json.dumps(text.json(wanted), ensure_ascii=False) + "\n" for text in texts.of(prompts))
    if wanted.out is not None:
        write_atomically(Path(wanted.out).expanduser(), "".join(lines).encode())
    else:
        for line in lines:
            print(line, end="", flush=True)
    return 0


def write_translations(restored: Restored, wanted: GenerateConfig, prompts: Iterable[str]) -> None:
    """Translates each prompt: prints a translation a line, or writes a line of JSON each to generate.out."""
    assert isinstance(restored.model, EncoderDecoder)
    translated = partial(
        translations,
        restored.model,
        restored.tokenizer,
        n_beams=wanted.beams,
        length_penalty=wanted.length_penalty,
        max_new_tokens=wanted.max_new_tokens,
    )
    if wanted.out is None:
        # A typed line is answered before the next one is read.
        parts = ([prompt] for prompt in prompts) if wanted.interactive else [list(prompts)]
        with ended_by_ctrl_c() if wanted.interactive else nullcontext():
            for found in itertools.chain.from_iterable(map(translated, parts)):
                print(one_line(found.text), flush=True)
        return
    sources = list(prompts)
    lines = [
        json.dumps({"prompt": source, "text": found.text, "score": found.score}, ensure_ascii=False) + "\n"
        for source, found in zip(sources, translated(sources), strict=True)
    ]
    write_atomically(Path(wanted.out).expanduser(), "".join(lines).encode())


def read_prompts(setting: str) -> list[str]:
    """The prompts of the file generate.prompts: `prompt` of each object in a .jsonl file, else each line.

    An empty line of a text file is an empty prompt, so answer k belongs to line k. Raises DataError for a file that
    cannot be read, and for a line that is no prompt.
    """
    path = Path(setting).expanduser()
    try:
        content = read_whole(path, MOST_BYTES)
    except OSError as error:
        raise DataError(f"generate.prompts={setting}: {error.strerror}") from None
    lines = content.removesuffix(b"\n").split(b"\n") if content else []
    read = prompt_of_json if path.suffix == ".jsonl" else text_of
    prompts = [read(line, f"line {number} of generate.prompts={setting}") for number, line in enumerate(lines, 1)]
    if not prompts:
        raise DataError(f"generate.prompts={setting}: it is empty. A text file has a prompt a line")
    return prompts


def text_of(line: bytes, where: str) -> str:
    """The text of a line, without the carriage return of Windows."""
    try:
        return line.removesuffix(b"\r").decode()
    except UnicodeDecodeError:
        raise DataError(f"{where}: it is not UTF-8. Save the file as UTF-8") from None


def prompt_of_json(line: bytes, where: str) -> str:
    try:
        found = parse_json(line)
    except ValueError as error:
        raise DataError(f"{where}: it is not JSON ({error}). {LINE}") from None
    if not isinstance(found, dict) or not isinstance(found.get("prompt"), str):
        raise DataError(f"{where}: no object with a text `prompt`. {LINE}")
    prompt: str = found["prompt"]
    if any("\ud800" <= letter <= "\udfff" for letter in prompt):
        raise DataError(f"{where}: its prompt has half a surrogate pair, which is no character. Correct the line")
    return prompt


def note_spaces(prompts: Sequence[str], tokenizer: Tokenizer) -> None:
    """Says on stderr how many prompts end in the space that the next word's piece would begin with."""
    n = sum(re.search(r"\S $", prompt) is not None for prompt in prompts)  # indentation is a piece by itself
    if n and tokenizer.kind not in ("bytes", "words"):
        which = "the prompt ends" if len(prompts) == 1 else f"{n} of {len(prompts)} prompts end"
        print(f"note: {which} in a space, where the model has hardly seen text cut: leave it out", file=sys.stderr)


def typed_prompts() -> Iterator[str]:
    """The lines of stdin until it ends (Ctrl-D). A terminal shows `> ` before each. A line that is not UTF-8 is skipped
    with a message on stderr."""
    if sys.stdin.isatty():
        import readline  # noqa: F401  gives `input` the arrow keys and a history

        lines = iter(lambda: input("> ").encode(errors="surrogateescape"), None)
    else:
        lines = (line.removesuffix(b"\n") for line in sys.stdin.buffer)
    try:
        for line in lines:
            try:
                yield text_of(line, "this prompt")
            except DataError as error:
                print(error, file=sys.stderr)
    except EOFError:
        print()  # ends the line of `> `


def converse(texts: Texts) -> None:
    """Continues each line of stdin, until it ends or Ctrl-C."""
    with ended_by_ctrl_c():
        for prompt in typed_prompts():
            note_spaces([prompt], texts.tokenizer)
            try:
                show(texts, prompt)
            except ConfigError as error:  # generate.overflow refuses this prompt; the next may be shorter
                print(error, file=sys.stderr)


@contextmanager
def ended_by_ctrl_c() -> Iterator[None]:
    """Ctrl-C ends the `with`, not the program."""
    try:
        yield
    except KeyboardInterrupt:
        print(flush=True)


def show(texts: Texts, prompt: str) -> None:
    """Prints the texts of a prompt, a single one as it comes."""
    config = texts.config
    comes = config.samples == 1
    # A note, such as which attention was chosen, would stand in the middle of the text.
    with saying_nothing():
        for text in texts.of([prompt], show=partial(print, end="", flush=True) if comes else None):
            if not comes:
                print(f"--- generate.seed={config.seed + text.sample}\n{texts.as_read(prompt)}{text.text}", end="")
            print(flush=True)
            if config.logprobs:
                pieces = [repr(texts.tokenizer.decode([token])) for token in text.tokens]
                lines = [f"{x:10.4f}  {piece}\n" for x, piece in zip(text.logprobs, pieces, strict=True)]
                print(*lines, sep="", end="")
