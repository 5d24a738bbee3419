"""What every decoder-only model is: embedding, a stack of blocks, a head, a loss.

An architecture adds its block, its head, its initialisation and its constraint. Nothing here knows how many devices
there are: compile, activation checkpointing, DDP and FSDP2 are applied from outside (ngpt_train/distributed).
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ngpt_train.config.model_keys import ModelConfig
from ngpt_train.models import decoding, flops, initialisation, parameter_groups
from ngpt_train.models.head import Head, Loss
from ngpt_train.models.layers.documents import Mask, check_documents, document_mask, positions_in_documents
from ngpt_train.models.layers.rope import Rope, rope_table
from ngpt_train.models.parameter_groups import ParameterGroup

__all__ = ["Decoder", "Head", "Loss"]


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

    def rope(self, tokens: Tensor, dtype: torch.dtype) -> Rope | None:
        """The rotary angles of a row's places; None where positions are told otherwise."""
        config = self.config
        interleaved = config.rope_layout == "interleaved"
        d_head = config.d_model // config.n_heads
        return rope_table(tokens.shape[1], d_head, config.rope_base, interleaved, tokens.device, dtype)

    def blocks(self) -> list[nn.Module]:
        """What is compiled, recomputed and sharded as one."""
        return list(self.layers)

    def stack(self, h: Tensor, rope: Rope | None, mask: Mask, doc_ids: Tensor | None) -> Tensor:
        """All blocks: h `(B, T, d_model)` -> the same."""
        return self.run_blocks(self.layers, h, rope, mask)

    def run_blocks(self, blocks: Iterable[nn.Module], h: Tensor, *arguments: Any) -> Tensor:
        """One after the other: h `(B, T, d_model)` -> the same."""
        for block in blocks:
            h = block(h, *arguments)
        return h

    def head(self, h: Tensor) -> Head:
        """What the logits are made of, from the last block's h `(B, T, d_model)`."""
        raise NotImplementedError

    def init_std(self, path: str) -> float:
        """Standard deviation at initialisation of the matrix at `path`.

        The 2 L matrices that write into the residual stream start smaller, so that its variance at the
        last layer does not grow with depth (Radford et al. 2019).
        """
        writes_residual = path.endswith((".wo", ".w_down"))
        return 0.02 / math.sqrt(2 * self.config.n_layers) if writes_residual else 0.02

    @property
    def projects(self) -> bool:
        """Whether project_ divides every row of every matrix by its length; it does that or nothing."""
        return False

    def project_(self, skipped: Tensor | None = None) -> None:
        """Re-imposes the architecture's constraint on its weights, in place; here there is none.

        skipped: 0-dim, of the device; where it is true no bit of a weight changes, and the host does not wait for it.
        """

    def check_documents(self, doc_ids: Tensor, device: torch.device) -> None:
        """Raises ValueError where attention on `device` has no room for so many documents. doc_ids: on the CPU."""
        dtype = self.compute_dtype or self.embedding.dtype
        check_documents(doc_ids, device, self.config.d_model // self.config.n_heads, dtype)

    def begin_step_(self, step: int, loss_scale: Tensor) -> None:
        """Tells the model, before the forward passes of a step, how many steps are behind it and by what the
        summed losses will be multiplied."""

    def statistics(self) -> dict[str, Tensor]:
        """Running statistics by name: not learned, but part of the state. They are changed in place."""
        return {}

    def notes(self) -> list[str]:
        """What whoever reads the training loss has to know."""
        return []

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
        head = self.head(self.stack(h, rope, mask, doc_ids))
        return head.logits() if targets is None else head.loss(targets, self.z_loss if self.training else 0.0)

    def loss(self, tokens: Tensor, targets: Tensor, doc_ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Summed cross-entropy in nats, in training mode with the z-loss, and the number of targets that count (not
        -100), both 0-dim."""
        loss = self(tokens, targets, doc_ids)
        return loss.total, loss.n_tokens

    # What is asked of it, each answered in a file of its own.

    def next_token_logits(self, prompt: Tensor, new: Tensor) -> Tensor:
        """`(V,)`: scores of the token after prompt `(P,)`, P >= 1, and new `(N,)`."""
        return decoding.by_decoder(self, prompt, new)

    def init_weights_(self, seed: int) -> None:
        """Gives all weights the values of step 0."""
        initialisation.init_weights_(self, seed)

    def parameter_groups(self) -> list[ParameterGroup]:
        """Parameters by what the optimizer does with them."""
        return parameter_groups.parameter_groups(self)

    def n_params(self) -> int:
        """Number of learned values, embeddings included."""
        return sum(parameter.numel() for parameter in self.parameters())

    def flops_per_token(self, context: int, causal: bool = False) -> int:
        """Floating-point operations of forward and backward for one token of a row of `context` tokens."""
        return flops.of_decoder(self, context, causal)
