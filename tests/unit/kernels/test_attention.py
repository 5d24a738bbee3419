"""Attention, whatever computes it, is the softmax by hand in fp64; the choice is told, made and said as documented."""

import functools
import logging
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention

from ngpt_train.config import ConfigError
from ngpt_train.config.schema import Config
from ngpt_train.core import log
from ngpt_train.distributed.recomputation import recomputed
from ngpt_train.kernels import attention as module
from ngpt_train.kernels import flash
from ngpt_train.kernels.attention import Blocks, Packed, attention, choose
from ngpt_train.models.layers.documents import document_mask
from ngpt_train.models.ngpt.keys import NGPTConfig
from ngpt_train.training import build_state
from tests.reference.flash_attn import GPU, install, softmax_attention
from tests.reference.varlen import run_torchs_kernel_on_cpus

D = 8
CPU, BF16 = torch.device("cpu"), torch.bfloat16
VERSIONS = ["2", "3", "3 beta", "4"]
SCALE = math.sqrt(D)  # nGPT's, D times what each of these takes by itself
ALL, GROUPED = (4, 4), (6, 2)  # heads of q, and of k and v

run_torchs_kernel_on_cpus()


@pytest.fixture(autouse=True)
def anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing found or said before, and no choice left over."""
    found = module.find_varlen
    found.cache_clear()
    log._said.clear()
    monkeypatch.setattr(module, "_choice", "auto")
    monkeypatch.setattr(module, "_flash", None)
    yield
    found.cache_clear()


def heads_of(B: int, T: int, S: int, heads: tuple[int, int], seed: int = 0) -> list[Tensor]:
    """q, k, v, and the gradient of y."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(B, T, heads[0], D), (B, S, heads[1], D), (B, S, heads[1], D), (B, T, heads[0], D)]
    # Transposed in memory, as they may come.
    q, k, v, dy = (torch.randn(b, h, t, d, generator=generator).double().transpose(1, 2) for b, t, h, d in shapes)
    return [q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dy]


