"""The `lockstep` group over several hosts: shared memory inside a host, Gloo between hosts.

General layout:

* `layout`: which ranks share a host. Pure data.
* `discovery`: determines that, and the address of each host; `store_exchange`: the data that ranks exchange for it.
* `connections`: one connection for each pair of ranks, shared by all their groups; reports when a process ends.
* `links`: the connections as one group uses them, for short messages.
* `peer_listener`: where they connect; `handshake`: how they authenticate each other.
* `link_store`: the values that ranks exchange over new connections.
* `gloo_port_filter`: keeps unauthenticated peers from the port on which Gloo listens.
* `gloo_connections`: Gloo's connections, shared by all groups; `gloo_transport`: these as one group uses them.
* `gloo_setup`: creates them; `first_ranks`: further ones between the first ranks of all hosts, for Gloo's own sums.
* `gloo_transfers`: Gloo's pending transfers, and who waits for them.
* `watchdog`: a thread that monitors the peers while a rank waits for Gloo.
* `team`: the connected ranks of one group, including the shared-memory team of this host.
* `late_ranks`: which rank is late, if several wait for each other.
* `pipeline`: large reductions in chunks, each in a different stage.
* `small_tensors`: collectives of small tensors, which travel inside control messages.
* `large_sums`: sums of large tensors, by the first ranks of the hosts.
* `algorithms`: the collectives.
* `mailbox`: point to point.
* `group`: creates a group and its engine.

The op table and the flight record are those of a group on one host; control messages, control blocks and arrival are
those of every group whose ranks communicate by messages (`comm/messages`). `wire.py` defines the number formats of the
messages.
"""
