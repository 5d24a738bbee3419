"""The processes and devices of a run, and the layouts of a single-device model over them."""
