"""The one exception that bad input raises."""


class NormlabError(ValueError):
    """Bad input: one line that says what is wrong and what to do. The command line prints it and exits with code 2."""
