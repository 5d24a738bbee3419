"""Words of report.json that its readers look for."""

MEASURED, OWN = "measured in turn", "own"  # clocks
BY_OWN_CLOCKS = "by the runs' own clocks"
POOLED = "The noise between seeds is pooled over budgets: it is taken to be alike at all of them."
BROUGHT = "each arm has what its architecture or its recipe brings"
