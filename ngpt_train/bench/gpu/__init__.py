"""`bench gpu`: all benchmarks on one GPU, within a budget of seconds. It needs no package but torch and triton."""
