"""The cost of telemetry: CPU seconds of training steps with and without it, in turn.

    python scripts/telemetry_cost.py MODEL SCALE [KEY=VALUE ...]

Tokens are random, of a vocabulary of 4,096. Set OMP_NUM_THREADS=1: threads that wait for work take CPU time too.
"""

import statistics
import sys
import time

from ngpt_train.config import load_config
from ngpt_train.observe.telemetry.collector import Telemetry
from ngpt_train.study.random_steps import tokens_of
from ngpt_train.training import build_state, train_step
from ngpt_train.training.step import NOBODY

STEPS, WARMUP, VOCABULARY = 4, 2, 4_096


def main(model: str, scale: str, *overrides: str) -> None:
    given = [f"model={model}", f"scale={scale}", "train.device=cpu", f"model.vocab_size={VOCABULARY}", *overrides]
    config = load_config(given)
    state = build_state(config)
    micro_batches = tokens_of(state)
    telemetry = Telemetry(state)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for step in range(WARMUP + STEPS):
        for observed in (False, True):
            started = time.process_time()
            train_step(state, micro_batches, untouched=True, observer=telemetry if observed else NOBODY)
            telemetry.records()
            if step >= WARMUP:
                seconds[observed].append(time.process_time() - started)
    plain, observed_step = (statistics.median(seconds[observed]) for observed in (False, True))
    more = observed_step / plain - 1
    print(
        f"{' '.join(given)}: {state.model.n_params():,} parameters, {config.train.batch_rows} rows of "
        f"{config.model.context}: {plain:.3f} s, observed "
        f"{observed_step:.3f} s; every 100 steps {more / 100:.2%}, every 10 {more / 10:.2%}"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
