"""A file for each group of checks: `look` collects facts on a rank, `judge` turns them into findings on rank 0."""
