"""The output embedding and the cross-entropy in chunks, in Triton's interpreter and in plain PyTorch, against fp64."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ngpt_train.core.constants import IGNORED
from ngpt_train.kernels import cross_entropy, dispatch
from ngpt_train.kernels.cross_entropy import linear_cross_entropy_forward, losses_and_gradients
from ngpt_train.kernels.gpu import cross_entropy as gpu
from tests.unit.kernels.looks import Seen, error

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-3}
SHAPES = [  # leading dimensions of h, d, V
    ((1,), 64, 3),
    ((2, 7), 64, 101),
    ((13,), 1024, 257),
    ((), 65, 128),
    ((3, 4), 1280, 320),
    # Chunks are of 5 rows, blocks of 64 columns: the one full and the other with one left over.
    ((10,), 32, 129),
    ((11,), 32, 128),
]

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter, computing what masks discard


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch, poison: None) -> None:
    """Several chunks, the last one smaller; several blocks of columns, the last one not full; poisoned memory."""
    monkeypatch.setattr(cross_entropy, "CPU_ROWS", 5)
    monkeypatch.setattr(gpu, "BLOCK", 64)


def linear_cross_entropy(*args: Any) -> Tensor:
    """The loss alone."""
    return cross_entropy.linear_cross_entropy(*args)[0]


def formula(*args: Any) -> Tensor:
    return cross_entropy.linear_cross_entropy.formula(*args)[0]


def draw(leading: tuple[int, ...], d: int, n_vocab: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple:
    """h, matrix, targets, scale; logits of a spread of about 2, scales away from 1, a third of the targets ignored."""
    generator = torch.Generator().manual_seed(seed + d + n_vocab)
    master = torch.promote_types(dtype, torch.float32)
    h = torch.randn(*leading, d, generator=generator, dtype=master).to(dtype).requires_grad_()
    matrix = (torch.randn(n_vocab, d, generator=generator, dtype=master) * d**-0.5).requires_grad_()
    scale = (0.5 + 3 * torch.rand(n_vocab, generator=generator, dtype=master)).requires_grad_()
    targets = torch.randint(n_vocab, leading, generator=generator)
    if targets.numel() > 1:
        targets[torch.rand(leading, generator=generator) < 1 / 3] = IGNORED
    return h, matrix, targets, scale


def in_fp64(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if t is None else t.detach().double().requires_grad_() for t in tensors]


def check(
    h: Tensor,
    matrix: Tensor,
    targets: Tensor,
    scale: Tensor | None,
    z_loss: float,
    tolerance: float,
    smoothing: float = 0.0,
) -> None:
    """Loss, its parts and the gradient of every argument, with a factor from above, against fp64 autograd of the
    reference."""
    leaves = [t for t in (h, matrix, scale) if t is not None]
    loss, plain, z_term = cross_entropy.linear_cross_entropy(h, matrix, targets, scale, z_loss, smoothing)
    gradients = torch.autograd.grad(loss * 1.7, leaves)
    h64, matrix64, scale64 = in_fp64(h, matrix, scale)
    expected = formula(h64, matrix64, targets, scale64, z_loss, smoothing)
    expected_gradients = torch.autograd.grad(expected * 1.7, [t for t in (h64, matrix64, scale64) if t is not None])
    assert loss.dtype == torch.promote_types(h.dtype, torch.float32)
    assert error(loss, expected) <= tolerance
    alone = formula(h64, matrix64, targets, scale64)
    assert error(plain, alone) <= tolerance
    assert torch.equal(plain, cross_entropy.linear_cross_entropy(h, matrix, targets, scale)[1])
    assert (z_term is None) == (z_loss == 0)
    if z_term is not None:
        assert error(z_term, formula(h64, matrix64, targets, scale64, z_loss) - alone) <= tolerance
        assert not z_term.requires_grad
    if not smoothing:
        assert torch.equal(loss, plain if z_term is None else plain + z_term)
    assert not plain.requires_grad
    for leaf, gradient, expected_gradient in zip(leaves, gradients, expected_gradients, strict=True):
        assert gradient.dtype == leaf.dtype
        assert error(gradient, expected_gradient) <= tolerance


@pytest.mark.parametrize(("scaled", "z_loss", "smoothing"), [(False, 0.0, 0.0), (True, 0.01, 0.6), (False, 0.0, 0.1)])
def test_formula_is_torchs_cross_entropy(scaled: bool, z_loss: float, smoothing: float) -> None:
    """Loss and gradients. Catches a mistake that the operation and its reference share: a mean for a sum, a scale
    forgotten, a smoothed share that is spread over V - 1 tokens (fairseq's)."""
    h, matrix, targets, scale = draw((3, 5), 64, 101, torch.float64)
    logits = F.linear(h, matrix) * (scale if scaled else 1)
    options = {"ignore_index": IGNORED, "reduction": "sum", "label_smoothing": smoothing}
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), **options)
    expected = expected + z_loss * (logits.exp().sum(-1).log() ** 2)[targets != IGNORED].sum()
    found = formula(h, matrix, targets, scale if scaled else None, z_loss, smoothing)
    leaves = [h, matrix, scale] if scaled else [h, matrix]
    gradients = [(one, *torch.autograd.grad(one, leaves)) for one in (found, expected)]
    assert error(found, expected) < 1e-13
    assert all(error(one, other) < 1e-12 for one, other in zip(*gradients, strict=True))


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("dtype", "scaled", "z_loss", "smoothing"),
    [(torch.float32, True, 0.0, 0.0), (torch.float32, True, 0.02, 0.1), (torch.bfloat16, False, 0.02, 0.1)],
)
@pytest.mark.parametrize(("leading", "d", "n_vocab"), SHAPES)
def test_against_fp64(kernels, leading, d, n_vocab, dtype, scaled, z_loss, smoothing) -> None:
    """Catches a wrong term, sign, mask or stride in the loss or in any gradient; a chunk or the padding of a row; a
    z-loss or smoothing in the reported cross-entropy, left out of the loss, or of a target that does not count."""
    h, matrix, targets, scale = draw(leading, d, n_vocab, dtype)
    check(h, matrix, targets, scale if scaled else None, z_loss, TOLERANCE[dtype], smoothing)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_soft_cap(kernels, dtype: torch.dtype) -> None:
    """Loss, losses of tokens and gradients of the capped logits, as torch's own operations have them in fp64. Caught: a
    slope that is forgotten, a target's logit without the cap, a cap before the scale."""
    h, matrix, targets, scale = draw((23,), 64, 101, dtype)
    loss, *_ = cross_entropy.linear_cross_entropy(h, matrix, targets, scale, 0.02, 0.1, 3.0)
    found = loss, *torch.autograd.grad(loss, (h, matrix, scale))
    leaves = in_fp64(h, matrix, scale)
    z = 3 * torch.tanh(F.linear(leaves[0], leaves[2][:, None] * leaves[1]) / 3)  # type: ignore[index, arg-type]
    options = {"ignore_index": IGNORED, "reduction": "none"}
    losses = F.cross_entropy(z, targets, **options)
    smoothed = F.cross_entropy(z, targets, label_smoothing=0.1, **options).sum()
    smoothed = smoothed + 0.02 * z.logsumexp(-1).square()[targets != IGNORED].sum()
    expected = smoothed, *torch.autograd.grad(smoothed, leaves)  # type: ignore[arg-type]
    for one, other in zip(found, expected, strict=True):
        assert error(one, other) <= TOLERANCE[dtype]
    assert error(cross_entropy.token_losses(h, matrix, targets, scale, 3.0), losses) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    """Catches fp32 arithmetic in an fp64 model, and a cast that takes bf16 for the only short dtype."""
    with dispatch.chosen("torch" if dtype == torch.float64 else "triton"):
        h, matrix, targets, scale = draw((11,), 64, 101, dtype)
        check(h, matrix, targets, scale, 0.01, TOLERANCE[dtype], 0.1)


