"""Names of autograd, tensors, modules and loaders that Lockstep uses."""

from __future__ import annotations

from lockstep.torch_private.record import NameRecord, Use

__all__ = ["RECORDS"]

_DDP = "lockstep.DistributedDataParallel"
_NO_DDP = "the engine raises an error; torch's DistributedDataParallel works on Lockstep's group"
_REPLICAS = "lockstep.DataParallel"
_NO_REPLICAS = "lockstep.DataParallel raises an error; use DistributedDataParallel"
_ZERO = "lockstep.ZeroRedundancyOptimizer"
_NO_ZERO = "the optimizer raises an error; torch's ZeroRedundancyOptimizer works on Lockstep's group"
_SPARSE = "sparse gradients"
_NO_SPARSE = "sparse tensors are refused; sparse_as_dense=True, or Embedding(sparse=False)"
_COPIES = "every gradient is copied out of its bucket: slower"
_SLOWER = "one call for each tensor: slower"

_AUTOGRAD = (
    NameRecord(
        "torch._C._current_graph_task_id",
        Use.READ,
        "distinguishes backward passes: nested ones, and one per micro-batch",
        _NO_DDP,
        _DDP,
    ),
    NameRecord(
        "torch._C._current_autograd_node",
        Use.READ,
        "the node at which an output's graph begins, to look for a re-entrant checkpoint",
        _NO_DDP,
        _DDP,
    ),
    NameRecord(
        "torch._C._will_engine_execute_node",
        Use.READ,
        "whether the current backward pass reaches the model's parameters",
        _NO_DDP,
        _DDP,
    ),
    NameRecord(
        "torch._C._functorch.peek_interpreter_stack",
        Use.READ,
        "whether a forward pass runs inside of torch.func.grad or the like",
        _NO_DDP,
        _DDP,
    ),
    NameRecord(
        "torch._C._functorch.maybe_get_level",
        Use.READ,
        "which transform of torch.func a tensor belongs to",
        _NO_DDP,
        _DDP,
    ),
    NameRecord(
        "torch._C._functorch.get_unwrapped",
        Use.READ,
        "the tensor outside of that transform, where gradients of parameters pass and a batch has its tag",
        _NO_DDP,
        _DDP,
    ),
    NameRecord(
        "torch._functorch.pyfunctorch.temporarily_pop_interpreter_stack",
        Use.READ,
        "looks at that tensor as the outer transform does",
        _NO_DDP,
        _DDP,
    ),
    NameRecord(
        "torch.autograd.forward_ad._current_level",
        Use.READ,
        "whether outputs may have tangents, through which gradients of parameters pass, too",
        _NO_DDP,
        _DDP,
    ),
    NameRecord(
        "torch._C._DisableFuncTorch",
        Use.READ,
        "monitors parameters and queries other ranks while torch.func.grad runs a backward pass",
        _NO_DDP,
        _DDP,
    ),
    NameRecord(
        "torch.autograd.Variable._execution_engine.queue_callback",
        Use.READ,
        "called at the end of a backward pass, to reduce gradients",
        _NO_DDP,
        f"{_DDP}, hvd.DistributedOptimizer",
    ),
    NameRecord(
        "torch.Tensor._version",
        Use.READ,
        "whether a gradient has been changed since it was reduced",
        "changes between the backward pass and the step go unnoticed",
        f"{_DDP}, hvd.DistributedOptimizer",
    ),
    NameRecord(
        "torch.autograd.profiler._is_profiler_enabled",
        Use.READ,
        "whether a profiler is running, and records the ranges of the engine",
        "each range costs some microseconds per step",
        _DDP,
    ),
    NameRecord(
        "torch.Tensor._base",
        Use.READ,
        "hooks on a view are lost when it is written to; those on its base are not",
        "a model whose output is a view that is changed in place is not averaged",
        f"{_DDP}, sparse and complex tensors in collectives",
    ),
)

_TENSORS = (
    NameRecord("torch._foreach_copy_", Use.READ, "copies gradients into buckets, in one call", _SLOWER, _DDP),
    NameRecord("torch._foreach_mul_", Use.READ, "divides gradients by the loss scale", _SLOWER, "apex.fp16_utils"),
    NameRecord(
        "torch._amp_foreach_non_finite_check_and_unscale_",
        Use.READ,
        "divides gradients and detects overflow in one pass, like torch's GradScaler",
        "apex.amp with a loss scale raises an error; use torch.amp.GradScaler",
        "apex.amp",
    ),
    NameRecord(
        "torch.Tensor._make_wrapper_subclass",
        Use.READ,
        "a tensor that represents a gradient of which each rank has a share",
        _NO_ZERO,
        _ZERO,
    ),
    NameRecord(
        "torch._C._disabled_torch_function_impl",
        Use.READ,
        "operations on such a tensor return plain tensors",
        _NO_ZERO,
        _ZERO,
    ),
    NameRecord(
        "torch._debug_has_internal_overlap",
        Use.READ,
        "detects outputs whose elements share an address, as after expand, to refuse them",
        "such outputs are written to nevertheless",
        "collectives",
    ),
    NameRecord("torch.Tensor._use_count", Use.READ, "whether a gradient is still referenced", _COPIES, _DDP),
    NameRecord("torch._C._storage_Use_Count", Use.READ, "whether a view of a gradient exists", _COPIES, _DDP),
    NameRecord(
        "torch.UntypedStorage._cdata",
        Use.READ,
        "identifies a tensor's memory, to find its batch and to count references to a gradient",
        _COPIES,
        _DDP,
    ),
    NameRecord(
        "torch.Tensor._values", Use.READ, "values of sparse tensors that are not coalesced", _NO_SPARSE, _SPARSE
    ),
    NameRecord(
        "torch.Tensor._indices", Use.READ, "indices of sparse tensors that are not coalesced", _NO_SPARSE, _SPARSE
    ),
    NameRecord("torch.Tensor._nnz", Use.READ, "number of entries that a rank contributes", _NO_SPARSE, _SPARSE),
    NameRecord(
        "torch.ops.quantized.embedding_bag_byte_prepack",
        Use.READ,
        "encodes wire format int8 in one pass over memory; torch is removing its quantized operators",
        "the same with plain operators, about ten times slower",
        "wire='int8'",
    ),
    NameRecord(
        "torch.ops.quantized.embedding_bag_byte_unpack",
        Use.READ,
        "decodes wire format int8",
        "the same with plain operators",
        "wire='int8'",
    ),
)

