"""The commands of `lockstep`, one module each: `main(arguments) -> exit code`. Each imports torch as late as it can.

General layout:

* `run`: starts N processes of a script; `launch`: the same, with the options of `torch.distributed.launch`.
* `horovodrun`: the same, with the options of horovodrun; `horovodrun_config`: reads them from a YAML file.
* `verify`: runs a script on N processes and on one, and compares them; `verify_hint`: mentions that command.
* `rehearse`: runs a script for GPUs on CPUs and reports what would fail on the cluster.
* `train`: starts a recipe; `data`: generates data to try a recipe with.
* `bench`: measures training and communication; `doctor`: reports what this machine has and lacks.
* `parsing`: options and error messages that commands share.
"""
