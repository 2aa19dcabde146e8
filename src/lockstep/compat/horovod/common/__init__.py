"""Shared by the shims of `lockstep.compat.horovod`."""
