"""Layouts: a file for each program that reads a model."""
