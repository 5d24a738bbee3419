"""Values and words that one room writes and another reads: of a batch, of a model's rows, of a record."""

from typing import Literal

IGNORED = -100  # target that the loss leaves out, as in torch's cross_entropy
PADDING = -1  # document id of a position that belongs to no document
Constraint = Literal["free", "sphere", "ball"]  # where a step leaves the rows of matrices: of length 1, or at most 1
DIVERGED = 4  # exit code of a run whose numbers became meaningless
MILLION = 1_000_000  # of a target that is a number, because targets are integers
# Of an eval record: the share of masked tokens or labels that are right, and other metrics of labels.
ANSWERED = ("accuracy", "f1", "matthews", "pearson", "spearman")
TRANSLATED = ("bleu", "sacrebleu", "chrf")  # of an eval record: scores of translations, up to 100
# What `compare` compares, and its unit; less is better. Metrics of answers count from 1 down, of translations from 100.
METRICS = {
    "loss": "nats per token",
    "bits_per_byte": "bits per byte",
    "error": "share of wrong answers",
    **{name: f"1 - {name}" for name in ANSWERED if name != "accuracy"},
    **{name: f"100 - {name}" for name in TRANSLATED},
}