def test_bf16_matrix(kernels) -> None:
    """Catches a gradient that leaves in the dtype of the sum instead of the matrix's, and a scale folded in bf16."""
    h, matrix, targets, scale = draw((11,), 64, 101, torch.bfloat16)
    matrix = matrix.detach().bfloat16()
    check(h, matrix.clone().requires_grad_(), targets, scale, 0.01, 1e-2)
    # Autograd would hide a missing cast.
    needed, on_triton = (True, True, True), kernels == "triton"
    with torch.no_grad():
        forward = losses_and_gradients(h, matrix, targets, scale, 0.01, *needed, 0.0, on_triton)
    assert forward[3].dtype == torch.bfloat16
    # In fp32 products a scale folded in bf16 is all the rounding there is.
    expected = formula(*in_fp64(h, matrix), targets, scale)
    assert error(linear_cross_entropy(h.float(), matrix, targets, scale), expected) <= 1e-5


def test_non_contiguous(kernels) -> None:
    """Catches pointers that take rows for adjacent: h transposed, targets and scale strided, an expanded scale."""
    h, matrix, targets, scale = draw((6, 4), 64, 101)
    h, targets = h.detach().transpose(0, 1).requires_grad_(), targets.t()
    assert not h.is_contiguous()
    matrix = matrix.detach().t().contiguous().t().requires_grad_()
    check(h, matrix, targets, scale, 0.01, 1e-5)
    check(h, matrix, targets, torch.full((1,), 2.5).expand(101).requires_grad_(), 0.01, 1e-5)
    column = torch.stack([targets[0], targets[0] * 0], -1)[:, 0]
    assert not column.is_contiguous()
    check(h[0], matrix, column, None, 0.0, 1e-5)


