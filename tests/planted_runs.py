"""Run directories without training, whose truth is known: an arm that needs `ratio` times fewer tokens than the
baseline, with noise of seeds and of validation rows."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from ngpt_train.config.validate import nested

ROWS_PER_STEP, CONTEXT = 8, 64
FIRST_BUDGET = 204_800  # tokens


def power_law(tokens: Any) -> Any:
    return 2.0 + 1.6 * (tokens / FIRST_BUDGET) ** -0.3


def log_linear(tokens: Any) -> Any:
    return 4.0 - 0.35 * np.log(tokens / FIRST_BUDGET)


@dataclass(frozen=True)
class Planted:
    """Two arms, `gpt` and `ngpt`, and the noise of their losses in nats (standard deviations)."""

    ratio: float = 1.7
    curve: Callable[[Any], Any] = power_law
    budgets: Sequence[float] = tuple(FIRST_BUDGET * np.geomspace(1, 8, 4))
    n_seeds: int = 3
    own: float = 0.008  # of a run
    shared: float = 0.0  # of both arms' runs of a seed at a budget
    of_seed: float = 0.0  # of all runs of a seed
    n_rows: int = 0
    difficulty: float = 0.5  # of a row, for both arms
    of_row: float = 0.0  # of a row, for one arm
    of_both: float = 0.0  # of a row in a run

    def draw(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray | None]:
        """End losses (2, K, S) of baseline and arm, and what each row adds to them (2, K, S, R)."""
        budgets, shape = np.asarray(self.budgets), (len(self.budgets), self.n_seeds)
        truth = np.stack([self.curve(budgets), self.curve(self.ratio * budgets)])[:, :, None]
        noise = rng.normal(0, self.shared, shape) + rng.normal(0, self.of_seed, (1, self.n_seeds))
        losses = truth + noise + rng.normal(0, self.own, (2, *shape))
        if not self.n_rows:
            return losses, None
        rows = rng.normal(0, self.difficulty, self.n_rows) + rng.normal(0, self.of_row, (2, 1, 1, self.n_rows))
        rows = rows + rng.normal(0, self.of_both, (2, *shape, self.n_rows))
        means = rows.mean(axis=-1)
        return losses + means, rows - means[..., None]

    def truth(self, budget: float) -> float:
        """The arm's loss less the baseline's."""
        return float(self.curve(self.ratio * budget) - self.curve(budget))


def write_run(
    path: Path,
    arm: str,
    steps: int,
    seed: int,
    loss: float,
    lr: float = 0.004,
    rows: np.ndarray | None = None,
    config: Mapping[str, Any] | None = None,
    ratio: float = 1.0,
    step_time: float = 0.01,
) -> Path:
    """A run that ends at `loss`. rows: what each validation row adds to it. ratio: within its schedule, the run is so
    many times ahead of one with the ratio 1."""
    path.mkdir(parents=True)
    tokens = (config or {}).get("train.batch_rows", ROWS_PER_STEP) * CONTEXT
    keys = {"run.name": path.name, "run.seed": seed, "model.name": arm, "train.steps": steps, "optim.lr": lr}
    keys |= {"train.batch_rows": ROWS_PER_STEP, "model.context": CONTEXT, "model.vocab_size": 4096, "model.d_model": 64}
    (path / "config.yaml").write_text(yaml.safe_dump(nested({**keys, **(config or {})})))
    facts = {
        "git_commit": "1" * 40,
        "device": "cpu",
        "world_size": 1,
        "n_params": 655_680,
        "data_fingerprint": "d" * 64,
    }
    (path / "run.json").write_text(json.dumps({"starts": [facts | {"tokenizer_fingerprint": "a" * 64}]}))
    n_targets = np.full(0 if rows is None else len(rows), CONTEXT)
    loss_sum = n_targets * 0.0 if rows is None else (loss + rows) * n_targets
    if rows is not None:  # a record is what its rows give, to the bit
        loss = float(loss_sum.sum()) / int(n_targets.sum())
    records = []
    for step in sorted({round(steps * share) for share in np.linspace(0, 1, 21)}):
        left = 1 - step / steps
        so_far = {
            "step": step,
            "tokens": step * tokens,
            "train_seconds": step * step_time,
            "flops": 1e6 * step * tokens,
        }
        at = loss + 1.5 * left + 0.2 * left * math.log(ratio) if step < steps else loss
        bits = loss_sum.sum() / math.log(2) / round(2 * n_targets.sum() / math.log(2)) if len(loss_sum) else at / 2
        hashed = {"rows_hash": "95a65f937612a073", "bits_per_byte": float(bits) if step == steps else at / 2}
        records.append({"kind": "eval", "loss": at, "ppl": math.exp(at), **hashed, **so_far})
        if step:
            of_step = {"lr": lr * left, "grad_norm": 1.0, "clipped": 0.1, "memory_gb": 0.4, "step_time": step_time}
            records.append({"kind": "train", "loss": at + 0.01 * math.sin(step), **of_step, **so_far})
    (path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (path / "exit.json").write_text(json.dumps({"code": 0, "reason": "done", "step": steps}))
    if rows is not None:
        (path / "evals").mkdir()
        with (path / f"evals/step_{steps:08d}.npz").open("wb") as file:
            np.savez(file, loss_sum=loss_sum, n_targets=n_targets, rows_hash="95a65f937612a073")
    return path


def write_study(root: Path, planted: Planted, seed: int = 0, lrs: Sequence[float] = (0.004,)) -> list[Path]:
    """A directory for each run, named as a study names them. lrs: tried with the first seed; the middle one is best."""
    losses, rows = planted.draw(np.random.default_rng(seed))
    best, paths = lrs[len(lrs) // 2], []
    for a, arm in enumerate(("gpt", "ngpt")):
        for k, budget in enumerate(planted.budgets):
            steps = round(budget / (ROWS_PER_STEP * CONTEXT))
            for s in range(planted.n_seeds):
                for lr in lrs if s == 0 else [best]:
                    path = root / f"{arm}-{round(budget)}-lr{lr:g}-seed{s}"
                    worse = 0.1 * math.log2(lr / best) ** 2
                    of_row = None if rows is None else rows[a, k, s]
                    time = 0.01 * (1.2 if arm == "ngpt" else 1)
                    loss = float(losses[a, k, s]) + worse
                    paths.append(write_run(path, arm, steps, s, loss, lr, of_row, step_time=time))
    return paths
