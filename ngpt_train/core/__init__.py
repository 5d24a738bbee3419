"""The ground floor: errors, atomic files, JSON, constants, the log. Knows nothing of the rest."""
