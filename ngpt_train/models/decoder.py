"""The skeleton of every decoder-only model: embedding, a stack of blocks, a head, a loss.

An architecture adds its block, its head, its initialisation and the constraint on its weights. The model is written for
one device: ngpt_train/distributed applies compile, activation checkpointing, DDP and FSDP2 from outside.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ngpt_train.config.model_keys import ModelConfig
from ngpt_train.core.constants import IGNORED, MILLION, Constraint
from ngpt_train.kernels.attention import Mask
from ngpt_train.kernels.cross_entropy import linear_cross_entropy, soft_capped, token_losses
from ngpt_train.models.layers.documents import boolean_mask, check_documents, document_mask, positions_in_documents
from ngpt_train.models.layers.dropout import Dropout, each_with_seeds, number_places, seeded, seeds_of_parts
from ngpt_train.models.layers.norms import project_rows_
from ngpt_train.models.layers.rope import UNSCALED, Rope, rope_table
from ngpt_train.models.weights import OUTSIDE_OF_BLOCKS, init_weights_, kind_of


class Loss(NamedTuple):
    """Sums over the targets that count, that is, are not -100; 0-dim tensors."""

    total: Tensor  # the loss that is differentiated: the smoothed cross-entropy + z_term
    n_tokens: Tensor  # number of targets that count
    cross_entropy: Tensor  # in nats, without smoothing and without gradient
    z_term: Tensor | None  # z_loss * logsumexp(logits)^2, without gradient; None if z_loss is 0
    by_token: Tensor | None = None  # (B, T) the cross-entropy of each target, 0 if it does not count; in no_grad
    # Where few tokens have a target, in no_grad:
    n_hits: Tensor | None = None  # (B,) targets that have the largest logit
    answers: Tensor | None = None  # (B, K) the ids with the largest logits, or the numbers, at the places with targets


class Head(NamedTuple):
    """Logits = scale * (matrix h): h `(B, T, d_model)`, matrix `(V, d_model)` as it is stored, scale `(V,)` or None.

    With a soft_cap c > 0 they are c tanh(logits / c).
    gradient_scale `(V,)` replaces scale in the loss's gradients of h and matrix (kernels/cross_entropy.py).
    """

    h: Tensor
    matrix: Tensor
    scale: Tensor | None = None
    soft_cap: float = 0.0
    gradient_scale: Tensor | None = None

    def logits(self) -> Tensor:
        """Logits `(B, T, V)` in at least fp32."""
        logits = F.linear(self.h, self.matrix.to(self.h.dtype)).to(torch.promote_types(self.h.dtype, torch.float32))
        return soft_capped(logits if self.scale is None else logits * self.scale, self.soft_cap)

    def loss(self, targets: Tensor, z_loss: float, label_smoothing: float = 0.0) -> Loss:
        """The loss of targets `(B, T)`, computed without holding all logits."""
        n_tokens = (targets != IGNORED).sum()
        if not torch.is_grad_enabled() and z_loss == label_smoothing == 0:
            losses = token_losses(self.h, self.matrix, targets, self.scale, self.soft_cap)
            total = losses.sum()
            return Loss(total, n_tokens, total, None, losses)
        total, cross_entropy, z_term = linear_cross_entropy(
            self.h, self.matrix, targets, self.scale, z_loss, label_smoothing, self.soft_cap, self.gradient_scale
        )
        return Loss(total, n_tokens, cross_entropy, z_term)


def squared_error(head: Head, targets: Tensor) -> Loss:
    """The summed squared error of the only logit; targets `(B, T)` are millionths."""
    counts, numbers = targets != IGNORED, head.logits()[..., 0]
    by_token = (numbers - targets / MILLION).square().where(counts, 0)
    total = by_token.sum()
    return Loss(total, counts.sum(), total.detach(), None, None if torch.is_grad_enabled() else by_token)


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that the optimizer treats alike."""

    names: list[str]  # as in named_parameters
    decay: bool  # True if weight decay applies
    constraint: Constraint  # where a step leaves the rows of matrices, as `project_` does
    kind: str | None = None  # of the matrices, a field of LrFactors; None: vectors, or matrices of several kinds


