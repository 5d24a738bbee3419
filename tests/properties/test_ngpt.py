"""Invariances of nGPT's normalisation, and quantities that must count."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from ngpt_train.kernels.dropout import row_seeds
from ngpt_train.kernels.norm import normalize
from ngpt_train.kernels.rotary import rotate
from ngpt_train.models import build_model, export_gradients, export_weights, load_weights
from ngpt_train.models.layers.dropout import seeded
from ngpt_train.models.layers.norms import project_rows_
from ngpt_train.models.layers.rope import rope_table
from ngpt_train.models.ngpt.keys import ReferenceConfig
from ngpt_train.models.ngpt.model import riemannian, slerp
from ngpt_train.models.weights import by_path
from tests.properties.architectures import (
    ARCHITECTURES,
    SMALL,
    Architecture,
    Scales,
    Size,
    config,
    jittered,
    ngpt_with,
    ntransformer_with,
    random_batch,
)


@pytest.mark.parametrize("name", ["wq", "wk", "wo", "w_u", "w_down", "s_u", "wv"])
def test_length_does_not_matter(name: str) -> None:
    """A matrix before a normalisation may have any length. Caught: q, k or a suggestion not normalised."""
    assert change_of_logits(name, 7.0) < 1e-12


@pytest.mark.parametrize("name", ["alpha_attn", "alpha_mlp"])
def test_sign_of_alpha_does_not_matter(name: str) -> None:
    """Caught: the missing |alpha|."""
    assert change_of_logits(name, -1.0) == 0


@pytest.mark.parametrize("name", ["s_v", "w_v", "s_qk", "alpha_attn", "alpha_mlp", "s_z", "output"])
def test_what_does_matter(name: str) -> None:
    """Caught: s_v left out."""
    assert change_of_logits(name, 1.1) > 1e-3


def change_of_logits(name: str, factor: float, architecture: Architecture = ARCHITECTURES["ngpt"]) -> float:
    """Largest change, relative to the largest logit, when `name` is multiplied in every layer."""
    model, weights = jittered(architecture, SMALL)
    tokens, _ = random_batch(ARCHITECTURES["ngpt"], SMALL, 2, 16)
    with torch.no_grad():
        before = model(tokens)
        load_weights(model, {key: x * factor if key.split(".")[-1] == name else x for key, x in weights.items()})
        return ((model(tokens) - before).abs().max() / before.abs().max()).item()


def unit(rows: int, size: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return normalize(torch.randn(rows, size, generator=generator, dtype=torch.float64))


def lerp(h: Tensor, new: Tensor, alpha: Tensor) -> Tensor:
    return h + alpha * (new - h)


def test_updates_meet_at_a_half() -> None:
    """SLERP and LERP point into the same direction half way and nowhere else. Caught: sin and cos exchanged."""
    h, new = unit(50, 16, 0), unit(50, 16, 1)
    for share, same in ((0.5, True), (0.3, False), (0.7, False)):
        alpha = torch.full((16,), share, dtype=torch.float64)
        apart = (normalize(lerp(h, new, alpha)) - normalize(slerp(h, new, alpha))).norm(dim=-1)
        assert (apart < 1e-12).all() if same else (apart > 1e-3).all()
        torch.testing.assert_close(slerp(h, new, alpha).norm(dim=-1), torch.ones_like(apart), rtol=0, atol=1e-12)


def test_the_riemannian_step_is_tangent() -> None:
    """Caught: h^T h_A left out, or taken over another axis."""
    h, new = unit(50, 16, 0), unit(50, 16, 1)
    step = riemannian(h, new, torch.ones(16, dtype=torch.float64)) - h
    assert (step * h).sum(-1).abs().max() < 1e-12
    assert (step * new).sum(-1).min() > 0, "away from the suggestion"
    euclidean = lerp(h, new, torch.ones(16, dtype=torch.float64)) - h
    assert (euclidean * h).sum(-1).abs().min() > 1e-3


def test_slerp_turns_by_its_share_of_the_angle() -> None:
    """In the plane of the two, by alpha theta, on the sphere all the way. Caught: alpha of the chord for the arc."""
    h, new = unit(50, 16, 0), unit(50, 16, 1)
    angle = (h * new).sum(-1).arccos()
    normal = normalize(new - (h * new).sum(-1, keepdim=True) * h)  # in the plane, at right angles to h
    for share in (0.0, 0.25, 0.5, 0.9, 1.0):
        turned = slerp(h, new, torch.full((16,), share, dtype=torch.float64))
        expected = (share * angle).cos()[:, None] * h + (share * angle).sin()[:, None] * normal
        torch.testing.assert_close(turned, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("angle", [0.0, 1e-9, 1e-5, 1e-3])
def test_slerp_of_near_points_is_the_straight_line(angle: float) -> None:
    """arccos has no derivative at 1. Caught: theta without the clamp, which gives NaN."""
    h = unit(4, 16, 0)
    new = normalize(h + angle * unit(4, 16, 1)).requires_grad_()
    alpha = torch.linspace(0.05, 0.6, 16, dtype=torch.float64)
    out = normalize(slerp(h, new, alpha))
    torch.testing.assert_close(out, normalize(lerp(h, new, alpha)), rtol=0, atol=max(angle**2, 1e-12))
    out.sum().backward()
    assert new.grad is not None
    assert new.grad.isfinite().all()


def test_parametrization_has_the_tangent_gradient() -> None:
    """On unit rows its gradient is the projected model's, less what would change a row's length.

    Caught: normalisation of the wrong axis, of a detached norm, of some matrices only.
    """
    tokens, targets = random_batch(ARCHITECTURES["ngpt"], SMALL, 2, 16)
    gradients = {}
    _, weights = jittered(ARCHITECTURES["ngpt"], SMALL)
    for name, constraint in (("free", "none"), ("tangent", "parametrization")):
        model, _ = jittered(ngpt_with(constraint=constraint), SMALL)
        load_weights(model, weights)
        model.loss(tokens, targets)[0].backward()
        gradients[name] = export_gradients(model)
    for key, row in weights.items():
        free, tangent = gradients["free"][key], gradients["tangent"][key]
        if row.ndim == 2:
            assert (tangent * row).sum(-1).abs().max() < 1e-9 * free.abs().max()
            free = free - (free * row).sum(-1, keepdim=True) * row
        torch.testing.assert_close(tangent, free, rtol=1e-9, atol=1e-9 * free.abs().max().item())


@pytest.mark.parametrize("constraint", ["projection", "ball", "none", "parametrization"])
@pytest.mark.parametrize("name", ["ngpt", "ntransformer"])
def test_the_start_of_output_matrices(name: str, constraint: str) -> None:
    """1 / sqrt(d_model), and 1 / sqrt(2 L) of it where nothing projects (A.5); a decoder with cross-attention writes
    3 L times. Caught: L for 2 L, the encoder's writes counted with the decoder's, unit rows of another start.
    """
    architecture = {"ngpt": ngpt_with, "ntransformer": ntransformer_with}[name](constraint=constraint)
    size = Size(128, n_layers=4, n_heads=4, vocab_size=64, n_kv_heads=4, d_mlp=512)
    for key, x in export_weights(build_model(config(architecture, size))).items():
        if x.ndim == 2:
            writes = 1
            if constraint in ("none", "parametrization") and key.endswith((".wo", ".w_down")):
                in_decoder = (3 if name == "ntransformer" else 2) * size.n_layers
                writes = 2 * size.n_encoder_layers if key.startswith("encoder.") else in_decoder
            assert x.std().item() == pytest.approx((128 * writes) ** -0.5, rel=0.03), key


def test_the_start_on_the_sphere_keeps_its_bits() -> None:
    """Rows drawn with 1 / sqrt(d_model), then projected. Caught: another length before the projection, whose rounding
    is another."""
    size = Size(128, n_layers=4, n_heads=4, vocab_size=64, n_kv_heads=4, d_mlp=512)
    weights = export_weights(build_model(config(ARCHITECTURES["ngpt"], size)))
    for name, path, rows in (("wo", "attention.wo", 128), ("w_down", "mlp.w_down", 512), ("wq", "attention.wq", 128)):
        expected = by_path(0, f"layers.1.{path}", (rows, 128), 1 / math.sqrt(128))
        project_rows_(expected, "sphere")
        assert torch.equal(weights[f"layers.1.{name}"], expected)


@pytest.mark.parametrize(
    ("qk_norm", "softmax_scale", "deviation"),
    [
        (True, "sqrt(d_k)", 1.0),
        (True, "1/sqrt(d_k)", 1 / 64),
        (False, "sqrt(d_k)", 64 / 256),
        (False, "1/sqrt(d_k)", 1 / 256),
        (False, "d/sqrt(d_k)", 1.0),
    ],
)
def test_scores_at_the_start(qk_norm: bool, softmax_scale: str, deviation: float) -> None:
    """Their standard deviation over pairs of tokens at d_model = 256 and d_k = 64. Caught: a scale of another name."""
    architecture = ngpt_with(qk_norm=qk_norm, softmax_scale=softmax_scale)
    size = Size(256, n_layers=1, n_heads=4, vocab_size=512, n_kv_heads=4, d_mlp=64)
    model = build_model(config(architecture, size))
    attention: Any = model.layers[0].attention
    tokens = torch.randperm(512)[None, :200]
    rope = model.rope(tokens, torch.float32)
    q, k, _ = attention.heads(attention.projections(model.embedding[tokens]), rope)
    scores = attention.softmax_scale * torch.einsum("bthd,bshd->bhts", q, k)
    assert scores.std().item() == pytest.approx(deviation, rel=0.05)


def test_the_eps_of_a_dropped_embedding() -> None:
    """It is an activation like others. Caught: Norm without norm_eps."""
    model, _ = jittered(ngpt_with(norm_eps=0.3, embedding_dropout=0.5), SMALL)
    h = model.embedding[None, :8].detach()
    with torch.no_grad(), seeded(row_seeds(0, 0, torch.arange(1))):
        found = model.drop_embedding(h)
    dropped = 2 * h * (found != 0)
    expected = dropped / (dropped.square().sum(-1, keepdim=True) + 0.3).sqrt()
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("constraint", ["none", "parametrization"])
def test_no_projection_without_a_constraint(constraint: str) -> None:
    """Caught: constraint=none, or a parametrization's rows, projected after each step."""
    model, weights = jittered(ngpt_with(constraint=constraint), SMALL, torch.float32)
    model.project_()
    assert all(torch.equal(x, weights[key].float()) for key, x in export_weights(model).items())