def assert_equal(y: Tensor, expected: Tensor, inputs: list[Tensor]) -> None:
    """Both outputs, and their gradients by q, k and v."""
    q, k, v, dy = inputs
    assert y.shape == q.shape
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)
    actual, by_hand = (torch.autograd.grad(x, (q, k, v), dy) for x in (y, expected))
    for one, other in zip(actual, by_hand, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def take(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on, in this process."""
    if backend in VERSIONS:
        install(monkeypatch, backend)
        choose("flash_attn", GPU, D, BF16)
    elif backend == "flex":
        # Its formula has gradients on a CPU too, where it refuses them for want of a kernel.
        monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
        choose("flex", GPU, D, BF16)
    elif backend == "varlen":
        monkeypatch.setattr(module, "find_varlen", lambda *_: (module.torch_varlen, "torch's varlen", "a test"))
    else:
        choose(backend, CPU, D, torch.float32)


@pytest.mark.parametrize(
    ("T", "S", "causal", "heads"),
    [(11, 11, True, GROUPED), (11, 11, False, ALL), (5, 9, False, GROUPED), (1, 1, True, ALL)],
)
@pytest.mark.parametrize("backend", ["auto", "sdpa", "flex", *VERSIONS])
def test_whole_rows(
    backend: str, T: int, S: int, causal: bool, heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Caught: a scale or causality not handed on, or to another argument; heads grouped otherwise; (y, lse) for y."""
    inputs = heads_of(2, T, S, heads)
    q, k, v, _ = inputs
    visible = torch.ones(T, S, dtype=torch.bool)
    take(backend, monkeypatch)
    y = attention(q, k, v, SCALE, causal)
    assert_equal(y, softmax_attention(q, k, v, SCALE, visible.tril() if causal else visible), inputs)


def documents(seed: int, B: int = 3, T: int = 37) -> Tensor:
    """doc_ids `(B, T)`, with padding at the end of some rows; all rows begin with document 0."""
    generator = torch.Generator().manual_seed(seed)
    doc_ids = (torch.rand(B, T, generator=generator) < 0.2).cumsum(1)
    lengths = torch.tensor([T, T - 4, 1])[:B]
    return doc_ids.masked_fill(torch.arange(T) >= lengths[:, None], -1)


def visible_in(doc_ids: Tensor) -> Tensor:
    same = doc_ids[:, None, :, None] == doc_ids[:, None, None, :]
    return same & torch.ones(same.shape[-2:], dtype=torch.bool).tril()


@pytest.mark.parametrize("heads", [ALL, GROUPED], ids=["all", "grouped"])
@pytest.mark.parametrize("backend", ["auto", "sdpa", "flex", "varlen", *VERSIONS])
def test_documents(backend: str, heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught: attention to other documents, or to later tokens; the choice of one backend that another computes."""
    kinds = {"auto": Tensor, "sdpa": Tensor, "flex": Blocks}
    take(backend, monkeypatch)
    for seed in range(2):
        doc_ids = documents(seed)
        inputs = heads_of(*doc_ids.shape, doc_ids.shape[1], heads, seed)
        q, k, v, _ = inputs
        mask = document_mask(doc_ids, D, BF16)
        assert isinstance(mask, kinds.get(backend, Packed))
        y = attention(q, k, v, SCALE, True, mask)
        assert_equal(y, softmax_attention(q, k, v, SCALE, visible_in(doc_ids)), inputs)


@pytest.mark.parametrize("backend", ["auto", "flex", *VERSIONS])
def test_other_masks(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As over an encoder-decoder's source. Caught: a mask that is lost in a kernel without masks."""
    inputs = heads_of(2, 5, 9, (4, 2))
    q, k, v, _ = inputs
    mask = (torch.arange(9) < torch.tensor([[9], [4]]))[:, None, None, :]
    take(backend, monkeypatch)
    assert_equal(attention(q, k, v, SCALE, False, mask), softmax_attention(q, k, v, SCALE, mask), inputs)


@pytest.mark.parametrize("backend", ["auto", *VERSIONS])
def test_causal_of_two_lengths(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """sdpa lets the first query see the first key, flash-attn the last the last. Caught: results that depend on it."""
    q, k, v, _ = heads_of(1, 5, 9, (4, 4))
    take(backend, monkeypatch)
    with pytest.raises(ValueError, match="causal attention of 5 queries to 9 keys"):
        attention(q, k, v, SCALE, True)


@pytest.mark.parametrize(
    ("installed", "capability", "d_head", "version"),
    [
        (["2"], (8, 0), 64, 2),
        (["2"], (9, 0), 64, 2),
        (["2"], (10, 0), 64, 2),
        (["3"], (9, 0), 256, 3),
        (["4"], (9, 0), 64, 4),
        (["2", "3", "4"], (8, 0), 64, 2),
        (["2", "3", "4"], (9, 0), 64, 3),
        (["2", "3", "4"], (10, 0), 64, 4),
        (["2", "4"], (8, 9), 64, 2),
        (["2", "4"], (9, 0), 160, 2),
        (["2", "3"], (10, 0), 64, 2),
    ],
)
def test_versions(
    installed: list[str], capability: tuple[int, int], d_head: int, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Caught: 4 alone, whose flash_attn is empty, taken for 2; a version on a GPU or for heads that it is not for."""
    install(monkeypatch, *installed, capability=capability)
    assert flash.find(GPU, d_head, BF16).version == version
    kernel, name, _ = module.find_varlen(GPU, d_head, BF16)
    taken = d_head <= 192
    assert (f"flash-attn {version}'s varlen" in name) == taken == (kernel is not None)


def test_files_of_4_without_its_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some builds of 2 hold them. Caught: a run that ends because they are there."""
    install(monkeypatch, "2")
    original = flash.importlib.import_module

    def import_module(name: str) -> object:
        if name == "flash_attn.cute":
            raise ModuleNotFoundError("No module named 'cutlass'")
        return original(name)

    monkeypatch.setattr(flash.importlib, "import_module", import_module)
    assert flash.find(GPU, 64, BF16).version == 2


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each names the key, the problem and the fix. Caught: an error in the first step, or none; a choice that
    failed and holds."""
    install(monkeypatch, "4", capability=(8, 0))
    cases = [
        ("flash_attn", CPU, 64, BF16, "its kernels are for GPUs, and this runs on a CPU"),
        ("flash_attn", GPU, 64, torch.float32, "bf16 or fp16, and train.precision asks for float32"),
        ("flash_attn", GPU, 20, BF16, "heads of a multiple of 8 up to 256, and these are of 20"),
        ("flash_attn", GPU, 320, BF16, "up to 256, and these are of 320"),
        ("flash_attn", GPU, 64, BF16, r"is version 2 \(2: flash_attn is there without its functions"),
    ]
    for *arguments, message in cases:
        with pytest.raises(ValueError, match=f"kernels.attention=flash_attn: .*{message}.*Use kernels.attention=auto"):
            choose(*arguments)
    install(monkeypatch, capability=(9, 0))
    each = r"no flash-attn for this GPU is installed.*3: .*flash_attn_interface.*; 4: .*; 2: .*flash_attn"
    with pytest.raises(ValueError, match=each):
        choose("flash_attn", GPU, 64, BF16)
    install(monkeypatch, "2", capability=(7, 5))
    with pytest.raises(ValueError, match="since Ampere"):
        choose("flash_attn", GPU, 64, BF16)
    with pytest.raises(ValueError, match=r"kernels.attention=flex: .*CPUs. Use kernels.attention=auto"):
        choose("flex", CPU, 64, BF16)
    with pytest.raises(ValueError, match=r"kernels.attention=fast: allowed are auto, sdpa, flash_attn, flex"):
        choose("fast", CPU, 64, BF16)
    assert (module._choice, module._flash) == ("auto", None)


@pytest.mark.parametrize("backend", ["flash_attn", "flex"])
def test_refused_at_the_start(backend: str) -> None:
    """Caught: a key that nothing reads, an error that is no ConfigError."""
    config = Config(model=NGPTConfig(vocab_size=16, n_layers=1, d_model=16, n_heads=2, context=8))
    config.train.device, config.train.batch_rows = "cpu", 1
    config.kernels.attention = backend
    with pytest.raises(ConfigError, match=f"kernels.attention={backend}"):
        build_state(config)
    config.kernels.attention = "sdpa"
    build_state(config)
    assert module._choice == "sdpa"


LINES = {
    "auto": [
        "a boolean mask for documents (kernels.attention=auto would take varlen, but its kernels are for GPUs, and "
        "this runs on a CPU)",
        "sdpa (kernels.attention=auto, and rows are whole)",
        "sdpa with a boolean mask (other kernels take none)",
    ],
    "sdpa": [
        "a boolean mask for documents (kernels.attention=sdpa)",
        "sdpa (kernels.attention=sdpa, and rows are whole)",
        "sdpa with a boolean mask (other kernels take none)",
    ],
    "flex": [
        "flex_attention for documents (kernels.attention=flex)",
        "sdpa (kernels.attention=flex, and rows are whole)",
    ],
    "3": [
        "flash-attn 3 (kernels.attention=flash_attn)",
        "flash-attn 3's varlen for documents (kernels.attention=flash_attn)",
    ],
}


@pytest.mark.parametrize("backend", LINES)
def test_the_log(backend: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Caught: a choice without a word, a line for each layer and step, the wrong backend or reason, lines that are lost
    where blocks are compiled."""
    take(backend, monkeypatch)
    caplog.set_level(logging.INFO, logger=log.__name__)
    torch.compiler.reset()
    compiled = torch.compile(attention, fullgraph=True, dynamic=False, backend="aot_eager")
    doc_ids = documents(0)
    q, k, v, _ = heads_of(*doc_ids.shape, doc_ids.shape[1], (4, 4))
    for run in (compiled, attention):
        for _ in range(2):
            run(q, k, v, SCALE, True)
            attention(q, k, v, SCALE, True, document_mask(doc_ids, D, BF16))
    lines = [record.message for record in caplog.records if record.message.startswith("attention: ")]
    assert sorted(lines) == sorted(f"attention: {line}" for line in LINES[backend])


def test_why_torchs_varlen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught: a GPU without flash-attn that takes the mask, a reason without the missing package."""
    install(monkeypatch, capability=(8, 0))
    kernel, name, why = module.find_varlen(GPU, 64, BF16)
    assert (kernel, name) == (module.torch_varlen, "torch's varlen for documents")
    assert why.startswith("kernels.attention=auto: no flash-attn for this GPU is installed")


@pytest.mark.parametrize("backend", ["auto", "flex", "varlen", "2"])
def test_compiles_whole(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught: a part that the compiler cannot trace, documents that are part of the graph."""
    take(backend, monkeypatch)
    torch.compiler.reset()
    # The stand-in for a varlen kernel is no operation to the compiler, as the packages' are.
    kernel = (lambda *_: module.torch_varlen) if backend in VERSIONS else module.varlen_kernel
    monkeypatch.setattr("ngpt_train.models.layers.documents.varlen_kernel", kernel)
    compiled = torch.compile(attention, fullgraph=True, dynamic=False, backend="aot_eager")
    for seed in range(2):
        doc_ids = documents(seed)
        inputs = heads_of(*doc_ids.shape, doc_ids.shape[1], (4, 2), seed)
        q, k, v, _ = inputs
        with torch._dynamo.config.patch(error_on_recompile=seed > 0):
            mask = document_mask(doc_ids, D, BF16)
            y = compiled(q, k, v, SCALE, True, mask)
        assert_equal(y, softmax_attention(q, k, v, SCALE, visible_in(doc_ids)), inputs)
    whole = torch.compile(attention, fullgraph=True, dynamic=False, backend="aot_eager")
    visible = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).tril()
    assert_equal(whole(q, k, v, SCALE, True), softmax_attention(q, k, v, SCALE, visible), inputs)


def test_version_4_in_a_compiled_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """It generates code as it runs. Caught: the compiler let into it, under activation checkpointing too."""
    install(monkeypatch, "4")
    package = sys.modules["flash_attn.cute"]
    inside = package.flash_attn_func
    traced = []

    def flash_attn_func(*args: object, **kwargs: object) -> object:
        traced.append(torch.compiler.is_compiling())
        return inside(*args, **kwargs)

    package.flash_attn_func = flash_attn_func
    choose("flash_attn", GPU, D, BF16)
    inputs = heads_of(2, 11, 11, (4, 2))
    q, k, v, _ = inputs
    visible = torch.ones(11, 11, dtype=torch.bool).tril()
    for block in (attention, recomputed(attention)):
        torch.compiler.reset()
        y = torch.compile(block, dynamic=False, backend="aot_eager")(q, k, v, SCALE, True)
        assert_equal(y, softmax_attention(q, k, v, SCALE, visible), inputs)
    assert traced
    assert not any(traced)


def test_flex_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Apart from blocks, as on a GPU. Caught: a compilation for each layer, or for the documents of each batch."""
    take("flex", monkeypatch)
    torch.compiler.reset()
    module._compiled.cache_clear()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    compiled = module._compiled(flex_attention.flex_attention)
    assert compiled is module._compiled(flex_attention.flex_attention)

    def blocks(visible: Any, B: int, T: int, device: torch.device) -> Blocks:
        return Blocks(module._compiled(flex_attention.create_block_mask)(visible, B, None, T, T, device=device))

    monkeypatch.setattr("ngpt_train.models.layers.documents.blocks", blocks)
    for seed in range(2):
        doc_ids = documents(seed)
        inputs = heads_of(*doc_ids.shape, doc_ids.shape[1], (4, 4), seed)
        q, k, v, _ = inputs
        with torch._dynamo.config.patch(error_on_recompile=seed > 0):
            mask = document_mask(doc_ids, D, BF16)
            assert isinstance(mask, Blocks)
            y = compiled(*(x.transpose(1, 2) for x in (q, k, v)), block_mask=mask.mask, scale=SCALE)
        assert_equal(y.transpose(1, 2), softmax_attention(q, k, v, SCALE, visible_in(doc_ids)), inputs)
    module._compiled.cache_clear()


@pytest.mark.parametrize("compiled", [None, "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("causal", [True, False])
def test_small_heads_in_bf16(compiled: str | None, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU the output is sdpa's to the bit; its gradients have smaller rounding errors."""
    inputs = heads_of(2, 33, 33, ALL)
    *exact, dy = inputs
    rounded = [x.detach().bfloat16().requires_grad_() for x in exact]
    inputs = [x.detach().double().requires_grad_() for x in rounded]
    visible = torch.ones(33, 33, dtype=torch.bool)
    expected = softmax_attention(*inputs, SCALE, visible.tril() if causal else visible)
    by_hand = torch.autograd.grad(expected, inputs, dy.bfloat16().double())

    def errors(function: Callable[..., Tensor]) -> tuple[Tensor, list[float]]:
        y = function(*rounded, SCALE, causal)
        gradients = torch.autograd.grad(y, rounded, dy.bfloat16())
        return y, [float((x.double() - z).norm() / z.norm()) for x, z in zip(gradients, by_hand, strict=True)]

    torch.compiler.reset()
    y, fewer = errors(torch.compile(attention, backend=compiled) if compiled else attention)
    monkeypatch.setattr(module, "is_faster_in_fp32", lambda *_: False)
    of_sdpa, more = errors(attention)
    assert torch.equal(y, of_sdpa)
    assert all(one < other < 0.01 for one, other in zip(fewer, more, strict=True)), (fewer, more)
