"""Errors, atomic files, JSON, constants, the log, progress, secrets. Imports no other room of the package."""
