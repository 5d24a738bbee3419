"""Logits with the keys and values of earlier tokens kept, against logits of the whole text computed again."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ngpt_train.models import Decoder, build_model
from ngpt_train.models.decoder import uncompiled
from ngpt_train.models.decoding import Recomputed, cached
from ngpt_train.models.layers.attention import Attention
from tests.properties.architectures import ARCHITECTURES, CONTEXT, SMALL, VARIANTS, Size, config, error, jittered

GROUPED = Size(24, 3, 6, 31, n_kv_heads=2, d_mlp=50, n_encoder_layers=2)
ALL = ARCHITECTURES | VARIANTS
# Each kind of positions, norms of q and k, tied embeddings, gelu, scales; the others are in the exhaustive tier.
FAST = [
    "composed qkv norm",
    "composed dyt",
    "composed normformer",
    "composed interleaved",
    "gpt interleaved",
    "ngpt tied",
    "ngpt engpt",
    "ngpt without qk-norm",
    "normformer learned",
    "normformer all, after",
    "ntransformer interleaved",
]


def model_of(name: str, size: Size, dtype: torch.dtype = torch.float64) -> Decoder:
    """With weights, and statistics of norms over a batch, away from their init. An encoder-decoder writes 6 tokens."""
    size = replace(size, source_context=CONTEXT - 6) if ALL[name].has_encoder else size
    model, _ = jittered(ALL[name], size, dtype)
    for statistic in model.statistics().values():
        statistic.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(3))
    return model.eval()


def prompts_of(size: Size, lengths: tuple[int, ...], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(size.vocab_size, (length,), generator=generator) for length in lengths]


def greedily(model: Decoder, prompts: list[Tensor], n: int, compiled: bool = False) -> Iterator[tuple[Tensor, Tensor]]:
    """(logits with caches, logits without) of n tokens of each prompt; the next token is the likeliest without
    caches."""
    reader, new = cached(model, compiled), [prompt[:0] for prompt in prompts]
    logits = reader.begin(prompts)
    for _ in range(n):
        expected = torch.stack([model.next_token_logits(*of_row) for of_row in zip(prompts, new, strict=True)])
        yield logits, expected
        tokens = expected.argmax(-1)
        new = [torch.cat([row, token[None]]) for row, token in zip(new, tokens, strict=True)]
        logits = reader.next(dict(enumerate(tokens.tolist())))


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("name", "size"),
    [
        *((name, GROUPED) for name in ARCHITECTURES),
        *(pytest.param(name, SMALL, marks=[] if name in FAST else [pytest.mark.exhaustive]) for name in VARIANTS),
    ],
    ids=lambda value: value if isinstance(value, str) else "small" if value is SMALL else "grouped",
)
def test_kept_keys_and_values_change_nothing(name: str, size: Size) -> None:
    """Prompts of several lengths beside each other: one outgrows the context, another is longer from the start.

    Caught: rows that see their neighbours' slots or positions, a context that does not slide, cross-attention to
    padding or to a source that grows, positions that are not added, query heads of the wrong group.
    """
    model = model_of(name, size)
    prompts = prompts_of(size, (1, 8, CONTEXT - 3, CONTEXT + 9))
    for actual, expected in greedily(model, prompts, 8 if ALL[name].has_encoder else 5):
        assert error(actual, expected) < 1e-12
    assert all(module.cache is None for module in model.modules() if isinstance(module, Attention))


@pytest.mark.parametrize("positions", ["learned", "rotary"])
@pytest.mark.parametrize("name", ["composed", "composed_encoder_decoder"])
def test_the_norm_of_embeddings(name: str, positions: str) -> None:
    """Caught: the norm of positions alone, or none, in the place of the norm of their sum with the embedding."""
    of_stacks = config(ALL[name], replace(GROUPED, source_context=CONTEXT - 6 if ALL[name].has_encoder else 0))
    model = build_model(replace(of_stacks, embedding_norm=True, positions=positions, norm="layer")).double().eval()
    model.init_weights_(0)
    with torch.no_grad():
        for of_model in model.parameters():
            of_model += 0.3 * torch.randn(of_model.shape, generator=torch.Generator().manual_seed(1))
    for actual, expected in greedily(model, prompts_of(GROUPED, (1, 5)), 3):
        assert error(actual, expected) < 1e-12


@pytest.mark.parametrize("name", ["gpt+qk_norm", "ngpt", "powernorm", "ntransformer"])
def test_greedy_tokens_in_fp32(name: str) -> None:
    """Slots that are not reached yet are attended to by nobody, as when the blocks are compiled."""
    for compiled in (False, True):
        for actual, expected in greedily(
            model_of(name, GROUPED, torch.float32), prompts_of(GROUPED, (5, 2)), 5, compiled
        ):
            assert torch.equal(actual.argmax(-1), expected.argmax(-1))
            assert error(actual, expected.double()) < 1e-4


@pytest.mark.parametrize("name", ["ngpt", "gpt_encoder_decoder"])
def test_rows_may_end_and_texts_may_follow(name: str) -> None:
    """Rows that have ended get no token. The next prompts do not see the last ones' caches."""
    model = model_of(name, SMALL)
    reader = cached(model)
    prompts = prompts_of(SMALL, (4, 9))
    reader.begin(prompts)
    reader.next({0: 1, 1: 2})
    reader.next({1: 3})
    logits = reader.next({0: 5})
    assert error(logits[0], model.next_token_logits(prompts[0], torch.tensor([1, 5]))) < 1e-12
    others = prompts_of(SMALL, (3, 2), seed=1)
    first, second = reader.begin(others), reader.next({0: 7, 1: 8})
    for row, prompt in enumerate(others):
        assert error(first[row], model.next_token_logits(prompt, prompt[:0])) < 1e-12
        assert error(second[row], model.next_token_logits(prompt, torch.tensor([7 + row]))) < 1e-12


@pytest.mark.parametrize("whole", [True, False], ids=["model", "a block"])
def test_texts_of_many_lengths_are_not_compiled(whole: bool) -> None:
    """Caught: a compilation for each length of a text."""
    model = model_of("gpt", SMALL, torch.float32)
    (model if whole else model.blocks()[-1]).compile(backend=lambda *_: pytest.fail("it is compiled"))
    Recomputed(model).begin(prompts_of(SMALL, (4, 9)))
    with uncompiled(model):
        model(prompts_of(SMALL, (5,))[0][None])


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["ngpt", "gpt+qk_norm", "ntransformer"])
def test_a_step_is_compiled_once(name: str) -> None:
    """For all blocks, tokens and prompts. Caught: shapes that grow with the text."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = model_of(name, GROUPED, torch.float32)
    for block in model.layers:
        block.compile(dynamic=False)
    with torch._dynamo.config.patch(error_on_recompile=True):
        reader = cached(model, compiled=True)
        for seed in (0, 1):
            prompts = prompts_of(GROUPED, (4 + seed, 9), seed)
            new: list[int] = []
            logits = reader.begin(prompts)
            for _ in range(3):
                with torch.compiler.set_stance("force_eager"):
                    expected = model.next_token_logits(prompts[0], torch.tensor(new, dtype=torch.long))
                assert error(logits[0], expected.double()) < 1e-4
                new.append(int(expected.argmax()))
                logits = reader.next({0: new[-1], 1: 1})
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
