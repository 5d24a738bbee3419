"""Errors, files, the log, progress, secrets, the process. Imports no other room of the package."""
