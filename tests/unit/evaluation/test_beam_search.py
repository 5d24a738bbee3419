"""Beam search beside a search of all translations, and beside one without a cache."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from ngpt_train.config import load_config
from ngpt_train.evaluation.beam_search import Hypothesis, translate
from ngpt_train.models import build_model
from ngpt_train.models.decoding import CachedEncoderDecoder
from ngpt_train.models.encoder_decoder import EncoderDecoder
from ngpt_train.training.guards import NumericalError

EOS = 0


def model_of(architecture: str, *arguments: str, context: int = 24) -> EncoderDecoder:
    given = [
        f"model={architecture}",
        "scale=debug",
        "data=pairs",
        "data.path=x",
        f"model.context={context}",
        *arguments,
    ]
    torch.manual_seed(1)
    model = build_model(load_config(given).model).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():  # else all continuations are about as likely
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    model.project_()
    assert isinstance(model, EncoderDecoder)
    return model


@torch.no_grad()
def log_probabilities(model: EncoderDecoder, source: Tensor, texts: list[list[int]]) -> Tensor:
    """log p `(N, n + 1, V)` of each next token of N texts of n tokens, in one pass over rows without a cache."""
    n = len(texts[0])
    half = max(len(source), n + 1)
    rows = torch.zeros(len(texts), 2 * half, dtype=torch.long)
    doc_ids = torch.full_like(rows, -1)
    rows[:, : len(source)], doc_ids[:, : len(source)] = source, 0
    rows[:, half : half + n + 1] = torch.tensor([[EOS, *ids] for ids in texts])
    doc_ids[:, half : half + n + 1] = 0
    logits = model(rows, doc_ids=doc_ids)
    assert isinstance(logits, Tensor)
    return logits[:, : n + 1].double().log_softmax(-1)


def all_translations(model: EncoderDecoder, source: Tensor, n: int, penalty: float, V: int) -> list[Hypothesis]:
    """Every translation of at most n tokens, eos included, or n without it; best first."""
    found = []
    for length in range(n + 1):
        texts = [list(ids) for ids in itertools.product(range(1, V), repeat=length)]
        for ids, log_p in zip(texts, log_probabilities(model, source, texts).tolist(), strict=True):
            total = sum(log_p[k][token] for k, token in enumerate(ids))
            ended = total + log_p[length][EOS] if length < n else total
            found.append(Hypothesis(ended / min(length + 1, n) ** penalty, ids))
    return sorted(found, key=lambda one: -one.score)


@pytest.mark.parametrize("architecture", ["gpt_encoder_decoder", "ntransformer", "composed_encoder_decoder"])
@pytest.mark.parametrize("penalty", [0.0, 1.0])
def test_a_wide_beam_finds_the_best_of_all(architecture: str, penalty: float) -> None:
    """Caught: a hypothesis that is lost or ends too early; a score without eos or with another length; caches that do
    not follow their hypotheses; sources that see each other or their padding."""
    V, n = 4, 4
    model = model_of(architecture, f"model.vocab_size={V}")
    sources = [torch.tensor(ids) for ids in ([1, 2, EOS], [3, EOS], [2, 2, 1, 3, 1, EOS])]
    wide = (V - 1) ** n + 1
    for source, kept in zip(sources, translate(model, sources, EOS, V, wide, penalty, n), strict=True):
        expected = all_translations(model, source, n, penalty, V)
        assert [one.ids for one in kept[:5]] == [one.ids for one in expected[:5]]
        assert [one.score for one in kept[:5]] == pytest.approx([one.score for one in expected[:5]], rel=1e-9)


@pytest.mark.parametrize(("n_beams", "penalty"), [(1, 1.0), (2, 0.6), (5, 1.0)])
def test_a_narrow_beam_beside_one_without_a_cache(n_beams: int, penalty: float) -> None:
    """Caught: a beam that is not greedy decoding where it has one hypothesis; 2 K candidates that are K; an ended
    hypothesis beyond the first K; a text that goes on, or stops, because another does."""
    model = model_of(
        "composed_encoder_decoder", "model.vocab_size=12", "model.norm=layer", "model.positions=sinusoidal"
    )
    draw = torch.Generator().manual_seed(0)
    sources = [
        torch.cat([torch.randint(1, 12, (int(n),), generator=draw), torch.tensor([EOS])])
        for n in torch.randint(1, 9, (12,), generator=draw)
    ]
    together = translate(model, sources, EOS, 12, n_beams, penalty, 8)
    lengths = set()
    for source, kept in zip(sources, together, strict=True):
        running: list[tuple[float, list[int]]] = [(0.0, [])]
        ended: list[Hypothesis] = []
        for n in range(1, 9):
            following = log_probabilities(model, source, [ids for _, ids in running])[:, -1].tolist()
            candidates = [
                (log_p + value, ids, token)
                for (log_p, ids), values in zip(running, following, strict=True)
                for token, value in enumerate(values)
            ]
            best = sorted(candidates, key=lambda one: -one[0])[: 2 * n_beams]
            for log_p, ids, token in best[:n_beams]:
                if token == EOS or n == 8:
                    ended.append(Hypothesis(log_p / n**penalty, ids if token == EOS else [*ids, token]))
            ended = sorted(ended, key=lambda one: -one.score)[:n_beams]
            running = [(log_p, [*ids, token]) for log_p, ids, token in best if token != EOS][:n_beams]
            if len(ended) == n_beams and ended[-1].score >= running[0][0] / n**penalty:
                break
        assert [one.ids for one in kept] == [one.ids for one in ended]
        assert [one.score for one in kept] == pytest.approx([one.score for one in ended], rel=1e-9)
        lengths.add(len(kept[0].ids))
        if n_beams == 1:
            alone = log_probabilities(model, source, [kept[0].ids])[0].argmax(-1).tolist()
            assert alone[: len(kept[0].ids)] == kept[0].ids
    assert len(lengths) > 1
    assert all(math.isfinite(one.score) for kept in together for one in kept)


def test_a_vocabulary_with_more_ids_than_the_tokenizer() -> None:
    """Caught: an id that the tokenizer lacks; caches as long as a row, whatever the texts; weights that are NaN."""
    model = model_of("gpt_encoder_decoder", "model.vocab_size=12", context=400)
    kept = translate(model, [torch.tensor([1, 2, EOS])] * 5, EOS, 3, 4, 1.0, 9)
    assert all(0 < i < 3 for of_text in kept for one in of_text for i in one.ids)
    decoder = CachedEncoderDecoder(model)
    decoder.begin([torch.tensor([1, 2, EOS, EOS])])
    for _ in range(8):
        decoder.next({0: 1})
    slots = {attention.causal: cache.k.shape[2] for attention, cache in decoder.caches if cache.k is not None}
    assert slots[False] == 3
    assert 9 <= slots[True] <= 16
    with torch.no_grad():
        model.embedding.fill_(torch.nan)
    with pytest.raises(NumericalError, match="not finite"):
        translate(model, [torch.tensor([1, EOS])], EOS, 3)