class Decoder(nn.Module):
    """Decoder-only language model; `vocab_size` and all widths come from its config."""

    decays = True  # False: weight decay never applies to the matrices

    def __init__(self, config: ModelConfig, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        assert isinstance(config.vocab_size, int)  # build_model refuses `auto`
        self.config = config
        # dtype of the activations and matrix products; None: the dtype of the weights.
        self.compute_dtype: torch.dtype | None = None
        self.rope_scaling = UNSCALED  # of an evaluation beyond the context of training
        self.z_loss = 0.0  # factor of logsumexp(logits)^2, which training mode adds to the loss of a target
        self.label_smoothing = 0.0  # share of a target's label that training mode spreads over the vocabulary
        self.embedding = nn.Parameter(torch.empty(config.vocab_size, config.d_model))
        self.layers = nn.ModuleList(blocks)
        number_places(self.layers)
        self.embedding_dropout = Dropout(config.embedding_dropout)
        tied = config.tied_embeddings and not config.n_classes
        self.n_outputs = config.n_classes or config.vocab_size  # logits of a token
        self.output = None if tied else nn.Parameter(torch.empty(self.n_outputs, config.d_model))

    @property
    def unembedding(self) -> Tensor:
        """The output embedding `(V, d_model)`; with tied embeddings it is the input embedding."""
        return self.embedding if self.output is None else self.output

    # An architecture overrides these.

    def embed(self, tokens: Tensor, table: Tensor) -> Tensor:
        """tokens `(B, T)`, embedding table `(V, d_model)` -> the first hidden state `(B, T, d_model)`."""
        return F.embedding(tokens, table)

    def add_positions(self, h: Tensor, positions: Tensor) -> Tensor:
        """h `(B, T, d_model)` plus an embedding of positions `(T,)` or `(B, T)`; here h itself, as RoPE has them."""
        return h

    def norm_first(self, h: Tensor) -> Tensor:
        """A norm of the sum of embedding and positions, h `(B, T, d_model)`; here h itself."""
        return h

    def drop_embedding(self, h: Tensor) -> Tensor:
        """model.embedding_dropout of the first hidden state h `(B, T, d_model)`."""
        return self.embedding_dropout(h)

    def rope(self, tokens: Tensor, dtype: torch.dtype) -> Rope | None:
        """The rotary angles of positions 0 to T - 1 for tokens `(B, T)`, in `dtype`; None for a model without RoPE."""
        config = self.config
        if not config.uses_rope:
            return None
        T, interleaved = tokens.shape[1], config.rope_layout == "interleaved"
        return rope_table(T, config.d_head, config.rope_base, interleaved, tokens.device, dtype, self.rope_scaling)

    def blocks(self) -> list[nn.Module]:
        """The units of compilation, activation checkpointing and sharding."""
        return list(self.layers)

    def stack(self, h: Tensor, rope: Rope | None, mask: Mask, doc_ids: Tensor | None) -> Tensor:
        """All blocks, and a norm after them if the head has none: h `(B, T, d_model)` -> the same shape."""
        return self.run_blocks(self.layers, h, rope, mask)

    def run_blocks(self, blocks: Iterable[nn.Module], h: Any, *arguments: Any) -> Any:
        """The blocks one after the other, each called as (h, *arguments): h `(B, T, d_model)` -> the same shape."""
        for block, seeds in each_with_seeds(blocks):
            with seeds:
                h = self.run_block(block, h, *arguments)
        return h

    def run_block(self, block: nn.Module, h: Any, *arguments: Any) -> Any:
        """One of the blocks of `run_blocks`."""
        return block(h, *arguments)

    def head(self, h: Tensor) -> Head:
        """The factors of the logits, from the last block's h `(B, T, d_model)`."""
        raise NotImplementedError

    def init_std(self, path: str) -> float:
        """Standard deviation of the matrix at `path` at step 0: model.init.*."""
        return self.config.init.std(kind_of(path), self.config.d_model, self.residual_writes(path))

    def residual_writes(self, path: str) -> int:
        """The number of matrices that write into the residual stream of the block that `path` is in."""
        return 2 * self.config.n_layers

    @property
    def constraint(self) -> Constraint:
        """Where project_ puts every row of every matrix."""
        return self.config.rows

    @property
    def on_sphere(self) -> bool:
        """True if only the direction of a matrix's row counts, not its length."""
        return self.constraint == "sphere"

    def project_(self, skipped: Tensor | None = None) -> None:
        """Imposes the constraint on the weights again, in place. skipped: 0-dim bool on the device. If it is true, no
        bit of a weight changes. The host does not wait for it."""
        if self.constraint != "free":
            for parameter in self.parameters():
                if parameter.ndim == 2:
                    project_rows_(parameter, self.constraint, skipped)

    def check_documents(self, doc_ids: Tensor, device: torch.device) -> None:
        """Raises ValueError if attention on `device` has no room for the documents of doc_ids `(B, T)`, on the CPU, in
        training. Attention with dropout or in both directions takes a mask with room for any number."""
        if self.config.attention_dropout or self.config.bidirectional:
            return
        check_documents(doc_ids, device, self.config.d_head, self.compute_dtype or self.embedding.dtype)

    def begin_step_(self, step: int, loss_factor: Tensor) -> None:
        """Called before the forward passes of a training step. step: steps completed before it. loss_factor: 0-dim, the
        factor of the summed losses."""

    def statistics(self) -> dict[str, Tensor]:
        """Running statistics by name: part of the training state, not learned. A caller may change them in place."""
        return {}

    def notes(self) -> list[str]:
        """Sentences for the log: how to read the training loss of this model."""
        return []

    # The forward pass, the same for all decoders.

    def forward(
        self, tokens: Tensor, targets: Tensor | None = None, doc_ids: Tensor | None = None, seeds: Tensor | None = None
    ) -> Tensor | tuple:
        """Logits `(B, T, V)` in at least fp32, or with targets their `Loss`.

        tokens, targets, doc_ids: `(B, T)` integers. Each token attends to itself and earlier tokens; with doc_ids only
        to tokens of its document, whose positions begin at 0 (layers/documents.py). seeds `(B,)`: of the rows' dropout
        in training (kernels/dropout.py: row_seeds). Raises ValueError if a model with dropout gets none. DDP's and
        FSDP2's hooks run at calls of the model, so `loss` calls the model too.
        """
        of_embedding, of_blocks = seeds_of_parts(self.seeds_in_use(seeds), 2)
        dtype = self.compute_dtype or self.embedding.dtype
        rope = self.rope(tokens, torch.promote_types(dtype, torch.float32))
        positions, mask = torch.arange(tokens.shape[1], device=tokens.device), None
        if doc_ids is not None:
            positions = positions_in_documents(doc_ids)
            rope = None if rope is None else rope.at(positions)
            drops = of_blocks is not None and self.config.attention_dropout > 0
            causal = not self.config.bidirectional
            mask = boolean_mask(doc_ids, causal) if drops else document_mask(doc_ids, self.config.d_head, dtype, causal)
        with seeded(of_embedding):
            h = self.first_hidden_state(tokens, self.embedding, positions)
        with seeded(of_blocks):
            h = self.stack(h, rope, mask, doc_ids)
            if targets is not None and self.config.predicted(tokens.shape[1]) < tokens.shape[1]:
                return self.loss_at_targets(h, targets)
            head = self.head(h)
        return head.logits() if targets is None else self.loss_of(head, targets)

    def first_hidden_state(self, tokens: Tensor, table: Tensor, positions: Tensor) -> Tensor:
        """The first block's h `(B, T, d_model)`: embedding and positions, normed, cast, with dropout."""
        h = self.norm_first(self.add_positions(self.embed(tokens, table), positions))
        return self.drop_embedding(h.to(self.compute_dtype or self.embedding.dtype))

    def seeds_in_use(self, seeds: Tensor | None) -> Tensor | None:
        """The seeds of dropout in training, None in evaluation and for a model without dropout."""
        if not self.training or not self.config.uses_dropout:
            return None
        if seeds is None:
            raise ValueError("training with dropout needs the seeds of the rows: kernels/dropout.py, row_seeds")
        return seeds

    def loss_of(self, head: Head, targets: Tensor) -> Loss:
        """The loss of targets `(B, T)`, in training mode with the z-loss and label smoothing."""
        if self.config.n_classes == 1:
            return squared_error(head, targets)
        return head.loss(targets, self.z_loss, self.label_smoothing) if self.training else head.loss(targets, 0.0)

    def loss_at_targets(self, h: Tensor, targets: Tensor) -> Loss:
        """The loss of targets `(B, T)`. The head reads h `(B, T, d_model)` at the K places alone that may have one."""
        counts, most = targets != IGNORED, self.config.predicted(targets.shape[1])  # the host does not know the number
        torch._assert_async((counts.sum(1) <= most).all(), f"a row has more than {most} targets: model.mask_share")
        places = counts.logical_not().to(torch.uint8).argsort(dim=1, stable=True)[:, :most]  # (B, K)
        head = self.head(h.gather(1, places[..., None].expand(-1, -1, h.shape[-1])))
        chosen = targets.gather(1, places)
        loss = self.loss_of(head, chosen)
        if loss.by_token is None:
            return loss
        logits = head.logits()
        answers = logits.argmax(-1) if self.n_outputs > 1 else logits[..., 0]  # (B, K)
        spread = torch.zeros(targets.shape, dtype=loss.by_token.dtype, device=h.device)
        hits = (answers == chosen).sum(1)
        return loss._replace(by_token=spread.scatter(1, places, loss.by_token), n_hits=hits, answers=answers)

    def loss(
        self, tokens: Tensor, targets: Tensor, doc_ids: Tensor | None = None, seeds: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The summed cross-entropy in nats, in training mode smoothed and with the z-loss, and the number of targets,
        both 0-dim. A target of -100 does not count. Arguments as of `forward`."""
        loss = self(tokens, targets, doc_ids, seeds)
        return loss.total, loss.n_tokens

    @torch.no_grad()
    def next_token_logits(self, prompt: Tensor, new: Tensor) -> Tensor:
        """Logits `(V,)` of the token that follows prompt `(P,)`, P >= 1, and the generated tokens new `(N,)`. Only the
        last `context` tokens count. All are computed again for each token; models/decoding.py keeps them."""
        return self(torch.cat([prompt, new])[None, -self.config.context :])[0, -1]

    def init_weights_(self, seed: int) -> None:
        """Sets all weights, in place, to their values at step 0, which depend on the seed alone."""
        init_weights_(self, seed)

    def parameter_groups(self, by_kind: bool = False) -> list[ParameterGroup]:
        """Two groups: matrices, including embeddings, which may decay; gains and scale vectors, which never do.

        by_kind: each kind of matrix is a group, as it is where the architecture has learning rates by kind
        (`ModelConfig.lr_factors`). Learned positions are of the embedding's kind.
        Vectors are apart even where nothing decays: FSDP2 shards the matrices and keeps the vectors whole, and torch's
        fused optimizers refuse sharded and whole tensors in one group.
        """
        shapes = {name: parameter.ndim for name, parameter in self.named_parameters()}
        matrices = [name for name, ndim in shapes.items() if ndim >= 2]
        of_kind: dict[str | None, list[str]] = {None: matrices}
        if by_kind or self.config.lr_factors(steps=1) is not None:
            kinds = OUTSIDE_OF_BLOCKS | {"positions": "embedding"}
            of_kind = {
                kind: [name for name in matrices if kinds.get(name, "hidden") == kind]
                for kind in ("embedding", "hidden", "output")
            }
        return [
            *(ParameterGroup(names, self.decays, self.constraint, kind) for kind, names in of_kind.items() if names),
            ParameterGroup([name for name, ndim in shapes.items() if ndim < 2], decay=False, constraint="free"),
        ]

    def n_params(self) -> int:
        """Number of learned values, including embeddings."""
        return sum(parameter.numel() for parameter in self.parameters())

    def flops_per_token(self, context: int, causal: bool = False) -> int:
        """Floating-point operations of forward and backward per token in rows of T = `context` tokens: 6 x matrices +
        12 L d_model T, the usual convention.

        A value of a matrix takes a multiplication and an addition in the forward pass, and twice as many in the
        backward pass. The output embedding counts at the places with a target, the look-up in the input embedding does
        not. The second term is attention, for all pairs of tokens. causal: the half that a mask hides does not count.
        """
        config = self.config
        attention = 12 * config.n_layers * config.d_model * context
        attention = attention // 2 if causal and not config.bidirectional else attention
        head = self.unembedding.numel() * config.predicted(context) // context
        return 6 * (in_matrices(self.layers) + head) + attention


def in_matrices(module: nn.Module) -> int:
    """Number of values in the matrices of a module."""
    return sum(parameter.numel() for parameter in module.parameters() if parameter.ndim == 2)


def uncompiled(model: Decoder) -> AbstractContextManager[object]:
    """Inside, a compiled model runs uncompiled. For texts of many lengths it would be compiled again and again."""
    is_compiled = any(module._compiled_call_impl is not None for module in (model, *model.blocks()))
    return torch.compiler.set_stance("force_eager") if is_compiled else nullcontext()
