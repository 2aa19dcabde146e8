"""The `lockstep` group over several hosts: shared memory inside a host, Gloo between hosts.

General layout:

* `layout`: who shares a host with whom. Pure data.
* `discovery`: finds that out, and the address of each host; `store_exchange`: what ranks tell each other meanwhile.
* `connections`: a connection for each pair of ranks, which all their groups share; reports the end of a process.
* `links`: the connections as one group uses them, for short messages.
* `peer_listener`: where they connect; `handshake`: how they prove to each other who they are.
* `link_store`: the values that ranks exchange over their new connections.
* `gloo_port_filter`: keeps strangers from the port at which Gloo listens.
* `gloo_connections`: those of Gloo, which all groups share; `gloo_transport`: as a group uses them.
* `gloo_setup`: makes them; `first_ranks`: further ones between the first ranks of all hosts, for sums of Gloo's own.
* `gloo_transfers`: what Gloo has under way, and who waits for it.
* `watchdog`: a thread that looks after the peers while a rank waits for Gloo.
* `team`: the ranks of one group, connected; with the team of shared memory of this host.
* `late_ranks`: which rank is late where several wait for each other.
* `pipeline`: large reductions in chunks, each of which is in another stage.
* `small_tensors`: the collectives of small tensors, which come with the notices.
* `large_sums`: sums of large tensors, by the first ranks of the hosts.
* `algorithms`: the collectives.
* `mailbox`: point to point.
* `group`: how a group comes to be, and its engine.

The op table, the flight record and what moves messages along are those of a group on one host; notices, control blocks
and arrival are those of every group whose ranks talk in messages (`comm/messages`). `wire.py` says what numbers
travel as.
"""
