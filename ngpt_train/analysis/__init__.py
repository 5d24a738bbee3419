"""The papers' measurements and figures, from checkpoints and telemetry; and where a model's loss is."""
