"""How the rows of a step are cut into micro batches."""

import math

from ngpt_train.config.keys import AUTO
from ngpt_train.core.errors import ConfigError

# With micro_rows=auto a forward pass has at most this many tokens: enough to keep a GPU busy at every scale here, and
# few enough for a model of 1B parameters in 80 GB.
AUTO_MICRO_TOKENS = 16_384


def resolve_micro_rows(batch_rows: int, micro_rows: int | str, context: int, world_size: int) -> int:
    """Rows of a micro batch: those of one rank in one forward pass.

    Raises ConfigError if batch_rows is not a whole number of micro batches on every rank.
    """
    if batch_rows % world_size:
        below = batch_rows // world_size * world_size
        near = " or ".join(str(rows) for rows in (below, below + world_size) if rows)
        raise ConfigError(
            f"train.batch_rows={batch_rows}: {world_size} ranks cannot share it evenly. "
            f"Use a multiple of {world_size}, for example train.batch_rows={near}."
        )
    rank_rows = batch_rows // world_size
    possible = divisors(rank_rows)
    if micro_rows == AUTO:
        return max([rows for rows in possible if rows * context <= AUTO_MICRO_TOKENS], default=1)
    if micro_rows not in possible:
        raise ConfigError(
            f"train.micro_rows={micro_rows}: a rank has {rank_rows} rows per step "
            f"(train.batch_rows={batch_rows} over {world_size} ranks), which is not a multiple of it. "
            f"Use one of {', '.join(map(str, possible))}."
        )
    return int(micro_rows)


def divisors(number: int) -> list[int]:
    """Those of a number >= 1, from 1 to itself."""
    small = [one for one in range(1, math.isqrt(number) + 1) if number % one == 0]
    return sorted({*small, *(number // one for one in small)})
