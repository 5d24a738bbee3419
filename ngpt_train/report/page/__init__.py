"""Figures as data, and what draws them: pages that open without a network, and pictures."""
