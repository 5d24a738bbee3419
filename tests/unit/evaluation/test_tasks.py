"""Our adapter for lm-evaluation-harness against the harness's own for Hugging Face's models, and a scorer of ours."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lm_eval.api.instance import Instance

from ngpt_train.config import load_config
from ngpt_train.data.tokenizers.hugging_face import HuggingFaceTokenizer
from ngpt_train.evaluation.tasks.adapter import Adapter, Scored, log_likelihoods
from ngpt_train.interop.importing import Imported, write_run
from ngpt_train.models import Decoder, build_model, export_weights
from ngpt_train.models.gpt.keys import GPTConfig
from tests.properties.architectures import ARCHITECTURES
from tests.unit.evaluation.large import ALONE, large
from tests.unit.interop.test_exchange import exported, restored_from

CONTEXT = 24
SIZES = {"d_model": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "d_mlp": 64, "context": CONTEXT}
TEXT = "the model reads a row of tokens, and moves every vector towards it. It learns; it forgets! "
WORDS = TEXT.split()


@pytest.fixture(scope="module")
def tokenizer() -> HuggingFaceTokenizer:
    """A byte-level BPE whose pieces join words and the letters around a space, trained here."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=["<eos>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    made.train_from_iterator([TEXT * 3], trainer)
    return HuggingFaceTokenizer(made.to_str().encode(), "<eos>", "a test")


def there_and_here(options: list[str], tokenizer: HuggingFaceTokenizer, directory: Path) -> tuple[Any, Adapter]:
    """The harness's own adapter on an exported model, and ours on its checkpoint."""
    pytest.importorskip("accelerate", reason="the harness's adapter for Hugging Face needs accelerate")
    from lm_eval.models.huggingface import HFLM

    sizes = [f"model.{name}={n}" for name, n in SIZES.items()]
    config = load_config(
        ["scale=debug", "tokenizer=bytes", *options, *sizes, f"model.vocab_size={tokenizer.vocab_size}"]
    )
    weights = export_weights(large(config.model, 4, seed=1))
    run = write_run(Imported(config, weights, tokenizer, "a test", None, []), "here", directory / "run")
    out, restored = exported(run, directory / "exported"), restored_from(run)
    theirs = HFLM(pretrained=str(out), device="cpu", dtype="float32", batch_size=4, trust_remote_code=True)
    return theirs, Adapter(restored.model, restored.tokenizer, ALONE)


def requests(kind: str, arguments: Sequence[tuple]) -> list[Instance]:
    return [Instance(kind, {}, given, i, metadata=("a_task", i, 1)) for i, given in enumerate(arguments)]


def pairs() -> list[tuple[str, str]]:
    """Contexts from nothing to far beyond the model's, with spaces at the boundary, in front of and behind it."""
    generator = np.random.default_rng(0)
    found = [("", " the model"), ("the", "model"), ("It ", "learns"), ("a row  ", "of"), ("the", "\n model")]
    for length in (1, 3, 8, 20, 60):
        words = [WORDS[i] for i in generator.integers(0, len(WORDS), length)]
        found += [(" ".join(words), f" {WORDS[i]} {WORDS[-i]}") for i in generator.integers(1, 9, 3)]
    return found


@pytest.mark.parametrize("options", [["model=gpt"], ["model=gpt", "model.qk_norm=true"], ["model=ngpt"]], ids=" ".join)
def test_equals_the_harness_on_the_exported_model(
    options: list[str], tokenizer: HuggingFaceTokenizer, tmp_path: Path
) -> None:
    """Request by request. Caught: no eos in front, here or in the exported tokenizer, a boundary one id off, a context
    cut off on the right, a score of the padding."""
    theirs, ours = there_and_here(options, tokenizer, tmp_path)
    asked = requests("loglikelihood", pairs())
    found, expected = ours.loglikelihood(asked), theirs.loglikelihood(asked, disable_tqdm=True)
    np.testing.assert_allclose([x for x, _ in found], [x for x, _ in expected], rtol=2e-5)
    assert [x for _, x in found] == [x for _, x in expected]
    assert max(len(tokenizer.encode(context)) for context, _ in pairs()) > 2 * CONTEXT

    texts = requests("loglikelihood_rolling", [(TEXT,), ("It learns",), (TEXT * 2,)])
    expected = theirs.loglikelihood_rolling(texts, disable_tqdm=True)
    np.testing.assert_allclose(ours.loglikelihood_rolling(texts), expected, rtol=2e-5)

    options = {"until": [" a", "w"], "max_gen_toks": 8}
    asked = requests("generate_until", [(context, dict(options)) for context, _ in pairs() if context])
    written = ours.generate_until(asked)
    assert written == theirs.generate_until(asked, disable_tqdm=True)
    assert len(set(written)) > 3


