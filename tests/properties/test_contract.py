"""The promises of every architecture. Each test names mistakes that it has caught."""

import dataclasses
import math

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ngpt_train.config.model_keys import ModelConfig
from ngpt_train.core.errors import ConfigError, DataError
from ngpt_train.models import build_model, export_weights, load_weights
from ngpt_train.models.composed.keys import ComposedConfig
from ngpt_train.models.gpt.keys import GPTConfig
from ngpt_train.models.gpt_encoder_decoder.keys import GPTEncoderDecoderConfig
from ngpt_train.models.ngpt.keys import NGPTConfig
from ngpt_train.models.normformer.keys import NormFormerConfig
from ngpt_train.models.ntransformer.keys import NTransformerConfig
from tests.properties.architectures import (
    ARCHITECTURES,
    BASELINE,
    NORMFORMER,
    SMALL,
    Size,
    config,
    documents,
    jittered,
    random_batch,
    shapes,
    source_length,
)
from tests.reference.ntransformer import initial_vector

GROUPED = Size(24, 3, 6, 31, n_kv_heads=2, d_mlp=50, n_encoder_layers=2, source_context=5)

architectures = pytest.mark.parametrize("name", ARCHITECTURES)
sizes = pytest.mark.parametrize("size", [SMALL, GROUPED], ids=["small", "grouped"])

OF_1_3B = {"d_model": 2048, "n_layers": 24, "n_heads": 32, "vocab_size": 51200}
OF_1_3B |= {"psi_warmup_steps": 0, "group_scaling": 0}
PRE = {"attn_norm_placement": None, "ffn_norm": "none", "head_scale": "none"}


@pytest.mark.sampled(3)
@architectures
@pytest.mark.parametrize(("d_model", "vocab_size"), [(128, 1009), (512, 2048)])
def test_initial_loss(name: str, d_model: int, vocab_size: int) -> None:
    """ln V + Var(logits) / 2. Caught: an init of 0.2, the mean for the sum, a tied head that knows the token read."""
    size = Size(d_model, n_layers=2, n_heads=4, vocab_size=vocab_size, n_kv_heads=4, d_mlp=512)
    model = build_model(config(ARCHITECTURES[name], size))
    tokens, targets = random_batch(ARCHITECTURES[name], size, 8, 64)
    with torch.no_grad():
        variance = model(tokens).var(-1).mean().item()
        loss, n_tokens = model.loss(tokens, targets)
    assert variance > 5e-4
    assert loss.item() / n_tokens == pytest.approx(math.log(size.vocab_size) + variance / 2, abs=0.05)


@architectures
def test_initial_weights(name: str) -> None:
    """On the sphere: any direction; the others N(0, 0.02), what writes into the residual stream 1 / sqrt(writes) of it.

    NormFormer's embedding, which is multiplied by sqrt(d_model), has its own. Caught: another deviation, the encoder's
    writes counted with the decoder's, one generator for all matrices.
    """
    architecture = ARCHITECTURES[name]
    size = Size(d_model=128, n_layers=4, n_heads=4, vocab_size=512, n_kv_heads=4, d_mlp=512)
    weights = export_weights(build_model(config(architecture, size)))
    for key, x in weights.items():
        if x.ndim == 1:
            is_bias = key.split(".")[-1] in ("bias", "bq", "bk", "bv", "bo", "b_u", "b_v", "b_down")
            expected = initial_vector(key, size.d_model) if architecture.starts_on_sphere else 0.0 if is_bias else 1.0
            assert x.unique().tolist() == pytest.approx([expected], rel=1e-6), key
            continue
        if architecture.starts_on_sphere:
            expected = size.d_model**-0.5
        else:
            in_encoder = key.startswith("encoder.")
            writes = 2 * size.n_encoder_layers if in_encoder else (2 + architecture.has_encoder) * size.n_layers
            expected = 0.02 * writes**-0.5 if key.endswith((".wo", ".w_down")) else 0.02
            if key in ("embedding", "source_embedding"):
                expected = architecture.embedding_std(size.d_model)
        assert x.std().item() == pytest.approx(expected, rel=0.03), key
        assert abs(x.mean().item()) < 0.03 * expected, key
    flat = [x.flatten()[:1000] for x in weights.values() if x.ndim == 2]
    assert torch.corrcoef(torch.stack(flat)).fill_diagonal_(0).abs().max() < 0.2, "matrices drawn alike"
    same, other = (export_weights(build_model(config(architecture, size), seed)) for seed in (0, 1))
    assert all(torch.equal(same[key], x) for key, x in weights.items())
    assert not any(torch.equal(other[key], x) for key, x in weights.items() if x.ndim == 2)


