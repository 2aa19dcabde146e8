"""The commands of `lockstep`, a module each: `main(arguments) -> exit code`. None imports torch before it must.

General layout:

* `run`: starts N processes of a script; `launch`: the same by the options of `torch.distributed.launch`.
* `horovodrun`: the same by the options of horovodrun; `horovodrun_config`: by a YAML file of them.
* `verify`: runs a script on N processes and on one, and says where they part; `verify_hint`: mentions it.
* `rehearse`: runs a script for GPUs on CPUs and reports what would fail on the cluster.
* `train`: starts a recipe; `data`: makes data to try a recipe with.
* `bench`: measures training and communication; `doctor`: says what this machine has and lacks.
* `parsing`: the options and the error messages that commands share.
"""
