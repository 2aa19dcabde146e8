"""Several hosts: one launcher on each, which agree on who takes part, and start, watch and end the job together.

General layout, from the bottom up:

* `options`: what the command line says about hosts, checked before anything is started. No torch.
* `membership`: who takes part in the job: a state and its transitions, as pure functions.
* `clients`: which addresses are connected to the rendezvous endpoint.
* `store_nonce`: the nonce of the job store, which its holder tells launchers that come.
* `job_store`: the torch store in which the launchers meet; one of them holds it.
* `heartbeat`: which launchers are still there.
* `rendezvous`: rounds of hosts, agreed on through the store: torch's interface of a rendezvous.
* `reports`: how the ranks of each host ended, told to all hosts.
* `agent`: torch's elastic agent over the ranks of this host.
* `job`: `launch_on_hosts`, which runs this host's part of the job.
* `start`: `start_on_hosts`, what `lockstep run --nnodes` calls. No torch before that.

[Note: rounds of hosts] A job goes through rounds. A round is a fixed list of hosts, with numbers in order, and one
start of all ranks: on each host an attempt. It ends when all ranks are done, when a rank fails, or when
the hosts change; then all hosts leave it, and those that are there make up the next. All that belongs to a round has
keys of its own, and rank 0 of each round listens on a port of its own, so nothing of one round is ever read in
another.

[Note: torch] The life of a round (rendezvous, start, watch, restart) is torch's `SimpleElasticAgent`, the store is
torch's, and the rendezvous implements torch's `RendezvousHandler`. Three things are not torch's:

* its agent for local processes, because `local_workers.py` runs the ranks of one host as in a job on one host;
* its dynamic rendezvous, which unpickles what it reads from the network, declares hosts dead whose clocks differ, takes
  45 s to continue after a host was lost, and does not tell the others at all when a host fails for good;
* its use of the agents' store for the ranks: the next start uses it again, and its ranks read addresses of the last.
"""
