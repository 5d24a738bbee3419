"""The loss by context and by position, against a forward pass for each target."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from ngpt_train.config import load_config
from ngpt_train.core.errors import ConfigError
from ngpt_train.data.tokenizers.tokenizer import BytesTokenizer
from ngpt_train.evaluation.length_curves import Window, bins, measure, plot_lengths, scaling_of, windows
from ngpt_train.models import Decoder
from ngpt_train.models.gpt.keys import GPTConfig
from ngpt_train.models.layers.rope import RopeScaling, rope_table
from ngpt_train.verbs.evaluate import check_lengths
from tests.unit.evaluation.large import ALONE, large

TRAINED = 8
DOCUMENTS = ["It learns; it forgets! And then?", "é", "the model reads a row of tokens"]


def model() -> Decoder:
    config = GPTConfig(d_model=16, n_layers=2, n_heads=2, d_mlp=32, vocab_size=257, context=TRAINED)
    return large(config, 5).double()


def test_every_target_counts_once() -> None:
    assert list(windows(10, 4, 3)) == [Window(0, 0, 4), Window(3, 4, 7), Window(6, 7, 10)]
    assert list(windows(9, 4, 3))[-1] == Window(5, 7, 9)
    assert list(windows(3, 4, 3)) == [Window(0, 0, 3)]
    assert bins(8) == [(0, 1), (1, 2), (2, 4), (4, 8)]
    assert bins(5) == [(0, 1), (1, 2), (2, 4), (4, 5)]


@pytest.mark.parametrize(("context", "stride", "rope"), [(8, 3, "none"), (12, 12, "none"), (16, 5, "ntk")])
@torch.no_grad()
def test_by_hand(context: int, stride: int, rope: str) -> None:
    """Caught: a target that counts twice for the context or not at all, a first token without eos before it, positions
    from 1 on, a document read on into the next, the bytes of eos or of another target."""
    net = model()
    (curve,) = measure(net, BytesTokenizer(), DOCUMENTS, [(context, stride, rope)], ALONE)
    net.rope_scaling = scaling_of(rope, context, TRAINED)
    nats, targets, by_position = 0.0, 0, np.zeros((2, context))
    for text in DOCUMENTS:
        data = list(text.encode())
        read = [256, *data]
        end = covered = 0
        while covered < len(data):
            end = min(context, len(data)) if not end else min(end + stride, len(data))
            start = max(0, end - context)
            for i in range(start, end):
                loss = -float(net(torch.tensor([read[start : i + 1]]))[0, -1].log_softmax(-1)[data[i]])
                by_position[:, i - start] += loss, 1
                if i >= covered:
                    nats, targets = nats + loss, targets + 1
            covered = end
    n_bytes = sum(len(text.encode()) for text in DOCUMENTS)
    assert (curve.targets, curve.bytes, curve.documents) == (targets, n_bytes, 3) == (n_bytes, n_bytes, 3)
    assert curve.shorter == 1
    found = curve.as_json()
    assert found["loss"] == pytest.approx(nats / targets, rel=1e-12)
    assert found["bits_per_byte"] == pytest.approx(nats / math.log(2) / n_bytes, rel=1e-12)
    np.testing.assert_allclose(curve.by_position[:2], by_position, rtol=1e-12)
    assert [p["targets"] for p in found["positions"]] == [by_position[1, a:b].sum() for a, b in bins(context)]


def test_rope_scaling() -> None:
    """Against Hugging Face's tables of the same names. Caught: positions multiplied, a base without its power, a model
    left scaled."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    d_head, length = 16, 4 * TRAINED
    for kind, theirs, scaling in [
        ("linear", {"rope_type": "linear", "factor": 4.0}, RopeScaling(linear=4.0)),
        ("ntk", {"rope_type": "dynamic", "factor": 1.0}, RopeScaling(ntk=4.0)),
    ]:
        config = LlamaConfig(
            hidden_size=d_head,
            num_attention_heads=1,
            max_position_embeddings=TRAINED,
            rope_parameters={"rope_theta": 10000.0, **theirs},
        )
        frequencies, _ = ROPE_INIT_FUNCTIONS[theirs["rope_type"]](config, torch.device("cpu"), seq_len=length)
        table = rope_table(length, d_head, 10000.0, False, torch.device("cpu"), torch.float64, scaling)
        angles = torch.outer(torch.arange(length, dtype=torch.float64), frequencies.double())
        torch.testing.assert_close(table.cos[:, 0], angles.cos(), rtol=0, atol=1e-5)
        assert scaling_of(kind, length, TRAINED) == scaling
        assert scaling_of(kind, TRAINED // 2, TRAINED) == RopeScaling()
    net = model()
    before = net(torch.tensor([[1, 2, 3]]))
    measure(net, BytesTokenizer(), DOCUMENTS, [(16, 8, "linear")], ALONE)
    assert torch.equal(net(torch.tensor([[1, 2, 3]])), before)
    assert net.training


def test_figure(tmp_path: Path) -> None:
    curves = measure(model(), BytesTokenizer(), DOCUMENTS, [(8, 4, "none"), (16, 8, "none"), (16, 8, "ntk")], ALONE)
    plot_lengths(curves, TRAINED, "a test", tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["model=gpt", "data=local"], ""),
        (["model=gpt"], "no text is named"),
        (["model=gpt", "data=tokens"], "no text is named"),
        (["model=ntransformer", "data=local"], "an encoder-decoder"),
        (["model=normformer", "model.positions=learned", "data=local"], "knows the positions of 256"),
    ],
)
def test_what_cannot_be_read(given: list[str], says: str) -> None:
    path = ["data.path=x"] if any(override.startswith("data=") for override in given) else []
    config = load_config([*given, *path, "evaluate.length.contexts=[128,512]"])
    chosen = [override for override in given if override.startswith("data")]
    if not says:
        check_lengths(config, config.model, chosen)
        return
    with pytest.raises(ConfigError, match=says):
        check_lengths(config, config.model, chosen)


def test_refused() -> None:
    for given in ("stride=200", "rope=[yarn]", "rope=[]"):
        with pytest.raises(ConfigError):
            load_config([f"evaluate.length.{given}", "evaluate.length.contexts=[128,512]"])
    with pytest.raises(ConfigError, match="two evaluations"):
        load_config(["tasks=[arc_easy]", "evaluate.length.contexts=[128,512]"])
