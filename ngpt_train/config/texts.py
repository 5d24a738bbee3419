"""What `generate` cannot do."""

from __future__ import annotations

from pathlib import Path

from ngpt_train.config.sections.verbs import GenerateConfig
from ngpt_train.config.validate import mistake


def check_texts(generate: GenerateConfig) -> None:
    """Raises ConfigError for keys of generate.* that exclude each other, and for files that cannot be used."""
    asked = {
        "generate.prompt": bool(generate.prompt),
        "generate.prompts": generate.prompts is not None,
        "generate.interactive": generate.interactive,
    }
    given = [name for name, is_given in asked.items() if is_given]
    if len(given) > 1:
        raise mistake(f"{', '.join(given)}: prompts from several places", "Keep one of them")
    if generate.interactive and generate.out is not None:
        raise mistake(
            f"generate.interactive=true, generate.out={generate.out}: the texts are printed", "Keep one of them"
        )
    if generate.min_new_tokens > generate.max_new_tokens:
        problem = f"generate.min_new_tokens={generate.min_new_tokens}: more than generate.max_new_tokens"
        raise mistake(problem, f"Set it to {generate.max_new_tokens} or less")
    if "" in (generate.stop or []):
        problem = "generate.stop: an empty string stops every text at once"
        raise mistake(problem, "Leave it out, for example generate.stop='[\"\\n\\n\"]'")
    if generate.prompts is not None and not Path(generate.prompts).expanduser().is_file():
        is_there = Path(generate.prompts).expanduser().exists()
        problem = f"generate.prompts={generate.prompts}: {'it is no file' if is_there else 'no such file'}"
        raise mistake(problem, "Name a text file with a prompt a line, or a .jsonl file of objects with a `prompt`")
    if generate.out is not None and Path(generate.out).expanduser().is_file():
        raise mistake(f"generate.out={generate.out}: the file exists already", "Remove it, or name another")
