"""What a model answered to labelled examples, and the metrics of GLUE's tasks."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ngpt_train.core.constants import MILLION


class Answers(NamedTuple):
    """labels (N,): classes, or millionths. answers (N,): classes, or numbers where n_classes is 1."""

    labels: NDArray[np.int64]
    answers: NDArray[np.float64]
    n_classes: int

    def lines(self) -> bytes:
        """A JSON object a line, in the order of the rows: label and answer, classes or numbers."""
        labels = self.labels / MILLION if self.n_classes == 1 else self.labels
        answers = self.answers if self.n_classes == 1 else self.answers.astype(np.int64)
        pairs = zip(labels.tolist(), answers.tolist(), strict=True)
        return "".join(f'{{"label": {label!r}, "answer": {answer!r}}}\n' for label, answer in pairs).encode()

    def metrics(self) -> dict[str, float]:
        """accuracy, f1 (of class 1; of several classes their mean) and matthews; of numbers pearson and spearman.

        From scikit-learn and scipy. A correlation with answers that are all equal is 0, as GLUE counts it.
        """
        if self.n_classes == 1:
            from scipy.stats import pearsonr, spearmanr

            wanted = self.labels / MILLION
            constant = np.ptp(self.answers) == 0 or np.ptp(wanted) == 0
            found: dict[str, Any] = {"pearson": pearsonr, "spearman": spearmanr}
            return {name: 0.0 if constant else float(f(wanted, self.answers).statistic) for name, f in found.items()}
        from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

        classes = self.answers.astype(np.int64)
        average = "binary" if self.n_classes == 2 else "macro"
        return {
            "accuracy": float(accuracy_score(self.labels, classes)),
            "f1": float(f1_score(self.labels, classes, average=average, zero_division=0.0)),
            "matthews": float(matthews_corrcoef(self.labels, classes)),
        }
