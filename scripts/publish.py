"""Publishes a finished study in docs/studies: its numbers, its page with one figure, and the records of its runs.

From the directory that holds `studies`, so that paths are relative:

    python -m ngpt_train compare studies/NAME compare.out=studies/NAME/report
    python scripts/publish.py studies/NAME FIGURE

FIGURE is a picture of studies/NAME/report/figures, such as speedup. Without FIGURE, the numbers and the figure of
`transfer`, in studies/NAME/transfer:

    python -m ngpt_train transfer studies/NAME transfer.out=studies/NAME/transfer
    python scripts/publish.py studies/NAME
"""

import io
import json
import shutil
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

from ngpt_train.core.recorded import read_end
from ngpt_train.study.compare.output.charts import PICTURES
from ngpt_train.study.compare.output.document import document
from ngpt_train.study.points import DIVERGED, ENDED

PUBLISHED = Path(__file__).parents[1] / "docs" / "studies"
RECORDS = ("config.yaml", "exit.json", "metrics.jsonl", "run.json")  # of a run; then its last losses by row


def publish(study: Path, figure: str, out: Path) -> None:
    report = json.loads((study / "report" / "report.json").read_text())
    for curve in report["curves"]:  # compare makes the whole curves from the records
        for part in ("eval", "train"):
            curve[part] = {name: points[-1:] for name, points in curve[part].items()}
    (out / "figures").mkdir(parents=True, exist_ok=True)
    shutil.copy(study / "report" / "figures" / f"{figure}.svg", out / "figures")
    (out / "report.json").write_text(json.dumps(report, separators=(",", ":")) + "\n")
    (out / "report.md").write_text(document(report, {f"figures/{figure}.svg": PICTURES[figure][1].caption}))
    pack(study, out / "records.tar.xz")


def publish_transfer(study: Path, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for name in ("transfer.json", "transfer.svg"):
        shutil.copy(study / "transfer" / name, out)
    pack(study, out / "records.tar.xz")


def pack(study: Path, out: Path) -> None:
    """The records of all runs that ended, as files of `studies`, like files side by side. A run that is a link to
    another study's is packed too, so that the archive alone gives the study's page."""
    root = str(study.parent.absolute())
    with tarfile.open(out, "w:xz", preset=9) as archive:
        for path in sorted(records(study), key=lambda path: (path.name, path)):
            content = path.read_bytes()
            if path.suffix != ".npz":
                content = content.replace(root.encode(), study.parent.name.encode())
            entry = tarfile.TarInfo(str(Path(study.parent.name, path.relative_to(study.parent))))
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))


def records(study: Path) -> Iterator[Path]:
    yield from (path for name in ("study.yaml", "descent.json") if (path := study / name).exists())
    for run in (study / "runs").iterdir():
        end = read_end(run)
        if end is not None and (end["reason"] == ENDED or end["code"] == DIVERGED):
            yield from (run / name for name in RECORDS)
            yield max((run / "evals").glob("*.npz"))


if __name__ == "__main__":
    study, *figure = Path(sys.argv[1]), *sys.argv[2:]
    if figure:
        publish(study, figure[0], PUBLISHED / study.name)
    else:
        publish_transfer(study, PUBLISHED / study.name)