_MODULES = (
    NameRecord(
        "torch.nn.Module._modules",
        Use.ATTRIBUTE,
        "children by all names: public iterators omit a child's second name, and None",
        _NO_REPLICAS,
        f"{_REPLICAS}, convert_sync_batchnorm",
    ),
    NameRecord(
        "torch.nn.Module._parameters",
        Use.ATTRIBUTE,
        "parameters by all names, including None",
        _NO_REPLICAS,
        f"{_REPLICAS}, convert_sync_batchnorm",
    ),
    NameRecord(
        "torch.nn.Module._buffers",
        Use.ATTRIBUTE,
        "scripts can replace buffers at any time, so their dict is kept rather than the buffers",
        "the engine does not copy buffers",
        f"{_DDP}, {_REPLICAS}, convert_sync_batchnorm, apex",
    ),
    NameRecord(
        "torch.nn.Module._replicate_for_data_parallel",
        Use.READ,
        "modules copy themselves for a replica, as under torch's DataParallel, with apex.amp's casts",
        _NO_REPLICAS,
        f"{_REPLICAS}, apex.amp",
    ),
    NameRecord(
        "torch.nn.modules.batchnorm._BatchNorm",
        Use.READ,
        "base class of all batch normalizations: convert_sync_batchnorm converts each",
        "the base class of nn.BatchNorm1d",
        "SyncBatchNorm, apex",
    ),
    NameRecord(
        "torch.nn.modules.batchnorm._BatchNorm._check_input_dim",
        Use.OVERRIDE,
        "SyncBatchNorm accepts inputs with any number of dimensions",
        "none: torch does not call it",
        "SyncBatchNorm",
    ),
    NameRecord(
        "torch._utils.ExceptionWrapper",
        Use.READ,
        "an exception of a replica's thread keeps its type and traceback",
        _NO_REPLICAS,
        _REPLICAS,
    ),
    NameRecord(
        "torch.nn.parallel._functions.Scatter",
        Use.READ,
        "distributes batches to GPUs",
        _NO_REPLICAS,
        f"{_REPLICAS} on GPUs",
    ),
    NameRecord(
        "torch.nn.parallel._functions.Gather",
        Use.READ,
        "gathers outputs from GPUs",
        _NO_REPLICAS,
        f"{_REPLICAS} on GPUs",
    ),
    NameRecord(
        "torch.utils._pytree.tree_*",
        Use.READ,
        "tensors in nested containers, including those that scripts have registered with torch",
        "models that accept or return containers are refused",
        f"{_DDP}, apex",
    ),
    NameRecord(
        "torch.Optimizer._opt_called",
        Use.ATTRIBUTE,
        "schedulers warn if they step before the optimizer; a step skipped because of overflow counts as one",
        "none: schedulers do not check",
        "apex.amp",
    ),
)

_LOADER = (
    NameRecord(
        "torch.utils.data.DataLoader._get_iterator",
        Use.OVERRIDE,
        "creates torch's iterators over a view of the loader whose data are seeded per sample",
        "lockstep.DataLoader raises an error; use torch's with a DistributedSampler",
        "lockstep.DataLoader",
    ),
    NameRecord(
        "torch.utils.data.DataLoader._workers_done_event",
        Use.ATTRIBUTE,
        "an event of its iterators: tells workers to end before an iterator is collected as part of a reference cycle",
        "torch then waits 5 s for each worker",
        "num_workers above 0",
    ),
    NameRecord(
        "torch.utils.data.DataLoader._index_queues",
        Use.ATTRIBUTE,
        "queues of its iterators: through these workers are told to end",
        "torch then waits 5 s for each worker",
        "num_workers above 0",
    ),
    NameRecord(
        "torch.utils.data._utils.collate.default_collate_fn_map",
        Use.READ,
        "makes torch's default collate function stack tensors in reused buffers; only in workers",
        "tensors are copied into such a buffer afterwards",
        "num_workers above 0",
    ),
    NameRecord(
        "torch.utils.data.DataLoader.__setattr__",
        Use.BEHAVIOUR,
        "it protects batch_size, drop_last, sampler and dataset; object.__setattr__ bypasses it",
        "none: there is no protection to bypass",
        "lockstep.DataLoader",
    ),
)

RECORDS = (*_AUTOGRAD, *_TENSORS, *_MODULES, *_LOADER)
