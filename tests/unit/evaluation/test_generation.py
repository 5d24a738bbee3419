"""Texts of several prompts at once, their tokens, and their text as it comes."""

import random
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor

from ngpt_train.config.sections.verbs import GenerateConfig
from ngpt_train.core.errors import ConfigError, DataError
from ngpt_train.data.tokenizers.tokenizer import BytesTokenizer, Tokenizer, WordsTokenizer
from ngpt_train.evaluation.continued_prompts import REPLACEMENT, ComingText, Texts
from ngpt_train.evaluation.sampling import continue_rows, restricted, row_of, sample
from ngpt_train.models import Decoder
from ngpt_train.models.decoding import Recomputed, cached
from ngpt_train.models.gpt.keys import GPTConfig
from ngpt_train.models.gpt_encoder_decoder.keys import GPTEncoderDecoderConfig
from ngpt_train.verbs.generate import note_spaces, read_prompts
from tests.unit.evaluation.large import large

BYTES = BytesTokenizer()
EOS = BYTES.eos
WORDS = WordsTokenizer(b"<eos>\n<unk>\n" + b"".join(b"w%d\n" % i for i in range(60)), "here")
PROMPTS = ["the model", "", "a", "of the loss and", "x" * 50]


def model_of(encoder: bool = False) -> Decoder:
    """With logits that differ enough for a text to have a sense of its own; the vocabulary is padded."""
    sizes = {"d_model": 16, "n_layers": 1, "n_heads": 2, "vocab_size": 261}
    if encoder:
        config = GPTEncoderDecoderConfig(**sizes, context=32, source_context=12, n_encoder_layers=1)
        return large(config, 30).eval()
    return large(GPTConfig(**sizes, context=24), 30).eval()


def texts_of(prompts: list[str], encoder: bool = False, **options: object) -> list[tuple[str, str, list[int]]]:
    config = GenerateConfig(**{"temperature": 1.0, "max_new_tokens": 20} | options)  # type: ignore[arg-type]
    return [(text.text, text.end, text.tokens) for text in Texts(model_of(encoder), BYTES, config).of(prompts)]


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"temperature": 0.5}, [0, 1, 2, 3, 4]),
        ({"temperature": 0}, [1]),
        ({"top_k": 2}, [1, 3]),
        ({"top_p": 0.5}, [1]),
        ({"top_p": 0.65}, [1, 3]),
        ({"top_p": 0.89}, [1, 2, 3]),
        ({"top_p": 1.0}, [0, 1, 2, 3, 4]),
    ],
    ids=str,
)
def test_what_is_drawn(options: dict[str, float], kept: list[int]) -> None:
    """Against the softmax over the tokens that the options leave."""
    logits = torch.tensor([0.0, 3.0, 1.0, 2.0, -1.0])
    config = GenerateConfig(**{"temperature": 1} | options)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(0)
    drawn = torch.bincount(torch.tensor([sample(logits, config, generator) for _ in range(4000)]), minlength=5) / 4000
    assert drawn.nonzero().flatten().tolist() == kept
    expected = torch.softmax(logits[kept] / (config.temperature or 1), 0)
    torch.testing.assert_close(drawn[kept], expected, rtol=0, atol=0.03)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("encoder", [False, True])
@pytest.mark.parametrize("options", [{}, {"top_k": 20, "top_p": 0.9}, {"temperature": 0.0}], ids=["all", "few", "one"])
def test_a_seed_gives_the_text_that_it_gave(encoder: bool, options: dict[str, float]) -> None:
    """The loop as it was before there was a cache, over the context's end and to an eos.

    Caught: random numbers that are drawn in another order, or for tokens that are not sampled; ids beyond the
    tokenizer's.
    """
    for seed in (0, 5):
        config = GenerateConfig(**{"temperature": 1.0, "max_new_tokens": 40, "seed": seed} | options)
        model, prompt = model_of(encoder), torch.tensor([EOS, 5, 7, 9])
        generator, new = torch.Generator().manual_seed(seed), prompt[:0]
        for _ in range(40):
            token = sample(model.next_token_logits(prompt, new)[:257], config, generator)
            if token == EOS:
                break
            new = torch.cat([new, new.new_tensor([token])])
        for reader in (cached(model), Recomputed(model)):
            row = row_of(model, prompt, seed)
            continue_rows(reader, [row], config, BYTES, lambda *_: False)
            assert row.new == new.tolist()


@pytest.mark.parametrize("encoder", [False, True])
def test_a_text_does_not_depend_on_its_neighbours(encoder: bool) -> None:
    """Nor on the batch or the order of ends. Caught: one generator for all rows, samples that share a seed."""
    together = texts_of(PROMPTS, encoder, samples=2, batch_rows=3, min_new_tokens=2)
    alone = [
        texts_of([prompt], encoder, seed=seed, min_new_tokens=2, cache=False)[0]
        for prompt in PROMPTS
        for seed in (0, 1)
    ]
    assert together == alone
    assert len({text for text, _, _ in together}) == 10


