"""README and the pages of docs/: short enough, no link into the void, no command that the program refuses."""

import re
import shlex
from pathlib import Path

import pytest

from ngpt_train.__main__ import main

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "tests/README.md", *sorted((ROOT / "docs").rglob("*.md"))]
OF_COMMANDS = ["README.md", "docs/runs.md", "docs/cluster.md"]


def without_code(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Those that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", without_code(page), re.MULTILINE)
    named = set(re.findall(r'<a (?:id|name)="([^"]+)"', page.read_text()))
    return named | {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def commands(page: str) -> list[str]:
    """Commands of ngpt_train in the blocks of a page, from the verb on."""
    blocks = re.findall(r"^```\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [line.partition("-m ngpt_train ")[2] for line in lines if "-m ngpt_train " in line]


def test_links_lead_somewhere() -> None:
    """Caught: a page that has moved, a heading with another name."""
    lost = []
    for page in PAGES:
        for link in re.findall(r"\]\(([^)\s]+)\)", without_code(page)):
            file, _, anchor = link.partition("#")
            target = page.parent / file if file else page
            if "://" in link:
                continue
            if not target.exists() or (anchor and anchor not in anchors(target)):
                lost.append(f"{page.relative_to(ROOT)}: {link}")
    assert not lost


def test_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 200
    assert len(text.split()) <= 1800


@pytest.mark.parametrize("page", OF_COMMANDS)
def test_commands_are_taken(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Caught: a key, a value or a verb that is no more."""
    found = commands(page)
    assert found
    monkeypatch.chdir(tmp_path)
    Path("prompts.txt").write_text("import\n")
    for command in found:
        words = shlex.split(command.replace("$run", "runs/a"), comments=True)
        code = main(words if "--help" in words or "--cfg" in words else [*words, "--cfg", "job"])
        assert code == 0, f"{command}\n{capsys.readouterr().err}"
