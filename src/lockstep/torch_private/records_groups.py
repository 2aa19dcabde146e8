"""Names of `torch.distributed` that Lockstep uses."""

from __future__ import annotations

from lockstep.torch_private.record import NameRecord, Use

__all__ = ["RECORDS"]

_MPI = "with the name 'mpi', if torch was built without MPI"
_GROUP = "in groups of Lockstep's"
_LAUNCHED = "under a launcher of Lockstep's"
_DISABLED = "torch.compiler.disable in place of all three, which imports the compiler"
_HOSTS = "in launchers on several hosts"
_C10D = "torch.distributed.distributed_c10d"
_CLASSES = "torch._C._distributed_c10d"
_AGENT = "torch.distributed.elastic.agent.server.api.SimpleElasticAgent"
_NO_AGENT = "`lockstep run --nnodes` does not start; several hosts need torchrun or Slurm"
_OLD_NAME = "none: releases that do not call it call the public name, which exists too"

_PATCHES = (
    NameRecord(
        f"{_C10D}.Backend.__new__",
        Use.PATCH,
        'Backend("mpi") returns "mpi4py", so that new_group and DeviceMesh find the group over mpi4py',
        'the name is "mpi4py", not "mpi"',
    ),
    NameRecord(
        f"{_C10D}.init_process_group",
        Use.PATCH,
        '"mpi" takes rank and world size from MPI; for old scripts, "tcp" is gloo and file://name is accepted; the '
        "launcher is told that a rank joins, and that it has joined",
        'the name is "mpi4py", with init_method="mpi://"; old scripts need "gloo" and a full path',
    ),
    NameRecord(
        f"{_C10D}.new_group",
        Use.PATCH,
        "the launcher is told that a rank waits for others to create a group",
        "the launcher reports such a rank as after its last collective",
    ),
    NameRecord(
        f"{_C10D}._new_process_group_helper",
        Use.PATCH,
        'also creates the group for GPUs in "cpu:lockstep,cuda:nccl", which torch leaves out next to ours',
        "such groups copy GPU tensors through host memory",
    ),
    NameRecord(
        f"{_C10D}.monitored_barrier",
        Use.PATCH,
        "torch's function refuses every backend other than gloo by its name",
        "dist.monitored_barrier works with gloo only; group.monitored_barrier() works",
    ),
    NameRecord(
        f"{_C10D}.batch_isend_irecv",
        Use.PATCH,
        "NCCL starts all messages of a batch together; torch 2.13 only does so for groups of its own class, so "
        "messages of a mixed group are passed to the underlying group first",
        "ranks that send large tensors to each other in such a batch may wait for each other",
    ),
    NameRecord(
        "torch.distributed._functional_collectives.traceable_collective_remaps",
        Use.PATCH,
        "Dynamo has a table of functions that it compiles as others; a patch takes over the entry of the original",
        "none: Dynamo does not compile any functions of torch.distributed",
    ),
    NameRecord(
        f"{_C10D}._set_pg_timeout",
        Use.PATCH,
        "dist.breakpoint and Megatron-LM set timeouts by it, but torch's only supports gloo and nccl; mixed groups "
        "call it for underlying groups that have no set_timeout()",
        "such a call warns, and does not change the timeout of our groups; group.set_timeout() works",
    ),
    NameRecord(
        "torch.distributed.rendezvous._rendezvous_handlers",
        Use.PATCH,
        'adds mpi://; "env://" under mpirun takes rank and world size from mpirun',
        "dist.init_process_group() under mpirun needs RANK and WORLD_SIZE; lockstep.init() does not",
    ),
    NameRecord(
        f"{_C10D}._maybe_attach_flight_recorder",
        Use.PATCH,
        "torch's flight recorder asks a group for a name that only groups with a C++ backend have",
        "none: no recorder is attached automatically",
        since="2.15",
    ),
    NameRecord(
        "torch.nn.parallel.distributed.DistributedDataParallel._register_builtin_comm_hook",
        Use.PATCH,
        "torch's built-in FP16 hook needs a future created in C++; torch's DDP gets torch's Python hook instead",
        "that hook causes an internal error in torch; register_comm_hook(None, fp16_compress_hook) works",
        _GROUP,
    ),
    NameRecord(
        "torch.distributed.algorithms.join.Join.notify_join_context",
        Use.PATCH,
        "torch's DDP passes its result to C++, which does not keep the Python half of a work alive",
        "join(divide_by_initial_world_size=False) of torch's DDP hangs",
        _GROUP,
    ),
    NameRecord(
        f"{_C10D}.destroy_process_group",
        Use.PATCH,
        "gloo's threads finish before its groups are destroyed",
        "torch's DDP on gloo may rarely hang when it is freed after destroy_process_group()",
    ),
    NameRecord(
        f"{_C10D}._shutdown_backend",
        Use.PATCH,
        "dist.destroy_process_group() only shuts down NCCL groups",
        "none: newer releases call shutdown() of every group",
        until="2.10",
    ),
    NameRecord(
        f"{_CLASSES}.ProcessGroup._set_group_name",
        Use.PATCH,
        "every new group gets the hook that observes the reductions of torch's DDP from C++",
        "the failure summary omits collectives called from C++",
        _LAUNCHED,
        since="2.14",
    ),
    NameRecord(
        f"{_CLASSES}.ProcessGroup.*",
        Use.PATCH,
        "every verb of gloo and nccl writes into the rank's status file, for the launcher's failure summary",
        "the failure summary omits calls by that name",
        _LAUNCHED,
    ),
    NameRecord(
        f"{_CLASSES}.Work.wait",
        Use.PATCH,
        "the status file records when a call has finished",
        "the failure summary treats a call as unfinished until the next one",
        _LAUNCHED,
    ),
    NameRecord(
        f"{_CLASSES}.Reducer.prepare_for_backward",
        Use.PATCH,
        "torch's DDP reduces from C++: only its forward passes can be recorded",
        "the failure summary omits torch's DDP",
        _LAUNCHED,
    ),
)

