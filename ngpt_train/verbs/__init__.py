"""What the command line does: one module per verb, each with `main(config, overrides) -> exit code`."""
