"""Each measure against brute force in numpy, and against matrices whose answer was planted."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from ngpt_train.analysis import paper_figures
from ngpt_train.analysis.measures import batch_statistics, gradient_norms, learned_vectors, matrices
from ngpt_train.analysis.measures.of_run import Curve, NoMeaning, OfRun, by_layer
from ngpt_train.analysis.paper_figures import measure
from ngpt_train.analysis.run_contents import in_use_of, weights_of
from ngpt_train.config import load_config
from ngpt_train.config.sections.verbs import FIGURES, LIVE_FIGURES
from ngpt_train.models import build_model, export_weights

SMALL = ["scale=debug", "tokenizer=bytes", "model.vocab_size=67", "model.d_model=16", "model.n_heads=4"]


def model_of(*overrides: str) -> torch.nn.Module:
    """A model whose weights, gains and scales are all away from their start."""
    config = load_config([*SMALL, *overrides]).model
    model = build_model(config)
    model.init_weights_(0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    model.project_()
    return model


def run_of(model: torch.nn.Module, name: str = "run", **more: object) -> OfRun:
    weights, in_use = weights_of(model), in_use_of(model)
    return OfRun(name, model.config, model.on_sphere, weights=weights, in_use=in_use, **more)


def planted(sigma: list[float], m: int, n: int, seed: int = 0) -> Tensor:
    """A matrix (m, n) in fp64 with these singular values."""
    generator = torch.Generator().manual_seed(seed)
    U, _ = torch.linalg.qr(torch.randn(m, m, generator=generator, dtype=torch.float64))
    V, _ = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64))
    S = torch.zeros(m, n, dtype=torch.float64)
    S[range(len(sigma)), range(len(sigma))] = torch.tensor(sigma, dtype=torch.float64)
    return U @ S @ V.T


def curve(curves: list[Curve], panel: str, name: str = "") -> Curve:
    (found,) = [each for each in curves if (each.panel, each.name) == (panel, name)]
    return found


def test_the_names_are_those_of_the_keys() -> None:
    """Caught: a figure that can be drawn and not asked for; a name that is refused only after torch is loaded."""
    assert list(paper_figures.FIGURES) == [*FIGURES, *LIVE_FIGURES]
    assert paper_figures.chosen(["all"]) == list(paper_figures.FIGURES)
    assert paper_figures.chosen(["live"]) == list(LIVE_FIGURES)
    assert paper_figures.chosen(["tnt_3", "ngpt_4"]) == ["ngpt_4", "tnt_3"]


def test_condition_numbers_of_planted_matrices() -> None:
    """Caught: fp32, which has no digits for 1e9; the wrong head; the mean in place of the median."""
    kappas = [1e9, 3.0, 1e3, 20.0]
    blocks = [planted([1.0, 0.5, 1 / kappa], 3, 12, seed) for seed, kappa in enumerate(kappas)]
    found = matrices.condition_numbers(matrices.heads(torch.cat(blocks), 4))
    assert found.tolist() == pytest.approx(kappas, rel=1e-6)
    assert matrices.condition_numbers(torch.zeros(3, 4)[None]).tolist() == pytest.approx([np.nan], nan_ok=True)
    model = replace(load_config([*SMALL, "model=gpt"]).model, d_model=12)
    weights = {"layers.0.wq": torch.cat(blocks)}
    curves = paper_figures.FIGURES["ngpt_5"].measure(OfRun("a", model, weights=weights))
    assert curve(curves, "wq", "median").y.tolist() == pytest.approx([(20 + 1e3) / 2], rel=1e-6)
    assert sorted(curve(curves, "wq", "heads").y) == pytest.approx(sorted(kappas), rel=1e-6)


def test_condition_numbers_by_brute_force() -> None:
    """Caught: K cut into as many heads as Q under grouped heads; W_down not whole; renormalisation along columns."""
    model = model_of("model=gpt", "model.n_kv_heads=2")
    run = run_of(model)
    curves = matrices.figure_10(run)
    for name in ("wq", "wk", "wv", "w_u", "w_v", "w_down"):
        for layer in range(2):
            W = run.weights[f"layers.{layer}.{name}"].double().numpy()
            n_heads = {"wq": 4, "wk": 2, "wv": 2}.get(name, 1)
            for suffix, matrix in (("", W), (" (renormalized)", W / np.linalg.norm(W, axis=1, keepdims=True))):
                expected = np.median([np.linalg.cond(head) for head in np.split(matrix, n_heads)])
                assert curve(curves, name, f"median{suffix}").y[layer] == pytest.approx(expected, rel=1e-9)
    on_sphere = matrices.figure_10(run_of(model_of("model=ngpt")))
    assert not [each for each in on_sphere if "renormalized" in each.name], "nothing to renormalise"


def test_rows_that_every_pass_divides_by_their_length() -> None:
    """Caught: the stored rows of model.constraint=parametrization, whose lengths have no effect."""
    model = model_of("model=ngpt", "model.constraint=parametrization")
    stored = export_weights(model)["layers.0.w_u"].double().numpy()
    lengths = np.linalg.norm(stored, axis=1, keepdims=True)
    assert lengths.max() > 1.1 * lengths.min(), "nothing to divide by"
    found = curve(paper_figures.FIGURES["ngpt_5"].measure(run_of(model)), "w_u", "median").y[0]
    assert found == pytest.approx(np.linalg.cond(stored / lengths), rel=1e-9)


def test_norms_and_singular_values_of_a_layer() -> None:
    """Caught: norms per head; the fourth layer in the third's place; values in no order."""
    run = run_of(model_of("model=gpt", "model.n_layers=4"))
    for figure, layer in (("ngpt_11", 2), ("ngpt_12", 3)):
        W = run.weights[f"layers.{layer}.wq"].double().numpy()
        curves = paper_figures.FIGURES[figure].measure(run)
        assert curve(curves, "wq_norms").y == pytest.approx(np.sort(np.linalg.norm(W, axis=1))[::-1], rel=1e-12)
        expected = np.linalg.svd(W[4:8], compute_uv=False)
        assert curve(curves, "wq_singular_values", "head 1").y == pytest.approx(expected, rel=1e-9)
    with pytest.raises(NoMeaning, match="2 layers"):
        paper_figures.FIGURES["ngpt_11"].measure(run_of(model_of("model=gpt")))