def test_logprobs_are_the_models_own() -> None:
    """Among all its ids, before every option. Caught: logprobs of the sampled distribution, or one token late."""
    config = GenerateConfig(max_new_tokens=15, temperature=0.3, top_k=3, repetition_penalty=1.5, min_new_tokens=15)
    model = model_of()
    (text,) = Texts(model, BYTES, config).of(["ab"])
    read = torch.tensor([EOS, *b"ab", *text.tokens])
    with torch.no_grad():
        expected = model(read[None, :-1])[0].double().log_softmax(-1)[2:].gather(1, read[3:, None])[:, 0]
    assert len(text.tokens) == 15
    assert text.logprobs == pytest.approx(expected.tolist(), rel=1e-5)


def test_options_are_hugging_faces() -> None:
    """On logits of both signs and tokens that repeat. Caught: penalties that raise negative logits, n-grams that end
    too early or late, min_p of the logits."""
    transformers = pytest.importorskip("transformers")
    generator = torch.Generator().manual_seed(0)
    for n in (1, 2, 3, 9):
        for length in (1, 2, 3, 40):
            read = torch.randint(5, (length,), generator=generator)
            logits = torch.randn(12, generator=generator)

            def theirs(name: str, *arguments: object, ids: Tensor = read, scores: Tensor = logits) -> Tensor:
                return getattr(transformers.generation.logits_process, name)(*arguments)(ids[None], scores[None])[0]

            def ours(ids: Tensor = read, scores: Tensor = logits, **options: object) -> Tensor:
                config = GenerateConfig(**{"max_new_tokens": 9} | options)  # type: ignore[arg-type]
                return restricted(scores, ids.tolist(), min(3, len(ids)), config, eos=7)

            assert torch.equal(ours(no_repeat_ngram_size=n), theirs("NoRepeatNGramLogitsProcessor", n))
            for penalty in (1.3, 0.7):
                expected = theirs("RepetitionPenaltyLogitsProcessor", penalty)
                assert torch.equal(ours(repetition_penalty=penalty), expected)
                assert (expected != logits).any()
            for least in (3, 4):
                expected = theirs("MinNewTokensLengthLogitsProcessor", max(0, length - 3), least, 7)
                assert torch.equal(ours(min_new_tokens=least), expected)
            allowed = theirs("MinPLogitsWarper", 0.2).isfinite()
            config = GenerateConfig(temperature=1, min_p=0.2)
            drawn = {sample(logits, config, generator) for _ in range(60)}
            assert drawn <= set(allowed.nonzero().flatten().tolist())
            assert not allowed.all()


def test_a_text_ends_where_every_token_is_forbidden() -> None:
    ((_, end, tokens),) = texts_of([""], no_repeat_ngram_size=1, max_new_tokens=300)
    assert end == "nothing_left"
    assert sorted(tokens) == list(range(256))


@pytest.mark.parametrize("tokenizer", [BYTES, WORDS], ids=["bytes", "words"])
def test_pieces_are_whole_characters_and_make_up_the_text(tokenizer: Tokenizer) -> None:
    """Characters of one to four bytes, some cut. Caught: half a character that is shown; text that is lost."""
    draw = random.Random(0)
    for _ in range(200):
        text = "".join(draw.choice("ab é€😀\n") for _ in range(draw.randrange(9)))
        prompt = tokenizer.encode(text).tolist()
        new = tokenizer.encode("".join(draw.choice("ab é€😀w1 w2 ") for _ in range(9))).tolist()
        if tokenizer is BYTES:
            new = [token for token in new if draw.random() < 0.9]
        coming = ComingText(tokenizer, prompt, [])
        pieces = [coming.add(token) for token in new]
        whole = tokenizer.decode(prompt) + "".join(pieces)
        assert tokenizer.decode([*prompt, *new]).startswith(whole)
        assert not any(piece.endswith(REPLACEMENT) for piece in pieces)
        assert whole + coming.end() == tokenizer.decode([*prompt, *new])


def test_a_stop_string_is_never_shown() -> None:
    """Whatever tokens it lies in. Caught: its beginning in an earlier piece; a later one of two; a false beginning that
    stays away."""
    for text, stops, expected in [
        ("one\n\ntwo", ["\n\n"], "one"),
        ("a STOP b END", ["END", "STOP"], "a "),
        ("ababac!", ["abac"], "ab"),
        ("xabc!", ["bc", "abc"], "x"),
        ("a\nb", ["\n\n"], "a\nb"),
        ("né€", ["€"], "né"),
        ("it ends\n", ["\n\n"], "it ends\n"),
    ]:
        coming = ComingText(BYTES, list(b"STOP"), stops)
        shown = ""
        for token in text.encode():
            shown += coming.add(token)
            assert expected.startswith(shown)
            if coming.stopped:
                break
        assert coming.stopped == (expected != text)
        assert shown + coming.end() == coming.text == expected


