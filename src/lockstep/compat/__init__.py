"""Shims for Horovod, Apex, and the `torch.distributed` of old scripts. Adapters only.

Each shim maps another library's names to Lockstep's engine; a table in its docstring marks every name as
supported, different or refused.

General layout:

* `finder`: makes `import horovod` and `import apex` find the shims; `install`: enables all shims in a process.
* `asking`: programs that only check whether Apex is installed.
* `script`: runs a script with the shims, for other launchers than Lockstep's.
* `notice`: prints messages of the shims, once per job.
* `horovod`, `apex`: shims for the two libraries, with tables of names.
* `legacy`: restores what scripts of 2018 to 2021 expect of torch, with a table.
"""
