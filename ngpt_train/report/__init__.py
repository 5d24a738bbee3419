"""The curves of a run that has ended, and the plan of a run that has not begun."""
