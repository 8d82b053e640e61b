"""A whole optimizer step against Gloo and the floor; the same as `parallelkit bench optimizer`."""

import sys

from parallelkit.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "optimizer", *sys.argv[1:]]))
