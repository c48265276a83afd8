"""The error of the command line, importable before triton is."""


class UsageError(ValueError):
    """What was asked for cannot be done; the text says why, and what can."""