def test_a_small_part_is_not_lost_beside_a_large_one(kernels) -> None:
    """Where it does its job, logsumexp is near 0. Catches a term that is had as the difference of two large sums."""
    torch.manual_seed(0)
    h, matrix, targets = torch.zeros(50, 4), torch.randn(3, 4), torch.zeros(50, dtype=torch.long)
    h[:, 0] = 1
    with torch.no_grad():
        matrix[:, 0] -= matrix[:, 0].logsumexp(0) - 0.03  # log(sum of exp(logits)) is 0.03
    z_term = cross_entropy.linear_cross_entropy(h, matrix, targets, None, 1e-4)[2]
    assert z_term is not None
    assert z_term.item() == pytest.approx(50 * 1e-4 * 0.03**2, rel=1e-4)


def test_extreme_logits(kernels) -> None:
    """Catches exp without the maximum taken off, or a maximum of the first block only: logits of +-10000."""
    h, matrix, targets, scale = draw((9,), 64, 200)
    check((h.detach() * 3000).requires_grad_(), matrix, targets, scale, 0.0, 1e-5)
    h = torch.zeros(9, 64, requires_grad=True)
    loss = linear_cross_entropy(h, matrix, targets.clamp(min=0), scale)
    assert error(loss, 9 * torch.tensor(200.0).log()) < 1e-6


def test_nan_reaches_the_loss(kernels) -> None:
    """Catches a maximum that swallows a NaN: a run that diverged must show it."""
    h, matrix, targets, scale = draw((9,), 64, 101)
    targets[4] = 3
    with torch.no_grad():
        h[4, 0] = float("nan")
    assert linear_cross_entropy(h, matrix, targets, scale).isnan()


def test_nothing_counts(kernels) -> None:
    """Catches a division by the number of targets, and gradients that ignored tokens get through the z-loss."""
    h, matrix, targets, scale = draw((9,), 64, 101)
    loss = linear_cross_entropy(h, matrix, torch.full_like(targets, IGNORED), scale, 0.1)
    gradients = torch.autograd.grad(loss, (h, matrix, scale))
    assert loss == 0
    assert all((gradient == 0).all() for gradient in gradients)


def test_no_tokens(kernels) -> None:
    """Catches a chunk of no rows, whose launch fails on a GPU, and weight gradients that nobody wrote."""
    h, matrix, targets, scale = draw((2, 0), 64, 101)
    loss = linear_cross_entropy(h, matrix, targets, scale)
    gradients = torch.autograd.grad(loss, (h, matrix, scale))
    assert loss == 0
    assert gradients[0].shape == h.shape
    assert all((gradient == 0).all() for gradient in gradients)


@pytest.mark.parametrize("target", [-5, 101])
def test_target_outside_the_vocabulary(kernels, target: int) -> None:
    """Catches a wrong target that trains quietly: PyTorch raises, the kernel, which cannot, gives NaN."""
    h, matrix, targets, _ = draw((9,), 64, 101)
    targets[7] = target
    if kernels == "triton":
        loss = linear_cross_entropy(h, matrix, targets)
        assert loss.isnan()
        dh, dmatrix = torch.autograd.grad(loss, (h, matrix))
        assert dh.isnan().all(1).tolist() == [row == 7 for row in range(9)]
        assert dmatrix.isnan().all()  # so that a training step is skipped
    else:
        with pytest.raises(RuntimeError, match="out of bounds"):
            linear_cross_entropy(h, matrix, targets)


