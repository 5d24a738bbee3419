"""Models in the form of other programs, and back: docs/exchange.md."""
