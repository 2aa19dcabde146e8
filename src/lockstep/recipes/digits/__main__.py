"""`python -m lockstep.recipes.digits`: one process, or a rank under any launcher."""

from __future__ import annotations

import argparse
import sys

from lockstep.recipes import digits

__all__ = ["main"]


def main() -> int:
    """Run the program; returns its exit code."""
    parser = argparse.ArgumentParser(prog="lockstep train digits", description="Train a CNN on handwritten digits.")
    digits.add_arguments(parser)
    return digits.main(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
