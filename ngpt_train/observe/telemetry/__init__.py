"""Telemetry: what happens inside of single training steps. docs/telemetry.md defines every number."""

from ngpt_train.observe.telemetry.collector import Telemetry

__all__ = ["Telemetry"]