def greedy_continuation(model: Decoder, ids: list[int], n: int) -> list[int]:
    for _ in range(n):
        ids = [*ids, int(model(torch.tensor([ids[-CONTEXT:]]))[0, -1].argmax())]
    return ids[-n:]


@torch.no_grad()
def test_scores_by_hand(tokenizer: HuggingFaceTokenizer) -> None:
    """A forward pass for each id. Caught: a greedy continuation called unlikely, a continuation that is longer than the
    context cut off."""
    model = large(GPTConfig(**SIZES, vocab_size=tokenizer.vocab_size), 4, seed=1).double().eval()
    before = [tokenizer.eos, *tokenizer.encode("It learns;").tolist()]
    likely = greedy_continuation(model, before, 5)
    unlikely = [*likely[:-1], (likely[-1] + 1) % tokenizer.vocab_size]
    long = tokenizer.encode(TEXT * 2).tolist()
    scored = [Scored([*before, *after], len(after)) for after in (likely, unlikely, long)]
    found, greedy = log_likelihoods(model, scored, ALONE)
    for value, (ids, n) in zip(found, scored, strict=True):
        # The target at place i of a long continuation is read in the stretch of `context` targets that it lies in.
        expected = 0.0
        for first in range(len(ids) - n, len(ids), CONTEXT):
            end = min(first + CONTEXT, len(ids))
            read = ids[max(0, end - 1 - CONTEXT) : end - 1]
            log_p = model(torch.tensor([read]))[0].log_softmax(-1)
            expected += sum(float(log_p[i - end, ids[i]]) for i in range(first, end))
        assert value == pytest.approx(expected, rel=1e-12)
    assert greedy.tolist() == [True, False, False]


def test_joined_at_the_boundary(tokenizer: HuggingFaceTokenizer) -> None:
    """Where the tokenizer joins the end of the context with all of the continuation, the harness is left without a
    continuation, and fails; here it is the joined id. Caught: a request without ids to score."""
    ours = Adapter(build_model(GPTConfig(**SIZES, vocab_size=tokenizer.vocab_size)), tokenizer, ALONE)
    joined = tokenizer.encode("the model").tolist()
    assert len(joined) <= len(tokenizer.encode("the mode"))
    same = [a for a, b in zip(joined, tokenizer.encode("the mode").tolist(), strict=False) if a == b]
    expected = [tokenizer.eos, *same], joined[len(same) :]
    assert ours._encode_pair("the mode", "l") == expected


@pytest.mark.parametrize("name", ["ntransformer", "gpt_encoder_decoder"])
@torch.no_grad()
def test_encoder_decoder(name: str, tokenizer: HuggingFaceTokenizer) -> None:
    """The encoder reads the context without its last id, as in training. Caught: an eos in front, the last id in both,
    a source cut off on the right, a decoder that reads more ids than in training."""
    S, T = 8, 6
    options = {"d_model": 32, "n_layers": 2, "n_heads": 2, "vocab_size": tokenizer.vocab_size, "context": S + T}
    config = ARCHITECTURES[name].config(**options, n_encoder_layers=1, source_context=S)
    model = build_model(config, seed=0).double().eval()
    for context, continuation in [
        ("It", " learns"),
        (TEXT.strip(), " the model reads"),
        (TEXT.strip(), " " + TEXT),
        ("", "the"),
    ]:
        before = tokenizer.encode(context).tolist() or [tokenizer.eos]
        after = tokenizer.encode(context + continuation).tolist()[len(tokenizer.encode(context)) :]
        ids, expected = [*before, *after], 0.0
        for first in range(len(before), len(ids), T):
            given, targets = ids[first - 1 : first + T][:T], ids[first : first + T]
            source = ids[max(0, first - 1 - S) : first - 1]
            doc_ids = torch.tensor([[0] * len(source) + [-1] * (S - len(source)) + [0] * len(given)])
            doc_ids[0, 0] = 0
            row = torch.tensor([[*source, *[0] * (S - len(source)), *given]])
            log_p = model(row, doc_ids=doc_ids)[0].log_softmax(-1)
            expected += sum(float(log_p[i, target]) for i, target in enumerate(targets))
        ((found, _),) = Adapter(model, tokenizer, ALONE).loglikelihood(
            requests("loglikelihood", [(context, continuation)])
        )
        assert found == pytest.approx(expected, rel=1e-12)
