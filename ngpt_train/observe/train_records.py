"""The train records of a run."""

from collections.abc import Mapping

from ngpt_train.core.recorded import Record
from ngpt_train.data.loader import Position, data_hash
from ngpt_train.distributed.world import World
from ngpt_train.observe.meters import Meter
from ngpt_train.training.loop import Hook, TrainingRun, due


class TrainRecords(Hook):
    """Logs a train record every logging.every steps: docs/records.md has its fields.
    epoch_rows: rows of an epoch by source ("" without a mixture), on rank 0 alone."""

    def __init__(self, meter: Meter, epoch_rows: Mapping[str, float]) -> None:
        self._meter, self._epoch_rows = meter, epoch_rows
        self._reported: set[str] = set()  # names of skipped shards

    def before_step(self, run: TrainingRun) -> None:
        assert run.position is not None
        skipped = run.position.skipped
        for name in skipped.keys() - self._reported:
            run.warn(f"data.on_bad_shard=skip leaves out {name}: {skipped[name]}")
        self._reported |= skipped.keys()

    def waits(self, run: TrainingRun) -> bool:
        return due(run.step, run.state.config.logging.every)

    def after_step(self, run: TrainingRun) -> None:
        self._meter.step(run.seconds, run.data_seconds, run.tokens_per_step)
        if self.waits(run):
            run.log(self._record(run))
            run.state.interval.reset()

    def _record(self, run: TrainingRun) -> Record:
        """The record of the last step and its interval. A collective call, which waits for the device."""
        state, result, position = run.state, run.result, run.position
        assert result is not None
        assert position is not None
        of_all_ranks, interval = seen(position, state.world), state.interval.read()
        return {
            "kind": "train",
            "step": state.step,
            "loss": run.loss,
            "loss_mean": interval["loss_mean"],
            **({} if result.z_loss is None else {"z_loss": float(result.z_loss)}),
            **({} if result.loss_scale is None else {"loss_scale": float(result.loss_scale)}),
            "lr": result.lr,
            "grad_norm": float(result.grad_norm),
            "tokens": int(state.tokens),
            **run.spent(),
            **epochs(position.rows, of_all_ranks.get("rows"), self._epoch_rows),
            **of_all_ranks,
            **padding(run),
            **self._meter.read(),
            "skipped": interval["skipped"],
            "clipped": interval["clipped"],
        }


def epochs(rows: int, rows_by_source: Mapping[str, int] | None, epoch_rows: Mapping[str, float]) -> Record:
    """epochs: passes over the training text so far, for streamed text an estimate; None on ranks that log nothing.
    rows: of the run so far.

    For a mixture, epochs_by_source has a number for each source, and epochs is the largest of them.
    """
    if rows_by_source is None:
        return {"epochs": rows / epoch_rows[""] if "" in epoch_rows else None}
    by_source = {name: rows / epoch_rows[name] for name, rows in rows_by_source.items() if name in epoch_rows}
    return {"epochs": max(by_source.values(), default=None), "epochs_by_source": by_source}


def padding(run: TrainingRun) -> Record:
    """{"padding": the share of padding in all targets so far} if rows are padded, else {}. Masked rows have no such
    record, because most of their tokens are no targets."""
    config = run.state.config
    pads = config.data.pack == "best_fit" and config.model.objective != "masked"
    return {"padding": 1 - int(run.state.tokens) / (run.step * run.tokens_per_step)} if pads else {}


def seen(position: Position, world: World) -> Record:
    """data_hash of the rows of all ranks so far and, with a mixture, the rows of each source. Collective."""
    # data_hash is a sum modulo 2^64. Its two halves are summed apart, because the sums must stay below 2^63.
    upper, lower, *rows = world.sum_of([*divmod(position.data_hash, 2**32), *position.rows_by_source.values()])
    by_source = dict(zip(position.rows_by_source, rows, strict=True))
    return {"data_hash": data_hash([(upper << 32) + lower])} | ({"rows": by_source} if by_source else {})