@architectures
@sizes
def test_later_tokens_do_not_matter(name: str, size: Size) -> None:
    """Nor do any others not matter: from its own position on each counts, one of a source everywhere.

    Caught: is_causal left out, a norm over the positions, a decoder that does not look at its source.
    """
    model, _ = jittered(ARCHITECTURES[name], size)
    model.eval()  # statistics of a batch are another matter: tests/unit/models/test_powernorm.py
    source = source_length(ARCHITECTURES[name], size)
    tokens, _ = random_batch(ARCHITECTURES[name], size, 2, 10)
    with torch.no_grad():
        before = model(tokens)
        for place in range(source + 10):
            changed = tokens.clone()
            changed[:, place] = (changed[:, place] + 1) % size.vocab_size
            after = model(changed)
            first = max(0, place - source)
            assert torch.equal(after[:, :first], before[:, :first])
            change = (after[:, first:] - before[:, first:]).abs().amax(-1) / before.abs().max()
            assert change.min() > 1e-9, f"token {place} is not seen by every position from it on"


@pytest.mark.sampled(6)
@architectures
def test_one_batch_can_be_overfitted(name: str) -> None:
    """Caught: a block that leaves out what its attention finds, in an encoder-decoder its attention to the source."""
    source = source_length(ARCHITECTURES[name], SMALL)
    model = build_model(config(ARCHITECTURES[name], SMALL))
    tokens, targets = random_batch(ARCHITECTURES[name], SMALL, 4, 16)
    # Which row it is can be read in the source alone, or in the first token.
    assert len(tokens[:, 0].unique()) == 4
    first = source or 1
    tokens[:, first:] = torch.arange(tokens.shape[1] - first)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    losses = []
    for _ in range(100):
        loss, n_tokens = model.loss(tokens, targets)
        losses.append(loss.item() / int(n_tokens))
        optimizer.zero_grad()
        (loss / n_tokens).backward()
        optimizer.step()
        model.project_()
    assert losses[0] > 4
    assert losses[-1] < 0.4


