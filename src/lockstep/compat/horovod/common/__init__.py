"""What the doors of `lockstep.compat.horovod` have in common."""
