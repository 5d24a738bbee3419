"""Reports as `compare` makes them, of invented numbers: whatever report.json can hold, its writers must bear."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

BUDGETS = (1_048_576, 2_097_152, 4_194_304, 8_388_608)
HOSTILE = 'x<img src="http://example.invalid/a.png" onerror="document.title=1">|*`b`</script>'
GAIN = {"gpt": 1.0, "gpt_qk": 1.13, "ngpt": 1.6, "powernorm": 0.7}  # tokens of the baseline for a token of the arm


def end_loss(arm: str, tokens: float, seed: int = 0) -> float:
    """A power law that the arm walks faster than the baseline by its gain."""
    noise = 0.006 * math.sin(37 * seed + 5 * len(arm) + math.log2(tokens))
    return 1.9 + 2.6 * (tokens * GAIN.get(arm, 1.0 + 0.05 * len(arm)) / 1e6) ** -0.28 + noise


def certificate(run: str, **other: Any) -> dict[str, Any]:
    says = {"equal": True, "how": "bitwise", "steps_compared": 60, "steps": 128, "windows": [[0, 32], [64, 92]]}
    found = {"found": 0, "commit": "12268a6f0c5f", "device": "cpu", "time": "2026-11-22T20:00:00", "valid": True}
    return {"run": run, **says, **found, "note": "", **other}


def example(
    arms: Sequence[str] = ("gpt", "gpt_qk", "ngpt", "powernorm"),
    budgets: Sequence[int] = BUDGETS,
    seeds: Sequence[int] = (1, 2, 3),
    untuned: Sequence[str] = ("powernorm",),
    confounds: bool = True,
    failures: bool = True,
    nulls: bool = False,
) -> dict[str, Any]:
    """`nulls`: everything that may be null is, as of runs without row files, clocks and audits."""
    baseline, *others = arms
    largest = budgets[-1]

    def maybe(value: Any) -> Any:
        return None if nulls else value

    lr = {arm: 0.001 * 2 ** (k % 4) for k, arm in enumerate(arms)}
    verdicts = {}
    for arm in others:
        gain = GAIN.get(arm, 1.2)
        verdicts[arm] = "better" if gain > 1.15 else "worse" if gain < 1 else "not_resolved"
        if len(seeds) < 2:
            verdicts[arm] = "not_resolved"
        if arm in untuned:
            verdicts[arm] = "untuned"
    per_token = {arm: 6.0e6 * (1 + 0.01 * k) for k, arm in enumerate(arms)}
    step_time = {arm: 0.05 * (1 + 0.12 * k) for k, arm in enumerate(arms)}

    def run_of(arm: str, budget: int, seed: int, value: float) -> str:
        return f"runs/example/runs/{arm}-{budget}-lr{value:g}-seed{seed}"

    losses, differences, speedups, tuning, curves = [], [], [], [], []
    for arm in arms:
        for budget in budgets:
            steps = budget // 8192
            for seed in seeds:
                values = {"optim.lr": lr[arm]}
                run = run_of(arm, budget, seed, lr[arm])
                loss = end_loss(arm, budget, seed)
                losses.append(
                    {
                        "arm": arm,
                        "budget": budget,
                        "seed": seed,
                        "loss": loss,
                        "rows_hash": maybe("0123456789abcdef"),
                        "values": values,
                        "run": run,
                        "step": steps,
                    }
                )
                at = [k / 10 for k in range(11)]
                shape = [loss + 5.0 * math.exp(-9 * t) + 0.35 * (1 - t) for t in at]
                tokens = [t * budget for t in at]
                curve = {
                    "step": [round(t * steps) for t in at],
                    "tokens": tokens,
                    "flops": [t * per_token[arm] for t in tokens],
                    "seconds": [maybe(t * steps * step_time[arm]) for t in at],
                    "loss": shape,
                }
                fine = [k / 60 for k in range(1, 61)]
                train = {
                    "tokens": [t * budget for t in fine],
                    "loss": [
                        loss + 5 * math.exp(-9 * t) + 0.35 * (1 - t) + 0.05 * math.sin(99 * t + seed) for t in fine
                    ],
                }
                curves.append(
                    {
                        "arm": arm,
                        "budget": budget,
                        "seed": seed,
                        "run": run,
                        "values": values,
                        "best": True,
                        "eval": curve,
                        "train": train,
                    }
                )
            points: list[dict[str, Any]] = []
            for k in range(-2, 2) if arm in untuned else range(-2, 3):
                octaves = k if arm not in untuned else k - 1
                loss = end_loss(arm, budget, seeds[0]) + 0.03 * octaves**2
                failed = arm == baseline and k == 2
                points.append(
                    {
                        "value": lr[arm] * 2.0**k,
                        "loss": None if failed else loss,
                        "seed": seeds[0],
                        "failed": failed,
                    }
                )
            known = arm not in untuned
            tuning.append(
                {
                    "arm": arm,
                    "budget": budget,
                    "key": "optim.lr",
                    "state": "bracketed" if known else "edge",
                    "points": points,
                    "optimum": lr[arm] if known else None,
                    "low": lr[arm] / 1.3 if known else None,
                    "high": lr[arm] * 1.3 if known else None,
                    "price_of_two": 0.03 if known else None,
                    "price_of_grid": 0.0 if known else None,
                }
            )
    for arm in others:
        for k, budget in enumerate(budgets):
            gap = sum(end_loss(arm, budget, s) - end_loss(baseline, budget, s) for s in seeds) / len(seeds)
            half = (0.05 if arm == "gpt_qk" else 0.012) if len(seeds) > 1 else 0.004
            differences.append(
                {
                    "arm": arm,
                    "baseline": baseline,
                    "budget": budget,
                    "estimate": gap,
                    "low": maybe(gap - half),
                    "high": maybe(gap + half),
                    "confidence": 0.95,
                    "noise_seeds": 0.004 if len(seeds) > 1 else None,
                    "noise_rows": maybe(0.002),
                    "n_seeds": len(seeds),
                    "n_rows": maybe(256),
                    "needed": {"seeds": maybe(9), "rows": maybe(4096)} if abs(gap) < half else None,
                }
            )
            for unit, cost in {"tokens": 1.0, "flops": per_token, "seconds": step_time}.items():
                dear = 1.0 if isinstance(cost, float) else cost[arm] / cost[baseline]
                ratio = GAIN.get(arm, 1.2) / dear
                beyond = GAIN.get(arm, 1.2) * budget > largest
                speedups.append(
                    {
                        "arm": arm,
                        "baseline": baseline,
                        "unit": unit,
                        "how": "annealed",
                        "budget": budget,
                        "estimate": maybe(ratio),
                        "low": maybe(ratio / 1.12),
                        "high": None if beyond else maybe(ratio * 1.12),
                        "confidence": 0.95,
                        "extrapolated": beyond,
                        "clock": "measured in turn" if unit == "seconds" else None,
                        "note": "the interval's upper end lies beyond the baseline's budgets" if beyond else None,
                    }
                )
                if k == len(budgets) - 1:
                    speedups.append(
                        {
                            "arm": arm,
                            "baseline": baseline,
                            "unit": unit,
                            "how": "within_schedule",
                            "budget": budget,
                            "estimate": maybe(ratio * 1.3),
                            "low": None,
                            "high": None,
                            "confidence": 0.95,
                            "extrapolated": False,
                            "clock": None,
                            "note": None,
                        }
                    )
    referee = [
        {
            "arms": [baseline, arm],
            "key": "model.name",
            "values": [baseline, arm],
            "kind": "under_test",
            "size": None,
            "note": "what the arms are compared for",
        }
        for arm in others
    ]
    referee += [
        {
            "arms": [baseline, arm],
            "key": "optim.weight_decay",
            "values": [0.1, 0.0],
            "kind": "follows",
            "size": None,
            "note": f"the recipe of {arm} sets it",
        }
        for arm in others
    ]
    if confounds and others:
        referee += [
            {
                "arms": [baseline, others[-1]],
                "key": "train.batch_tokens",
                "values": [8192, 16384],
                "kind": "confound",
                "size": "2 times the tokens per step",
                "note": "fewer steps at equal tokens",
            },
            {
                "arms": [baseline, others[0]],
                "key": "train.precision",
                "values": ["fp32", "bf16"],
                "kind": "confound",
                "size": None,
                "note": "parameters are stored otherwise",
            },
        ]
    failed = [
        {
            "arm": baseline,
            "budget": budget,
            "seed": seeds[0],
            "values": {"optim.lr": lr[baseline] * 4},
            "reason": "diverged at step 61: the loss is not finite",
            "run": run_of(baseline, budget, seeds[0], lr[baseline] * 4),
        }
        for budget in budgets
    ]
    return {
        "format": 1,
        "title": "gpt_vs_ngpt",
        "metric": "loss",
        "unit": "nats per token",
        "confidence": 0.95,
        "baseline": baseline,
        "budgets": list(budgets),
        "arms": {
            arm: {
                "runs": [c["run"] for c in curves if c["arm"] == arm],
                "tuned": arm not in untuned,
                "best": {"optim.lr": lr[arm]},
                "overrides": [f"model={arm}"],
                "state": "edge" if arm in untuned else "bracketed",
                "best_by_budget": {str(budget): {"optim.lr": lr[arm]} for budget in budgets},
            }
            for arm in arms
        },
        "losses": losses,
        "differences": differences,
        "speedups": speedups,
        "referee": referee,
        "verdicts": verdicts,
        "failures": failed if failures else [],
        "tuning": tuning,
        "curves": curves,
        "costs": [
            {
                "arm": arm,
                "n_params": 1_000_000 + 1000 * k,
                "n_params_without_embeddings": 800_000 + 1000 * k,
                "flops_per_token": per_token[arm],
                "memory_gb": maybe(0.61 + 0.05 * k),
                "step_time": maybe(step_time[arm]),
                "step_time_how": maybe("measured in turn"),
            }
            for k, arm in enumerate(arms)
        ],
        "trends": [],
        "looked_at": {"keys": 117, "options": ["model.s_z.init"], "facts": ["git_commit", "device"]},
        "tuning_of_keys": {
            arm: {
                "budget": largest,
                "tuned": {"optim.lr": [lr[arm] / 2, lr[arm], lr[arm] * 2]},
                "chosen": {"optim.clip_norm": None} if k else {},
                "not_tuned": {"optim.eps": 1e-8, "optim.weight_decay": 0.1 * k},
            }
            for k, arm in enumerate(arms)
        },
        "audits": [] if nulls else [certificate(curves[0]["run"])],
        "commits": ["12268a6f0c5f"],
        "notes": ["A power law was invented for this example."],
        "commands": [
            "python -m ngpt_train study study=gpt_vs_ngpt",
            "python -m ngpt_train compare runs/example/runs/* compare.out=report/",
        ],
    }
