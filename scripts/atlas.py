"""Writes docs/atlas.md: what is claimed of each method, beside what the published studies measure.

python scripts/atlas.py [STUDIES]

STUDIES holds a directory with `report.json` for each study that docs/atlas.yaml names; by default docs/studies.
"""

import json
import sys
from pathlib import Path
from typing import Any

import yaml

from ngpt_train.study.compare.output.wording import VERDICTS

DOCS = Path(__file__).parents[1] / "docs"
HEAD = """# Atlas

What is claimed of each method, and what the [studies](studies/README.md) measure. Written by `python
scripts/atlas.py` from [atlas.yaml](atlas.yaml) and the studies' `report.json`.

- *Claim*: the authors' in short unless it says otherwise, with scale, budget and baseline. "Second-hand": only texts
  about it were found.
- *Difference*: the arm's loss less the baseline's in nats, at the largest budget that both have, with its 95 %
  interval. Our models have some million parameters and see some million tokens. A claim about other sizes is neither
  confirmed nor refuted by them.
- *Tokens*: the baseline's tokens for the same loss over the arm's.
- A baseline is as its study tuned it. With its head and embedding tuned, GPT with AdamW ends 0.09 lower than in
  `optimizers` ([third arms](studies/README.md#third-arms)), and fully tuned 0.19 lower than in `gpt_vs_ngpt`
  ([fully tuned](studies/README.md#fully-tuned-arms)), with keys of the largest budget 0.27 lower.
- `NAME/fresh_seeds` repeats a point of each arm of a study with eight other seeds: the best, of `other_text`
  the best before its last lists. Where both are here, it is what we conclude. `NAME/against_BASELINE` is NAME
  against the baseline of the claim.
- Options of which nobody claims a gain have no row: `model.constraint=ball`, tied embeddings of nGPT, a soft cap of
  GPT's logits.
- nuGPT and HyperP claim rates that carry over; [how theirs drift over depth](studies/README.md#rules-for-depth) is not
  resolved.
- *Step*: the arm's time of a step over the baseline's, where both were measured in turn. Repeats differ by up to 0.15.
"""


def claims() -> str:
    """The table of claims, a row for each method."""
    rows = ["| method | chosen by | what is claimed | scale | budget | against |", "|---|---|---|---|---|---|"]
    for entry in entries():
        where = entry["source"] + ("" if entry["read"] == "paper" else f", {entry['read']}")
        cells = f"`{entry['chosen_by']}`", f"{entry['claim']} ({where})", entry["scale"], entry["budget"]
        rows.append(f"| {entry['method']} | {' | '.join(cells)} | {entry['against']} |")
    return "\n".join(rows)


def measurements(studies: Path) -> str:
    """The table of measurements, a row for each method and study, and the methods that no study has."""
    rows = ["| method | study | arm, baseline | tokens a run | difference | tokens | verdict | step |"]
    rows.append("|---|---|---|---:|---:|---:|---|---:|")
    absent: list[str] = []
    for entry in entries():
        for study, arm in entry["arms"].items():
            report = json.loads((studies / study / "report.json").read_text())
            rows.append(f"| {entry['method']} | [{study}](studies/README.md) | {measured(report, arm)} |")
        if not entry["arms"]:
            absent.append(entry["method"])
    return "\n".join(rows) + f"\n\nNot measured yet with tuned arms, seeds and intervals: {', '.join(absent)}."


def measured(report: dict[str, Any], arm: str) -> str:
    """The cells of an arm, from a study's report.json. Raises KeyError for an arm that the report does not have."""
    baseline = report["baseline"]
    verdict = VERDICTS[report["verdicts"][arm]]
    differences = [each for each in report["differences"] if each["arm"] == arm]
    if not differences:
        return f"`{arm}`, `{baseline}` | - | - | - | {verdict} | {_step(report, arm, baseline)}"
    difference = max(differences, key=lambda each: each["budget"])
    ratio = next(
        each
        for each in report["speedups"]
        if (each["arm"], each["budget"], each["how"], each["unit"]) == (arm, difference["budget"], "annealed", "tokens")
    )
    cells = [
        f"`{arm}`, `{baseline}`",
        f"{difference['budget']:,}",
        _with_interval(difference, 3),
        _with_interval(ratio, 2) + (", extrapolated" if ratio["extrapolated"] and ratio["estimate"] else ""),
        verdict,
        _step(report, arm, baseline),
    ]
    return " | ".join(cells)


def entries() -> list[dict[str, Any]]:
    return yaml.safe_load((DOCS / "atlas.yaml").read_text())


def _with_interval(found: dict[str, Any], digits: int) -> str:
    """An estimate with its interval, which may be open at an end; a dash where there is no estimate."""
    if found["estimate"] is None:
        return "-"
    low, high = (None if found[end] is None else f"{found[end]:.{digits}f}" for end in ("low", "high"))
    interval = {
        (False, False): ", no interval",
        (False, True): f" (at most {high})",
        (True, False): f" (at least {low})",
        (True, True): f" ({low} to {high})",
    }[low is not None, high is not None]
    return f"{found['estimate']:.{digits}f}{interval}"


def _step(report: dict[str, Any], arm: str, baseline: str) -> str:
    costs = {each["arm"]: each for each in report["costs"]}
    pair = costs[arm], costs[baseline]
    if any(each["step_time_how"] != "measured in turn" for each in pair):
        return "-"
    return f"{pair[0]['step_time'] / pair[1]['step_time']:.2f}"


def text(studies: Path) -> str:
    """docs/atlas.md, whole."""
    return f"{HEAD}\n## Claims\n\n{claims()}\n\n## Measurements\n\n{measurements(studies)}\n"


if __name__ == "__main__":
    (DOCS / "atlas.md").write_text(text(Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS / "studies"))
