"""Puts the parts of the telemetry together: one vector on the device for each observed step, read for its record."""

from collections.abc import Sequence
from itertools import islice

import torch
from torch import Tensor

from ngpt_train.core.recorded import Record
from ngpt_train.observe.telemetry import Numbers, Part
from ngpt_train.observe.telemetry.batch_distances import RunningStatistics
from ngpt_train.observe.telemetry.scores import AttentionScores
from ngpt_train.observe.telemetry.weight_numbers import Vectors, WeightChanges
from ngpt_train.training.loop import Hook, TrainingRun, due
from ngpt_train.training.state import TrainState
from ngpt_train.training.step import MicroBatch, Observer


class Telemetry(Observer):
    """Observes steps of `state`. Two collectives a step, a sum and a maximum; the host waits for nothing."""

    def __init__(self, state: TrainState) -> None:
        model, world = state.model, state.world
        self._scores = AttentionScores(model, world.device)
        self._running = RunningStatistics(model, world.size, world.device)
        self._weights = WeightChanges(model, world.is_main, world.device)
        vectors = Vectors(model, world.is_main, world.device)
        self._parts: tuple[Part, ...] = (self._weights, vectors, self._running, self._scores)
        self._lengths: list[tuple[int, int]] = []  # of the numbers of each part
        # Of each observed step: its number; tokens as in the state, on the device; numbers of all parts and ranks.
        self._seen: list[tuple[int, Tensor, Numbers]] = []

    def before_step(self, state: TrainState, micro_batches: Sequence[MicroBatch]) -> None:
        self._scores.before_step(micro_batches[0])
        self._running.before_step()

    def before_update(self, state: TrainState) -> None:
        self._weights.before_update(None if state.loss_scale is None else state.loss_scale.value)

    def after_update(self, state: TrainState) -> None:
        each = [part.after_update() for part in self._parts]
        self._lengths = [(len(numbers.summed), len(numbers.largest)) for numbers in each]
        summed = state.world.sum_(torch.cat([numbers.summed for numbers in each]))
        largest = state.world.max_(torch.cat([numbers.largest for numbers in each]))
        self._seen.append((state.step, state.tokens.clone(), Numbers(summed, largest)))

    def records(self) -> list[Record]:
        """Records of the steps seen since the last call. Waits for the device."""
        seen, self._seen = self._seen, []
        return [self._record(*each) for each in seen]

    def _record(self, step: int, tokens: Tensor, numbers: Numbers) -> Record:
        record: Record = {"kind": "telemetry", "step": step, "tokens": int(tokens)}
        summed, largest = iter(numbers.summed.tolist()), iter(numbers.largest.tolist())
        for part, (n_summed, n_largest) in zip(self._parts, self._lengths, strict=True):
            record |= part.record(list(islice(summed, n_summed)), list(islice(largest, n_largest)))
        return record


class ObservedSteps(Hook):
    """Lets `telemetry` see every n-th step, and logs its records once the host waits for the device anyway."""

    def __init__(self, telemetry: Telemetry, every: int) -> None:
        self._telemetry, self._every = telemetry, every
        self._spent: dict[int, Record] = {}  # step -> seconds and FLOPs so far, for records not logged yet

    def before_step(self, run: TrainingRun) -> None:
        if due(run.step + 1, self._every):
            run.observer = self._telemetry

    def after_step(self, run: TrainingRun) -> None:
        if run.observer is self._telemetry:
            self._spent[run.step] = run.spent()

    def check(self, run: TrainingRun) -> None:
        if run.rests:
            for record in self._telemetry.records():
                run.log(record | self._spent.pop(record["step"]))
