"""The two errors that a user's mistake raises. The command line exits with their `exit_code`."""


class ConfigError(ValueError):
    """A mistake in the configuration. The message names the key, its value, what is allowed and the fix."""

    exit_code = 2


class DataError(ValueError):
    """Data, a tokenizer or a checkpoint cannot be used as configured. The message names the file and the fix."""

    exit_code = 3
