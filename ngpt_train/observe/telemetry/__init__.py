"""Telemetry: what happens inside of single training steps. docs/telemetry.md defines every number."""
