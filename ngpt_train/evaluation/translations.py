"""Translations of texts by a model, and their scores beside references."""

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ngpt_train.data.tokenizers.tokenizer import Tokenizer
from ngpt_train.distributed.world import World
from ngpt_train.evaluation.beam_search import translate
from ngpt_train.evaluation.validation import longest_first
from ngpt_train.models.encoder_decoder import EncoderDecoder

logger = logging.getLogger(__name__)

BATCH_TOKENS = 65_536  # of all hypotheses' sources and of the longest translations that they may become


class Translation(NamedTuple):
    text: str
    score: float  # log-probability / length^penalty


def translations(
    model: EncoderDecoder,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    n_beams: int,
    length_penalty: float,
    max_new_tokens: int | None = None,
) -> list[Translation]:
    """The best translation of each text, in their order. Texts of like length are translated together.

    A text that is longer than half a row is cut, and the log says how many are.
    """
    model.eval()  # norms over the batch take their running statistics
    limit, device = model.config.context // 2, model.embedding.device
    ids = [tokenizer.encode(text) for text in texts]
    if too_long := sum(len(one) + 1 > limit for one in ids):
        logger.warning("%d of %d texts are cut to half a row, model.context / 2 = %d tokens", too_long, len(ids), limit)
    sources = [torch.from_numpy(np.append(one[: limit - 1], tokenizer.eos).astype(np.int64)) for one in ids]
    found: dict[int, Translation] = {}
    most_new = min(max_new_tokens or limit, limit)
    n_tokens = [n_beams * (len(source) + most_new) for source in sources]
    for batch in longest_first(n_tokens, lambda n: BATCH_TOKENS // n):
        of_batch = [sources[number].to(device) for number in batch]
        kept = translate(model, of_batch, tokenizer.eos, tokenizer.vocab_size, n_beams, length_penalty, most_new)
        for number, (best, *_) in zip(batch, kept, strict=True):
            found[number] = Translation(whole_words(tokenizer.decode(best.ids), tokenizer), best.score)
    return [found[number] for number in range(len(texts))]


def whole_words(text: str, tokenizer: Tokenizer) -> str:
    """The text of a tokenizer of words without subword-nmt's marks: `un@@ related` is one word."""
    return f"{text} ".replace("@@ ", "").rstrip(" ") if tokenizer.kind == "words" else text


def translated_pairs(
    model: EncoderDecoder,
    tokenizer: Tokenizer,
    pairs: Sequence[Sequence[str]],
    world: World,
    n_beams: int,
    length_penalty: float,
) -> tuple[list[str], list[str]]:
    """Translations and references, a line each, in the order of the pairs. A collective call: each rank, which has
    whole weights, translates a part."""
    mine = [source for source, _ in pairs[world.rank :: world.size]]
    found = world.gather(translations(model, tokenizer, mine, n_beams, length_penalty))
    texts = [one_line(found[k % world.size][k // world.size].text) for k in range(len(pairs))]
    return texts, [one_line(whole_words(reference, tokenizer)) for _, reference in pairs]


def one_line(text: str) -> str:
    """The text with a space for each line break, so that line k of a file is text k."""
    return " ".join(text.splitlines())


def scores(found: Sequence[str], references: Sequence[str], moses: str | None = None) -> dict[str, Any]:
    """Of sacrebleu, all from 0 to 100: `bleu` of the words between white space, as papers with tokenized texts count;
    `sacrebleu`, which tokenizes by itself, and `chrf`, each with its signature. moses: the language of texts that Moses
    has tokenized, which the last two see without its spaces and escapes."""
    from sacrebleu.metrics import BLEU, CHRF  # of the extra [eval]

    result: dict[str, Any] = {"bleu": BLEU(tokenize="none").corpus_score(found, [references]).score}
    if moses is not None:
        from sacremoses import MosesDetokenizer

        detokenizer = MosesDetokenizer(lang=moses)
        found, references = ([detokenizer.detokenize(x.split()) for x in texts] for texts in (found, references))
    for name, metric in (("sacrebleu", BLEU()), ("chrf", CHRF())):
        result[name] = metric.corpus_score(found, [references]).score
        result[f"{name}_signature"] = str(metric.get_signature())
    return result
