"""Jobs on several hosts: one launcher on each; they agree on the hosts, and start, watch and end the job together.

General layout, from the bottom up:

* `options`: the command line options about hosts, checked before anything is started. No torch.
* `membership`: which hosts take part in the job: a state and its transitions, as pure functions.
* `clients`: which addresses are connected to the rendezvous endpoint.
* `store_nonce`: the nonce of the job store, which its holder tells to new launchers.
* `job_store`: the torch store in which the launchers meet; one of them holds (hosts) it.
* `heartbeat`: which launchers are still alive.
* `rendezvous`: rounds of hosts, agreed on through the store; implements torch's rendezvous interface.
* `reports`: how the ranks of each host ended, sent to all hosts.
* `agent`: torch's elastic agent over the ranks of this host.
* `job`: `launch_on_hosts`, which runs this host's part of the job.
* `start`: `start_on_hosts`, called by `lockstep run --nnodes`. No torch before that.

[Note: rounds of hosts] A job consists of rounds. A round is a fixed list of hosts, numbered in order, and one start of
all ranks: on each host an attempt. It ends when all ranks are done, when a rank fails, or when the hosts change; then
all hosts leave it, and the hosts that are available make up the next. All keys belong to one round, and rank 0 of each
round listens on a separate port, so nothing of one round is ever read in another.

[Note: torch] The cycle of a round (rendezvous, start, watch, restart) is torch's `SimpleElasticAgent`, the store is
torch's, and the rendezvous implements torch's `RendezvousHandler`. Three parts of torch are replaced:

* its agent for local processes, because `local_workers.py` runs the ranks of one host as in a job on a single host;
* its dynamic rendezvous, which unpickles what it reads from the network, declares hosts dead whose clocks differ, takes
  45 s to continue after a host was lost, and does not tell the others at all when a host fails permanently;
* its use of the agents' store for the ranks: the next start reuses it, and its ranks read addresses of the last one.
"""
