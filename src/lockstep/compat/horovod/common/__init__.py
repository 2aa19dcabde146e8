"""What the shims of `lockstep.compat.horovod` have in common."""
