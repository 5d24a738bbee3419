"""What every architecture promises, whatever is inside it."""

import dataclasses
import math

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ngpt_train.config.architectures import GPTConfig, ModelConfig, NGPTConfig, NormFormerConfig
from ngpt_train.config.keys import ConfigError, DataError
from ngpt_train.models import build_model, export_weights, load_weights
from tests.properties.architectures import (
    ARCHITECTURES,
    BASELINE,
    SMALL,
    Size,
    config,
    jittered,
    normformer_with,
    random_batch,
    shapes,
)
from tests.reference.ngpt import initial_vector

GROUPED = Size(d_model=24, n_layers=3, n_heads=6, vocab_size=31, n_kv_heads=2, d_mlp=50)

architectures = pytest.mark.parametrize("name", ARCHITECTURES)
sizes = pytest.mark.parametrize("size", [SMALL, GROUPED], ids=["small", "grouped"])


@architectures
def test_initial_loss(name: str) -> None:
    size = Size(d_model=128, n_layers=4, n_heads=4, vocab_size=1009, n_kv_heads=4, d_mlp=512)
    torch.manual_seed(0)
    model = build_model(config(ARCHITECTURES[name], size))
    tokens = torch.randint(size.vocab_size, (8, 64))
    targets = torch.randint(size.vocab_size, (8, 64))
    with torch.no_grad():
        variance = model(tokens).var(-1).mean().item()
        loss, n_tokens = model.loss(tokens, targets)
    assert variance > 1e-3
    assert loss.item() / n_tokens == pytest.approx(math.log(size.vocab_size) + variance / 2, abs=0.05)


@architectures
def test_initial_weights(name: str) -> None:
    """nGPT: any direction; the others N(0, 0.02), what writes into the residual stream 1 / sqrt(2 L) of it."""
    size = Size(d_model=128, n_layers=4, n_heads=4, vocab_size=512, n_kv_heads=4, d_mlp=512)
    weights = export_weights(build_model(config(ARCHITECTURES[name], size)))
    for key, x in weights.items():
        if x.ndim == 1:
            is_bias = key.split(".")[-1] in ("bias", "bq", "bk", "bv", "bo", "b_u", "b_down")
            expected = initial_vector(key, size.d_model) if name == "ngpt" else 0.0 if is_bias else 1.0
            assert x.unique().tolist() == pytest.approx([expected], rel=1e-6), key
            continue
        if name == "ngpt":
            expected = size.d_model**-0.5
        else:
            expected = 0.02 * (2 * size.n_layers) ** -0.5 if key.endswith((".wo", ".w_down")) else 0.02
        assert x.std().item() == pytest.approx(expected, rel=0.03), key
        assert abs(x.mean().item()) < 0.03 * expected, key
    flat = [x.flatten()[:1000] for x in weights.values() if x.ndim == 2]
    assert torch.corrcoef(torch.stack(flat)).fill_diagonal_(0).abs().max() < 0.2, "matrices drawn alike"
    same, other = (export_weights(build_model(config(ARCHITECTURES[name], size), seed)) for seed in (0, 1))
    assert all(torch.equal(same[key], x) for key, x in weights.items())
    assert not any(torch.equal(other[key], x) for key, x in weights.items() if x.ndim == 2)


@architectures
@sizes
def test_later_tokens_do_not_matter(name: str, size: Size) -> None:
    model, _ = jittered(ARCHITECTURES[name], size, torch.float32)
    model.eval()  # statistics of a batch are another matter: tests/unit/test_powernorm.py
    tokens, _ = random_batch(size, 2, 24)
    with torch.no_grad():
        before = model(tokens)
        for t in (1, 10, 23):
            changed = tokens.clone()
            changed[:, t] = (changed[:, t] + 1) % size.vocab_size
            after = model(changed)
            assert torch.equal(after[:, :t], before[:, :t])
            assert (after[:, t:] != before[:, t:]).any(-1).all()