def test_eigenvalues_of_a_planted_covariance() -> None:
    """Caught: a covariance that is not centred; eigenvalues of squares in fp32; the largest in the median's place."""
    sigma = [1e4, 3.0, 2.0, 1.0, 1e-4]
    X = planted(sigma, 40, 5)
    X -= X.mean(0)
    U, _, V = torch.linalg.svd(X, full_matrices=False)  # columns of U stay without a mean
    E = U @ torch.diag(torch.tensor(sigma, dtype=torch.float64)) @ V + torch.randn(5, dtype=torch.float64) * 7
    found = matrices.eigenvalues_over_median(E)
    assert found.tolist() == pytest.approx([(s / 2.0) ** 2 for s in sigma], rel=1e-4)
    E = torch.randn(50, 8)
    expected = np.sort(np.linalg.eigvalsh(np.cov(E.double().numpy().T)))[::-1]
    assert matrices.eigenvalues_over_median(E).tolist() == pytest.approx(expected / np.median(expected), rel=1e-9)


def test_dot_products_of_all_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught: a vector with itself; a pair twice; pairs across blocks left out."""
    monkeypatch.setattr(matrices, "ROWS_AT_ONCE", 7)
    E = torch.randn(30, 5, generator=torch.Generator().manual_seed(0))
    edges, density = matrices.pairwise_dot_products(E)
    products = (E.double() @ E.double().T).numpy()[np.triu_indices(30, k=1)]
    assert len(products) == 435
    counts = np.histogram(products, edges)[0]
    assert counts.sum() == 435
    assert density == pytest.approx(counts / 435 / np.diff(edges), rel=1e-9)


def test_figure_4_and_spectra_of_tied_and_untied() -> None:
    """Caught: the input in the output's place; a tied model without output."""
    for overrides in (["model=gpt"], ["model=gpt", "model.tied_embeddings=true"]):
        run = run_of(model_of(*overrides))
        curves = matrices.figure_4(run)
        output = run.weights.get("output", run.weights["embedding"]).double().numpy()
        expected = np.sort(np.linalg.norm(output, axis=1))[::-1]
        assert curve(curves, "output_norms").y == pytest.approx(expected, rel=1e-12)
        s = np.linalg.svd(output, compute_uv=False)
        assert curve(matrices.powernorm_figure_6(run), "output").y == pytest.approx(s / s[0], rel=1e-9)