@torch.no_grad()
def test_the_ball() -> None:
    """Rows start at length 1; a longer row returns there, a shorter one keeps its bits, and of a skipped step all do.
    Caught: rows that start at any length below 1, the projection of the sphere, one at every length above 0."""
    model = build_model(config(ngpt_with(constraint="ball"), SMALL))
    matrices = {key: x for key, x in model.named_parameters() if x.ndim == 2}
    for x in matrices.values():
        torch.testing.assert_close(x.norm(dim=1), torch.ones(len(x)), rtol=0, atol=1e-6)
        x[::2] *= 3
        x[1::2] *= 0.9
    before = {key: x.clone() for key, x in matrices.items()}
    model.project_(skipped=torch.tensor(True))
    assert all(torch.equal(x, before[key]) for key, x in matrices.items())
    model.project_(skipped=torch.tensor(False))
    for key, x in matrices.items():
        torch.testing.assert_close(x[::2], before[key][::2] / 3, rtol=0, atol=1e-6)
        assert torch.equal(x[1::2], before[key][1::2])
        assert x.norm(dim=1).max() <= 1 + 1e-6


@pytest.mark.parametrize(
    ("word", "number"),
    [
        *(("1/L", 1 / 2), ("1/sqrt(d)", 32**-0.5), ("sqrt(d)", 32**0.5), (0.7, 0.7)),
        *(("0.05*L_ref/L", 0.05 * 6 / 2), ("sqrt(d/d_ref)", 4**0.5)),
    ],
    ids=str,
)
def test_words_for_starts_are_numbers(word: float | str, number: float) -> None:
    """As init it is the value in use, as scale the stored value. Caught: 1/(L + 1), d for sqrt(d)."""
    scales: Scales = {"alpha_mlp": ("vector", word, 0.5), "s_z": ("vector", 3.0, word)}
    model = build_model(config(ngpt_with(scales, reference=ReferenceConfig(d_model=8, n_layers=6)), SMALL))
    alpha, s_z = model.layers[0].alpha_mlp, model.s_z  # type: ignore[union-attr]
    assert alpha().tolist() == pytest.approx([number] * 32)  # type: ignore[operator]
    assert s_z().tolist() == pytest.approx([3.0] * SMALL.vocab_size)  # type: ignore[operator]
    assert export_weights(model)["s_z"].tolist() == pytest.approx([number] * SMALL.vocab_size)


