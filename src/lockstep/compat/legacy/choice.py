"""Which changes to torch a rank makes: decided once by the launcher, from the script's text, and handed to the ranks.

Where no launcher of ours has decided (`python -m lockstep.compat.script`, mpirun), a rank reads the script itself. With
LOCKSTEP_COMPAT=1, which `--compat` sets, all changes are made, whatever the script says; with 0, which `--no-compat`
sets, none. Imports no torch.
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
        script: the name by which messages call the script.
        changes: names of `needs.CHANGES`, each with the line that needs it.
        is_asked: somebody has asked for all, whatever the script says.
    """

    script: str
    changes: Mapping[str, str] = field(default_factory=dict)
    is_asked: bool = False

    def dump(self) -> str:
        """The choice as the text of an environment variable."""
        return json.dumps({"script": self.script, "changes": dict(self.changes)})

    @staticmethod
    def load(text: str) -> Choice:
        """The choice that such a text stands for.

        Raises:
            ValueError: it is no such text.
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
        """What has been done, and how to have torch left alone; empty if nothing is to be said yet.

        Args:
            done: the changes that have been made.
        """
        if self.is_asked:
            return f"torch is changed for old scripts, as --compat asks: {', '.join(CHANGES[name] for name in done)}"
        return self._say([f"{CHANGES[name]} ({self.changes[name]})" for name in done if name not in SAID_AT_USE])

    def sentence_at_use(self, change: str, site: str) -> str:
        """What torch would have turned away just now; empty if all has been said at the beginning.

        Args:
            change: one of `needs.SAID_AT_USE`.
            site: the line of the call.
        """
        return "" if self.is_asked else self._say([f"{CHANGES[change]} ({site})"])

    def _say(self, changes: list[str]) -> str:
        made = f"{self.script} is written for an older torch: {', '.join(changes)}; {opt_out()} leaves torch alone"
        return made if changes else ""


def choose(target: str, is_module: bool = False, words: Sequence[str] = ()) -> Choice:
    """What a script needs, by its text. Local; see `find_needs`.

    Args:
        target: path of a script, or name of a module.
        is_module: `target` is the name of a module.
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
    """Decide for a job, and write it into the variables of its ranks. Local.

    Args:
        variables: of the ranks; LOCKSTEP_COMPAT in them settles it without a look at the script.
        asked: True for `--compat`, False for `--no-compat`, None for neither.
        target: as for `choose`.
        is_module: as for `choose`.
        words: as for `choose`.
    """
    if asked is not None:
        env.LOCKSTEP_COMPAT.set(asked, variables)
    # What an outer job has decided is about its own script.
    env.LOCKSTEP_OLD_TORCH.unset(variables)
    is_program = is_module and target.split(".")[0] == "lockstep"  # Ours, which becomes a program of any kind.
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
        help="let torch take all that its releases of 2018 to 2021 took, also where the script's text shows no need; "
        "and tell programs that ask whether Apex is installed that it is",
    )
    group.add_argument(
        "--no-compat",
        dest="compat",
        action="store_const",
        const=False,
        help="leave torch alone, and do not let `import horovod` and `import apex` find Lockstep's own where they are "
        "not installed",
    )


def choose_here() -> Choice:
    """The choice for this process, whose main module is the script by now. Local."""
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
