"""Shims for other libraries: Horovod, Apex and what old scripts expect of `torch.distributed`. Adapters only.

Each shim maps foreign names to the engine that Lockstep's own names use; a table in its docstring marks every name
supported, different or refused.

General layout:

* `finder`: lets `import horovod` and `import apex` find the shims; `install`: switches all shims on in a process.
* `asking`: programs that only ask whether Apex is installed.
* `script`: runs a script with the shims, where no launcher of Lockstep's starts it.
* `notice`: prints what the shims have to say, once for a job.
* `horovod`, `apex`: shims for the two libraries, with tables of names.
* `legacy`: adds what scripts of 2018 to 2021 expect of torch, with a table.
"""
