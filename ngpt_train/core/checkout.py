"""The commit that this package runs from."""

import functools
import subprocess
from pathlib import Path


@functools.cache
def git_commit() -> str | None:
    """Commit of the checkout that this package runs from, with `+` if files differ from it; None without a checkout."""
    where = Path(__file__).parents[1]

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(where), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")) != where.parent:
            return None  # installed into a directory of somebody else's repository
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None
