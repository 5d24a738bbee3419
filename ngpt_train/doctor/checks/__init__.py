"""A file for each group of checks: `look`, in its own process, finds facts; `judge`, on rank 0, says what they mean."""
