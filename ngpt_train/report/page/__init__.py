"""Figures as data, drawn on pages that open without a network, and as pictures."""
