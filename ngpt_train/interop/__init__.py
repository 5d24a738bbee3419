"""Models in the files of other programs: export and import. See docs/exchange.md."""
