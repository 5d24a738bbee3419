"""Checks each kernel that a run will use against its formula, and times it beside what would run in its place."""
