"""Dropout in every architecture: where it acts, and what its masks depend on."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from ngpt_train.core.errors import ConfigError
from ngpt_train.distributed.recomputation import recomputed
from ngpt_train.kernels import dropout
from ngpt_train.kernels.dropout import row_seeds
from ngpt_train.models import Decoder, build_model
from ngpt_train.models.composed.keys import ComposedConfig
from ngpt_train.models.layers.dropout import number_places
from tests.properties.architectures import ARCHITECTURES, SMALL, Architecture, documents, jittered, random_batch

PLACES = ("embedding_dropout", "residual_dropout", "attention_dropout")
ROWS, T = 4, 12
architectures = pytest.mark.parametrize("name", ARCHITECTURES)


def dropping(
    name: str, p: float = 0.5, places: tuple[str, ...] = PLACES, dtype: torch.dtype = torch.float64
) -> Decoder:
    """The model of an architecture with random weights, in training, with dropout in these places."""
    options = ARCHITECTURES[name].options | dict.fromkeys(places, p)
    return jittered(replace(ARCHITECTURES[name], options=options), SMALL, dtype)[0].train()


def seeds(rows: int = ROWS, step: int = 0) -> Tensor:
    return row_seeds(0, step, torch.arange(rows))


def batch(name: str, of_documents: bool = False) -> tuple[Tensor, ...]:
    architecture: Architecture = ARCHITECTURES[name]
    tokens, targets = random_batch(architecture, SMALL, ROWS, T)
    return (tokens, *documents(architecture, SMALL, targets)) if of_documents else (tokens, targets)


@architectures
@pytest.mark.parametrize("kept", [False, True])
def test_residual_dropout_is_of_all_that_is_added(name: str, kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With all values dropped, or all kept and doubled, the model is one without dropout whose sublayers' last matrices
    or, for NormFormer's attention, whose norm after them are multiplied by 0 or 2. Caught: a sublayer without dropout,
    dropout before NormFormer's norm, a factor in a place where none belongs."""
    monkeypatch.setattr(dropout, "kept", lambda p, seeds, shape: torch.full(shape, kept))
    tokens = batch(name)[0]
    with torch.no_grad():
        logits = dropping(name, places=("residual_dropout",))(tokens, seeds=seeds())
        expected = dropping(name, places=())
        for path, parameter in expected.named_parameters():
            after_attention = ("norm_post_attn", "norm_post_cross") if "normformer" in name else ("wo",)
            if any(word in path.split(".") for word in (*after_attention, "w_down")):
                parameter *= 2 if kept else 0
        torch.testing.assert_close(logits, expected(tokens), rtol=1e-11, atol=1e-12)
        assert (dropping(name, places=())(tokens) - logits).abs().max() > 1e-3 or (
            kept and name in ("ngpt", "ntransformer")
        )