_READ = (
    NameRecord(
        f"{_C10D}.Backend._plugins",
        Use.READ,
        "names of registered backends, for lockstep.init's choice and errors",
        "taken from Backend.backend_list, except for torch's built-in ones",
        "lockstep.init()",
    ),
    NameRecord(
        f"{_C10D}._world",
        Use.READ,
        "its group_count: a failed start undoes the naming of groups; its pg_map: which groups "
        "exist, to notice that nothing averages gradients; its pg_group_ranks: the ranks of a mixed group's parts",
        "a process that retries after a failed lockstep.init() may not meet the others; an unwrapped model "
        "is only reported at the end",
        "lockstep.init()",
    ),
    NameRecord(
        f"{_CLASSES}.ProcessGroup._get_sequence_number_for_group",
        Use.READ,
        "whether one of torch's groups was called between two optimizer steps",
        "it counts as called: an unwrapped model is only reported at the end",
        "lockstep.init()",
    ),
    NameRecord(
        f"{_C10D}._get_default_store",
        Use.READ,
        "ranks on torch's groups compare their models through it when they leave the world",
        "they are not compared",
        "lockstep.init()",
    ),
    NameRecord(
        f"{_C10D}._get_default_timeout",
        Use.READ,
        "the timeout of Horovod's channel on a group that is not ours",
        "torch's default_pg_timeout",
        "hvd.init() on gloo or nccl",
    ),
    NameRecord(
        f"{_C10D}._coalescing_manager",
        Use.READ,
        "the conformance suite checks coalesced collectives",
        "those checks fail",
        "in tests",
    ),
    NameRecord(
        f"{_C10D}.ProcessGroupGloo._Options",
        Use.READ,
        "Gloo listens on the address of the host's connection; with _devices, _timeout and _threads of its instances",
        "groups over several hosts raise an error; use gloo",
        "groups over several hosts",
    ),
    NameRecord(
        f"{_CLASSES}.ProcessGroupGloo.create_device",
        Use.BEHAVIOUR,
        "its socket listens when it returns, so that a filter can reject unauthenticated peers",
        "Gloo's port is open to anyone who can reach it",
        "groups over several hosts",
    ),
    NameRecord(
        f"{_CLASSES}.ProcessGroupGloo.send, recv",
        Use.BEHAVIOUR,
        "a wait that times out closes the pair's connection, which is used to end a wait for a dead rank",
        "a survivor only notices a lost rank at the group's timeout",
        "groups over several hosts",
    ),
    NameRecord(
        "c10d::ProcessGroupGloo::RecvWork::abort, SendWork::abort",
        Use.BEHAVIOUR,
        "ends the wait for a transfer whose connection broke during it, which Gloo itself never ends",
        "a survivor of a lost rank may keep waiting until its launcher ends it",
        "groups over several hosts",
    ),
    NameRecord(
        f"{_CLASSES}.ProcessGroup._device_types",
        Use.OVERRIDE,
        "torch's object collectives, asynchronous checkpoints and `collective_device` query a group's devices",
        "nccl groups are assumed to be for GPUs, all others for the CPU",
        _GROUP,
    ),
    NameRecord(
        f"{_CLASSES}.ProcessGroup._get_backend",
        Use.OVERRIDE,
        "torch queries a group's backend for a device: it is the group itself",
        "none: torch does not call it",
        _GROUP,
    ),
    NameRecord(
        f"{_CLASSES}.ProcessGroup._start_coalescing",
        Use.OVERRIDE,
        "in mixed groups torch's _coalescing_manager with a device makes the underlying group coalesce calls",
        "none: torch does not call it",
        _GROUP,
    ),
    NameRecord(
        f"{_CLASSES}.ProcessGroup._end_coalescing",
        Use.OVERRIDE,
        "the same",
        "the same",
        _GROUP,
    ),
    NameRecord(
        "torch._C._dynamo.eval_frame._FrameAction",
        Use.READ,
        "its SKIP makes Dynamo run a function uncompiled, which the verbs of a group need",
        _DISABLED,
        _GROUP,
        since="2.11 or earlier",
    ),
    NameRecord(
        "torch._C._dynamo.eval_frame._FrameExecStrategy",
        Use.READ,
        "combines two such actions: for the function, and for what it calls",
        _DISABLED,
        _GROUP,
        since="2.11 or earlier",
    ),
    NameRecord(
        "torch._C._dynamo.eval_frame.set_code_exec_strategy",
        Use.READ,
        "attaches both to the code of a verb, so that calls have no overhead",
        _DISABLED,
        _GROUP,
        since="2.11 or earlier",
    ),
    NameRecord(
        f"{_CLASSES}.ProcessGroup._allgather_base",
        Use.OVERRIDE,
        "all_gather_into_tensor, until torch calls all_gather_single",
        _OLD_NAME,
        _GROUP,
    ),
    NameRecord(
        f"{_CLASSES}.ProcessGroup._reduce_scatter_base",
        Use.OVERRIDE,
        "reduce_scatter_tensor, until torch calls reduce_scatter_single",
        _OLD_NAME,
        _GROUP,
    ),
)

