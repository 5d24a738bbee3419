"""`study`: trains the arms of a comparison, each tuned, at several budgets and seeds, and compares them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ngpt_train.config.schema import Config
from ngpt_train.study.definition import Study
from ngpt_train.study.points import Point, Result
from ngpt_train.study.runner import ended, make


def main(config: Config, overrides: Sequence[str], options: Sequence[str] = ()) -> int:
    """Returns 0 when all runs are made and compared, or the study was interrupted and its runs have saved; 1 where runs
    have crashed too often. Raises what `make` raises."""
    return make("study", config, overrides, options, compared)


def compared(config: Config, study: Study, results: Mapping[Point, Result]) -> int:
    """Says which runs have failed, and compares the others; the exit code. Raises what `compare` raises."""
    failed, code = ended(study, results)
    if len(study.arms) > 1 and len(failed) < len(results):
        from ngpt_train.verbs import compare

        out = config.compare.out or str(study.path / "report")
        is_here = config.study.engine == "local"  # elsewhere this may be no such machine
        compare.main(replace(config, compare=replace(config.compare, runs=[str(study.path)], out=out)), [], is_here)
        print(f"the page: {Path(out) / 'report.html'}, the curves: {Path(out) / 'figures/loss_over_tokens.png'}")
    if config.study.prompt is not None:
        show_samples(config, study, results.values())
    if missing := what_is_missing(study):
        print(f"\n{missing}")
    return code


def show_samples(config: Config, study: Study, results: Iterable[Result]) -> None:
    """Prints how the run with the lowest loss of each arm continues study.prompt."""
    from ngpt_train.verbs import generate

    for arm in study.arms:
        runs = {result.run: result.loss for result in results if result.point.arm == arm and result.loss is not None}
        if not runs:
            continue
        best = min(runs, key=runs.__getitem__)
        print(f"\n--- {arm}, a sample of {best}", flush=True)
        of_run = replace(config.generate, checkpoint=str(best), prompt=config.study.prompt or "")
        generate.main(replace(config, generate=of_run), [])


def what_is_missing(study: Study) -> str | None:
    """In words, why this study proves nothing, and which command does; None where it has several seeds and budgets."""
    few = [f"one {word}" for word, values in (("seed", study.seeds), ("budget", study.budgets)) if len(values) == 1]
    if not few:
        return None
    return (
        f"{' and '.join(few).capitalize()}: this proves nothing, for another may turn it round. What does, with tuned "
        "rates, several budgets and seeds, and intervals: python -m ngpt_train study study=gpt_vs_ngpt"
    )
