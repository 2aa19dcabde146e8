"""Programs of a cluster that scripts run: `nvidia-smi`, unless it is installed, and `scontrol show hostnames`.

A shell script for each, in the job's private folder, which goes into the PATH of the rank and of what it starts. A
real `scontrol` knows nothing of the job that is pretended.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from lockstep import env
from lockstep.tools.rehearse.settings import RehearsalSettings

__all__ = ["install"]

_FOLDER = "programs"

# Lists the stand-ins; a query gets a row of zeros for each, and a header unless told otherwise.
_NVIDIA_SMI = """\
#!/bin/sh
fields= header=1
for word in "$@"; do
    case "$word" in
        --query-*=*) fields="${{word#*=}}" ;;
        *noheader*) header= ;;
    esac
done
if [ -n "$fields" ] && [ -n "$header" ]; then echo "$fields"; fi
index=0
while [ "$index" -lt {devices} ]; do
    if [ -n "$fields" ]; then
        echo "$fields" | sed 's/[^,][^,]*/0/g; s/,/, /g'
    else
        echo "GPU $index: Lockstep rehearsal stand-in (CPU)"
    fi
    index=$((index + 1))
done
"""

# All nodes are this one.
_SCONTROL = """\
#!/bin/sh
case "$1 $2" in
    "show hostname" | "show hostnames") ;;
    *)
        echo "scontrol: there is no Slurm in a rehearsal, only an answer to 'scontrol show hostnames'" >&2
        exit 1
        ;;
esac
index=0
while [ "$index" -lt {nodes} ]; do
    echo localhost
    index=$((index + 1))
done
"""


def install(settings: RehearsalSettings) -> None:
    """Let this process and what it starts find those programs. Any number of ranks at the same time."""
    folder = env.LOCKSTEP_RENDEZVOUS.get()
    texts = {}
    if shutil.which("nvidia-smi") is None:
        texts["nvidia-smi"] = _NVIDIA_SMI.format(devices=settings.devices)
    if settings.slurm:
        texts["scontrol"] = _SCONTROL.format(nodes=settings.nodes)
    if folder is None or not texts:
        return
    programs = Path(folder, _FOLDER)
    programs.mkdir(exist_ok=True)
    for name, text in texts.items():
        draft = programs / f"{name}.{os.getpid()}"
        draft.write_text(text, encoding="utf-8")
        draft.chmod(0o755)
        os.replace(draft, programs / name)
    env.PATH.set(f"{programs}{os.pathsep}{env.PATH.get() or os.defpath}")
