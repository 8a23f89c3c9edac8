"""`python -m normlab` and the command `normlab`."""

import sys

from normlab.errors import ended_by, ends_at_once


def main() -> int:
    """Run the command. Ctrl-C ends it with one line from here on, and so does too little memory for its imports."""
    try:
        with ends_at_once():
            from normlab import cli
    except (ImportError, MemoryError, SystemError) as error:
        return ended_by(error)
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
