"""The processes and devices of a run, and the layouts that spread a single-device model over them."""
