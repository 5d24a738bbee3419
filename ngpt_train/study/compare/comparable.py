"""The metric of a comparison, and runs that cannot be compared."""

from __future__ import annotations

from collections.abc import Iterable

from ngpt_train.core.errors import DataError
from ngpt_train.study.compare.key_kinds import is_harmless, value_of
from ngpt_train.study.compare.runs import Run


def check_comparable(runs: Iterable[Run]) -> str:
    """ "loss", in nats per token, or "bits_per_byte" for runs with different tokenizers. Raises DataError, with the
    reason, for runs validated on different text."""
    validated = [run for run in runs if run.evals]
    validated = [run for run in validated if run.is_annealed] or validated
    if not validated:
        raise DataError("compare: no run has been validated: there is no eval record in any metrics.jsonl")
    first, *others = validated
    for run in others:
        if why := _why_not(first, run):
            raise DataError(
                f"{run.path} cannot be compared with {first.path}: {why}. Compare runs of one text and objective."
            )
    if not any(_other_tokenizer(first, run) for run in others):
        return "loss"
    for run in validated:
        if run.evals[-1].get("bits_per_byte") is None:
            raise DataError(
                f"{run.path} has another tokenizer than others, so that a loss per token means something else, and no "
                "bits_per_byte in its eval records. Leave it out, or `evaluate` its checkpoint with this version."
            )
    return "bits_per_byte"


def _why_not(one: Run, other: Run) -> str:
    """The reason why the losses of two runs cannot be compared; empty if they can."""
    hashes = one.rows_hash, other.rows_hash
    if hashes[0] == hashes[1] is not None:
        return ""
    objectives = [value_of(run.config, "data.objective") for run in (one, other)]
    if objectives[0] != objectives[1]:
        return "one predicts the next token and the other continues the beginning of a document"
    if _other_tokenizer(one, other):
        return (text := _other_text(one, other)) and f"it was validated on other text, by {text}"
    if _differ(one, other, "data_fingerprint"):
        return f"it was validated on other text: rows_hash {hashes[1]} and {hashes[0]}, and other fingerprints of data"
    # Other rows of one text, and unknown rows, are a confound of `examine`.
    known = None not in (one.facts.get("data_fingerprint"), other.facts.get("data_fingerprint"))
    text = "" if known or None in hashes else _other_text(one, other)
    return text and f"it was validated on other text, by {text}: rows_hash {hashes[1]} and {hashes[0]}"


def _other_text(one: Run, other: Run) -> str:
    """The keys of the text that differ in two configs; empty if none does."""
    keys = [key for key in {**one.config, **other.config} if key.startswith("data.") and not is_harmless(key)]
    text = ("kind", "path", "repo", "revision", "split", "files", "mixture", "text_field", "val_fraction", "val_files")
    differing = [key for key in keys if key.removeprefix("data.") in text]
    return ", ".join(key for key in differing if value_of(one.config, key) != value_of(other.config, key))


def _other_tokenizer(one: Run, other: Run) -> bool:
    """True if the fingerprints differ. If one is unknown, the configs decide, unless the validation rows are equal."""
    fact = "tokenizer_fingerprint"
    if None not in (one.facts.get(fact), other.facts.get(fact)) or one.rows_hash == other.rows_hash is not None:
        return _differ(one, other, fact)
    return any(
        value_of(one.config, key) != value_of(other.config, key) for key in ("tokenizer.kind", "tokenizer.vocab_size")
    )


def _differ(one: Run, other: Run, fact: str) -> bool:
    values = one.facts.get(fact), other.facts.get(fact)
    return None not in values and values[0] != values[1]