@pytest.mark.exhaustive
@pytest.mark.parametrize("packed", [False, True], ids=["", "documents"])
@architectures
def test_compiled_is_eager(name: str, packed: bool) -> None:
    """Block by block, as the trainer compiles. Caught: statistics that a compiled block keeps to itself."""
    tokens, targets = random_batch(ARCHITECTURES[name], SMALL, 2, 24)
    doc_ids = None
    if packed:
        targets, doc_ids = documents(ARCHITECTURES[name], SMALL, targets)
    eager, compiled = (jittered(ARCHITECTURES[name], SMALL, torch.float32)[0] for _ in range(2))
    torch.compiler.reset()
    for block in compiled.blocks():
        block.compile(dynamic=False)
    for _ in range(2):  # the second knows running statistics
        losses = []
        for model in (eager, compiled):
            loss, _n_tokens = model.loss(tokens, targets, doc_ids)
            loss.backward()
            losses.append(loss.item())
        assert losses[1] == pytest.approx(losses[0], rel=1e-6)
        largest = max(p.grad.abs().max().item() for p in eager.parameters() if p.grad is not None)
        for actual, expected in zip(compiled.parameters(), eager.parameters(), strict=True):
            assert actual.grad is not None
            assert expected.grad is not None
            own = expected.grad.abs().max().item()  # 0, but for rounding, of a bias that shifts all scores alike
            torch.testing.assert_close(actual.grad, expected.grad, rtol=1e-4, atol=1e-5 * max(own, 0.1 * largest))
    for key, value in compiled.statistics().items():
        torch.testing.assert_close(value, eager.statistics()[key], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("model_config", "n_params"),
    [
        (GPTConfig(d_model=1024, n_layers=24, n_heads=16, vocab_size=32000), 468_239_360),
        (GPTConfig(d_model=1280, n_layers=36, n_heads=20, vocab_size=32000), 1_025_731_840),
        (NGPTConfig(d_model=1024, n_layers=24, n_heads=16, vocab_size=32000), 468_491_520),
        (NGPTConfig(d_model=1280, n_layers=36, n_heads=20, vocab_size=32000), 1_026_177_280),
        # Table 2 of the NormFormer paper: each size without and with the three operations.
        (NormFormerConfig(d_model=768, n_layers=12, n_heads=12, vocab_size=51200, **BASELINE), 124_377_600),
        (NormFormerConfig(d_model=768, n_layers=12, n_heads=12, vocab_size=51200), 124_469_904),
        (NormFormerConfig(d_model=1024, n_layers=24, n_heads=16, vocab_size=51200, **BASELINE), 354_740_224),
        (NormFormerConfig(d_model=1024, n_layers=24, n_heads=16, vocab_size=51200), 354_986_368),
        (NormFormerConfig(d_model=2048, n_layers=24, n_heads=32, vocab_size=51200, **BASELINE), 1_313_460_224),
        (NormFormerConfig(d_model=2048, n_layers=24, n_heads=32, vocab_size=51200), 1_313_952_512),
        (NormFormerConfig(d_model=2560, n_layers=32, n_heads=32, vocab_size=51200, **BASELINE), 2_648_724_480),
        (NormFormerConfig(d_model=2560, n_layers=32, n_heads=32, vocab_size=51200), 2_649_544_704),
        # The same in the words of the composed decoder.
        (ComposedConfig(**OF_1_3B, **NORMFORMER), 1_313_952_512),
        (ComposedConfig(**OF_1_3B, **NORMFORMER | PRE), 1_313_460_224),
        (ComposedConfig(**OF_1_3B, **NORMFORMER | PRE | {"norm_placement": "post"}), 1_313_456_128),
        # The TnT paper's size; its 325.24M leave out s_z and the s_qk of cross-attention.
        (NTransformerConfig(d_model=1024, n_layers=6, n_heads=8, vocab_size=32100, context=1536), 325_283_172),
        (GPTEncoderDecoderConfig(d_model=1024, n_layers=6, n_heads=8, vocab_size=32100, context=1536), 325_136_384),
        # The paper's baseline, whose MLP has no gate: 333.94M. With a gate it has more.
        (GPTEncoderDecoderConfig(d_model=1152, n_layers=6, n_heads=8, vocab_size=32100, mlp="plain"), 333_927_936),
        (GPTEncoderDecoderConfig(d_model=1152, n_layers=6, n_heads=8, vocab_size=32100), 397_628_928),
    ],
    ids=lambda x: x.name if isinstance(x, ModelConfig) else str(x),
)
def test_the_papers_parameter_counts(model_config: ModelConfig, n_params: int) -> None:
    """Caught: a scale vector of another length, a bias too many, tied embeddings counted twice."""
    with torch.device("meta"):
        model = build_model(model_config)
    assert all(p.is_meta for p in model.parameters())
    with pytest.raises(ValueError, match="on meta"):
        load_weights(model, export_weights(model))
    assert model.n_params() == n_params == sum(p.numel() for p in model.parameters())


@architectures
@sizes
def test_parameter_count_is_what_is_exported(name: str, size: Size) -> None:
    """Caught: a parameter that is missing in the export, or stored in another shape than docs/weights.md says."""
    model = build_model(config(ARCHITECTURES[name], size))
    assert model.n_params() == sum(x.numel() for x in export_weights(model).values())
    assert {key: tuple(x.shape) for key, x in export_weights(model).items()} == shapes(ARCHITECTURES[name], size)


