"""The audit of a finished run: do its records follow from its config, code and data?"""