_ELASTIC = tuple(
    NameRecord(f"{_AGENT}.{name}", Use.OVERRIDE, why, _NO_AGENT, _HOSTS)
    for name, why in (
        ("_assign_worker_ranks", "numbers the ranks of a round as in the membership"),
        ("_start_workers", "ranks are started by Lockstep's launcher"),
        ("_monitor_workers", "the launcher waits instead of polling"),
        ("_stop_workers", "ranks are stopped, and swept, by the launcher; is_restart is not passed by all releases"),
        ("_shutdown", "does nothing, as nothing is left when the agent ends"),
        ("_exit_barrier", "does nothing, as hosts leave through the rendezvous"),
        ("_construct_event", "creates events without torch's workers"),
    )
)

_MORE = (
    NameRecord(
        f"{_AGENT}._remaining_restarts",
        Use.ATTRIBUTE,
        "how often the run loop restarts the ranks: hosts that join or are told to leave do not count",
        "each round counts as a restart",
        _HOSTS,
    ),
    NameRecord(
        "torch.distributed.algorithms.join.Joinable._join_config",
        Use.ATTRIBUTE,
        "whether the forward pass runs under torch's Join",
        "lockstep.DistributedDataParallel raises AttributeError under Join; model.join() does not need it",
        "lockstep.DistributedDataParallel",
    ),
    NameRecord(
        f"{_C10D}.Work._source_rank",
        Use.OVERRIDE,
        "dist.recv from any source reads the sender from the handle that recv_anysource returns",
        "none: releases that do not call it call the public method",
        _GROUP,
    ),
)

RECORDS = (*_MORE, *_PATCHES, *_READ, *_ELASTIC)
