"""Reports as `compare` makes them, of invented numbers: whatever report.json can hold, its writers must bear."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

BUDGETS = (1_048_576, 2_097_152, 4_194_304, 8_388_608)
HOSTILE = 'x<img src="http://example.invalid/a.png" onerror="document.title=1">|*`b`</script>'
SMALLEST: dict[str, Any] = {"arms": ("gpt", "ngpt"), "budgets": BUDGETS[-1:], "seeds": (1,), "untuned": ()}
SMALLEST |= {"confounds": False, "failures": False, "nulls": True}
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
            for seed in seeds:
                about = {"arm": arm, "budget": budget, "seed": seed, "values": {"optim.lr": lr[arm]}}
                about["run"] = run_of(arm, budget, seed, lr[arm])
                loss, steps = end_loss(arm, budget, seed), budget // 8192
                losses.append({**about, "loss": loss, "rows_hash": maybe("0123456789abcdef"), "step": steps})

                def shape(t: float, loss: float = loss) -> float:
                    return loss + 5.0 * math.exp(-9 * t) + 0.35 * (1 - t)

                at = [k / 10 for k in range(11)]
                columns = {"step": [round(t * steps) for t in at], "tokens": [t * budget for t in at]}
                columns["flops"] = [t * budget * per_token[arm] for t in at]
                columns["seconds"] = [maybe(t * steps * step_time[arm]) for t in at]
                columns["loss"] = [shape(t) for t in at]
                fine = [k / 60 for k in range(1, 61)]
                train = {"tokens": [t * budget for t in fine]}
                train["loss"] = [shape(t) + 0.05 * math.sin(99 * t + seed) for t in fine]
                curves.append({**about, "best": True, "eval": columns, "train": train})
            points: list[dict[str, Any]] = []
            known = arm not in untuned
            for k in range(-2, 3) if known else range(-2, 2):
                loss = end_loss(arm, budget, seeds[0]) + 0.03 * (k if known else k - 1) ** 2
                failed = arm == baseline and k == 2
                value = {"value": lr[arm] * 2.0**k, "loss": None if failed else loss, "seed": seeds[0]}
                points.append({**value, "failed": failed})
            optimum = {"optimum": lr[arm], "low": lr[arm] / 1.3, "high": lr[arm] * 1.3}
            optimum |= {"price_of_two": 0.03, "price_of_grid": 0.0}
            entry = {"arm": arm, "budget": budget, "key": "optim.lr", "state": "bracketed" if known else "edge"}
            tuning.append({**entry, "points": points, **(optimum if known else dict.fromkeys(optimum))})
    for arm in others:
        for budget in budgets:
            names = {"arm": arm, "baseline": baseline, "budget": budget, "confidence": 0.95}
            gap = sum(end_loss(arm, budget, s) - end_loss(baseline, budget, s) for s in seeds) / len(seeds)
            half = (0.05 if arm == "gpt_qk" else 0.012) if len(seeds) > 1 else 0.004
            noise = {"noise_seeds": 0.004 if len(seeds) > 1 else None, "noise_rows": maybe(0.002)}
            noise |= {"n_seeds": len(seeds), "n_rows": maybe(256)}
            needed = {"seeds": maybe(9), "rows": maybe(4096)} if abs(gap) < half else None
            ends = {"estimate": gap, "low": maybe(gap - half), "high": maybe(gap + half)}
            differences.append({**names, **ends, **noise, "needed": needed})
            for unit, cost in {"tokens": None, "flops": per_token, "seconds": step_time}.items():
                ratio = GAIN.get(arm, 1.2) / (cost[arm] / cost[baseline] if cost else 1.0)
                beyond = GAIN.get(arm, 1.2) * budget > largest
                ends = {"estimate": maybe(ratio), "low": maybe(ratio / 1.12)}
                ends["high"] = None if beyond else maybe(ratio * 1.12)
                note = "the interval's upper end lies beyond the baseline's budgets" if beyond else None
                how = {"unit": unit, "how": "annealed", "extrapolated": beyond, "note": note}
                speedups.append({**names, **ends, **how, "clock": "measured in turn" if unit == "seconds" else None})
                if budget == largest:
                    ends = {"estimate": maybe(ratio * 1.3), "low": None, "high": None}
                    how = {"unit": unit, "how": "within_schedule", "extrapolated": False, "note": None}
                    speedups.append({**names, **ends, **how, "clock": None})

    def difference(
        arm: str, key: str, values: list[Any], kind: str, note: str, size: float | None = None
    ) -> dict[str, Any]:
        return {"arms": [baseline, arm], "key": key, "values": values, "kind": kind, "size": size, "note": note}

    referee = [
        difference(x, "model.name", [baseline, x], "under_test", "what the arms are compared for") for x in others
    ]
    referee += [
        difference(x, "optim.weight_decay", [0.1, 0.0], "follows", f"the recipe of {x} sets it") for x in others
    ]
    if confounds and others:
        fewer = "fewer steps at equal tokens"
        referee.append(difference(others[-1], "train.batch_tokens", [8192, 16384], "confound", fewer, 2.0))
        stored = "parameters are stored otherwise"
        referee.append(difference(others[0], "train.precision", ["fp32", "bf16"], "confound", stored))
    failed_points = [
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
        "failures": failed_points if failures else [],
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
