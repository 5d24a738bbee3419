"""What a checkpoint's files hold, byte by byte: which rank writes what, checksums, room on the disk, copies."""

import json
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from ngpt_train.config import load_config
from ngpt_train.core.errors import DataError
from ngpt_train.models.gpt.model import GPT
from ngpt_train.training import TrainState, build_state, train_step
from ngpt_train.training.checkpoint import Checkpoints, load_state
from ngpt_train.training.checkpoint.catalogue import differences, size_and_checksum, verify
from ngpt_train.training.checkpoint.save import share
from ngpt_train.training.checkpoint.stored_tensors import StoredTensors
from ngpt_train.training.checkpoint.tensor_files import Piece, write_tensors
from ngpt_train.training.hooks import saving
from ngpt_train.training.hooks.saving import Staging, resolve_asynchronous
from tests.stored import save_state

FILE = "shard-00001-model-00001-of-00001.safetensors"
TENSORS = {
    "b": torch.arange(6.0).reshape(2, 3),
    "a": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "step": torch.tensor(7.0),
    "turned": torch.arange(12.0, dtype=torch.float64).reshape(3, 4).T,  # not contiguous
    "count": torch.tensor([True, False, True]),
}


def begun(*overrides: str) -> TrainState:
    given = ["model=gpt", "scale=debug", "model.vocab_size=64", "train.device=cpu", "train.batch_rows=2"]
    return build_state(load_config([*given, "train.micro_rows=2", *overrides], world_size=1))


def one_step(state: TrainState) -> float:
    """The loss before it."""
    state.optimizer.param_groups[0]["lr"] = 0.1
    rows = torch.randint(64, (2, state.config.model.context + 1), generator=torch.Generator().manual_seed(0))
    return float(train_step(state, [(rows[:, :-1], rows[:, 1:])]).loss)


def trained(*overrides: str) -> TrainState:
    state = begun(*overrides)
    one_step(state)
    return state


@pytest.mark.parametrize("kind", ["xxh3", "sha256"])
def test_a_file_is_what_its_libraries_read(tmp_path: Path, kind: str) -> None:
    """Caught: a header or an order of bytes that safetensors reads otherwise; a checksum of other bytes than those in
    the file; places that torch's reader does not find."""
    pieces = [Piece(name, (0,) * tensor.ndim, tensor) for name, tensor in TENSORS.items()]
    entry = write_tensors(tmp_path / FILE, pieces, kind)
    assert entry == size_and_checksum(tmp_path / FILE, kind)
    read = load_file(tmp_path / FILE)
    assert set(read) == set(TENSORS)
    assert all(torch.equal(read[name], tensor) and read[name].dtype == tensor.dtype for name, tensor in TENSORS.items())
    by_torch = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}
    dcp.load(by_torch, storage_reader=HuggingFaceStorageReader(str(tmp_path)), no_dist=True)
    assert all(torch.equal(by_torch[name], tensor) for name, tensor in TENSORS.items())
    ours = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}
    StoredTensors(tmp_path).read(ours)
    assert all(torch.equal(ours[name], tensor) for name, tensor in TENSORS.items())


def test_pieces_of_ranks_are_put_together(tmp_path: Path) -> None:
    """Three ranks wrote rows of a matrix. Caught: rows in another place, a rank's file that is left out, a hole or
    another shape that is taken for zeros."""
    whole = torch.arange(20.0).reshape(5, 4)
    for rank, (begin, end) in enumerate([(0, 2), (2, 4), (4, 5)]):
        write_tensors(tmp_path / f"shard-{rank}.safetensors", [Piece("w", (begin, 0), whole[begin:end])], "xxh3")
    read = {"w": torch.zeros(5, 4)}
    StoredTensors(tmp_path).read(read)
    assert torch.equal(read["w"], whole)
    with pytest.raises(DataError, match=r"w has the shape \[5, 4\] there, and \[6, 4\] in the model"):
        StoredTensors(tmp_path).read({"w": torch.zeros(6, 4)})
    write_tensors(tmp_path / "shard-3.safetensors", [Piece("w", (0, 0), whole[0:2])], "xxh3")
    (tmp_path / "shard-1.safetensors").rename(tmp_path / "elsewhere")
    with pytest.raises(DataError, match="lacks a part of w"):  # as many numbers as w has, rows 0 and 1 twice
        StoredTensors(tmp_path).read({"w": torch.zeros(5, 4)})
    (tmp_path / "shard-3.safetensors").unlink()
    with pytest.raises(DataError, match="lacks a part of w"):
        StoredTensors(tmp_path).read({"w": torch.zeros(5, 4)})
    save_file({"w": whole}, tmp_path / "shard-1.safetensors")
    with pytest.raises(DataError, match="has one twice"):
        StoredTensors(tmp_path).read({"w": torch.zeros(5, 4)})
    (tmp_path / "shard-1.safetensors").write_bytes(b"{")
    with pytest.raises(DataError, match=r"cannot be read: shard-1\.safetensors: SafetensorError: "):
        StoredTensors(tmp_path)


def test_each_place_is_written_once() -> None:
    """Caught: what all ranks hold is written by one of them, which the others wait for; or by none."""
    shared = {(f"w{n}", (0, 0)): 100 + n for n in range(9)}
    held = [shared | {("sharded", (rank, 0)): 50} for rank in range(3)]
    shares = share(held)
    assert sorted(place for mine in shares for place in mine) == sorted({place for one in held for place in one})
    assert all(("sharded", (rank, 0)) in mine for rank, mine in enumerate(shares))
    sizes = [sum(held[rank][place] for place in mine) for rank, mine in enumerate(shares)]
    assert max(sizes) - min(sizes) < 120
    assert share(held) == shares


