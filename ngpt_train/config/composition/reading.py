"""Reads one YAML file of the configuration, once for each content."""

from __future__ import annotations

import io
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from ngpt_train.core.errors import ConfigError
from ngpt_train.core.files import read_yaml_text


def read_mapping(path: Path) -> Mapping[Any, Any]:
    """The content of a YAML file, interpolations unresolved; not to be changed. Raises ConfigError with file and
    line."""
    from omegaconf.errors import OmegaConfBaseException
    from yaml import MarkedYAMLError, YAMLError

    try:
        status = path.stat()
        tree = _parsed(path, status.st_mtime_ns, status.st_size)
    except MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{path}{line}: not valid YAML: {error.problem}") from None
    except (YAMLError, ValueError) as error:  # a number of thousands of digits is a ValueError, as is broken UTF-8
        raise ConfigError(f"{path}: cannot be read as YAML in UTF-8: {error}") from None
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: {str(error).splitlines()[0]}") from None
    except OSError as error:
        link = "" if path.exists() or not path.is_symlink() else f"it links to {path.readlink()}: "
        raise ConfigError(f"{path}: cannot be read: {link}{error.strerror or error}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: a list, but a config file is a mapping of keys to values")
    return tree


@cache
def _parsed(path: Path, modified: int, size: int) -> Any:
    return parse(read_yaml_text(path))


def parse(text: str) -> Any:
    """What YAML says as the configuration reads it: 1.0e6 is a number. Raises YAMLError, OmegaConfBaseException."""
    from omegaconf import OmegaConf

    return OmegaConf.to_container(OmegaConf.load(io.StringIO(text)), resolve=False)