def effective(run: OfRun, path: str, init: float, scale: float) -> np.ndarray:
    return run.weights[path].double().numpy() * init / scale


def test_rates_and_scales_are_effective() -> None:
    """Caught: stored values, which are 1/sqrt(d) of the effective ones; a mean in which alpha's signs cancel."""
    run = run_of(model_of("model=ngpt"))
    curves = learned_vectors.figure_6(run)
    for panel, init, scale, of in (
        ("alpha_attn", 0.05, 0.25, np.abs),
        ("alpha_mlp", 0.05, 0.25, np.abs),
        ("s_qk", 1.0, 0.25, np.array),
        ("s_u", 1.0, 1.0, np.array),
        ("s_v", 1.0, 1.0, np.array),
    ):
        expected = [of(effective(run, f"layers.{i}.{panel}", init, scale)).mean() for i in range(2)]
        assert curve(curves, panel).y == pytest.approx(expected, rel=1e-12)
    assert (run.weights["layers.0.alpha_attn"] < 0).any(), "nothing to take the absolute value of"
    assert curve(curves, "s_z").y == pytest.approx(effective(run, "s_z", 1.0, 0.25), rel=1e-12)


def test_histograms_have_the_same_bins_for_all_runs() -> None:
    """Caught: bins of each run's own; one layer in the place of all; a density that is a count."""
    runs = [run_of(model_of("model=ngpt", f"model.n_layers={n}"), f"n{n}") for n in (2, 3)]
    found = measure(runs, ["ngpt_14"]).curves["ngpt_14"]
    values = {run.name: np.concatenate([v.double() for p, v in run.in_use.items() if "alpha_mlp" in p]) for run in runs}
    edges = np.linspace(min(map(np.min, values.values())), max(map(np.max, values.values())), learned_vectors.BINS + 1)
    for run in runs:
        of = curve(found[run.name], "alpha_mlp")
        assert of.edges == pytest.approx(edges, rel=1e-6)
        assert of.y == pytest.approx(np.histogram(values[run.name], of.edges, density=True)[0], rel=1e-6)
        assert (of.y * np.diff(of.edges)).sum() == pytest.approx(1)


def test_scales_that_are_fixed_or_one_number() -> None:
    """Caught: a fixed scale, which is no weight, left out; a number as one entry among vectors."""
    run = run_of(model_of("model=ngpt", "model.s_qk.kind=fixed", "model.s_u.kind=scalar"))
    curves = learned_vectors.figure_6(run)
    assert curve(curves, "s_qk").y.tolist() == [1.0, 1.0]
    assert curve(curves, "s_u").y == pytest.approx([float(run.weights[f"layers.{i}.s_u"]) for i in range(2)], rel=1e-6)
    assert len(learned_vectors.values_of(run, "s_u").y) == sum(
        len(v) for p, v in run.in_use.items() if p.endswith(".s_u")
    )


def test_encoder_and_decoder_stored_and_effective() -> None:
    """Caught: the decoder in the encoder's place; stored and effective exchanged; cross-attention among the rest."""
    run = run_of(model_of("model=ntransformer"))
    curves = [*paper_figures.FIGURES["tnt_3"].measure(run), *paper_figures.FIGURES["tnt_4"].measure(run)]
    for panel, where, path in (
        ("alpha_mlp", "encoder", "encoder.{}.alpha_mlp"),
        ("alpha_mlp", "decoder", "layers.{}.alpha_mlp"),
        ("alpha_cross", "decoder", "layers.{}.alpha_cross"),
        ("s_qk", "encoder", "encoder.{}.s_qk"),
        ("s_qk", "decoder", "layers.{}.s_qk"),
        ("s_qk_cross", "decoder", "layers.{}.cross.s_qk"),
    ):
        of, init = (np.abs, 0.05) if panel.startswith("alpha") else (np.array, 1.0)
        for said, factor in (("stored", 1.0), ("effective", init / 0.25)):
            expected = [of(run.weights[path.format(i)].double().numpy()).mean() * factor for i in range(2)]
            assert curve(curves, panel, f"{where} {said}").y == pytest.approx(expected, rel=1e-6)
    with pytest.raises(NoMeaning):
        paper_figures.FIGURES["tnt_3"].measure(run_of(model_of("model=ngpt")))


