"""What Lockstep uses of `torch.distributed`."""

from __future__ import annotations

from lockstep.torch_private.record import NameRecord, Use

__all__ = ["RECORDS"]

_MPI = "with the name 'mpi', where torch was built without MPI"
_GROUP = "in groups of Lockstep's"
_LAUNCHED = "under a launcher of Lockstep's"
_DISABLED = "torch.compiler.disable in the place of all three, which imports the compiler"
_HOSTS = "in launchers on several hosts"
_C10D = "torch.distributed.distributed_c10d"
_CLASSES = "torch._C._distributed_c10d"
_AGENT = "torch.distributed.elastic.agent.server.api.SimpleElasticAgent"
_NO_AGENT = "`lockstep run --nnodes` does not start; several hosts need torchrun or Slurm"
_OLD_NAME = "none: releases that do not call it call the public name, which is there too"

_PATCHES = (
    NameRecord(
        f"{_C10D}.Backend.__new__",
        Use.PATCH,
        'Backend("mpi") says "mpi4py", so that new_group and DeviceMesh find the group over mpi4py',
        'the name is "mpi4py", not "mpi"',
    ),
    NameRecord(
        f"{_C10D}.init_process_group",
        Use.PATCH,
        '"mpi" takes rank and number of ranks from MPI; for old scripts, "tcp" is gloo and file://name is taken; a '
        "launcher is told that a rank joins, and that it has joined",
        'the name is "mpi4py", with init_method="mpi://"; old scripts need "gloo" and a whole path',
    ),
    NameRecord(
        f"{_C10D}.new_group",
        Use.PATCH,
        "a launcher is told that a rank waits for others to make a group",
        "a launcher says that such a rank is after its last collective",
    ),
    NameRecord(
        f"{_C10D}._new_process_group_helper",
        Use.PATCH,
        'in "cpu:lockstep,cuda:nccl" the group for GPUs is made too, which torch leaves out beside ours',
        "such groups copy tensors of GPUs through memory of the host",
    ),
    NameRecord(
        f"{_C10D}.monitored_barrier",
        Use.PATCH,
        "torch's function turns away every backend but gloo by its name",
        "dist.monitored_barrier works with gloo only; group.monitored_barrier() works",
    ),
    NameRecord(
        f"{_C10D}.batch_isend_irecv",
        Use.PATCH,
        "NCCL begins all messages of a batch together; torch 2.13 has it do so for groups of its own class alone, so "
        "messages of a mixed group are handed to the group behind it first",
        "ranks that send large tensors to each other in such a batch may wait for each other",
    ),
    NameRecord(
        "torch.distributed._functional_collectives.traceable_collective_remaps",
        Use.PATCH,
        "Dynamo has a table of functions that it compiles as others; a patch takes the entry of what it replaces",
        "none: Dynamo leaves all functions of torch.distributed out",
    ),
    NameRecord(
        f"{_C10D}._set_pg_timeout",
        Use.PATCH,
        "dist.breakpoint and Megatron-LM set timeouts by it, and torch's knows gloo and nccl alone; mixed groups call "
        "it for groups behind them that have no set_timeout()",
        "such a call warns, and the timeout of our groups stays; group.set_timeout() works",
    ),
    NameRecord(
        "torch.distributed.rendezvous._rendezvous_handlers",
        Use.PATCH,
        'mpi:// is ours, and "env://" under mpirun takes rank and number of ranks from mpirun',
        "dist.init_process_group() under mpirun wants RANK and WORLD_SIZE; lockstep.init() does not",
    ),
    NameRecord(
        f"{_C10D}._maybe_attach_flight_recorder",
        Use.PATCH,
        "torch's flight recorder asks a group for a name that only groups with a C++ backend have",
        "none: no recorder is attached by itself",
        since="2.15",
    ),
    NameRecord(
        "torch.nn.parallel.distributed.DistributedDataParallel._register_builtin_comm_hook",
        Use.PATCH,
        "torch's built-in FP16 hook needs a future made in C++; torch's DDP gets torch's hook in Python instead",
        "that hook ends in an internal error of torch; register_comm_hook(None, fp16_compress_hook) works",
        _GROUP,
    ),
    NameRecord(
        f"{_C10D}.destroy_process_group",
        Use.PATCH,
        "gloo's threads finish before its groups go",
        "torch's DDP on gloo may, seldom, hang when it is freed after destroy_process_group()",
    ),
    NameRecord(
        f"{_C10D}._shutdown_backend",
        Use.PATCH,
        "dist.destroy_process_group() shuts down NCCL's groups alone",
        "none: newer releases call shutdown() of every group",
        until="2.10",
    ),
    NameRecord(
        f"{_CLASSES}.ProcessGroup._set_group_name",
        Use.PATCH,
        "every new group gets the hook that sees what torch's DDP reduces from C++",
        "the failure summary says nothing of collectives that C++ calls",
        _LAUNCHED,
        since="2.14",
    ),
    NameRecord(
        f"{_CLASSES}.ProcessGroup.*",
        Use.PATCH,
        "every verb of gloo and nccl writes into the rank's status file, for the launcher's failure summary",
        "the failure summary says nothing of calls by that name",
        _LAUNCHED,
    ),
    NameRecord(
        f"{_CLASSES}.Work.wait",
        Use.PATCH,
        "the status file says when a call is over",
        "the failure summary takes a call for unfinished until the next one",
        _LAUNCHED,
    ),
    NameRecord(
        f"{_CLASSES}.Reducer.prepare_for_backward",
        Use.PATCH,
        "torch's DDP reduces from C++: its forward passes are what can be recorded",
        "the failure summary says nothing of torch's DDP",
        _LAUNCHED,
    ),
)

