"""What becomes of saves that fail: the run goes on and tries again soon, and the third failure in a row is an alarm."""

ALARM = 3  # failures in a row
MOST_AT_THE_END = 3  # attempts to save the last step
PAUSE = 1.0  # seconds between them
SOONER = 10  # the next attempt comes after this part of checkpoint.every


class Attempts:
    """The saves of one start. every: checkpoint.every."""

    def __init__(self, every: int) -> None:
        self._pause = max(1, every // SOONER)
        self._in_a_row = 0
        self._again: int | None = None

    def due(self, step: int) -> bool:
        """Whether a save that has failed is tried again after `step`."""
        return self._again is not None and step >= self._again

    def begun(self) -> None:
        """A save is under way."""
        self._again = None

    def succeeded(self) -> None:
        self._in_a_row, self._again = 0, None

    def failed(self, error: Exception, step: int) -> tuple[bool, str]:
        """Counts a failure that is known at `step`; returns whether it is an alarm, and what to say."""
        self._in_a_row += 1
        self._again = step + self._pause
        text = f"{error} Training goes on; the next attempt follows step {self._again}."
        if self._in_a_row % ALARM:
            return False, text
        return (
            True,
            f"{self._in_a_row} saves in a row have failed, and what is not saved is lost if the run ends. {text}",
        )
