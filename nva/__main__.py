"""`python -m nva`: the command line of cli/main.py."""

import sys

from nva.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