@pytest.mark.parametrize("kind", ["xxh3", "sha256"])
def test_either_checksum_tells_a_flipped_bit(tmp_path: Path, kind: str) -> None:
    """Caught: a checkpoint with the checksum of before that is not verified, or refused."""
    state = trained()
    path = save_state(Checkpoints(tmp_path, state.world, 1, None, kind), state)
    entries = json.loads((path / "MANIFEST.json").read_text())["files"]
    assert {tuple(entry) for entry in entries.values()} == {("bytes", kind)}
    verify(path, state.world)
    load_state(path, state)
    content = bytearray((path / FILE).read_bytes())
    content[-5] ^= 1
    (path / FILE).write_bytes(content)
    assert differences(path, entries) == [f"{FILE} has another {kind} than when it was written"]
    with pytest.raises(DataError, match=f"has another {kind}"):
        verify(path, state.world)


def test_a_disk_without_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught: a save that fills the disk before it fails; one that is refused because of what a killed one has left."""
    state = trained()
    kept = Checkpoints(tmp_path, state.world, 1, None)
    first = save_state(kept, state)
    (tmp_path / ".unfinished-step_00000009").mkdir()
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1_100_000))
    state.step += 1
    size = sum(tensor.nbytes for tensor in load_file(first / FILE).values())
    missing = size + 2**20 - 1_100_000
    with pytest.raises(
        DataError, match=rf"takes {size / 1e6:.2f} MB, and 1.10 MB are free on its disk: {missing / 1e6:.2f} MB"
    ):
        save_state(kept, state)
    assert [path.name for path in tmp_path.iterdir()] == [first.name]
    monkeypatch.undo()
    assert save_state(kept, state).is_dir()


def test_what_is_read_back_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught: an older checkpoint that is deleted for a newer one whose file is not what was written."""
    from ngpt_train.training.checkpoint import save

    state = trained()
    kept = Checkpoints(tmp_path, state.world, 1, None)
    first = save_state(kept, state)
    write = save.write_tensors

    def written_wrongly(path: Path, *given: object) -> object:
        entry = write(path, *given)  # type: ignore[arg-type]
        path.write_bytes(path.read_bytes()[:-1] + b"!")
        return entry

    monkeypatch.setattr(save, "write_tensors", written_wrongly)
    state.step += 1
    with pytest.raises(DataError, match="a file reads back differently: shard-00001"):
        save_state(kept, state)
    assert [path.name for path in tmp_path.iterdir()] == [first.name]


@pytest.mark.parametrize("kind", ["buffer", "shared", "frozen", "before a step"])
def test_models_of_others_are_saved_and_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Caught: a plug-in's buffer or shared MLP without a name, a frozen parameter that gets moments on a resume."""
    init = GPT.__init__

    def changed(self: GPT, *given: object) -> None:
        init(self, *given)  # type: ignore[arg-type]
        first, second = self.layers
        if kind == "buffer":
            self.register_buffer("table", torch.arange(4.0))
        elif kind == "shared":
            second.mlp = first.mlp
        elif kind == "frozen":
            first.norm_attn.gain.requires_grad_(False)

    monkeypatch.setattr(GPT, "__init__", changed)
    state, again = begun(), begun()
    if kind != "before a step":
        one_step(state)
    if kind == "buffer":
        state.model.table += 1
    path = save_state(Checkpoints(tmp_path, state.world, 1, None), state)
    for weight in again.model.state_dict().values():
        weight.zero_()
    load_state(path, again)
    for _ in range(2):
        stored, read = state.model.state_dict(), again.model.state_dict()
        assert all(torch.equal(value, stored[name]) for name, value in read.items())
        losses = [one_step(each) for each in (state, again)]
        assert losses[0] == losses[1]


def test_copies_are_apart_and_used_again() -> None:
    """Caught: a copy that training changes, a checkpoint that takes new memory each time."""
    weight = torch.ones(3, 2)
    copies = Staging(weight.device, torch.optim.SGD([weight]))
    (first,) = copies.copy([Piece("w", (0, 0), weight)])
    weight.fill_(2)
    assert torch.equal(first.rows, torch.ones(3, 2))
    (second,) = copies.copy([Piece("w", (0, 0), weight)])
    assert torch.equal(second.rows, weight)
    assert second.rows.data_ptr() == first.rows.data_ptr()


@pytest.mark.parametrize(("free", "chosen"), [(10, False), (10**12, True), (None, True)])
def test_auto_goes_by_the_memory(monkeypatch: pytest.MonkeyPatch, free: int | None, chosen: bool) -> None:
    state = trained()
    monkeypatch.setattr(saving, "available_memory", lambda: free)
    asynchronous, why = resolve_asynchronous("auto", state)
    assert asynchronous is chosen
    size = 3 * 4 * state.model.n_params()
    assert f"copies of the state take {size / 1e6:.2f} MB on this host" in why
    assert resolve_asynchronous(not chosen, state)[0] is not chosen


def test_memory_of_a_control_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught: a container that is given the memory of its machine."""
    files = {"/proc/meminfo": "MemTotal: 9\nMemAvailable:  1000 kB\n", "/sys/fs/cgroup/memory.max": "max"}
    monkeypatch.setattr(saving, "text_of", lambda path: files.get(str(path), ""))
    assert saving.available_memory() == 1_024_000
    files |= {"/sys/fs/cgroup/memory.max": "5000", "/sys/fs/cgroup/memory.current": "2000"}
    assert saving.available_memory() == 3000
    files.clear()
    assert saving.available_memory() is None
