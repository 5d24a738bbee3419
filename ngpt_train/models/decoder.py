"""What every decoder-only model is: embedding, a stack of blocks, a head, a loss.

An architecture (gpt.py, ngpt.py) adds its block, its head, its initialisation and its constraint.
Nothing here knows how many devices there are: compile, activation checkpointing, DDP and FSDP2 are
applied from outside (ngpt_train/distributed).
"""

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ngpt_train.config.model_keys import ModelConfig
from ngpt_train.core.constants import IGNORED
from ngpt_train.kernels.cross_entropy import linear_cross_entropy
from ngpt_train.models.layers.documents import Mask, document_mask, positions_in_documents
from ngpt_train.models.layers.rope import Rope, rope_table
from ngpt_train.models.weights import stacked_parameters, write_full


class Loss(NamedTuple):
    """Of the targets that count (not -100), 0-dim."""

    total: Tensor  # what is differentiated: the summed cross-entropy and in training z_loss * logsumexp(logits)^2
    n_tokens: Tensor  # how many they are
    cross_entropy: Tensor  # its first part, in nats, without gradient
    z_term: Tensor | None  # its second part, if there is one


class Head(NamedTuple):
    """Logits = scale * (matrix h): h `(B, T, d_model)`, matrix `(V, d_model)` as it is stored, scale `(V,)` or None."""

    h: Tensor
    matrix: Tensor
    scale: Tensor | None = None

    def logits(self) -> Tensor:
        """`(B, T, V)`, at least fp32."""
        logits = F.linear(self.h, self.matrix.to(self.h.dtype)).to(torch.promote_types(self.h.dtype, torch.float32))
        return logits if self.scale is None else logits * self.scale

    def loss(self, targets: Tensor, z_loss: float) -> Loss:
        """Of the targets `(B, T)`, without the logits."""
        total, cross_entropy, z_term = linear_cross_entropy(self.h, self.matrix, targets, self.scale, z_loss)
        return Loss(total, (targets != IGNORED).sum(), cross_entropy, z_term)


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that the optimizer treats alike."""

    names: list[str]
    decay: bool
    unit_rows: bool  # after a step every row is divided by its length: what project_ does


class Decoder(nn.Module):
    """Decoder-only language model; `vocab_size` and all widths come from its config."""

    decays = True  # whether weight decay means anything for the architecture's matrices

    def __init__(self, config: ModelConfig, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        assert isinstance(config.vocab_size, int)  # build_model refuses `auto`
        self.config = config
        # dtype of the activations and matrix products; None is that of the weights.
        self.compute_dtype: torch.dtype | None = None
        self.z_loss = 0.0  # what logsumexp(logits)^2 counts in the loss of a target; in training mode only
        self.embedding = nn.Parameter(torch.empty(config.vocab_size, config.d_model))
        self.layers = nn.ModuleList(blocks)
        self.output = None if config.tied_embeddings else nn.Parameter(torch.empty_like(self.embedding))

    @property
    def unembedding(self) -> Tensor:
        """The output embedding `(V, d_model)`, which may be the input's."""
        return self.embedding if self.output is None else self.output

    # What an architecture says about itself.

    def embed(self, tokens: Tensor, table: Tensor) -> Tensor:
        """The first hidden state `(B, T, d_model)` of tokens `(B, T)` from an embedding `(V, d_model)`."""
        return F.embedding(tokens, table)

    def add_positions(self, h: Tensor, positions: Tensor) -> Tensor:
        """h `(B, T, d_model)` with what tells positions, `(T,)` or `(B, T)`; here attention's rotation does."""
        return h

    def blocks(self) -> list[nn.Module]:
        """What is compiled, recomputed and sharded as one."""
        return list(self.layers)

    def head(self, h: Tensor) -> Head:
        """What the logits are made of, from the last block's h `(B, T, d_model)`."""
        raise NotImplementedError

    def init_std(self, name: str) -> float:
        """Standard deviation at initialisation of the matrix `name`.

        The 2 L matrices that write into the residual stream start smaller, so that its variance at the
        last layer does not grow with depth (Radford et al. 2019).
        """
        writes_residual = name.endswith((".wo", ".w_down"))
        return 0.02 / math.sqrt(2 * self.config.n_layers) if writes_residual else 0.02

    @property
    def projects(self) -> bool:
        """Whether project_ divides every row of every matrix by its length; it does that or nothing."""
        return False

    def project_(self, skipped: Tensor | None = None) -> None:
        """Re-imposes the architecture's constraint on its weights, in place; here there is none.

        skipped: 0-dim, of the device; where it is true no bit of a weight changes, and the host does not wait for it.
        """

    def begin_step_(self, step: int, loss_scale: Tensor) -> None:
        """Tells the model, before the forward passes of a step, how many steps are behind it and by what the
        summed losses will be multiplied."""

    def statistics(self) -> dict[str, Tensor]:
        """Running statistics by name: not learned, but part of the state. They are changed in place."""
        return {}

    def notes(self) -> list[str]:
        """What whoever reads the training loss has to know."""
        return []

    def stack(self, h: Tensor, rope: Rope | None, mask: Mask, doc_ids: Tensor | None) -> Tensor:
        """The blocks, one after the other: h `(B, T, d_model)` -> the same."""
        return self.through(self.layers, h, rope, mask)

    def through(self, blocks: Iterable[nn.Module], h: Tensor, *arguments: Any) -> Tensor:
        for block in blocks:
            h = block(h, *arguments)
        return h

    # What follows from it.

    def forward(self, tokens: Tensor, targets: Tensor | None = None, doc_ids: Tensor | None = None) -> Tensor | tuple:
        """Logits, or with targets their `Loss`. One entry, so that DDP's and FSDP2's hooks always run.

        tokens, targets, doc_ids: `(B, T)` integers. Tokens attend to earlier tokens. Where doc_ids are given each
        document is as if alone, see layers/documents.py. Returns logits `(B, T, V)`, at least fp32.
        """
        dtype = self.compute_dtype or self.embedding.dtype
        rope = self.rope(tokens, torch.promote_types(dtype, torch.float32))
        positions, mask = torch.arange(tokens.shape[1], device=tokens.device), None
        if doc_ids is not None:
            positions = positions_in_documents(doc_ids)
            rope = None if rope is None else rope.at(positions)
            mask = document_mask(doc_ids, self.config.d_model // self.config.n_heads, dtype)
        h = self.add_positions(self.embed(tokens, self.embedding), positions).to(dtype)  # (B, T, d_model)
        h = self.stack(h, rope, mask, doc_ids)
        head = self.head(h)
        return head.logits() if targets is None else head.loss(targets, self.z_loss if self.training else 0.0)

    @torch.no_grad()
    def next_token_logits(self, prompt: Tensor, new: Tensor) -> Tensor:
        """`(V,)`: scores of the token after prompt `(P,)`, P >= 1, and new `(N,)`; the last `context` tokens count."""
        return self(torch.cat([prompt, new])[None, -self.config.context :])[0, -1]

    def rope(self, tokens: Tensor, dtype: torch.dtype) -> Rope | None:
        """The rotary angles of a row's places; None where positions are told otherwise."""
        config = self.config
        interleaved = config.rope_layout == "interleaved"
        d_head = config.d_model // config.n_heads
        return rope_table(tokens.shape[1], d_head, config.rope_base, interleaved, tokens.device, dtype)

    def loss(self, tokens: Tensor, targets: Tensor, doc_ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Summed cross-entropy in nats, in training mode with the z-loss, and the number of targets that count (not
        -100), both 0-dim."""
        loss = self(tokens, targets, doc_ids)
        return loss.total, loss.n_tokens

    @torch.no_grad()
    def init_weights_(self, seed: int) -> None:
        """Sets vectors and statistics to their start, draws every matrix from N(0, init_std^2), imposes the constraint.

        Each matrix has a generator of its own, seeded by (seed, name), and is drawn whole in fp32 on
        the CPU: the values do not depend on device, layout or world size.
        """
        for module in self.modules():
            if callable(reset := getattr(module, "reset_parameters", None)):
                reset()
        for parameter, parts in stacked_parameters(self):
            if parameter.ndim >= 2:
                drawn = [self.drawn(seed, name, (rows, *parameter.shape[1:])) for name, rows in parts.items()]
                write_full(parameter, torch.cat(drawn))
        self.project_()

    def drawn(self, seed: int, name: str, shape: tuple[int, ...]) -> Tensor:
        digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        values = torch.empty(shape, dtype=torch.float32, device="cpu")
        return values.normal_(std=self.init_std(name), generator=generator)

    def parameter_groups(self) -> list[ParameterGroup]:
        """Matrices, embeddings included, may decay; gains and scale vectors never.

        Two groups even where nothing decays: under FSDP2 matrices alone are sharded, and torch's fused
        optimizers refuse sharded and whole tensors in one group.
        """
        shapes = {name: parameter.ndim for name, parameter in self.named_parameters()}
        return [
            ParameterGroup([name for name, ndim in shapes.items() if ndim >= 2], self.decays, self.projects),
            ParameterGroup([name for name, ndim in shapes.items() if ndim < 2], decay=False, unit_rows=False),
        ]

    def n_params(self) -> int:
        """Number of learned values, embeddings included."""
        return sum(parameter.numel() for parameter in self.parameters())

    def flops_per_token(self, context: int, causal: bool = False) -> int:
        """Floating-point operations of forward and backward for one token of a row of `context` tokens.

        Three times the forward matrix products, the head's included and the embedding look-up not,
        plus attention's 12 L d_model T; causal counts only the half of it that is not masked.
        """
        matrices = sum(p.numel() for p in self.layers.parameters() if p.ndim == 2) + self.unembedding.numel()
        attention = 12 * self.config.n_layers * self.config.d_model * context
        return 6 * matrices + (attention // 2 if causal else attention)