@architectures
@sizes
@pytest.mark.parametrize("t", [8, 20])
def test_flops_are_what_is_counted(name: str, size: Size, t: int) -> None:
    """Caught: the embedding counted, the head left out, 6 for 12 in attention, the source's keys forgotten."""
    model = build_model(config(ARCHITECTURES[name], size))
    tokens, _ = random_batch(ARCHITECTURES[name], size, 2, t)
    # The plain attention multiplies the whole T x T square, which is the convention of the formula.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        model(tokens)
    rows, context = tokens.shape
    row = 3 * counter.get_total_flops() // rows
    # An integer per token, where the row's total need not divide by its tokens.
    assert model.flops_per_token(context) == row // context
    # Half of the decoder's own attention is masked, and of nothing else.
    assert (
        model.flops_per_token(context, causal=True)
        == (row - 12 * size.d_model * size.n_layers * (t * t - t * t // 2)) // context
    )


@architectures
@sizes
def test_export_and_load_round_trip(name: str, size: Size) -> None:
    """Caught: references in place of copies, a load that leaves something out."""
    source, weights = jittered(ARCHITECTURES[name], size, torch.float32)
    exported = export_weights(source)
    assert all(torch.equal(exported[key], x.float()) for key, x in weights.items())
    target = build_model(config(ARCHITECTURES[name], size))
    load_weights(target, exported)
    tokens, _ = random_batch(ARCHITECTURES[name], size, 2, 9)
    assert torch.equal(target(tokens), source(tokens))
    # What was exported is a copy: training on does not change it.
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.zero_()
    assert all(torch.equal(exported[key], x.float()) for key, x in weights.items())


@architectures
def test_load_names_what_does_not_fit(name: str) -> None:
    """Caught: weights loaded in part, shapes that fit by broadcasting."""
    model, weights = jittered(ARCHITECTURES[name], SMALL, torch.float32)
    before = export_weights(model)
    wrong = {
        "layers.1.wo": {key: x for key, x in weights.items() if key != "layers.1.wo"},
        "layers.7.wq": weights | {"layers.7.wq": weights["layers.0.wq"]},
        "layers.0.w_down": weights | {"layers.0.w_down": weights["layers.0.w_down"].T},
        "output": weights | {"output": torch.zeros(SMALL.vocab_size + 1, SMALL.d_model)},
        "embedding": weights | {"embedding": torch.zeros(1, SMALL.d_model)},
    }
    for key, bad in wrong.items():
        with pytest.raises(DataError, match=key.replace(".", r"\.")):
            load_weights(model, {k: torch.zeros_like(x) for k, x in bad.items()})
        assert all(torch.equal(x, before[k]) for k, x in export_weights(model).items()), "loaded in part"


@architectures
def test_projection(name: str) -> None:
    """Unit rows on the sphere, after initialisation too; a second projection and the other architectures: nothing.

    Caught: columns for rows, no projection at the start, an embedding left out.
    """
    constrained = ARCHITECTURES[name].starts_on_sphere
    model = build_model(config(ARCHITECTURES[name], SMALL))
    for step in ("initialised", "moved"):
        if step == "moved":
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter))
            before = export_weights(model)
            model.project_()
            changed = {key for key, x in export_weights(model).items() if not torch.equal(x, before[key])}
            assert changed == ({key for key, x in before.items() if x.ndim == 2} if constrained else set())
        if constrained:
            for x in export_weights(model).values():
                if x.ndim == 2:
                    torch.testing.assert_close(x.norm(dim=-1), torch.ones(len(x)), rtol=0, atol=1e-6)
    once = export_weights(model)
    model.project_()
    for key, x in export_weights(model).items():
        torch.testing.assert_close(x, once[key], rtol=1e-6, atol=1e-9)


@architectures
def test_zero_rows_stay_finite(name: str) -> None:
    """Caught: x / |x| without its floor, theta / sin(theta) at 0."""
    model, weights = jittered(ARCHITECTURES[name], SMALL, torch.float32)
    tokens, targets = random_batch(ARCHITECTURES[name], SMALL, 2, 12)
    start = source_length(ARCHITECTURES[name], SMALL)
    for key, x in weights.items():
        if x.ndim == 2 and key != "embedding":
            x[0] = 0
    # A token without a direction, among others: alone at the start of a row its gradient would be of x/|x| at 0.
    weights["embedding"][tokens[0, start + 5]] = 0
    tokens[:, start] = (tokens[0, start + 5] + 1) % SMALL.vocab_size
    load_weights(model, weights)
    model.project_()
    loss, _ = model.loss(tokens, targets)
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@architectures
def test_rows_without_targets_count_nothing(name: str) -> None:
    """Caught: the mean for the sum, which is 0 / 0, and targets of -100 in the count."""
    model, _ = jittered(ARCHITECTURES[name], SMALL, torch.float32)
    tokens, _ = random_batch(ARCHITECTURES[name], SMALL, 2, 12)
    loss, n_tokens = model.loss(tokens, torch.full_like(tokens, -100))
    loss.backward()
    assert (loss.item(), int(n_tokens)) == (0.0, 0)
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


@architectures
def test_decay_is_for_matrices(name: str) -> None:
    """Caught: decay on the sphere, decay of gains, a parameter in no group or in two."""
    model = build_model(config(ARCHITECTURES[name], SMALL))
    parameters = dict(model.named_parameters())
    decayed: dict[str, bool] = {}
    for group in model.parameter_groups():
        for key in group.names:
            assert key not in decayed
            decayed[key] = group.decay
    assert decayed.keys() == parameters.keys()
    expected = {key: not ARCHITECTURES[name].starts_on_sphere and p.ndim == 2 for key, p in parameters.items()}
    assert decayed == expected


@architectures
def test_vocabulary_must_be_known(name: str) -> None:
    """Caught: a model of a made-up number of rows; a message that does not say from where the number comes."""
    unknown = dataclasses.replace(config(ARCHITECTURES[name], SMALL), vocab_size="auto")
    with pytest.raises(ConfigError, match=r"model\.vocab_size=auto: .*takes it from the tokenizer"):
        build_model(unknown)
