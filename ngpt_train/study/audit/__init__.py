"""`audit`: trains parts of a finished run again, and says whether its records are what its config, its code and its
data give."""
