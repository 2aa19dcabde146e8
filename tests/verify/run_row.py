"""Runs a row of `another_answers.py` as a script: python run_row.py NAME [heeded]."""

from __future__ import annotations

import sys

import torch

import lockstep
from another_answers import ANOTHER_ANSWERS, Site

if __name__ == "__main__":
    torch.set_num_threads(1)
    with lockstep.init():
        ANOTHER_ANSWERS[sys.argv[1]][0](Site(heeds="heeded" in sys.argv[2:]))
