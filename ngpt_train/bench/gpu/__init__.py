"""`bench gpu`: the whole protocol on one GPU, within a budget of seconds; needs torch and triton alone."""
