"""One module for each verb of the command line; its `main(config, overrides)` returns the exit code."""
