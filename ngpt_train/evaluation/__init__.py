"""Evaluation of a model: its validation loss, tasks, and text that it generates."""
