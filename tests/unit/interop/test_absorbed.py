"""anGPT as Qwen3ForCausalLM: its constants and alphas in the weights, and no code beside them."""

from pathlib import Path

import pytest
import torch

from ngpt_train.core.errors import ConfigError, DataError
from ngpt_train.interop.importing import read_model
from ngpt_train.interop.layouts import chosen_layout
from ngpt_train.interop.layouts.absorbed import AnGPTLayout
from ngpt_train.models import build_model, export_weights
from ngpt_train.models.ngpt.keys import AlphaConfig, ScaleVectorConfig
from tests.properties.architectures import ARCHITECTURES, VARIANTS, Size, angpt_with, config, error, jittered
from tests.unit.interop.test_exchange import exported, run_of
from tests.unit.interop.test_llama import in_transformers

pytest.importorskip("transformers", reason="ngpt-train[hf] is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")
LAYOUT = AnGPTLayout()
SIZE = Size(d_model=32, n_layers=3, n_heads=4, vocab_size=61, n_kv_heads=2, d_mlp=80)


@torch.no_grad()
@pytest.mark.parametrize("name", ["angpt", "angpt tied", "angpt interleaved", "angpt of numbers"])
def test_logits(name: str, tmp_path: Path) -> None:
    """Of 50 tokens, and of a text that transformers continues. Caught: a factor in the wrong layer, nu forgotten, pairs
    of another layout of RoPE, s_z left out, a norm that sees h."""
    if name == "angpt of numbers":
        numbers = angpt_with(alpha_attn=AlphaConfig("fixed", 0.3), s_z=ScaleVectorConfig("scalar", 8.0, 0.5))
        model = build_model(config(numbers, SIZE))
    else:
        model, _ = jittered((ARCHITECTURES | VARIANTS)[name], SIZE, torch.float32)
    foreign = LAYOUT.to_foreign(export_weights(model), model.config)
    other = in_transformers("AutoModelForCausalLM", tmp_path, LAYOUT.config_json(model.config), foreign)
    assert type(other).__name__ == "Qwen3ForCausalLM"
    tokens = torch.randint(SIZE.vocab_size, (3, 50), generator=torch.Generator().manual_seed(0))
    ours = model.eval()(tokens)
    assert error(other(tokens).logits, ours.double()) < 1e-6
    told = other.generate(tokens[:1, :5], max_new_tokens=9, do_sample=False)
    assert told[0, 5:].equal(model(told)[0, 4:-1].argmax(-1))


@pytest.mark.parametrize("alpha", [0.9, 1.0])
def test_an_alpha_near_1_is_refused(alpha: float) -> None:
    """Caught: weights that are not finite, or whose digits are lost."""
    model = build_model(config(angpt_with(alpha_mlp=AlphaConfig("fixed", alpha)), SIZE))
    with pytest.raises(DataError, match=r"an alpha near 1 leaves .*\n  Set export.layout=safetensors"):
        LAYOUT.to_foreign(export_weights(model), model.config)


def test_export(tmp_path: Path) -> None:
    """As a user does it. Caught: an export in a dtype that rounds twice, an import that takes absorbed weights for the
    model's own."""
    run, _ = run_of(tmp_path / "run", "model=angpt")
    said: list[str] = []
    out = exported(run, tmp_path / "out", said.append, layout="auto")
    assert said[0].startswith("angpt, fp32: ")
    assert "Qwen3ForCausalLM and ngpt-train, whose order is another" in "\n".join(said)
    assert not list(out.glob("*.py"))
    with pytest.raises(DataError, match=r"factors are absorbed into these weights\n  Import an export with"):
        read_model(str(out), None)
    model = jittered(ARCHITECTURES["angpt"], SIZE)[0]
    assert chosen_layout("auto", model.config, "bf16").name == "safetensors"
    with pytest.raises(ConfigError, match=r"export.layout=angpt: export.dtype=bf16: this layout writes"):
        chosen_layout("angpt", model.config, "bf16")
