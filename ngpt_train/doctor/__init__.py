"""Whether a training run would work here: what each rank finds, what rank 0 makes of it, and how to mend it."""