@architectures
@sizes
def test_documents_are_alone(name: str, size: Size) -> None:
    """The loss of a document is the same wherever it stands in a row and whatever stands around it.

    For this nGPT's s_qk has to be equal within a rotary pair: a scale per channel after RoPE is not relative.
    """
    architecture = ARCHITECTURES[name]
    if name == "normformer":
        architecture = normformer_with(positions="rotary")  # the others count from the start of the row
    model, weights = jittered(architecture, size)
    model.eval()
    half = size.d_model // size.n_heads // 2
    for key, x in weights.items():
        if key.endswith("s_qk"):
            pairs = x.view(size.n_heads, 2, half)
            pairs[:, 1] = pairs[:, 0]
    load_weights(model, weights)
    (document, targets), (other, _) = random_batch(size, 2, 11), random_batch(size, 2, 14, seed=1)
    nothing = torch.full_like(other, -100)
    with torch.no_grad():
        alone, _ = model.loss(document, targets)
        for place in (3, 14):
            row = torch.cat([other[:, :place], document, other[:, place:]], 1)
            row_targets = torch.cat([nothing[:, :place], targets, nothing[:, place:]], 1)
            ids = torch.cat([torch.zeros(place), torch.ones(11), torch.full((14 - place,), 2.0)]).long().expand(2, -1)
            packed, _ = model.loss(row, row_targets, ids)
            leaking, _ = model.loss(row, row_targets)
            assert packed.item() == pytest.approx(alone.item(), rel=1e-12)
            assert leaking.item() != pytest.approx(alone.item(), rel=1e-4)


@architectures
def test_one_batch_can_be_overfitted(name: str) -> None:
    torch.manual_seed(0)
    model = build_model(config(ARCHITECTURES[name], SMALL))
    tokens = torch.randint(SMALL.vocab_size, (4, 16))
    targets = torch.randint(SMALL.vocab_size, (4, 16))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    losses = []
    for _ in range(80):
        loss, n_tokens = model.loss(tokens, targets)
        losses.append(loss.item() / int(n_tokens))
        optimizer.zero_grad()
        (loss / n_tokens).backward()
        optimizer.step()
        model.project_()
    assert losses[0] > 4
    assert losses[-1] < 0.4


@pytest.mark.slow
@architectures
def test_compiled_is_eager(name: str) -> None:
    tokens, targets = random_batch(SMALL, 2, 24)
    eager, compiled = (jittered(ARCHITECTURES[name], SMALL, torch.float32)[0] for _ in range(2))
    torch.compiler.reset()
    compiled.forward = torch.compile(compiled.forward)  # type: ignore[method-assign]
    for _ in range(2):  # the second knows running statistics
        losses = []
        for model in (eager, compiled):
            loss, _n_tokens = model.loss(tokens, targets)
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
    ],
    ids=lambda x: x.name if isinstance(x, ModelConfig) else str(x),
)
def test_the_papers_parameter_counts(model_config: ModelConfig, n_params: int) -> None:
    with torch.device("meta"):
        model = build_model(model_config)
    assert all(p.is_meta for p in model.parameters())
    with pytest.raises(ValueError, match="on meta"):
        load_weights(model, export_weights(model))
    assert model.n_params() == n_params == sum(p.numel() for p in model.parameters())


@architectures
@sizes
def test_parameter_count_is_what_is_exported(name: str, size: Size) -> None:
    model = build_model(config(ARCHITECTURES[name], size))
    assert model.n_params() == sum(x.numel() for x in export_weights(model).values())
    assert {key: tuple(x.shape) for key, x in export_weights(model).items()} == shapes(ARCHITECTURES[name], size)


@architectures
@sizes
def test_flops_are_what_is_counted(name: str, size: Size) -> None:
    model = build_model(config(ARCHITECTURES[name], size))
    tokens, _ = random_batch(size, 2, 20)
    # The plain attention multiplies the whole T x T square, which is the convention of the formula.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        model(tokens)
    assert model.flops_per_token(20) * tokens.numel() == 3 * counter.get_total_flops()


