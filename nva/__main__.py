"""`python -m nva`: the command line of cli.py."""

import sys

from nva.cli import main

if __name__ == "__main__":
    sys.exit(main())
