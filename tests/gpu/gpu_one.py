"""One rank of one check: `gpu_one.py NAME`. Prints `RESULT {…}` with what it found when it is through."""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import json
import os
import sys

from gpu_context import Context, Skip
from gpu_table import TABLE


def main() -> int:
    """Run the check."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dump-after", type=float, default=0.0, metavar="S", help="say where it stands, and end")
    # Scripts of 2018 are given their rank so; nothing here needs it.
    parser.add_argument("--local_rank", "--local-rank", type=int)
    options = parser.parse_args()
    if options.dump_after > 0:
        faulthandler.dump_traceback_later(options.dump_after, exit=True)
    check = next(check for check in TABLE if check.name == options.name)
    if check.apart:
        host = f"host-{os.environ.get('RANK', '0')}"
        os.environ |= {"NCCL_HOSTID": host, "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    module, _, function = check.function.partition(":")
    is_first = int(os.environ.get("RANK", "0")) == 0
    try:
        facts = getattr(importlib.import_module(module), function)(Context(options.device), *check.arguments) or {}
    except Skip as reason:
        facts = {"skipped": str(reason)}
    if is_first:
        print(f"RESULT {json.dumps({'done': True, **facts})}", flush=True)
    faulthandler.cancel_dump_traceback_later()
    return 0


if __name__ == "__main__":
    sys.exit(main())
