"""Stand-ins for cluster programs that scripts run: `nvidia-smi`, unless installed, and `scontrol show hostnames`.

Each is a shell script in the job's private folder, which is put first in the PATH of the rank and its children. A
real `scontrol` is replaced because it does not know the simulated job.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from lockstep import env
from lockstep.tools.rehearse.settings import RehearsalSettings

__all__ = ["install"]

_FOLDER = "programs"

# Lists the stand-ins; a query returns a row of zeros for each, after a header unless `noheader` is given.
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

# Every simulated node is this host.
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
    """Put those programs in the PATH of this process and its children. Ranks may call this concurrently."""
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
