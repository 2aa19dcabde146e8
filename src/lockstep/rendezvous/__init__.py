"""Rendezvous: how the ranks of a job find each other if the launcher gives them numbers but no address.

General layout:

* `slurm`: an address and a port, or a name on one host, that every task of a step computes independently. No torch.
* `folder`: a torch store that processes of one host share through a folder, which is removed once they have met.
* `waiting`: the line that says which ranks rank 0 is waiting for.
* `meeting`: a random name on which ranks that share a store agree.
* `tcp`: a torch store between hosts.
* `mpi`: a store for the ranks of an MPI job, through MPI or, on one host, without it.
* `slurm_store`: the store of a Slurm step, through one of these.
* `urls`: the same for scripts that call `dist.init_process_group` themselves.
"""
