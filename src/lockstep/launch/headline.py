"""Finds the one line that explains an error of torch's; it may be further down in the text, or missing.

Only reads texts, because the launcher does not import torch. For a text that another release of torch words
differently, it returns the first line.
"""

from __future__ import annotations

import re

__all__ = [
    "first_reason",
    "gave_accelerate_a_backend",
    "knows_two_backends",
    "locations_in",
    "needs_gpu",
    "origin_of",
    "why_worker_is_gone",
]

# torch re-raises an error of a worker, a replica or a spawned process with that one's traceback as the text.
# multiprocessing's pools raise the error itself, caused by one with such a text.
_RELAYED = re.compile(
    r"Caught \S+ in (?P<where>[^\n]+?)\.\s*\nOriginal Traceback"
    r"|\s*-- Process (?P<number>\d+) terminated with the following error:\s*\nTraceback"
    r'|\s*"""\s*\nTraceback'
)
_GONE = re.compile(r"DataLoader worker \(pid\(s\) [\d, ]+\) exited unexpectedly")
# What its loader noticed, from which that error is raised.
_GONE_BY = re.compile(r"DataLoader worker \(pid \d+\) (?:is killed by signal|exited unexpectedly with exit)[^\n]*")
_FRAME = re.compile(r'^  File "(?P<file>[^"\n]+)", line (?P<line>\d+), in ', re.MULTILINE)
_KEYS = re.compile(r"(?P<kind>Missing|Unexpected) key\(s\) in state_dict: (?P<keys>[^\n]*)")
_QUOTED = re.compile(r'"([^"]*)"')
_WRAPPERS_PREFIX = "module."
_MAX_REASON_CHARS = 200
# nccl's own message is at the end of the text that torch raises; often there is none.
_NCCLS = re.compile(r"NCCL error in: .*^Last error:\s*\n(?P<reason>[^\n]+)", re.MULTILINE | re.DOTALL)
_SHARED_GPU = "Duplicate GPU detected"
# The error of Hugging Face Accelerate for a backend that is not in its list.
_REFUSED_BACKEND = re.compile(r"Your assigned backend \S*lockstep\S* is not ava\w+")
# `assert backend in ["gloo", "nccl"]`, in programs for object detection, before they pickle objects into tensors.
_TWO_BACKENDS = re.compile(r"^ +assert .*backend.*(gloo.*nccl|nccl.*gloo)", re.MULTILINE)
_GPU_PHRASES = (
    "doesn't have NCCL built in",
    "_cuda_setDevice",
    "Found no NVIDIA driver",
    "Torch not compiled with CUDA enabled",
    "No CUDA GPUs are available",
    "ProcessGroupNCCL is only supported with GPUs",
    "Attempting to deserialize object on a CUDA device but torch.cuda.is_available() is False",
)


def locations_in(message: str) -> list[tuple[str, int]]:
    """File and line of each frame of a traceback embedded in an error, outermost first."""
    if _RELAYED.match(message) is None:
        return []
    return [(frame["file"], int(frame["line"])) for frame in _FRAME.finditer(message)]


def origin_of(kind: str, message: str) -> str | None:
    """The original error of a worker, a replica or a spawned process: `bad jpeg 37 (in DataLoader worker process 0)`.

    Args:
        kind: name of the exception whose text contains the traceback.
        message: text of that exception.

    Returns:
        None if the text does not contain such a traceback.
    """
    relayed = _RELAYED.match(message)
    frames = list(_FRAME.finditer(message))
    if relayed is None or not frames:
        return None
    raised = [line for line in message[frames[-1].start() :].splitlines() if line and not line[0].isspace()]
    if not raised:
        return None
    name, _, text = raised[0].partition(": ")
    # The name is left out if it is the same; torch raises a RuntimeError in place of an exception that it cannot
    # create.
    reason = text if name == kind and text else raised[0]
    where = relayed["where"] or f"process {relayed['number']} that it had spawned"
    return f"{reason} (in {where})"


def why_worker_is_gone(message: str, trace: str) -> str | None:
    """Why a loader's worker ended: `DataLoader worker (pid 4711) is killed by signal: Killed (out of memory?)`.

    Args:
        message: text of the exception that the loader raised.
        trace: its traceback, including the exception that caused it.

    Returns:
        None if the text is about something else, or the traceback does not tell.
    """
    # The SIGCHLD handler raises it wherever the rank is; a loader that waits for a batch raises another one from it.
    found = _GONE_BY.match(message) or (_GONE_BY.search(trace) if _GONE.match(message) else None)
    if found is None:
        return None
    reason = found[0].strip().removesuffix(".")
    return f"{reason} (out of memory?)" if reason.endswith("signal: Killed") else reason


def first_reason(message: str) -> str:
    """The first line of a text; if that ends with a colon, also the next one, and a hint if a known pattern occurs."""
    if (found := _NCCLS.match(message)) is not None:
        hint = " (each rank needs a GPU of its own: cuda:LOCAL_RANK, and as many GPUs)"
        return f"NCCL: {found['reason'].strip()}{hint if _SHARED_GPU in found['reason'] else ''}"
    lines = [line.strip() for line in message.strip().splitlines()]
    if len(lines) < 2 or not lines[0].endswith(":"):
        return lines[0] if lines else ""
    reason = next(line for line in lines[1:] if line) if any(lines[1:]) else ""
    if len(reason) > _MAX_REASON_CHARS:
        reason = reason[:_MAX_REASON_CHARS] + "…"
    hint = _prefix_hint(message)
    return f"{lines[0]} {reason}{f' ({hint})' if hint else ''}".rstrip()


def _prefix_hint(message: str) -> str:
    """Advice if the keys of a state_dict differ by the prefix of a wrapped model."""
    keys = {found["kind"]: set(_QUOTED.findall(found["keys"])) for found in _KEYS.finditer(message)}
    missing, unexpected = keys.get("Missing", set()), keys.get("Unexpected", set())
    if missing and {f"{_WRAPPERS_PREFIX}{key}" for key in missing} & unexpected:
        return (
            "the saved keys begin with 'module.': they are those of a wrapped model. Load them into the wrapped model, "
            "or save model.module.state_dict()"
        )
    if unexpected and {f"{_WRAPPERS_PREFIX}{key}" for key in unexpected} & missing:
        return "the saved keys lack 'module.', which a wrapped model's have: load them into model.module"
    return ""


def gave_accelerate_a_backend(message: str) -> bool:
    """Whether this is Accelerate's error, which accepts our group but not the name of our backend."""
    return _REFUSED_BACKEND.search(message) is not None


def knows_two_backends(kind: str, trace: str) -> bool:
    """Whether a program has asserted that its backend is gloo or nccl.

    Args:
        kind: name of the exception.
        trace: its traceback.
    """
    return kind == "AssertionError" and _TWO_BACKENDS.search(trace) is not None


def needs_gpu(message: str) -> bool:
    """Whether this is the error of a script that needs a GPU, on a machine or with a torch without one."""
    return any(phrase in message for phrase in _GPU_PHRASES)
