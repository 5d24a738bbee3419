"""The two mistakes of a user."""


class ConfigError(ValueError):
    """A mistake of the user in the configuration; the message names key, value, what is allowed and the fix."""

    exit_code = 2


class DataError(ValueError):
    """Data, tokenizer or checkpoint that cannot be used as asked; the message names the file and the fix."""

    exit_code = 3
