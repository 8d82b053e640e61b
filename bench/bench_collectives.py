"""The weighted mean against Gloo and the floor; the same as `parallelkit bench collectives`."""

import sys

from parallelkit.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "collectives", *sys.argv[1:]]))
