"""Records collectives that torch calls from C++, by the hooks that its groups have since 2.14 (for `torch_record.py`).

torch's DDP reduces gradients from C++, bypassing all Python methods. From 2.14 on a group has hooks that its dispatcher
calls, for calls from Python and from C++. They see more than the wrapped methods, but cannot replace them:

* no hook says when a call has finished: gloo reports no completion, and a completion hook must not take the GIL. So a
  waiting rank would look like one that has continued. The wrapped `Work.wait` makes that difference for calls from
  Python;
* `monitored_barrier` and the tag of a message do not pass through them;
* each hook belongs to one group, so every new group has to be noticed anyway.

A call from C++ therefore counts as finished when it is issued, and errors about it say "after". On a GPU, backward
passes run in threads without Python frames: there the user's line is unknown.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable
from typing import Any

from lockstep.torch_private.patching import wrap

__all__ = ["from_python", "watch"]

# The id under which hooks are registered: any number that nothing else in this process uses.
_HOOK_ID = 0x10C57E9

# Prefixes of the names in torch's HookOpName, longer ones first, with the corresponding Python names. Messages are left
# out: they are not steps of the group.
_OPERATIONS = {
    "ALLREDUCE": "all_reduce",
    "ALLGATHER": "all_gather",
    "ALLTOALL": "all_to_all",
    "REDUCE_SCATTER": "reduce_scatter",
    "REDUCE": "reduce",
    "BROADCAST": "broadcast",
    "BARRIER": "barrier",
    "GATHER": "gather",
    "SCATTER": "scatter",
}

_Note = Callable[[Any, str, tuple[Any, ...]], None]


class _FromPython(threading.local):
    depth = 0


from_python = _FromPython()
"""`depth`: number of calls through Python methods that this thread is within; the hook has nothing to add to these."""
_hooked: weakref.WeakSet[Any] = weakref.WeakSet()


def watch(group_class: Any, note: _Note) -> None:
    """Hook every group that torch creates from now on. Local. Does nothing before torch 2.14, which has no hooks.

    Args:
        group_class: torch's `ProcessGroup`. Its `_set_group_name`, called once for each new group, is wrapped.
        note: called with the group, the operation's name and its tensors when C++ calls a collective.
    """
    if not hasattr(group_class, "register_pre_hook"):
        return

    def naming_and_hooking(torchs_own: Callable[..., None]) -> Callable[..., None]:
        def name_group(group: Any, name: str) -> None:
            torchs_own(group, name)
            # The group keeps the hook, so the hook must not keep the group.
            known = weakref.ref(group)
            group.register_pre_hook(_HOOK_ID, lambda call: _pass_on(call, known, note))
            _hooked.add(group)

        return name_group

    wrap("torch._C._distributed_c10d.ProcessGroup._set_group_name", naming_and_hooking)
    atexit.register(_let_go)


def _let_go() -> None:
    """Remove all hooks: a group that outlives the interpreter with a Python hook crashes the process (SIGSEGV)."""
    for group in list(_hooked):
        group.unregister_pre_hook(_HOOK_ID)


def _pass_on(call: Any, known: weakref.ref[Any], note: _Note) -> None:
    group = known()
    if group is None or from_python.depth > 0:
        return
    begins = (operation for prefix, operation in _OPERATIONS.items() if call.name.name.startswith(prefix))
    operation = next(begins, None)
    if operation is not None:
        note(group, operation, (call.input_tensors or call.output_tensors,))
