"""A document in a packed row is as if alone, whatever stands around it and however attention is computed."""

import random

import pytest
import torch
from torch import Tensor

from ngpt_train.distributed.recomputation import recomputed
from ngpt_train.kernels.attention import find_varlen, torch_varlen
from ngpt_train.models import Decoder
from ngpt_train.models.layers import documents
from ngpt_train.models.layers.documents import check_documents, packed, positions_in_documents
from tests.properties.architectures import ARCHITECTURES, SMALL, VARIANTS, Size, jittered
from tests.reference.flash_attn import GPU, install
from tests.reference.varlen import run_torchs_kernel_on_cpus, varlen

GROUPED = Size(24, 3, 6, 31, n_kv_heads=2, d_mlp=50)
DECODERS = {name: each for name, each in (ARCHITECTURES | VARIANTS).items() if not each.has_encoder}
LENGTHS = [[7, 1, 12, 0], [24], [5, 3, 5, 2]]  # of the documents of each row; the rest is padding
T = 24

run_torchs_kernel_on_cpus()
kinds = pytest.mark.parametrize("kind", ["mask", "varlen"])


def rows(size: Size, lengths: list[list[int]] = LENGTHS, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """tokens, targets, doc_ids `(B, T)`. Ids begin anywhere; the last of the second row is the first of the third."""
    generator = torch.Generator().manual_seed(seed)
    tokens, targets = (torch.randint(size.vocab_size, (len(lengths), T), generator=generator) for _ in range(2))
    doc_ids = torch.full_like(tokens, -1)
    for row, of_row in enumerate(lengths):
        ids = torch.arange(len(of_row)).repeat_interleave(torch.tensor(of_row)) + (3 if row == 0 else 0)
        doc_ids[row, : len(ids)] = ids
    return tokens, targets.masked_fill(doc_ids < 0, -100), doc_ids


def through(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention by the mask, as on this machine, or on the way of a GPU with the reference for its kernel."""
    if kind == "varlen":
        monkeypatch.setattr(documents, "varlen_kernel", lambda *_: varlen)


def gradients(model: Decoder, *batches: tuple[Tensor | None, ...]) -> dict[str, Tensor]:
    """Gradients of the summed loss of all batches."""
    model.zero_grad()
    for batch in batches:
        model.loss(*batch)[0].backward()  # type: ignore[arg-type]
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("size", "kind"), [(SMALL, "mask"), (GROUPED, "varlen")], ids=["small-mask", "grouped-varlen"])
@pytest.mark.parametrize("name", DECODERS)
def test_documents_are_alone(name: str, size: Size, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed documents have the logits and gradients of separate rows.

    Caught: positions that do not restart, or of the row before them; a mask by position instead of id; boundaries
    without those between rows, or without the last; the softmax's own scale in place of the model's.
    """
    model, _ = jittered(DECODERS[name], size)
    model.eval()  # statistics of a batch are of all its documents
    tokens, targets, doc_ids = rows(size)
    alone = []
    for row, of_row in enumerate(LENGTHS):
        ends = torch.tensor(of_row).cumsum(0).tolist()
        alone += [(row, slice(end - n, end)) for n, end in zip(of_row, ends, strict=True) if n]
    assert len(alone) == 8
    separately = gradients(model, *((tokens[row, None, at], targets[row, None, at]) for row, at in alone))
    together = gradients(model, (tokens, targets))

    through(kind, monkeypatch)
    with torch.no_grad():
        logits = model(tokens, doc_ids=doc_ids)
        assert logits.isfinite().all()
        for row, at in alone:
            torch.testing.assert_close(logits[row, None, at], model(tokens[row, None, at]), rtol=0, atol=1e-10)
    actual = gradients(model, (tokens, targets, doc_ids))
    assert actual.keys() == separately.keys()
    largest = max(x.abs().max().item() for x in separately.values())
    for key, expected in separately.items():
        torch.testing.assert_close(actual[key], expected, rtol=0, atol=1e-10 * largest, msg=key)
    assert any((together[key] - x).abs().max() > 1e-3 * largest for key, x in separately.items()), "documents hide"


@kinds
@pytest.mark.parametrize("name", ["gpt", "ngpt", "normformer", "normformer learned", "powernorm"])
def test_nothing_sees_padding(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding's own activations are finite. Caught: padding in PowerNorm's statistics; in no sequence, where a kernel
    leaves old memory."""
    through(kind, monkeypatch)
    # In training. Two of them: a forward pass advances running statistics.
    models = [jittered(DECODERS[name], SMALL)[0] for _ in range(2)]
    tokens, targets, doc_ids = rows(SMALL, [[7, 5], [0], [24]])
    others = torch.where(doc_ids < 0, (tokens + 1) % SMALL.vocab_size, tokens)
    real = doc_ids >= 0
    with torch.no_grad():
        before, after = (model(x, doc_ids=doc_ids) for model, x in zip(models, (tokens, others), strict=True))
    assert before.isfinite().all()
    assert after.isfinite().all()
    assert torch.equal(before[real], after[real])
    assert not torch.equal(before[~real], after[~real])
    batches = [(x, targets, doc_ids) for x in (tokens, others)]
    first, second = (gradients(model, batch) for model, batch in zip(models, batches, strict=True))
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_positions_and_boundaries() -> None:
    """By counting. Caught: a document that goes on in the next row of the same id, one token documents left out."""
    choose = random.Random(0)
    for _ in range(50):
        B, T = choose.randint(1, 4), choose.randint(1, 40)
        share = choose.choice([0.0, 0.2, 1.0])
        doc_ids, positions, starts = [], [], []
        for _ in range(B):
            length = choose.randint(0, T)
            ids = [0]
            for _ in range(T - 1):
                ids.append(ids[-1] + (choose.random() < share) * choose.randint(1, 3))
            ids = [x if at < length else -1 for at, x in enumerate(ids)]
            starts += [len(doc_ids) * T + at for at in range(T) if at == 0 or ids[at] != ids[at - 1]]
            positions.append([at - ids.index(x) for at, x in enumerate(ids)])
            doc_ids.append(ids)
        assert positions_in_documents(torch.tensor(doc_ids)).tolist() == positions
        mask = packed(torch.tensor(doc_ids), varlen)
        assert (mask.boundaries.dtype, mask.longest, len(mask.boundaries)) == (torch.int32, T, B * T + 1)
        assert mask.boundaries.tolist() == starts + [B * T] * (B * T + 1 - len(starts))


def test_room_for_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of a batch share it. Caught: documents dropped without a word, room for each token of long rows."""
    monkeypatch.setattr(documents, "varlen_kernel", lambda *_: varlen)
    about = torch.device("cpu"), 8, torch.bfloat16
    doc_ids = torch.arange(256).expand(2, -1) // 4
    boundaries = packed(doc_ids, varlen).boundaries
    assert boundaries.tolist() == list(range(0, 513, 4))
    one_more = doc_ids.clone()
    one_more[0, -1] = 64
    with pytest.raises(RuntimeError, match="more than 128 documents in a batch of 2 rows of 256 tokens"):
        packed(one_more, varlen)
    with pytest.raises(ValueError, match="holds 129 documents, and the GPU's kernels have room for 128"):
        check_documents(one_more, *about)
    check_documents(doc_ids, *about)
    one_more[1] = 0
    assert packed(one_more, varlen).boundaries.tolist() == [*range(0, 253, 4), 255, 256] + [512] * 63
    assert len(packed(torch.zeros(3, 8192, dtype=torch.long), varlen).boundaries) == 3 * 256 + 1


def test_where_there_is_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught: a kernel where it has no backward pass, or none at all."""
    install(monkeypatch, capability=(8, 0))

    def found(device: torch.device, d_head: int, dtype: torch.dtype) -> bool:
        return find_varlen.__wrapped__(device, d_head, dtype)[0] is not None

    assert found(GPU, 128, torch.float16)
    assert found(GPU, 192, torch.bfloat16)
    assert not found(torch.device("cpu"), 64, torch.bfloat16)
    assert not found(GPU, 64, torch.float32)
    assert not found(GPU, 20, torch.bfloat16)
    assert not found(GPU, 256, torch.bfloat16)
    install(monkeypatch, capability=(7, 5))
    assert not found(GPU, 64, torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "kind"), [("gpt", "varlen"), ("ngpt", "mask"), ("normformer", "varlen"), ("powernorm", "mask")]
)
def test_blocks_compile_whole(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under activation checkpointing too, and once for all batches of a shape.

    Caught: a number of documents that is part of the graph, a kernel that is looked up while tracing.
    """
    if kind == "varlen":  # as torch has it, which to the compiler is one operation
        monkeypatch.setattr(documents, "varlen_kernel", lambda *_: torch_varlen)
    eager, compiled = (jittered(DECODERS[name], SMALL)[0] for _ in range(2))
    torch.compiler.reset()
    for block in compiled.blocks():
        block.forward = recomputed(block.forward)
        block.compile(dynamic=False, fullgraph=True, backend="aot_eager")
    for lengths, recompiling in ((LENGTHS, False), ([[24], [1] * 24, [3]], True)):
        batch = rows(SMALL, lengths)
        with torch._dynamo.config.patch(error_on_recompile=recompiling):
            actual = gradients(compiled, batch)
        for key, expected in gradients(eager, batch).items():
            torch.testing.assert_close(actual[key], expected, rtol=1e-9, atol=1e-9, msg=key)
