"""The receiver of a run's records and messages. Without torch: wandb's process imports it."""

from ngpt_train.core.recorded import Record


class Sink:
    """Takes the records and messages of a run: metrics.jsonl, the console, wandb. Only rank 0 has sinks."""

    def log(self, record: Record) -> None:
        """Takes a record {"kind": "train" | "eval" | "tasks" | "sample" | "telemetry" | "rollback", "step": n, ...}.

        Its other values are numbers or None; a sample also has texts.
        """

    def message(self, text: str) -> None:
        """Takes one line for people."""

    def close(self, reason: str) -> None:
        """Called once, last. reason: how the run ended."""
