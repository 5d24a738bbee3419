"""model.init.*, the standard deviations of the matrices at step 0, and model.init_table, where a recipe has the starts
that were measured at a scale:

    tiny: {init.embedding: 1.0, init.hidden: 1/sqrt(d_model), source: who found them, and how}

`auto` is the table's value for the scale, else the architecture's default, which is its paper's. nGPT's starts are the
`init` and `scale` of its scale vectors, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ngpt_train.config.keys import AUTO, FloatOrAuto, key

RULES = ("1/sqrt(d_model)", "0.5/sqrt(d_model)")
DIVIDED = "hidden/sqrt(writes)"
KINDS = ("embedding", "output", "hidden", "residual")


@dataclass
class InitConfig:
    """Standard deviations of the matrices at step 0, whose entries are normal. The defaults are GPT-2's and the nGPT
    paper's for its baseline (section A.5); 0.02 was chosen for widths of 1,000 and more."""

    embedding: FloatOrAuto = key(
        0.02,
        "Standard deviation of the input embedding at step 0 (an encoder-decoder has two). auto: the recipe's "
        "model.init_table for the scale, else the paper's.",
        choices=(AUTO, *RULES),
        above=0,
        maximum=1000,
    )
    output: FloatOrAuto = key(
        0.02, "As model.init.embedding, of the output embedding.", choices=(AUTO, *RULES), minimum=0, maximum=1000
    )
    hidden: FloatOrAuto = key(
        0.02,
        "As model.init.embedding, of all matrices but embeddings and the ones of model.init.residual; also of learned "
        "positions.",
        choices=(AUTO, *RULES),
        above=0,
        maximum=1000,
    )
    residual: FloatOrAuto = key(
        DIVIDED,
        "As model.init.embedding, of W_o and W_down, which write into the residual stream. hidden/sqrt(writes) is "
        "hidden's divided by the square root of the number of these matrices: 2 n_layers in a decoder; in an "
        "encoder-decoder 2 n_encoder_layers in the encoder and 3 n_layers in the decoder.",
        choices=(AUTO, "hidden", DIVIDED, *RULES),
        minimum=0,
        maximum=1000,
    )

    def std(self, kind: str, d_model: int, writes: int) -> float:
        """The standard deviation of a matrix of one of KINDS. writes: how many matrices write into the residual stream
        that this one writes into."""
        rule = getattr(self, kind)
        if rule == "hidden":
            return self.std("hidden", d_model, writes)
        if rule == DIVIDED:
            return self.std("hidden", d_model, writes) / math.sqrt(writes)
        if rule in RULES:
            return float(rule.removesuffix("/sqrt(d_model)")) / math.sqrt(d_model)
        return float(rule)


def problem_of(table: Mapping[Any, Any]) -> str | None:
    """The first mistake in an init_table, and where it is; None for a correct one."""
    return next(_problems(table), None) if table else None  # while the schema is made there are no keys yet


def _problems(table: Mapping[Any, Any]) -> Iterator[str]:
    from ngpt_train.config.architectures import all_keys, architectures  # which need this file

    starts = dict.fromkeys(name for model in architectures().values() for name in model.starts)
    for scale, entry in table.items():
        if not isinstance(scale, str) or not isinstance(entry, dict):
            yield f"{scale}: must be the name of a scale, and then {{init.embedding: 1.0, source: ...}}"
            continue
        for name, value in entry.items():
            if name == "source":
                problem = None if isinstance(value, str) and value else "must be text"
            elif name in starts:
                problem = all_keys()[f"model.{name}"].problem(value) or ("is no value" if value == AUTO else None)
            else:
                problem = f"is none of {', '.join((*starts, 'source'))}"
            if problem:
                yield f"{scale}: {name} {problem}"
