"""`lockstep rehearse`: a script for GPUs, unedited, on CPU processes, and a report of what would fail on the cluster.

General layout, from the bottom up:

* `line`, `sites`, `source`: lines of the user's code: in a record, on the stack, as text.
* `settings`, `plan`: what to pretend, and how the script wants to be started.
* `patching`: how names of torch are replaced in a rehearsing process.
* `devices`: stand-ins for GPUs.
* `watch`: what each process notes while the script runs, written to the job's private folder.
* `events`, `findings`: what the processes saw, and what it means; `report`: says it, to people and programs.
* `programs`: stand-ins for programs of a cluster that scripts run.
* `spawning`: processes that the script spawns are part of the rehearsal, too.
* `rank`, `spawned`: what runs before the script in a rank, and in a process that it spawns; `rehearsal`: the whole.

[Note: stand-ins] A tensor on a GPU is a CPU tensor whose storage is marked (`devices/marks.py`). A
`TorchDispatchMode` hands marks on from inputs to results, in forward and backward passes alike, and the few
attributes by which Python sees a device (`.device`, `.is_cuda`, `.to`, `.cuda`) read the mark. So kernels, autograd,
DDP's reducer, DataLoader, NumPy and collectives meet nothing but CPU tensors, and still a script that forgets
`.cuda()`, calls `.numpy()` on a GPU tensor or gives a host tensor to nccl fails as it would on the cluster.

*Rejected:*

* A `PrivateUse1` device named "cuda": torch refuses the name, and every operator would need a registered kernel.
* A wrapper subclass of Tensor, as FakeTensor is one: what is in it has no memory that C++ can read, so NumPy,
  DataLoader, shared memory and DDP's reducer break; `module.cuda()` would make new parameters, which an optimizer
  that was made before does not know; and the autograd engine wants a thread for each device, which the build lacks.
* A `TorchFunctionMode` alone: it sees calls in Python, but not what backward passes and C++ code make.
* Rewriting `cuda` to `cpu` in the script or in arguments: then a forgotten `.cuda()` goes unnoticed, which is what one
  rehearses for.
"""