def test_gains_of_normformer() -> None:
    """Caught: quantiles over all layers together; depth from 1; the baseline's norms among the additions."""
    run = run_of(model_of("model=normformer", "model.res_scale=true"))
    curves = learned_vectors.normformer_figure_4(run)
    assert {each.panel for each in curves} == {"norm_ffn", "norm_post_attn", "head_scale"}
    expected = [np.quantile(run.weights[f"layers.{i}.norm_ffn"].double().numpy(), 0.25) for i in range(2)]
    assert curve(curves, "norm_ffn", "lower quarter").y == pytest.approx(expected, rel=1e-9)
    of = curve(learned_vectors.normformer_figure_6(run), "res_scale")
    assert of.x.tolist() == [0, 0.5]
    assert of.y == pytest.approx([float(run.weights[f"layers.{i}.res_scale"].mean()) for i in range(2)], rel=1e-6)
    with pytest.raises(NoMeaning, match="res_scale"):
        learned_vectors.normformer_figure_6(run_of(model_of("model=gpt")))


def batches(n: int, rows: int = 3) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, 67, (n, rows, 13), generator=generator)
    return [[part[:, :-1], part[:, 1:].clone()] for part in ids]


def test_gradients_of_the_mean_loss() -> None:
    """Caught: the mean of the batches' means, whose counts differ; a sum of squares; a gradient that stays."""
    model = model_of("model=gpt")
    given = batches(2)
    given[1][1][:, 4:] = -100
    found, loss = gradient_norms.gradient_l1(model, given)
    logits = torch.cat([model(tokens) for tokens, _ in given])
    targets = torch.cat([targets for _, targets in given])
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1).double(), targets.flatten())
    (of_down,) = torch.autograd.grad(expected, [model.layers[1].mlp.w_down.matrix])
    assert found["layers.1.w_down"] == pytest.approx(float(of_down.abs().sum()), rel=1e-5)
    assert loss == pytest.approx(float(expected), rel=1e-6)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_ratios_are_to_the_first_run() -> None:
    """Caught: the inverse; the losses left out; a layer that the baseline lacks."""
    model = load_config([*SMALL, "model=gpt"]).model
    first = OfRun("a", model, gradient_l1={"layers.0.wq": 2.0, "layers.1.wq": 4.0}, loss=4.0)
    other = OfRun("b", model, gradient_l1={f"layers.{i}.wq": 3.0 for i in range(3)}, loss=2.0)
    found = measure([first, other], ["normformer_7"]).curves["normformer_7"]
    assert curve(found["a"], "wq").y.tolist() == [1, 1]
    assert curve(found["b"], "wq").x.tolist() == [0, 1]
    assert curve(found["b"], "wq").y.tolist() == [3 / 2.0 / (2.0 / 4), 3 / 2.0 / (4.0 / 4)]


