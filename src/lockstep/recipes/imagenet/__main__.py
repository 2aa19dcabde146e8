"""`python -m lockstep.recipes.imagenet`: one process, or a rank under any launcher."""

from __future__ import annotations

import argparse
import sys

from lockstep.recipes import imagenet

__all__ = ["main"]


def main() -> int:
    """Run the program; returns its exit code."""
    parser = argparse.ArgumentParser(prog="lockstep train imagenet", description="Train an image classifier.")
    imagenet.add_arguments(parser)
    return imagenet.main(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
