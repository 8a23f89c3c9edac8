"""`python -m normlab` and the command `normlab`."""

import sys

from normlab.errors import ends_at_once


def main() -> int:
    """Run the command. Ctrl-C ends it with one line from here on."""
    with ends_at_once():
        from normlab import cli
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
