"""nGPT in transformers: the modeling file that `export` writes computes what our model computes, for every option."""

import json
import shutil
import sys
from dataclasses import replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ngpt_train.core.errors import ConfigError, DataError
from ngpt_train.interop.layouts.ngpt import NGPTLayout
from ngpt_train.models import Decoder, export_gradients, export_weights
from ngpt_train.models.decoding import cached
from ngpt_train.models.gpt.keys import GPTConfig
from ngpt_train.models.ngpt.keys import ReferenceConfig
from tests.properties.architectures import (
    ARCHITECTURES,
    VARIANTS,
    Architecture,
    Size,
    error,
    jittered,
    ngpt_with,
    random_batch,
)

pytest.importorskip("transformers", reason="ngpt-train[hf] is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")

LAYOUT = NGPTLayout()
GROUPED = Size(d_model=32, n_layers=2, n_heads=4, vocab_size=61, n_kv_heads=2, d_mlp=80)
WHOLE = replace(GROUPED, n_kv_heads=4)
WORDS: Any = {
    "alpha_attn": ("vector", "0.05*L_ref/L", "1/L"),
    "alpha_mlp": ("vector", "1/L", "0.05*sqrt(L_ref/L)"),
    "s_u": ("scalar", 1.0, "sqrt(d/d_ref)"),
    "s_z": ("vector", "sqrt(d/d_ref)", "1/sqrt(d)"),
}
OPTIONS: dict[str, tuple[Architecture, Size]] = {
    name: (architecture, GROUPED)
    for name, architecture in (ARCHITECTURES | VARIANTS).items()
    if name.split()[0] == "ngpt"
}
OPTIONS |= {"ngpt, a key a query": (ARCHITECTURES["ngpt"], WHOLE), "ngpt base": (ngpt_with(rope_base=50.0), GROUPED)}
# The reference knows numbers; the words get the factors that the paper's numbers would.
words = ngpt_with(WORDS, reference=ReferenceConfig(16, 6)).options
OPTIONS["ngpt words"] = (
    replace(ARCHITECTURES["ngpt"], options=words, shapes=ngpt_with(WORDS).shapes),
    GROUPED,
)


def write(model: Decoder, folder: Path) -> Path:
    folder.mkdir(parents=True)
    config = {**LAYOUT.config_json(model.config), "eos_token_id": None, "bos_token_id": None}
    (folder / "config.json").write_text(json.dumps(config))
    foreign = LAYOUT.to_foreign(export_weights(model), model.config)
    save_file(foreign, folder / "model.safetensors", metadata={"format": "pt"})
    for file in LAYOUT.files:
        shutil.copy(file, folder)
    return folder


def load(folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=dtype, **options).eval()


def read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


def model_of(name: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Decoder, Tensor]:
    """A model away from its initialisation, and tokens `(3, 40)`. Keys without an effect have their defaults, as the
    command line wants it."""
    architecture, size = OPTIONS[name]
    model = jittered(architecture, size, dtype, seed)[0].eval()
    for _, key in model.config.without_effect():
        section, _, leaf = key.rpartition(".")
        own, default = ((getattr(x, section) if section else x) for x in (model.config, type(model.config)()))
        setattr(own, leaf, getattr(default, leaf))
    return model, random_batch(architecture, size, 3, 40, seed)[0]


def both(
    name: str, folder: Path, dtype: torch.dtype = torch.float32, seed: int = 0, **options: Any
) -> tuple[Decoder, Tensor, Any]:
    """Our model, tokens `(3, 40)`, and its export in `folder`/export as transformers loads it."""
    model, tokens = model_of(name, dtype, seed)
    return model, tokens, load(write(model, folder / "export"), dtype, **options)


@pytest.mark.parametrize("name", OPTIONS)
@torch.no_grad()
def test_there_and_back(name: str, tmp_path: Path) -> None:
    """Caught: an option that the file reads differently, a factor at the wrong place; a bit or a key that gets lost on
    the way, also by way of transformers' save_pretrained.

    Not 0: ours multiplies s_u and s_v into the matrix and moves h by torch.lerp, which round otherwise. The logits
    are relative to the largest.
    """
    model, tokens, theirs = both(name, tmp_path / "fp64", torch.float64)
    assert error(theirs(tokens).logits, model(tokens)) < 1e-14
    model, tokens, theirs = both(name, tmp_path)
    assert error(theirs(tokens).logits, model(tokens).double()) < 4e-6
    theirs.save_pretrained(tmp_path / "saved")
    weights = export_weights(model)
    for place in ("export", "saved"):
        keys, back = LAYOUT.from_foreign(*read(tmp_path / place))
        assert back.keys() == weights.keys()
        assert all(back[name].equal(x) and back[name].dtype == x.dtype for name, x in weights.items())
        assert {key: attrgetter(key)(model.config) for key in keys} == keys
        assert keys["d_mlp"] == 80