@architectures
@sizes
def test_export_and_load_round_trip(name: str, size: Size) -> None:
    source, weights = jittered(ARCHITECTURES[name], size, torch.float32)
    exported = export_weights(source)
    assert all(torch.equal(exported[key], x.float()) for key, x in weights.items())
    target = build_model(config(ARCHITECTURES[name], size))
    load_weights(target, exported)
    tokens, _ = random_batch(size, 2, 9)
    assert torch.equal(target(tokens), source(tokens))
    # What was exported is a copy: training on does not change it.
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.zero_()
    assert all(torch.equal(exported[key], x.float()) for key, x in weights.items())


@architectures
def test_load_names_what_does_not_fit(name: str) -> None:
    model, weights = jittered(ARCHITECTURES[name], SMALL, torch.float32)
    before = export_weights(model)
    wrong = {
        "layers.1.wo": {key: x for key, x in weights.items() if key != "layers.1.wo"},
        "layers.7.wq": weights | {"layers.7.wq": weights["layers.0.wq"]},
        "layers.0.w_down": weights | {"layers.0.w_down": weights["layers.0.w_down"].T},
        "output": weights | {"output": torch.zeros(SMALL.vocab_size + 1, SMALL.d_model)},
    }
    for key, bad in wrong.items():
        with pytest.raises(DataError, match=key.replace(".", r"\.")):
            load_weights(model, {k: torch.zeros_like(x) for k, x in bad.items()})
        assert all(torch.equal(x, before[k]) for k, x in export_weights(model).items()), "loaded in part"


@architectures
def test_projection(name: str) -> None:
    """Unit rows for nGPT, after initialisation too; a second projection and the other architectures: nothing."""
    constrained = name == "ngpt"
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
        torch.testing.assert_close(x, once[key], rtol=0, atol=1e-7)


@architectures
def test_zero_rows_stay_finite(name: str) -> None:
    model, weights = jittered(ARCHITECTURES[name], SMALL, torch.float32)
    tokens, targets = random_batch(SMALL, 2, 12)
    for key, x in weights.items():
        if x.ndim == 2 and key != "embedding":
            x[0] = 0
    # A token without a direction, among others: alone at the start of a row its gradient is that of x/|x| at 0.
    weights["embedding"][tokens[0, 5]] = 0
    tokens[:, 0] = (tokens[0, 5] + 1) % SMALL.vocab_size
    load_weights(model, weights)
    model.project_()
    loss, _ = model.loss(tokens, targets)
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@architectures
def test_rows_without_targets_count_nothing(name: str) -> None:
    model, _ = jittered(ARCHITECTURES[name], SMALL, torch.float32)
    tokens, _ = random_batch(SMALL, 2, 12)
    loss, n_tokens = model.loss(tokens, torch.full_like(tokens, -100))
    loss.backward()
    assert (loss.item(), int(n_tokens)) == (0.0, 0)
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


@architectures
def test_decay_is_for_matrices(name: str) -> None:
    model = build_model(config(ARCHITECTURES[name], SMALL))
    parameters = dict(model.named_parameters())
    decayed: dict[str, bool] = {}
    for group in model.parameter_groups():
        for key in group.names:
            assert key not in decayed
            decayed[key] = group.decay
    assert decayed.keys() == parameters.keys()
    expected = {key: name != "ngpt" and p.ndim == 2 for key, p in parameters.items()}
    assert decayed == expected


@architectures
def test_vocabulary_must_be_known(name: str) -> None:
    unknown = dataclasses.replace(config(ARCHITECTURES[name], SMALL), vocab_size="auto")
    with pytest.raises(ConfigError, match=r"model\.vocab_size"):
        build_model(unknown)