def test_chunks_are_summed_in_fp32(monkeypatch) -> None:
    """Catches a gradient of the matrix that is summed in bf16: of 200 chunks alike, more than half would be lost."""
    monkeypatch.setattr(cross_entropy, "CPU_ROWS", 1)
    h, matrix, targets, scale = draw((200,), 64, 101, torch.bfloat16)
    with torch.no_grad():
        h.copy_(h[:1].expand_as(h))
        targets.fill_(3)
    check(h, matrix, targets, scale, 0.0, TOLERANCE[torch.bfloat16])


def test_shapes_that_do_not_fit() -> None:
    """Catches targets that broadcast, and a scale of the wrong vocabulary."""
    h, matrix, targets, scale = draw((2, 3), 64, 101)
    for arguments in ((h, matrix, targets[:, :2]), (h[..., :3], matrix, targets), (h, matrix, targets, scale[:1])):
        with pytest.raises(ValueError, match="do not fit"):
            linear_cross_entropy(*arguments)


def test_chunks_do_not_change_the_loss(monkeypatch) -> None:
    """Catches losses summed chunk by chunk: then resuming on another device changes the curve."""
    h, matrix, targets, scale = draw((200,), 64, 101)
    losses = []
    for rows in (1, 7, 16, 4096):
        monkeypatch.setattr(cross_entropy, "CPU_ROWS", rows)
        losses.append(float(linear_cross_entropy(h, matrix, targets, scale).detach()))
    assert max(losses) - min(losses) <= 2e-7 * losses[0]


