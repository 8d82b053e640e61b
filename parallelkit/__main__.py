"""`python -m parallelkit` is the command `parallelkit`."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
