"""Would a training run work here? The facts that each rank finds, the table that rank 0 makes of them, the remedies."""
