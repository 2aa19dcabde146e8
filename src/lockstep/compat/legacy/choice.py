"""Decides which changes to torch ranks make: once, in the launcher, from the script's source.

Without Lockstep's launcher (`python -m lockstep.compat.script`, mpirun), a rank reads the script itself. With
LOCKSTEP_COMPAT=1, set by `--compat`, all changes are made, whatever the script; with 0, set by `--no-compat`,
none. Does not import torch.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field

from lockstep import env
from lockstep.compat.legacy.needs import CHANGES, SAID_AT_USE, find_needs
from lockstep.compat.notice import opt_out
from lockstep.errors import SetupError

__all__ = ["Choice", "add_arguments", "choose", "choose_here", "tell_ranks"]


@dataclass(frozen=True)
class Choice:
    """Changes to torch for one script.

    Attributes:
        script: name of the script, for messages.
        changes: names in `needs.CHANGES`, each with the line that needs it.
        is_asked: whether all changes were requested, whatever the script.
    """

    script: str
    changes: Mapping[str, str] = field(default_factory=dict)
    is_asked: bool = False

    def dump(self) -> str:
        """The choice as the text of an environment variable."""
        return json.dumps({"script": self.script, "changes": dict(self.changes)})

    @staticmethod
    def load(text: str) -> Choice:
        """Parse the text of `dump`.

        Raises:
            ValueError: the text is malformed.
        """
        try:
            read = json.loads(text)
        except RecursionError:
            read = None
        match read:
            case {"script": str(script), "changes": dict(changes)}:
                return Choice(script, {name: str(line) for name, line in changes.items() if name in CHANGES})
        raise ValueError("expected an object with script and changes")

    def sentence(self, done: Sequence[str]) -> str:
        """A message about the changes made, and how to turn them off; may be empty.

        Args:
            done: the changes made.
        """
        if self.is_asked:
            return f"torch is changed for old scripts because of --compat: {', '.join(CHANGES[name] for name in done)}"
        return self._say([f"{CHANGES[name]} ({self.changes[name]})" for name in done if name not in SAID_AT_USE])

    def sentence_at_use(self, change: str, site: str) -> str:
        """A message about a call that torch would have rejected; empty if it was announced at the start.

        Args:
            change: one of `needs.SAID_AT_USE`.
            site: line of the call.
        """
        return "" if self.is_asked else self._say([f"{CHANGES[change]} ({site})"])

    def _say(self, changes: list[str]) -> str:
        made = f"{self.script} is written for an older torch: {', '.join(changes)}; {opt_out()} leaves torch alone"
        return made if changes else ""


def choose(target: str, is_module: bool = False, words: Sequence[str] = ()) -> Choice:
    """The changes that a script needs, by its source. Local; see `find_needs`.

    Args:
        target: path of a script, or name of a module.
        is_module: whether `target` is the name of a module.
        words: the script's arguments.
    """
    script = target if is_module else os.path.basename(os.path.abspath(target))
    return Choice(script, find_needs(target, is_module, words))


def tell_ranks(
    variables: MutableMapping[str, str],
    asked: bool | None,
    target: str,
    is_module: bool = False,
    words: Sequence[str] = (),
) -> None:
    """Decide for a job, and write the choice to its ranks' environment. Local.

    Args:
        variables: environment of the ranks; LOCKSTEP_COMPAT in it decides without reading the script.
        asked: True for `--compat`, False for `--no-compat`, None for neither.
        target: as for `choose`.
        is_module: as for `choose`.
        words: as for `choose`.
    """
    if asked is not None:
        env.LOCKSTEP_COMPAT.set(asked, variables)
    # An outer job's choice is for its own script.
    env.LOCKSTEP_OLD_TORCH.unset(variables)
    is_program = is_module and target.split(".")[0] == "lockstep"  # Lockstep's modules, which may run any program.
    if env.LOCKSTEP_COMPAT.get(variables) is None and not is_program:
        env.LOCKSTEP_OLD_TORCH.set(choose(target, is_module, words).dump(), variables)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--compat` and `--no-compat`: `compat` is True, False or None."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--compat",
        dest="compat",
        action="store_const",
        const=True,
        help="change torch to accept all that its releases of 2018 to 2021 did, even if the script shows no need; "
        "and let programs that check whether Apex is installed find it",
    )
    group.add_argument(
        "--no-compat",
        dest="compat",
        action="store_const",
        const=False,
        help="do not change torch, and do not let `import horovod` and `import apex` find Lockstep's shims if they are "
        "not installed",
    )


def choose_here() -> Choice:
    """The choice for this process, whose main module is already the script. Local."""
    asked = env.LOCKSTEP_COMPAT.get()
    if asked is not None:
        return Choice("", dict.fromkeys(CHANGES, "") if asked else {}, is_asked=asked)
    text = env.LOCKSTEP_OLD_TORCH.get()
    if text is not None:
        try:
            return Choice.load(text)
        except ValueError as error:
            raise SetupError(
                f"environment variable {env.LOCKSTEP_OLD_TORCH.name}={text[:60]!r}: {error}. The launcher sets it for "
                "its ranks: unset it"
            ) from None
    main = sys.modules.get("__main__")
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if spec is not None:
        return choose(spec.name.removesuffix(".__main__"), True, sys.argv[1:])
    return Choice("") if file is None else choose(file, False, sys.argv[1:])