@pytest.mark.parametrize("norm", ["batch", "pn_v", "pn"])
def test_statistics_of_batches(norm: str) -> None:
    """Caught: sigma^2 for sigma; a sum over channels in place of the norm / d; statistics that have moved."""
    model = model_of("model=powernorm", f"model.norm={norm}", "model.group_scaling=0", "model.psi_warmup_steps=0")
    with torch.no_grad():
        for value in model.statistics().values():
            value.add_(0.5)
    before = {name: value.clone() for name, value in [*model.statistics().items(), *model.named_parameters()]}
    given = batches(3)
    found = batch_statistics.batch_gaps(model, given, step=10)
    after = dict([*model.statistics().items(), *model.named_parameters()])
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not model.training
    assert not any(module.training for module in model.modules())

    tokens, _ = given[1]
    X = (
        torch.nn.functional.embedding(tokens, model.embedding).flatten(0, 1).detach().double()
    )  # what the first norm reads
    norm_0, *_ = found[1]
    assert norm_0 == "layers.0.norm_attn"
    gap = found[1][norm_0]
    running = {
        name.rpartition(".")[2]: value.double() for name, value in before.items() if "layers.0.norm_attn" in name
    }
    eps = model.config.norm_eps

    def dist(a: Tensor, b: Tensor) -> float:
        return float(np.sqrt(((a - b).numpy() ** 2).sum())) / 16

    if norm == "batch":
        variance = X.var(0, unbiased=False)
        assert gap["mu"] == pytest.approx(dist(X.mean(0), running["mu"]), rel=1e-5)
        assert gap["sigma_squared"] == pytest.approx(dist(variance, running["variance"]), rel=1e-5)
        expected = dist((variance + eps).sqrt(), (running["variance"] + eps).sqrt())
        assert gap["sigma"] == pytest.approx(expected, rel=1e-5)
    else:
        square = X.square().mean(0)
        assert gap["psi_squared"] == pytest.approx(dist(square, running["psi_squared"]), rel=1e-5)
        expected = dist((square + eps).sqrt(), (running["psi_squared"] + eps).sqrt())
        assert gap["psi"] == pytest.approx(expected, rel=1e-5)
    assert {"batch": "g_sigma_squared", "pn_v": "g_psi_squared"}.get(norm, "psi") in gap
    assert ("g_psi_squared" in gap) == (norm == "pn_v")

    run = OfRun("a", model.config, over_batch=True, batches=found)
    name = "mu" if norm == "batch" else "psi"
    curves = batch_statistics.over_batches(run, [name])
    all_batches = [each["layers.1.norm_mlp"][name] for each in found]
    assert curve(curves, f"{name}_mean", "norm_mlp").y[1] == pytest.approx(np.mean(all_batches))
    assert curve(curves, f"{name}_variance", "norm_mlp").y[1] == pytest.approx(np.var(all_batches, ddof=1))


def test_terms_of_the_gradient_make_up_the_gradient() -> None:
    """Eq. 3: dL/dX = gamma / sigma_B dL/dY - (g_mu + g_sigma^2 x_hat), so the terms are those that autograd subtracts.
    Caught: sums for means; gamma or sigma left out; x for x_hat."""
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(40, 6, dtype=torch.float64, generator=generator, requires_grad=True)
    gamma = torch.randn(6, dtype=torch.float64, generator=generator)
    weights = torch.randn(40, 6, dtype=torch.float64, generator=generator)
    sigma = (X.var(0, unbiased=False) + 1e-5).sqrt()
    X_hat = (X - X.mean(0)) / sigma
    Y = gamma * X_hat
    (dL_dX,) = torch.autograd.grad((weights * Y).sum(), X)
    rest = gamma / sigma * weights - dL_dX  # (B, d): c_mu + c_sigma * x_hat
    c_mu = rest.mean(0)  # x_hat has no mean
    c_sigma = (rest * X_hat).mean(0)  # and mean square 1, but for eps
    terms = (None, X_hat.detach())
    found = [batch_statistics.gradient_term(weights, of, gamma, sigma.detach()) for of in terms]
    assert found[0] == pytest.approx(float(c_mu.norm()) / 6, rel=1e-9)
    assert found[1] == pytest.approx(float(c_sigma.norm()) / 6, rel=1e-4)


def test_stacks_of_an_encoder_decoder() -> None:
    named = {"encoder.1.wq": 1, "encoder.0.wq": 0, "layers.0.wq": 2, "layers.0.cross.wq": 3, "layers.0.norm_q.wq": 4}
    assert by_layer(named, "wq") == {"encoder": {0: 0, 1: 1}, "decoder": {0: 2}, "cross-attention": {0: 3}}
    assert by_layer({"layers.0.wq": 2}, "wq") == {"": {0: 2}}


def test_figures_without_meaning_are_named() -> None:
    """Caught: an error where an architecture has no such thing; a figure that vanishes without a word."""
    runs = [run_of(model_of("model=gpt"), "gpt"), run_of(model_of("model=ngpt"), "ngpt")]
    found = measure(runs, paper_figures.chosen(["all"]))
    assert list(found.curves["ngpt_6"]) == ["ngpt"]
    assert "tnt_3" not in found.curves
    seen = {(name, run) for name, of in found.curves.items() for run in of}
    said = {(each.figure, each.run) for each in found.skipped}
    assert seen | said == {(name, run.name) for name in paper_figures.FIGURES for run in runs}
    assert not seen & said