def test_stops_end_a_row_and_leave_the_others() -> None:
    free = texts_of(PROMPTS)
    stop = free[0][0][4:6]
    for (text, end, tokens), (text_before, _, tokens_before) in zip(texts_of(PROMPTS, stop=[stop]), free, strict=True):
        assert text == text_before.partition(stop)[0]
        assert (end == "stop") == (stop in text_before)
        assert tokens_before[: len(tokens)] == tokens
    config = GenerateConfig(stop=["a\\n", "\\\\n", "\\t"])
    assert Texts(model_of(), BYTES, config).stops == ["a\n", "\\n", "\t"]


@pytest.mark.parametrize(
    ("encoder", "prompt", "new", "fits"),
    [(False, 20, 4, True), (False, 20, 5, False), (True, 13, 20, True), (True, 14, 20, False), (True, 2, 21, False)],
)
def test_overflow(encoder: bool, prompt: int, new: int, fits: bool, caplog: pytest.LogCaptureFixture) -> None:
    """A decoder reads an eos, the prompt, and all new tokens but the last."""
    caplog.set_level("INFO")
    options = {"max_new_tokens": new, "min_new_tokens": new}
    assert len(texts_of(["y" * prompt], encoder, **options)[0][2]) == new
    assert ("computed again for each token" in caplog.text) != fits
    if fits:
        texts_of(["y" * prompt], encoder, overflow="refuse", **options)
    else:
        with pytest.raises(ConfigError, match=r"overflow=refuse: the prompt has \d+ tokens"):
            texts_of(["y" * prompt], encoder, overflow="refuse", **options)


def test_a_prompt_that_ends_in_a_space_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """Caught: a hint where the space does no harm, as indentation or a token by itself; none where it does."""
    prompts = ["import ", "if x:\n    ", "import", "", "x "]

    def said(kind: str, prompts: list[str]) -> str:
        note_spaces(prompts, cast(Tokenizer, SimpleNamespace(kind=kind)))
        return capsys.readouterr().err

    for kind in ("sentencepiece", "gpt2", "hf"):
        assert said(kind, prompts).startswith("note: 2 of 5 prompts end in a space")
        assert said(kind, prompts[:1]).startswith("note: the prompt ends in a space")
        assert said(kind, prompts[1:4]) == ""
    assert said("bytes", prompts) == said("words", prompts) == ""


def test_files_of_prompts(tmp_path: Path) -> None:
    """Caught: an empty line that is left out, so that line k of the answers is another's."""
    path = tmp_path / "prompts.txt"
    path.write_bytes(b"one\r\n\n \xe2\x82\xac{}\n")
    assert read_prompts(str(path)) == ["one", "", " €{}"]
    jsonl = tmp_path / "prompts.jsonl"
    jsonl.write_text('{"prompt": "a\\nb", "id": 3}\n{"prompt": ""}')
    assert read_prompts(str(jsonl)) == ["a\nb", ""]
    for content, problem in [
        ("", "it is empty"),
        ('{"prompt": "a"}\n{"text": "b"}\n', "line 2 of .* no object with a text `prompt`"),
        ('{"prompt": 3}\n', "line 1 of .* no object with a text `prompt`"),
        ("hello\n", "line 1 of .* it is not JSON"),
        ('{"prompt": "\\ud800"}\n', "half a surrogate pair"),
    ]:
        jsonl.write_text(content)
        with pytest.raises(DataError, match=problem):
            read_prompts(str(jsonl))
    path.write_bytes(b"good\n\xff\n")
    with pytest.raises(DataError, match=r"line 2 of .* it is not UTF-8"):
        read_prompts(str(path))


def test_keys_that_exclude_each_other(tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.touch()
    for options, problem in [
        ({"prompt": "a", "interactive": True}, "generate.prompt, generate.interactive: prompts from several places"),
        ({"prompt": "a", "prompts": str(there)}, "generate.prompt, generate.prompts: prompts from several places"),
        ({"interactive": True, "out": "x"}, "generate.interactive=true, generate.out=x: the texts are printed"),
        ({"min_new_tokens": 201}, "generate.min_new_tokens=201: more than generate.max_new_tokens"),
        ({"stop": ["a", ""]}, "generate.stop: an empty string"),
        ({"prompts": str(tmp_path / "no")}, "generate.prompts=.*/no: no such file"),
        ({"out": str(there)}, "generate.out=.*/there: the file exists already"),
    ]:
        with pytest.raises(ConfigError, match=problem):
            GenerateConfig(**options).check_texts()  # type: ignore[arg-type]
    GenerateConfig(prompts=str(there), out=str(tmp_path / "new"), stop=["\n"]).check_texts()
