"""What the pictures of reports share: their look, and their files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 160
SETTINGS: Any = {
    "font.size": 9,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "text.parse_math": False,  # a name may hold a dollar sign
    "svg.fonttype": "none",
    "svg.hashsalt": "ngpt-train",  # so that equal reports give equal files
}


def write_picture(figure: Figure, folder: Path, name: str) -> Path:
    """Writes NAME.png and NAME.svg into `folder`; returns the PNG."""
    figure.savefig(folder / f"{name}.png", dpi=DPI)
    figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
    return folder / f"{name}.png"