_READ = (
    NameRecord(
        f"{_C10D}.Backend._plugins",
        Use.READ,
        "names of registered backends, for lockstep.init's error and choice",
        "taken from Backend.backend_list, without those that torch has built in",
        "lockstep.init()",
    ),
    NameRecord(
        f"{_C10D}._world",
        Use.READ,
        "its group_count: a failed start takes back the names of groups that it has given; its pg_map: which groups "
        "there are, to see that nothing averages gradients; its pg_group_ranks: who is in the group behind a mixed one",
        "a process that tries again after a failed lockstep.init() may not meet the others; a model not wrapped "
        "is told at the end only",
        "lockstep.init()",
    ),
    NameRecord(
        f"{_CLASSES}.ProcessGroup._get_sequence_number_for_group",
        Use.READ,
        "whether a group of torch's was called between two optimizer steps",
        "it is taken for called: a model that nobody wrapped is told at the end only",
        "lockstep.init()",
    ),
    NameRecord(
        f"{_C10D}._get_default_store",
        Use.READ,
        "ranks on torch's groups compare their models through it when they leave the world",
        "they do not compare",
        "lockstep.init()",
    ),
    NameRecord(
        f"{_C10D}._get_default_timeout",
        Use.READ,
        "how long Horovod's channel waits on a group that is not ours",
        "torch's default_pg_timeout",
        "hvd.init() on gloo or nccl",
    ),
    NameRecord(
        f"{_C10D}._coalescing_manager",
        Use.READ,
        "the conformance suite checks several collectives in one",
        "those checks fail",
        "in tests",
    ),
    NameRecord(
        f"{_C10D}.ProcessGroupGloo._Options",
        Use.READ,
        "Gloo listens at the address of the host's connection; with _devices, _timeout and _threads of its instances",
        "groups over several hosts refuse; use gloo",
        "groups over several hosts",
    ),
    NameRecord(
        f"{_CLASSES}.ProcessGroupGloo.create_device",
        Use.BEHAVIOUR,
        "its socket listens when it returns, and takes a filter that keeps strangers away",
        "Gloo's port is open to whoever reaches it",
        "groups over several hosts",
    ),
    NameRecord(
        f"{_CLASSES}.ProcessGroupGloo.send, recv",
        Use.BEHAVIOUR,
        "a wait that times out closes the connection of the pair, which is how a wait for a dead rank is ended",
        "a survivor hears of a lost rank at the group's timeout",
        "groups over several hosts",
    ),
    NameRecord(
        "c10d::ProcessGroupGloo::RecvWork::abort, SendWork::abort",
        Use.BEHAVIOUR,
        "ends the wait for a transfer whose connection broke in the middle of its bytes, which Gloo itself never ends",
        "a survivor of a lost rank may wait on, until its launcher ends it",
        "groups over several hosts",
    ),
    NameRecord(
        f"{_CLASSES}.ProcessGroup._device_types",
        Use.OVERRIDE,
        "torch's object verbs and asynchronous checkpoints ask a group for its devices; so does `collective_device`",
        "nccl groups are taken for those of GPUs, all others for those of the CPU",
        _GROUP,
    ),
    NameRecord(
        f"{_CLASSES}.ProcessGroup._get_backend",
        Use.OVERRIDE,
        "torch asks a group for the backend of a device: it is the group itself",
        "none: nobody asks",
        _GROUP,
    ),
    NameRecord(
        f"{_CLASSES}.ProcessGroup._start_coalescing",
        Use.OVERRIDE,
        "in mixed groups torch's _coalescing_manager with a device has the group behind collect calls into one",
        "none: nobody asks",
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
        "its SKIP has Dynamo run a function as it is, which the verbs of a group need",
        _DISABLED,
        _GROUP,
        since="2.11 or earlier",
    ),
    NameRecord(
        "torch._C._dynamo.eval_frame._FrameExecStrategy",
        Use.READ,
        "holds that action twice: for the function, and for what it calls",
        _DISABLED,
        _GROUP,
        since="2.11 or earlier",
    ),
    NameRecord(
        "torch._C._dynamo.eval_frame.set_code_exec_strategy",
        Use.READ,
        "gives the two to the code of a verb, so that a call pays nothing",
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
        ("_assign_worker_ranks", "ranks of a round are those of the membership"),
        ("_start_workers", "ranks are started by Lockstep's launcher"),
        ("_monitor_workers", "the launcher waits instead of polling"),
        ("_stop_workers", "ranks are stopped, and swept, by the launcher; is_restart is not passed by all releases"),
        ("_shutdown", "nothing is left when the agent ends"),
        ("_exit_barrier", "hosts part by the rendezvous"),
        ("_construct_event", "no event of ours needs a worker of torch's"),
    )
)

_MORE = (
    NameRecord(
        f"{_AGENT}._remaining_restarts",
        Use.ATTRIBUTE,
        "how often the run loop starts the ranks again: hosts that join or are told to go do not count",
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
        "dist.recv from anybody asks the handle who it was; recv_anysource hands it out",
        "none: releases that do not ask it ask the public method",
        _GROUP,
    ),
)

RECORDS = (*_MORE, *_PATCHES, *_READ, *_ELASTIC)
