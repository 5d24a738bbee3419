"""What of a state each rank writes: the rows that it alone holds, and its share of what several ranks hold."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex

Place = tuple[str, tuple[int, ...]]  # a tensor's name, and where in the tensor a piece begins


@dataclass(frozen=True)
class Piece:
    """Neighbouring rows of the tensor `name`, which begin at `offsets` of it."""

    name: str
    offsets: tuple[int, ...]
    rows: Tensor

    @property
    def place(self) -> Place:
        return self.name, self.offsets


def pieces_of(name: str, tensor: Tensor) -> Iterator[Piece]:
    """What this rank holds of a tensor: all of it, or of a sharded one its rows, if it has some. Nothing is copied."""
    if not hasattr(tensor, "__create_chunk_list__"):
        yield Piece(name, (0,) * tensor.ndim, tensor.detach())
        return
    for chunk in tensor.__create_chunk_list__():
        if chunk.sizes.numel():
            rows = tensor.__get_tensor_shard__(MetadataIndex(name, chunk.offsets))  # type: ignore[attr-defined]
            yield Piece(name, tuple(chunk.offsets), rows.detach())


def share(held: Sequence[Mapping[Place, int]]) -> list[set[Place]]:
    """What each rank writes, so that each place is written once, and all ranks write about as much.

    held: of each rank the bytes of what it holds by place. Every rank computes the same.
    """
    holders: dict[Place, list[int]] = {}
    for rank, places in enumerate(held):
        for place in places:
            holders.setdefault(place, []).append(rank)
    size = {place: held[ranks[0]][place] for place, ranks in holders.items()}
    load = [0] * len(held)
    shares: list[set[Place]] = [set() for _ in held]
    # Places with one holder first, then the large ones.
    for place in sorted(holders, key=lambda place: (len(holders[place]) > 1, -size[place], place)):
        writer = min(holders[place], key=lambda rank: (load[rank], rank))
        load[writer] += size[place]
        shares[writer].add(place)
    return shares
