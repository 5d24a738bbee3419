"""Encoder-decoders beyond the contract: a source, padding, and prompts that are read, then answered."""

import dataclasses

import pytest
import torch

from ngpt_train.models import build_model, export_weights, load_weights
from ngpt_train.training import build_state, train_step
from tests.processes.test_equality import RECIPES
from tests.properties.architectures import (
    ARCHITECTURES,
    SMALL,
    Size,
    config,
    documents,
    error,
    jittered,
    random_batch,
    shapes,
)
from tests.properties.runs import padded_rows, run_config
from tests.reference.attention import loss_sum

GROUPED = Size(24, 3, 6, 31, n_kv_heads=2, d_mlp=50, n_encoder_layers=2, source_context=5)

architectures = pytest.mark.parametrize("name", [name for name, each in ARCHITECTURES.items() if each.has_encoder])
sizes = pytest.mark.parametrize("size", [SMALL, GROUPED], ids=["small", "grouped"])


@architectures
@sizes
def test_padding_is_as_if_it_were_not_there(name: str, size: Size) -> None:
    """Whatever stands in it; and at the end of the source it is as good as a shorter source.

    Caught: padding masked in one of encoder, decoder and cross-attention but not in the others.
    """
    architecture = ARCHITECTURES[name]
    model, weights = jittered(architecture, size)
    s = size.source_context
    tokens, targets = random_batch(architecture, size, 3, 8)
    targets, doc_ids = documents(architecture, size, targets)
    padding = doc_ids < 0
    assert padding[:, :s].any()
    assert padding[:, s:].any()
    others = torch.where(padding, (tokens + 7) % size.vocab_size, tokens)
    real = ~padding[:, s:]
    with torch.no_grad():
        before, after = model(tokens, doc_ids=doc_ids), model(others, doc_ids=doc_ids)
        assert torch.equal(after[real], before[real])
        assert (model(others)[real] != model(tokens)[real]).any()  # not so if nobody says that it is padding
        assert model.loss(others, targets, doc_ids)[0].item() == model.loss(tokens, targets, doc_ids)[0].item()

        shorter, _ = jittered(architecture, dataclasses.replace(size, source_context=s - 2))
        load_weights(shorter, weights)
        ids = torch.zeros_like(tokens)
        ids[:, s - 2 : s] = -1
        ids[:, -3:] = -1
        kept = [*range(s - 2), *range(s, tokens.shape[1] - 3)]
        assert error(model(tokens, doc_ids=ids)[:, :-3], shorter(tokens[:, kept])) < 1e-12


@architectures
def test_targets_in_the_source_do_not_count(name: str) -> None:
    """Caught: n_tokens of the whole row."""
    model, _ = jittered(ARCHITECTURES[name], SMALL)
    tokens, targets = random_batch(ARCHITECTURES[name], SMALL, 2, 6)
    expected, n_tokens = model.loss(tokens, targets)
    targets[:, : SMALL.source_context] = 1
    actual, n_actual = model.loss(tokens, targets)
    assert (actual.item(), int(n_actual)) == (expected.item(), int(n_tokens))
    with pytest.raises(ValueError, match="none is left to decode"):
        model(tokens[:, : SMALL.source_context])


def test_both_stacks_are_blocks() -> None:
    """At the TnT paper's size; names and shapes are the reference's.

    Caught: an encoder that is not compiled, recomputed and sharded block by block.
    """
    size = Size(1024, 6, 8, 32100, n_kv_heads=8, d_mlp=4096, n_encoder_layers=5, source_context=1024)
    for architecture in (each for each in ARCHITECTURES.values() if each.has_encoder):
        with torch.device("meta"):
            model = build_model(config(architecture, size, context=1536))
        assert len(model.blocks()) == 11
        assert {key: tuple(x.shape) for key, x in export_weights(model).items()} == shapes(architecture, size)


@architectures
def test_generation_reads_the_prompt_as_a_source(name: str) -> None:
    """The last token of the prompt begins the decoder; the source is the text before it, padded or its end.

    Caught: the prompt's last token in both halves, padding that is attended to, an old end of the new text.
    """
    model, weights = jittered(ARCHITECTURES[name], SMALL)
    s, context = SMALL.source_context, 96
    generator = torch.Generator().manual_seed(0)
    for p, n in ((s + 1, 0), (s + 1, 4), (s + 6, 3), (4, 0), (4, 5), (2, 2), (s + 1, context)):
        prompt, new = (torch.randint(SMALL.vocab_size, (length,), generator=generator) for length in (p, n))
        source, written = prompt[:-1][-s:], torch.cat([prompt[-1:], new])[-(context - s) :]
        size = dataclasses.replace(SMALL, source_context=len(source))
        expected = ARCHITECTURES[name].logits(weights, torch.cat([source, written])[None], size)[0, -1]
        assert error(model.next_token_logits(prompt, new), expected) < 1e-12
    assert model.next_token_logits(prompt[:1], new[:3]).isfinite().all()


def test_training_through_the_step_contract() -> None:
    """A step's loss is the reference's with the weights before the step, for all sizes of micro batches.

    Caught: document ids that the step does not hand on.
    """
    name, size, runs = "ntransformer", dataclasses.replace(SMALL, source_context=10), []
    for micro_rows in (1, 4):
        given = run_config(name, size, RECIPES[name], rows=8, context=32, micro_rows=micro_rows, parallel="single")
        state = build_state(given)
        losses = []
        for step in range(4):
            batch = padded_rows(8, 32, size, seed=step)
            weights = {key: x.double() for key, x in export_weights(state.model).items()}
            result = train_step(state, list(zip(*(part.split(micro_rows) for part in batch), strict=True)))
            losses.append(result.loss.item())
            tokens, targets, doc_ids = batch
            assert int(result.n_tokens) == int((targets != -100).sum())
            logits = ARCHITECTURES[name].logits(weights, tokens, size, doc_ids)
            expected = loss_sum(logits, targets[:, 10:]) / result.n_tokens
            assert losses[-1] == pytest.approx(expected.item(), rel=1e-6)
        assert losses[-1] < losses[0]
        runs.append(losses)
        final = export_weights(state.model)
        assert all((x.norm(dim=-1) - 1).abs().max() < 1e-6 for x in final.values() if x.ndim == 2)
    assert runs[0] == pytest.approx(runs[1], rel=1e-6)
