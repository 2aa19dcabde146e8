"""The way to `lockstep.cli` for editable installations from before the command moved there.

Their console script still imports `main` from here; installing again makes one that does not.
"""

from lockstep import cli

__all__ = ["main"]

main = cli.main