def test_the_depth_of_an_encoder_is_its_own() -> None:
    """Caught: 1/L of the decoder's L in the encoder."""
    model = build_model(config(ntransformer_with({"alpha_attn": ("vector", "1/L", 1.0)}), SMALL))
    starts = [block.alpha_attn().mean().item() for block in model.blocks()]  # type: ignore[operator]
    assert starts == pytest.approx([1 / 3] * 3 + [1 / 2] * 2)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_rope_turns_and_knows_distances_alone(layout: str) -> None:
    """Caught: terms of sin and cos not added, pairs of one layout with angles of the other."""
    rope = rope_table(40, 8, 10000.0, layout == "interleaved", torch.device("cpu"), torch.float64)
    x = torch.randn(1, 40, 2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(rotate(x, rope).norm(dim=-1), x.norm(dim=-1), rtol=1e-12, atol=0)
    q, k = (rotate(x[:, :1].expand_as(x) * factor, rope)[0, :, 0] for factor in (1.0, -0.7))
    scores = q @ k.T
    for distance in (1, 3, 17):
        diagonal = scores.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-12, atol=1e-12)
    assert scores[:, 0].std() > 1e-2, "nothing turns"


def test_rope_layouts_are_permutations_of_each_other() -> None:
    """Caught: the interleaved pairs put back in another order."""
    x = torch.randn(1, 12, 2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    half, interleaved = (rope_table(12, 8, 10000.0, kind, torch.device("cpu"), torch.float64) for kind in (False, True))
    order = torch.arange(8).view(2, 4).T.flatten()  # 0 4 1 5 2 6 3 7
    torch.testing.assert_close(rotate(x[..., order], interleaved), rotate(x, half)[..., order], rtol=0, atol=1e-14)


@pytest.mark.parametrize("name", ["alpha_attn", "alpha_mlp"])
def test_the_sign_of_a_free_alpha_matters(name: str) -> None:
    """Caught: |alpha| whatever alpha_sign says."""
    assert change_of_logits(name, -1.0, ngpt_with(alpha_sign="free")) > 1e-3
