"""The plan of a run before it begins, and its curves after its end."""
