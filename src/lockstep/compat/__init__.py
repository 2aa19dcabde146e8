"""Shims for other libraries: Horovod, Apex and what old scripts expect of `torch.distributed`. Adapters only.

Each shim maps foreign names to the engine that Lockstep's own names use; a table in its docstring marks every name
supported, different or refused.
"""
