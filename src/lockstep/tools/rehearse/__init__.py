"""`lockstep rehearse`: runs a GPU script unedited on CPU processes, and reports what would fail on the cluster.

General layout, from the bottom up:

* `line`, `sites`, `source`: lines of the user's code, in a record, on the stack and as text.
* `settings`, `plan`: what to simulate, and how the script must be started.
* `patching`: replaces names of torch in a rehearsing process.
* `devices`: stand-ins for GPUs.
* `watch`: what each process records while the script runs, in a file in the job's private folder.
* `events`, `findings`: the records of all processes, and what is wrong in them; `report`: the report, as text or JSON.
* `programs`: stand-ins for cluster programs that scripts run.
* `spawning`: makes processes that the script spawns part of the rehearsal.
* `rank`, `spawned`: run before the script, in a rank and in a process that it spawns; `rehearsal`: the entry point.

[Note: stand-ins] A tensor on a GPU is a CPU tensor whose storage is marked (`devices/marks.py`). A
`TorchDispatchMode` passes marks from inputs to results, in forward and backward passes alike, and the few
attributes through which Python sees a device (`.device`, `.is_cuda`, `.to`, `.cuda`) read the mark. Kernels, autograd,
DDP's reducer, DataLoader, NumPy and collectives therefore only see CPU tensors, yet a script that forgets
`.cuda()`, calls `.numpy()` on a GPU tensor or passes a host tensor to nccl fails as it would on the cluster.

*Rejected:*

* A `PrivateUse1` device named "cuda": torch refuses the name, and every operator would need a registered kernel.
* A wrapper subclass of Tensor, like FakeTensor: it has no memory that C++ can read, so NumPy, DataLoader, shared
  memory and DDP's reducer break; `module.cuda()` would create new parameters, unknown to an optimizer created before;
  and the autograd engine needs a thread per device, which a CPU build lacks.
* A `TorchFunctionMode` alone: it sees calls in Python, but not tensors created by backward passes and C++ code.
* Rewriting `cuda` to `cpu` in the script or its arguments: a forgotten `.cuda()`, one of the mistakes that a rehearsal
  should find, would go unnoticed.
"""