@pytest.mark.parametrize("needed", [(0,), (1,), (2,), (0, 2), (1, 2)])
def test_only_gradients_that_are_needed(kernels, needed: tuple[int, ...]) -> None:
    """Catches a frozen output embedding, or scale, whose gradient is paid for, and a gradient that spoils the
    others."""
    h, matrix, targets, scale = draw((9,), 64, 101)
    tensors = [h, matrix, scale]
    h64, matrix64, scale64 = in_fp64(*tensors)
    every = torch.autograd.grad(formula(h64, matrix64, targets, scale64), (h64, matrix64, scale64))
    for i, tensor in enumerate(tensors):
        tensor.requires_grad_(i in needed)
    with Seen() as seen:
        loss = linear_cross_entropy(h, matrix, targets, scale)
        gradients = torch.autograd.grad(loss, [tensors[i] for i in needed])
    for i, gradient in zip(needed, gradients, strict=True):
        assert error(gradient, every[i]) <= 1e-5
    assert seen.products == 2 * (1 + (0 in needed) + (1 in needed or 2 in needed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradient_scale(kernels, dtype: torch.dtype) -> None:
    """Only h and matrix get another gradient. Catches one that reaches the loss or the scale's gradient, one that is
    multiplied by the scale too, and a formula that disagrees."""
    h, matrix, targets, scale = draw((11,), 64, 101, dtype)
    other = torch.linspace(-1, 3, 101)
    options = (0.01, 0.1, 0.0, other)
    h64, matrix64, scale64 = in_fp64(h, matrix, scale)
    logits = (scale64 * (h64 @ matrix64.t())).detach().requires_grad_()
    loss = F.cross_entropy(logits, targets, reduction="sum", label_smoothing=0.1, ignore_index=IGNORED)
    loss = loss + 0.01 * (logits.logsumexp(-1) ** 2)[targets != IGNORED].sum()
    (dz,) = torch.autograd.grad(loss, logits)
    du = other.double() * dz
    expected = (du @ matrix64, du.t() @ h64, (dz * (h64 @ matrix64.t())).sum(0))
    found = linear_cross_entropy(h, matrix, targets, scale, *options)
    assert torch.equal(found, linear_cross_entropy(h, matrix, targets, scale, *options[:2]))
    for gradient, wanted in zip(torch.autograd.grad(found, (h, matrix, scale)), expected, strict=True):
        assert error(gradient, wanted) <= TOLERANCE[dtype]
    exact = formula(h64, matrix64, targets, scale64, 0.01, 0.1, 0.0, other.double())
    assert error(exact, loss) < 1e-14
    for gradient, wanted in zip(torch.autograd.grad(exact, (h64, matrix64, scale64)), expected, strict=True):
        assert error(gradient, wanted) <= 1e-13


def test_no_grad_computes_the_loss_alone(kernels) -> None:
    """Catches an evaluation that pays for the gradients of parameters."""
    h, matrix, targets, scale = draw((9,), 64, 101)
    loss = linear_cross_entropy(h, matrix, targets, scale).detach()
    with torch.no_grad(), Seen() as seen:
        alone = linear_cross_entropy(h, matrix, targets, scale)
    assert torch.equal(alone, loss)
    assert seen.products == 2


def test_backward_twice(kernels) -> None:
    """Catches a backward that multiplies its saved tensors in place: the second one would be scaled twice."""
    h, matrix, targets, scale = draw((9,), 64, 101)
    loss = linear_cross_entropy(h, matrix, targets, scale) * 3
    first = torch.autograd.grad(loss, (h, matrix, scale), retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(first, torch.autograd.grad(loss, (h, matrix, scale)), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_values(dtype: torch.dtype) -> None:
    """Catches .item(), boolean masks, nonzero and copies to the CPU, each of which would stall the GPU's queue once per
    chunk: on the meta device there are no values that a host could ask for."""
    h, matrix, targets, scale = (t.detach().to("meta") for t in draw((23,), 64, 101, dtype))
    outputs = losses_and_gradients(h, matrix, targets, scale, 0.01, True, True, True, 0.1, False)
    assert [t.shape for t in outputs] == [targets.shape, (), h.shape, matrix.shape, scale.shape, ()]


def test_all_logits_are_never_held(kernels) -> None:
    """Catches a copy of N x V logits or of their gradient."""
    h, matrix, targets, scale = draw((15,), 4, 300, torch.bfloat16)
    with Seen() as seen:
        linear_cross_entropy(h, matrix, targets, scale).backward()
    assert seen.largest <= 2 * 5 * 320  # a chunk has 5 x 320 with its padding; the interpreter copies its bytes
    assert seen.products == 3 * 3


def test_compiled() -> None:
    """Catches a graph break, and a fake kernel whose shapes are not the real one's."""
    h, matrix, targets, scale = draw((3, 4), 64, 101, torch.bfloat16)
    compiled = torch.compile(linear_cross_entropy, fullgraph=True, backend="aot_eager")
    losses, gradients = [], []
    for function in (linear_cross_entropy, compiled):
        loss = function(h, matrix, targets, scale, 0.01)
        losses.append(loss)
        gradients.append(torch.autograd.grad(loss * 2, (h, matrix, scale)))
    assert torch.equal(*losses)
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    with torch.no_grad():
        assert torch.equal(compiled(h, matrix, targets, scale, 0.01), losses[0])
    frozen = matrix.detach()
    expected = torch.autograd.grad(linear_cross_entropy(h, frozen, targets), h)
    assert torch.equal(torch.autograd.grad(compiled(h, frozen, targets), h)[0], expected[0])


def test_recomputed() -> None:
    """Catches gradients that hang on something beside what autograd saves, which is then kept and not made anew."""
    h, matrix, targets, scale = draw((9,), 64, 101)
    direct = torch.autograd.grad(linear_cross_entropy(h, matrix, targets, scale, 0.01), (h, matrix, scale))
    loss = checkpoint(linear_cross_entropy, h, matrix, targets, scale, 0.01, use_reentrant=False)
    with Seen() as seen:
        recomputed = torch.autograd.grad(loss, (h, matrix, scale))
    assert all(torch.equal(a, b) for a, b in zip(direct, recomputed, strict=True))
    assert seen.products == 2 * 3  # all anew: none of it was kept


@pytest.mark.parametrize(
    ("on_triton", "scaled", "z_loss", "needed"),
    [
        (True, True, 0.01, (True, True, True)),
        (False, True, 0.01, (True, True, True)),
        (False, False, 0.01, (True, False, False)),
        (False, True, 0.0, (False, True, False)),
    ],
)
def test_opcheck(on_triton: bool, scaled: bool, z_loss: float, needed: tuple[bool, bool, bool]) -> None:
    """Catches an operation that changes or aliases an argument, and a fake kernel of another shape, stride or dtype."""
    h, matrix, targets, scale = (t.detach() for t in draw((2, 4), 64, 101, torch.bfloat16))
    smoothing = 0.1 if z_loss and scaled else 0.0
    arguments = (h, matrix, targets, scale if scaled else None, z_loss, *needed, smoothing, on_triton)
    torch.library.opcheck(linear_cross_entropy_forward, arguments)