@torch.no_grad()
def test_long_rows(tmp_path: Path) -> None:
    """Caught: angles that are computed in fp32, which at position 20,000 are off by 1e-3."""
    model, _, theirs = both("ngpt", tmp_path)
    tokens = torch.arange(64)[None] % GROUPED.vocab_size
    at = torch.arange(20_000, 20_064)[None]
    model.config.context = 20_064
    rope = model.rope(torch.empty(1, 20_064), torch.float32)
    assert rope is not None
    expected = model.head(model.stack(model.embed(tokens, model.embedding), rope.at(at), None, None)).logits()
    assert error(theirs(tokens, position_ids=at).logits, expected.double()) < 4e-6


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("ngpt", torch.bfloat16), ("ngpt engpt", torch.bfloat16), ("ngpt without qk-norm", torch.float16)],
)
@torch.no_grad()
def test_half_precision(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Caught: norms, scale vectors or logits that are computed, or loaded, in half precision.

    Ours in half precision rounds at the same places. So the file's error against fp32 is about ours.
    """
    model, tokens = model_of(name)
    folder = write(model, tmp_path / "export")
    exact = model(tokens).double()
    model.compute_dtype = dtype
    ours = error(model(tokens), exact)
    for attention in ("sdpa", "eager"):
        theirs = load(folder, dtype, attn_implementation=attention)
        logits = theirs(tokens).logits
        assert logits.dtype == torch.float32
        assert error(logits, exact) < 1.5 * ours
    stored = {name: x.dtype for name, x in theirs.named_parameters()}
    assert {x for name, x in stored.items() if name.endswith("stored")} == {torch.float32}
    assert {x for name, x in stored.items() if name.endswith("weight")} == {dtype}


@torch.no_grad()
def greedy(model: Decoder, prompt: Tensor, n: int) -> list[int]:
    """The n most likely tokens after the prompt `(P,)`, one after the other, by our cache."""
    reader = cached(model)
    with torch.no_grad():
        logits = reader.begin([prompt])
        new = [int(logits[0].argmax())]
        while len(new) < n:
            new.append(int(reader.next({0: new[-1]})[0].argmax()))
    return new


@pytest.mark.parametrize("name", ["ngpt engpt", "ngpt interleaved"])
def test_generation(name: str, tmp_path: Path) -> None:
    """Caught: a cache whose keys have wrong positions, s_qk or heads."""
    model, tokens, theirs = both(name, tmp_path, seed=5)
    prompt = tokens[:1, :7]
    ours = greedy(model, prompt[0], 24)
    generate = partial(theirs.generate, prompt, max_new_tokens=24, do_sample=False, pad_token_id=0)
    assert generate()[0, 7:].tolist() == ours
    assert generate(use_cache=False)[0, 7:].tolist() == ours
    assert generate(cache_implementation="static", disable_compile=True)[0, 7:].tolist() == ours
    assert len(set(ours)) > 3, "the text says nothing"


@torch.no_grad()
def test_cache_token_by_token(tmp_path: Path) -> None:
    """Caught: logits with a cache that differ from those without, where the largest stays the same."""
    _, tokens, theirs = both("ngpt", tmp_path, torch.float64)
    whole, cache, parts = theirs(tokens).logits, None, []
    for part in tokens.split([5, 1, 1, 33], dim=1):
        out = theirs(part, past_key_values=cache, use_cache=True)
        cache, parts = out.past_key_values, [*parts, out.logits]
    assert error(torch.cat(parts, 1), whole) < 1e-13
    assert error(theirs(tokens, logits_to_keep=2).logits, whole[:, -2:]) < 1e-14


def test_sampling_and_beams(tmp_path: Path) -> None:
    """Caught: a cache that beams cannot reorder; logits that the samplers do not take."""
    _, tokens, theirs = both("ngpt", tmp_path)
    generate = partial(theirs.generate, tokens[:, :7], max_new_tokens=12, pad_token_id=0)
    torch.manual_seed(0)
    drawn = generate(do_sample=True, top_p=0.9, temperature=0.8)
    assert drawn.shape == (3, 19)
    beams = [generate(num_beams=3, do_sample=False, use_cache=cached) for cached in (True, False)]
    assert beams[0].equal(beams[1])
    assert score(theirs, beams[0]) >= score(theirs, generate(do_sample=False)) - 1e-4


@torch.no_grad()
def score(model: Any, texts: Tensor) -> float:
    """The log probability of the 12 last tokens of texts `(B, T)`."""
    log_p = model(texts).logits.log_softmax(-1)[:, :-1].gather(-1, texts[:, 1:, None])[:, -12:]
    return log_p.sum().item()


@pytest.mark.parametrize(("attention", "dtype"), [("sdpa", torch.float32), ("eager", torch.bfloat16)])
@torch.no_grad()
def test_left_padding(attention: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Caught: padding that is attended to, that moves positions, or that makes NaN."""
    model, tokens = model_of("ngpt")
    theirs = load(write(model, tmp_path / "export"), dtype, attn_implementation=attention)
    lengths = [40, 23, 1]
    mask = torch.stack([torch.arange(40) >= 40 - n for n in lengths]).long()
    most = {torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    together = theirs(tokens * mask, attention_mask=mask).logits
    assert together.isfinite().all()
    for row, n in enumerate(lengths):
        alone = theirs(tokens[row : row + 1, -n:]).logits
        assert error(together[row, -n:], alone[0].double()) < most
    if dtype == torch.float32:
        new = theirs.generate(tokens * mask, attention_mask=mask, max_new_tokens=8, do_sample=False, pad_token_id=0)
        assert [row[40:].tolist() for row in new] == [
            greedy(model, row[-n:], 8) for row, n in zip(tokens, lengths, strict=True)
        ]


@pytest.mark.parametrize("name", ["ngpt engpt", "ngpt tied"])
def test_training(name: str, tmp_path: Path) -> None:
    """Caught: a loss of other targets; a scale vector without a gradient; checkpointed blocks with another one."""
    model, tokens = model_of(name, torch.float64)
    folder = write(model, tmp_path / "export")
    loss, n = model.loss(tokens[:, :-1], tokens[:, 1:])
    (loss / n).backward()
    ours = LAYOUT.to_foreign(export_gradients(model), model.config)
    for checkpointed in (False, True):
        theirs = load(folder, torch.float64).train()
        if checkpointed:
            theirs.gradient_checkpointing_enable()
        out = theirs(tokens, labels=tokens, use_cache=False)
        assert out.loss.item() == pytest.approx((loss / n).item(), rel=2e-7)  # they take fp32 for it
        out.loss.backward()
        gradients = {name: x.grad for name, x in theirs.named_parameters()}
        assert gradients.keys() == ours.keys()
        assert max(error(gradients[name], ours[name]) for name in ours) < 2e-6


@torch.no_grad()
@pytest.mark.parametrize(("name", "factor"), [("ngpt", 1.5), ("ngpt ball", 1.5), ("ngpt ball", 0.5)])
def test_projection(name: str, factor: float, tmp_path: Path) -> None:
    """Caught: W_o and W_down normalised along the other axis; rows in the ball made longer."""
    model, _, theirs = both(name, tmp_path, torch.float64)
    for each in (*model.parameters(), *theirs.parameters()):
        each.mul_(factor)
    model.project_()
    theirs.project_()
    ours = LAYOUT.to_foreign(export_weights(model), model.config)
    assert max(error(x, ours[name]) for name, x in theirs.named_parameters()) < 1e-15


def test_new_model(tmp_path: Path) -> None:
    """Caught: a model that transformers initialises off the sphere, or with scale vectors that are not `scale`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model, tokens = model_of("ngpt starts")
    folder = write(model, tmp_path / "export")
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    new = AutoModelForCausalLM.from_config(config, trust_remote_code=True)
    assert {name: x.unique().tolist() for name, x in new.named_parameters() if name.endswith("s_u.stored")} == {
        f"model.layers.{i}.mlp.s_u.stored": [pytest.approx(0.2)] for i in range(2)
    }
    weights = LAYOUT.from_foreign(config.to_dict(), new.state_dict())[1]
    assert all(x.norm(dim=-1).sub(1).abs().max() < 1e-6 for x in weights.values() if x.ndim == 2)
    assert new(tokens, labels=tokens).loss.item() < 1.2 * torch.tensor(float(GROUPED.vocab_size)).log().item()


@torch.no_grad()
def test_what_else_transformers_asks(tmp_path: Path) -> None:
    """Caught: hidden states and probabilities that are left out; a tuple asked for; embeddings in the place of ids."""
    model, tokens = model_of("ngpt")
    folder = write(model, tmp_path / "export")
    theirs = load(folder, attn_implementation="eager")
    out = theirs(tokens, output_hidden_states=True, output_attentions=True)
    assert len(out.hidden_states) == 3
    assert all(h.norm(dim=-1).sub(1).abs().max() < 1e-6 for h in out.hidden_states)
    assert [p.shape for p in out.attentions] == [(3, 4, 40, 40)] * 2
    assert all(p.sum(-1).sub(1).abs().max() < 1e-6 for p in out.attentions)
    assert theirs(tokens, return_dict=False)[0].equal(out.logits)
    assert theirs(inputs_embeds=theirs.get_input_embeddings()(tokens)).logits.equal(out.logits)
    on_device = load(folder, device_map={"": "cpu"})
    assert error(on_device(tokens).logits, out.logits.double()) < 1e-5
    with pytest.raises(ValueError, match="attn_implementation='eager'"):
        on_device(tokens, output_attentions=True)


def test_two_exports_do_not_mix(tmp_path: Path) -> None:
    """Caught: transformers' cache of modules, which gives one export the code of another of the same folder name."""
    (first, tokens), (second, _) = model_of("ngpt"), model_of("ngpt engpt", seed=1)
    folders = [write(model, tmp_path / part / "export") for part, model in (("a", first), ("b", second))]
    code = folders[1] / "modeling_ngpt.py"
    code.write_text(code.read_text() + "\nOF_THE_SECOND = True\n")
    loaded = [load(folder) for folder in folders]
    for model, theirs in zip((first, second), loaded, strict=True):
        with torch.no_grad():
            assert error(theirs(tokens).logits, model(tokens).double()) < 4e-6
    modules = [sys.modules[type(theirs).__module__] for theirs in loaded]
    assert [hasattr(module, "OF_THE_SECOND") for module in modules] == [False, True]


def test_refusals(tmp_path: Path) -> None:
    """Caught: foreign files that make another model silently, or a traceback. Of tied weights the second one, refused
    though it is a copy, or taken though it is another matrix."""
    model, _ = model_of("ngpt")
    assert LAYOUT.refusal(model.config) is None
    assert LAYOUT.refusal(GPTConfig()) == "model.name=gpt: this layout writes model.name=ngpt alone"
    config, weights = read(write(model, tmp_path / "export"))
    int8 = {"model.layers.0.attention.wq.weight": torch.ones(32, 32, dtype=torch.int8)}
    for keys, tensors, kind, message in [
        ({"model_type": "llama"}, {}, DataError, "model_type='llama' is not 'ngpt_train_ngpt'"),
        ({"s_qk": {"kind": "vector"}}, {}, DataError, "s_qk.init is missing"),
        ({"sphere_update": "walk"}, {}, ConfigError, "model.update=walk: must be lerp, slerp or riemannian"),
        ({"num_attention_heads": 3}, {}, ConfigError, "the heads do not divide the width"),
        ({"hidden_size": "wide"}, {}, ConfigError, "model.d_model=wide: must be an integer"),
        ({"num_hidden_layers": 3}, {}, DataError, r"missing: model\.layers\.2.attention.wq.weight"),
        ({"vocab_size": 62}, {}, DataError, r"lm_head.weight has shape \(61, 32\), and should have \(62, 32\)"),
        ({}, {"model.extra": torch.ones(1)}, DataError, r"unknown: model.extra \(1,\)"),
        ({}, int8, DataError, r"wq\.weight has dtype torch\.int8"),
    ]:
        with pytest.raises(kind, match=message):
            LAYOUT.from_foreign(config | keys, weights | tensors)
    config, weights = read(write(model_of("ngpt tied")[0], tmp_path / "tied"))
    table = weights["model.embed_tokens.weight"]
    assert "output" not in LAYOUT.from_foreign(config, weights | {"lm_head.weight": table.clone()})[1]
    with pytest.raises(DataError, match=r"unknown: lm_head.weight"):
        LAYOUT.from_foreign(config, weights | {"lm_head.weight": table + 1})


def test_the_file_refuses_words(tmp_path: Path) -> None:
    """Caught: an edited config.json with a word that no branch of the code knows, taken for another."""
    model, _ = model_of("ngpt")
    folder = write(model, tmp_path / "export")
    config = json.loads((folder / "config.json").read_text())
    for key, value, message in [
        ("alpha_sign", "negative", "alpha_sign='negative' must be one of positive, free"),
        ("s_u", {"kind": "matrix"}, "kind='matrix' of s_u"),
        ("num_attention_heads", 32, "heads of an even width"),
        ("num_key_value_heads", 3, "must divide num_attention_heads=4"),
    ]:
        (folder / "config.json").write_text(json.dumps(config | {key: value}))
        with pytest.raises(ValueError, match=message):
            load(folder)


@pytest.mark.exhaustive
@torch.no_grad()
def test_compiled(tmp_path: Path) -> None:
    """Caught: code that torch.compile cannot take as one graph."""
    model, tokens, theirs = both("ngpt", tmp_path)
    compiled = torch.compile(theirs, fullgraph=True, backend="eager")
    assert error(compiled(tokens, use_cache=False).logits, model(tokens).double()) < 1e-5