@architectures
def test_embedding_dropout(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedding with its positions drops, before the first block, the source's too; nGPT's h stays on the
    sphere."""
    monkeypatch.setattr(dropout, "kept", lambda p, seeds, shape: torch.arange(shape[-1]).expand(shape) % 2 == 0)
    found: list[list[Tensor]] = []
    for places in (("embedding_dropout",), ()):
        model, first = dropping(name, places=places), []
        for blocks in (model.layers, getattr(model, "encoder", [])):
            for block in blocks[:1]:
                block.register_forward_pre_hook(lambda _, given, first=first: first.append(given[0]))
        model(batch(name)[0], seeds=seeds())
        found.append([h.to_read if isinstance(h, tuple) else h for h in first])
    assert len(found[0]) == (2 if ARCHITECTURES[name].has_encoder else 1)
    for h, plain in zip(*found, strict=True):
        expected = 2 * plain * (torch.arange(SMALL.d_model) % 2 == 0)
        if ARCHITECTURES[name].on_sphere:
            expected = expected / expected.norm(dim=-1, keepdim=True)
        torch.testing.assert_close(h, expected, rtol=1e-12, atol=0)


def test_activation_dropout_is_before_the_norm_of_the_hidden_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """W_down sees twice the kept values; with ffn_norm=norm a doubled hidden state is the same."""
    monkeypatch.setattr(dropout, "kept", lambda p, seeds, shape: torch.full(shape, True))
    keys = {"d_mlp": 24, "mlp": "plain", "activation": "relu", "norm_eps": 1e-30, "vocab_size": 20}
    keys |= {"n_layers": 2, "d_model": 16, "n_heads": 2, "psi_warmup_steps": 0, "group_scaling": 0}
    tokens = torch.randint(0, 20, (ROWS, T))
    for ffn_norm, factor in (("none", 2), ("norm", 1)):
        logits = []
        for p in (0.5, 0.0):
            shape = ComposedConfig(**keys, ffn_norm=ffn_norm, activation_dropout=p)
            torch.manual_seed(0)
            model = build_model(shape).double().train()
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64))
                    if p == 0 and "w_down" in name.split("."):
                        parameter *= factor
                logits.append(model(tokens, seeds=seeds()))
        torch.testing.assert_close(*logits, rtol=1e-9, atol=1e-9)


@architectures
def test_every_place_has_seeds_of_its_own(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught: two places, layers or halves of a model, or two rows, that drop the same."""
    seen: list[Tensor] = []
    real = dropout.kept
    monkeypatch.setattr(dropout, "kept", lambda p, seeds, shape: seen.append(seeds) or real(p, seeds, shape))
    dropping(name)(batch(name)[0], seeds=seeds())
    if ARCHITECTURES[name].has_encoder:
        assert len(seen) == 2 + 3 * SMALL.n_encoder_layers + 5 * SMALL.n_layers
    else:
        assert len(seen) == 1 + 3 * SMALL.n_layers
    assert len(torch.cat(seen).unique()) == len(seen) * ROWS


APART = [name for name in ARCHITECTURES if name != "powernorm"]  # PowerNorm's rows share statistics


@pytest.mark.parametrize("of_documents", [False, True])
@pytest.mark.parametrize(
    ("name", "places"), [*((name, PLACES) for name in APART), *(("ntransformer", (place,)) for place in PLACES)]
)
def test_a_row_drops_the_same_in_any_batch(places: tuple[str, ...], name: str, of_documents: bool) -> None:
    """A row has the same logits, in fp64, alone and among others; another step has other logits. Caught: a place in
    the batch that enters the mask, a mask shared by rows, a step that does not."""
    model = dropping(name, 0.3, places)
    tokens, _, *doc_ids = batch(name, of_documents)
    with torch.no_grad():
        logits = model(tokens, None, *doc_ids, seeds=seeds())
        alone = model(tokens[2:3], None, *(ids[2:3] for ids in doc_ids), seeds=seeds()[2:3])
        later = model(tokens, None, *doc_ids, seeds=seeds(step=1))
        without = model.eval()(tokens, None, *doc_ids)
    torch.testing.assert_close(alone[0], logits[2], rtol=1e-11, atol=1e-11)
    assert (later - logits).abs().max() > 1e-3
    assert (without - logits).abs().max() > 1e-3


@architectures
def test_evaluation_drops_nothing_and_training_needs_seeds(name: str) -> None:
    """Caught: an evaluation with masks, or training that drops nothing because nobody gave seeds."""
    model, plain = dropping(name).eval(), dropping(name, places=()).eval()
    tokens, targets = batch(name)
    assert torch.equal(model(tokens), plain(tokens))
    assert torch.equal(model(tokens, seeds=seeds()), plain(tokens))
    with pytest.raises(ValueError, match="row_seeds"):
        model.train().loss(tokens, targets)


@architectures
def test_recomputed_blocks_drop_the_same(name: str) -> None:
    """Activation checkpointing, with another forward pass before the backward pass. Caught: masks from a generator."""
    gradients = []
    for again in (False, True):
        model = dropping(name)
        if again:
            for block in model.blocks():
                block.forward = recomputed(block.forward)
        loss, _ = model.loss(*batch(name), seeds=seeds())
        model.loss(*batch(name), seeds=seeds(step=1))
        loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["gpt", "ngpt", "normformer", "powernorm", "ntransformer"])
def test_compiled_blocks_drop_the_same(name: str) -> None:
    """In fp32, gradients too, and with one graph for all blocks of a kind and all steps. Caught: hashes that compiled
    code computes otherwise; a seed or a layer's number that is a constant of the graph."""
    results: list[list[Tensor]] = []
    graphs = []
    for compiled in (False, True):
        torch.compiler.reset()
        counters.clear()
        model = dropping(name, 0.2, dtype=torch.float32)
        for block in model.blocks():
            if compiled:
                block.compile(dynamic=False)
        for step in (0, 1, 2):
            loss, _ = model.loss(*batch(name), seeds=seeds(step=step))
            loss.backward()
            graphs.append(counters["stats"]["unique_graphs"])
        results.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
    assert graphs[:3] == [0, 0, 0]
    assert 0 < graphs[3] == graphs[5] <= (2 if ARCHITECTURES[name].has_encoder else 1)
    largest = max(x.norm() for x in results[0][1:])
    for eager, other in zip(*results, strict=True):
        assert (other - eager).norm() < 1e-4 * eager.norm().clamp(min=1e-3 * largest)


def test_a_block_that_waits_for_seeds_is_refused() -> None:
    """Caught: a plug-in of an earlier form that trains without its dropout."""

    class Block(torch.nn.Module):
        def forward(self, h: Tensor, rope: object, mask: object, seeds: Tensor | None = None) -> Tensor:
            return h

    with pytest.raises(ConfigError, match="Remove the argument"):
        number_places([Block()])
