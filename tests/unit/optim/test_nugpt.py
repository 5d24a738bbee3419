"""nuGPT's learning rates (arXiv 2604.27077, section 3.1), its paper's ablations, HyperP's rule (arXiv 2603.28743)."""

import pytest

from ngpt_train.config import load_config
from ngpt_train.config.schema import Config
from ngpt_train.models import build_model
from ngpt_train.models.ngpt.keys import EXPONENTS, nugpt_lr_factors
from ngpt_train.optim.optimizer import build_optimizer, hyperp, lr_factors
from tests.reference.training import nugpt_rates


@pytest.mark.parametrize(("m", "horizon"), [(0.5, 333.0), (3.0, 0.25)])
def test_each_factor(m: float, horizon: float) -> None:
    """Caught: exponents exchanged, a horizon that a kind does not follow, an output without its half."""
    found = nugpt_lr_factors(m, horizon)
    expected = nugpt_rates(["embedding", "layers.0.wq", "output", "s_z"], m, horizon)
    assert list(found) == pytest.approx(list(expected.values()), rel=1e-14)


def test_at_the_reference_all_but_the_output_have_the_base_rate() -> None:
    assert nugpt_lr_factors(1.0, 1.0) == (1.0, 1.0, 0.5, 1.0)
    assert nugpt_lr_factors(16.0, 1.0) == (0.25, 0.125, 0.0625, 1.0)
    assert nugpt_lr_factors(1.0, 8.0) == pytest.approx((0.5, 0.5, 0.25, 0.5), rel=1e-15)


def test_the_papers_ablations() -> None:
    """Twice the depth and 16 times the width. Caught: a factor of depth in nuGPT's own rates, or a rule that differs at
    the reference."""
    assert nugpt_lr_factors(16.0, 1.0, 2.0) == nugpt_lr_factors(16.0, 1.0)
    assert nugpt_lr_factors(16.0, 1.0, 2.0, "completep") == (0.25, 1 / 16, 0.5 / 4, 1.0)
    assert nugpt_lr_factors(16.0, 1.0, 4.0, "depth_mup") == (0.25, 0.125 / 2, 0.0625, 1.0)
    assert len({nugpt_lr_factors(1.0, 1.0, 1.0, rule) for rule in EXPONENTS}) == 1
    model = ["model=ngpt", "recipe=nugpt", "model.n_layers=16", "model.lr_rule=depth_mup"]
    config = load_config([*model, *(f"model.alpha_{x}.init=0.05*sqrt(L_ref/L)" for x in ("attn", "mlp"))])
    assert config.model.lr_factors(300) == pytest.approx((1.0, 0.5, 0.5, 1.0))
    config.model.vocab_size = 32
    for block in build_model(config.model).blocks():
        assert block.alpha_attn().unique().tolist() == pytest.approx([0.05 / 2])  # type: ignore[operator]


def test_hyperp() -> None:
    """Caught: an exponent of another size, a factor at the reference."""
    assert hyperp(1.0, 1.0, 1.0) == 1.0
    assert hyperp(1.0, 1.0, 2.0) == pytest.approx(0.801, abs=5e-4)
    assert hyperp(1.0, 4.0, 1.0) == 0.5
    assert hyperp(4.0, 1.0, 1.0) == 2.0


@pytest.mark.parametrize("recipe", [["model=gpt"], ["model=ngpt"]])
def test_hyperp_of_a_run(recipe: list[str]) -> None:
    """Each parameter has the rule's rate. Caught: a missing size that counts as 1, tokens without the steps."""
    size = ["scale=debug", "model.n_layers=8", "train.steps=50", "train.batch_rows=8", "optim.lr_rule=hyperp"]
    config = load_config([*recipe, *size, "optim.reference.n_layers=2", "optim.reference.tokens=12800"])
    assert [*set(rates(config).values())] == pytest.approx([0.5 * 2**-0.32])
    config = load_config([*recipe, *size, "optim.reference.batch_tokens=128"])
    assert set(rates(config).values()) == {2.0}


def rates(config: Config) -> dict[str, float]:
    """Of each parameter, relative to the base rate, as the optimizer's groups have it."""
    config.model.vocab_size = 64
    model = build_model(config.model)
    groups = model.parameter_groups()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    held = build_optimizer(model, groups, config.optim).param_groups
    factors = lr_factors(groups, config)
    return {names[id(x)]: factor for group, factor in zip(held, factors, strict=True) for x in group["params"]}


@pytest.mark.parametrize("model", ["ngpt", "ntransformer"])
def test_every_parameter_has_the_rate_of_its_kind(model: str) -> None:
    """Caught: an encoder's embedding among the hidden matrices, the steps of the reference alone."""
    size = ["model.d_model=64", "model.n_heads=2", "train.steps=100", "optim.lr=1e-2"]
    reference = ["model.reference.d_model=16", "model.reference.steps=800"]
    found = rates(load_config([f"model={model}", "recipe=nugpt", *size, *reference]))
    expected = {"embedding": 4**-0.5, "source_embedding": 4**-0.5, "output": 0.5 * 4**-0.75}
    for name, rate in found.items():
        of_kind = expected.get(name, 4**-0.75 if name.endswith(".matrix") else 1.0)
        assert rate == pytest.approx(8 ** (1 / 3) * of_kind), name
    assert len(set(found.values())) == 4


@pytest.mark.parametrize("model", ["gpt", "ngpt", "normformer", "ntransformer", "composed"])
def test_without_the_rule_there_are_two_groups_and_one_rate(model: str) -> None:
    """The groups of every recipe but nuGPT's, which checkpoints of before have too."""
    config = load_config([f"model={model}", "optim.lr=1e-2"])
    found = rates(config)
    assert set(found.values()) == {1.0}
    assert len(build_model(config.model).parameter_groups()) == 2


def test_what_the_recipe_sets() -> None:
    config = load_config(["model=ngpt", "recipe=nugpt", "model.d_model=512", "model.n_layers=16", "train.steps=2400"])
    factors = config.model.lr_factors(config.train.steps)
    assert factors == pytest.approx((0.5 * 0.5, 0.5 * 4**-0.75, 0.25 * 4**-0.75, 0.5))
    optim, schedule = config.optim, config.schedule
    assert (optim.name, optim.weight_decay, optim.betas, optim.eps) == ("adam", 0, [0.9, 0.95], 1e-16)
    assert (schedule.kind, schedule.warmup_steps) == ("cosine", 0)
    assert schedule.final_lr == pytest.approx(float(optim.lr) / 10)
    config.model.vocab_size = 32
    model = build_model(config.model)
    assert model.s_z().unique().tolist() == pytest.approx([2.0])  # type: ignore[operator]  # sqrt(m)
    for block in model.blocks():
        assert block.alpha_attn().unique().tolist() == pytest.approx([0.05 / 4])  # type: ignore[operator]
        assert block.alpha_mlp().unique().tolist() == pytest.approx([0.05 / 4])  # type: ignore[operator]
        assert block.attention.s_qk().unique().tolist() == pytest.approx([1.0])  # type: ignore[union-attr, operator]
    stored = {name: x.unique().item() for name, x in model.named_parameters() if x.ndim == 1}
    expected = {name: 1.0 if ".s_u." in name or ".s_v." in name else 0.03 for name in stored}
    assert stored == pytest.approx(expected)
