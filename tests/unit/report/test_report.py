"""The picture of a run's curves."""

import json
import math
import struct
from pathlib import Path

import numpy as np
import pytest

from ngpt_train.config import DataError
from ngpt_train.report.ended_runs import _moving_mean, plot_run


def write_metrics(path: Path, n_records: int, every: int = 1) -> None:
    with path.open("w") as file:
        print(json.dumps({"kind": "eval", "step": 0, "tokens": 0, "loss": 8.3}), file=file)
        for step in range(every, n_records * every + 1, every):
            record = {
                "kind": "train",
                "step": step,
                "tokens": 4096 * step,
                "loss": None if step == 2 * every else 3 + 5 * math.exp(-4 * step / (n_records * every)),
                "lr": 0.01,
                "grad_norm": 0.5 + math.sin(step) ** 2,
            }
            print(json.dumps(record), file=file)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("n_records", [0, 1, 3, 5000])
def test_picture_of_any_length(tmp_path: Path, n_records: int) -> None:
    write_metrics(tmp_path / "metrics.jsonl", n_records, every=10)
    picture = plot_run(tmp_path)
    assert picture == tmp_path / "curves.png"
    header = picture.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", header[16:])
    assert width > 800
    assert height > 600


def test_moving_mean_leaves_out_what_is_missing() -> None:
    y = np.array([1.0, np.nan, 3.0, 5.0, 100.0])
    np.testing.assert_allclose(_moving_mean(y, window=2), [1.0, 2.0, 4.0, 36.0, 52.5])


def test_no_metrics(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"metrics\.jsonl does not exist"):
        plot_run(tmp_path)
