"""Words of report.json that its readers look for."""

MEASURED, OWN = "measured in turn", "own"  # clocks
BY_OWN_CLOCKS = "by the runs' own clocks"
OWN_NOISE = "The noise between seeds is each budget's own; other budgets count as far as they look alike."
BENDS_DOWN = "the baseline's losses fall faster and faster, so that its fit is not followed beyond the budgets"
NO_FORM = (
    "the baseline's losses are no power law with a floor: the ratio comes from lines between its budgets, its interval "
    "has their error, and beyond the budgets nothing is said"
)
BROUGHT = "each arm has what its architecture or its recipe brings"
