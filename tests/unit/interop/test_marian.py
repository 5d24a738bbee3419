"""A translating model as MarianMTModel and back, and its beam search beside transformers'."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ngpt_train.core.errors import DataError
from ngpt_train.evaluation.beam_search import translate
from ngpt_train.interop.layouts import chosen_layout
from ngpt_train.interop.layouts.marian import FORM, MarianLayout
from ngpt_train.models.composed_encoder_decoder.keys import ComposedEncoderDecoderConfig
from ngpt_train.models.encoder_decoder import EncoderDecoder
from tests.unit.interop.test_llama import brought_back, in_transformers, jittered

SIZES = {
    "d_model": 48,
    "n_layers": 2,
    "n_encoder_layers": 3,
    "n_heads": 4,
    "d_mlp": 96,
    "vocab_size": 53,
    "context": 48,
}
OPTIONS = {"activation": "relu", "scaled_embedding": True, "psi_warmup_steps": 0, "group_scaling": 0}
CONFIG = ComposedEncoderDecoderConfig(**SIZES, **OPTIONS, **FORM)
EOS = 0


def test_there_and_back(tmp_path: Path) -> None:
    """Caught: a matrix that is not transposed, positions in another order or place, a norm in another's place, a
    lost bias or scale of the embedding; hypotheses of a beam that are not transformers'."""
    model, weights = jittered(CONFIG)
    assert isinstance(model, EncoderDecoder)
    layout = chosen_layout("auto", CONFIG)
    assert layout.name == "marian"
    ends = {"eos_token_id": EOS, "bos_token_id": EOS, "decoder_start_token_id": EOS}
    there = {**layout.config_json(CONFIG), **ends, "ngpt_train": {"layout": "marian"}}
    _, foreign = brought_back(layout, CONFIG, there, weights)
    with pytest.raises(DataError, match="only exports of ours"):
        layout.from_foreign({**there, "ngpt_train": None}, foreign)

    (tmp_path / "generation_config.json").write_text(json.dumps({**ends, "pad_token_id": EOS}))
    exported = in_transformers("AutoModelForSeq2SeqLM", tmp_path, there, foreign)
    rows = torch.randint(53, (3, 48), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found = exported(rows[:, :24], decoder_input_ids=rows[:, 24:]).logits
        torch.testing.assert_close(found, model.eval()(rows), rtol=0, atol=1e-5)
        assert found.abs().max() > 1

    draw = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, 14, (12,), generator=draw).tolist()
    sources = [torch.cat([torch.randint(1, 53, (n,), generator=draw), torch.tensor([EOS])]) for n in lengths]
    for n_beams, penalty in ((1, 1.0), (4, 1.0), (5, 0.6)):
        ours = translate(model, sources, EOS, 53, n_beams, penalty, 20)
        options = {"length_penalty": penalty} if n_beams > 1 else {}
        for source, kept in zip(sources, ours, strict=True):
            ids = exported.generate(
                source[None],
                attention_mask=torch.ones_like(source)[None],
                **{"num_beams": n_beams, "do_sample": False, "max_new_tokens": 20, **options},
            )[0].tolist()
            assert [EOS, *kept[0].ids] == (ids[:-1] if ids[-1] == EOS else ids)


@pytest.mark.parametrize(
    "change", [{"norm_placement": "pre"}, {"qk_norm": True}, {"shared_source": False}, {"norm": "rms"}]
)
def test_other_forms_are_refused(change: dict[str, object]) -> None:
    config = replace(CONFIG, **change)
    assert f"model.{next(iter(change))}" in (MarianLayout().refusal(config) or "")
    assert chosen_layout("auto", config).name == "safetensors"
