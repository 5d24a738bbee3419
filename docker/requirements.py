"""Prints the requirements of pyproject.toml without torch and triton, which NVIDIA's image has."""

import re
import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
print("\n".join(line for line in project["dependencies"] if re.split(r"\W", line)[0] not in ("torch", "triton")))
