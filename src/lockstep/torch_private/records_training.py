"""What Lockstep uses of autograd, tensors, modules and loaders."""

from __future__ import annotations

from lockstep.torch_private.record import NameRecord, Use

__all__ = ["RECORDS"]

_DDP = "lockstep.DistributedDataParallel"
_NO_DDP = "the engine refuses; torch's DistributedDataParallel works on Lockstep's group"
_REPLICAS = "lockstep.DataParallel"
_NO_REPLICAS = "lockstep.DataParallel refuses; use DistributedDataParallel"
_ZERO = "lockstep.ZeroRedundancyOptimizer"
_NO_ZERO = "the optimizer refuses; torch's ZeroRedundancyOptimizer works on Lockstep's group"
_SPARSE = "sparse gradients"
_NO_SPARSE = "sparse tensors are refused; sparse_as_dense=True, or Embedding(sparse=False)"
_COPIES = "every gradient is copied out of its bucket: slower"
_SLOWER = "one call for each tensor: slower"

_AUTOGRAD = (
    NameRecord(
        "torch._C._current_graph_task_id",
        Use.READ,
        "tells backward passes apart: one in another, and one per micro-batch",
        _NO_DDP,
        _DDP,
    ),
    NameRecord(
        "torch._C._current_autograd_node",
        Use.READ,
        "where the graph behind an output begins, to look for a re-entrant checkpoint",
        _NO_DDP,
        _DDP,
    ),
    NameRecord(
        "torch._C._will_engine_execute_node",
        Use.READ,
        "whether the backward pass under way reaches the model's parameters",
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
        "watches parameters and asks other ranks while torch.func.grad runs a backward pass",
        _NO_DDP,
        _DDP,
    ),
    NameRecord(
        "torch.autograd.Variable._execution_engine.queue_callback",
        Use.READ,
        "the end of a backward pass, at which gradients are reduced",
        _NO_DDP,
        f"{_DDP}, hvd.DistributedOptimizer",
    ),
    NameRecord(
        "torch.Tensor._version",
        Use.READ,
        "whether a gradient has been changed since it was reduced",
        "changes between backward pass and step go unnoticed",
        f"{_DDP}, hvd.DistributedOptimizer",
    ),
    NameRecord(
        "torch.autograd.profiler._is_profiler_enabled",
        Use.READ,
        "whether a profiler runs, which shall see the ranges of the engine",
        "each range costs some microseconds of every step",
        _DDP,
    ),
    NameRecord(
        "torch.Tensor._base",
        Use.READ,
        "hooks of a view are lost when it is written to; those of its base are not",
        "a model whose output is a view that is changed in place is not averaged",
        f"{_DDP}, sparse and complex tensors in collectives",
    ),
)

_TENSORS = (
    NameRecord("torch._foreach_copy_", Use.READ, "gradients into buckets, in one call", _SLOWER, _DDP),
    NameRecord("torch._foreach_mul_", Use.READ, "gradients divided by the loss scale", _SLOWER, "apex.fp16_utils"),
    NameRecord(
        "torch._amp_foreach_non_finite_check_and_unscale_",
        Use.READ,
        "divides gradients and finds overflow in one pass, as torch's GradScaler",
        "apex.amp with a loss scale refuses; use torch.amp.GradScaler",
        "apex.amp",
    ),
    NameRecord(
        "torch.Tensor._make_wrapper_subclass",
        Use.READ,
        "a tensor that stands for a gradient of which each rank has a share",
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
        "turns away outputs whose elements share an address, as after expand",
        "such outputs are written to as they are",
        "collectives",
    ),
    NameRecord("torch.Tensor._use_count", Use.READ, "whether somebody still holds a gradient", _COPIES, _DDP),
    NameRecord("torch._C._storage_Use_Count", Use.READ, "whether somebody holds a view of a gradient", _COPIES, _DDP),
    NameRecord(
        "torch.UntypedStorage._cdata",
        Use.READ,
        "names a tensor's memory, to find its batch and to count a gradient's holders",
        _COPIES,
        _DDP,
    ),
    NameRecord(
        "torch.Tensor._values", Use.READ, "values of sparse tensors that are not coalesced", _NO_SPARSE, _SPARSE
    ),
    NameRecord(
        "torch.Tensor._indices", Use.READ, "indices of sparse tensors that are not coalesced", _NO_SPARSE, _SPARSE
    ),
    NameRecord("torch.Tensor._nnz", Use.READ, "how many entries ranks contribute", _NO_SPARSE, _SPARSE),
    NameRecord(
        "torch.ops.quantized.embedding_bag_byte_prepack",
        Use.READ,
        "encodes wire format int8 in one pass over memory; torch retires its quantized operators",
        "the same by plain operators, about ten times as slow",
        "wire='int8'",
    ),
    NameRecord(
        "torch.ops.quantized.embedding_bag_byte_unpack",
        Use.READ,
        "decodes wire format int8",
        "the same by plain operators",
        "wire='int8'",
    ),
)

_MODULES = (
    NameRecord(
        "torch.nn.Module._modules",
        Use.ATTRIBUTE,
        "children under every name: public iterators leave out a child's second name, and None",
        _NO_REPLICAS,
        f"{_REPLICAS}, convert_sync_batchnorm",
    ),
    NameRecord(
        "torch.nn.Module._parameters",
        Use.ATTRIBUTE,
        "parameters under every name, None included",
        _NO_REPLICAS,
        f"{_REPLICAS}, convert_sync_batchnorm",
    ),
    NameRecord(
        "torch.nn.Module._buffers",
        Use.ATTRIBUTE,
        "buffers can be replaced by scripts at any time, so where they stand is kept and not what",
        "the engine leaves buffers alone",
        f"{_DDP}, {_REPLICAS}, convert_sync_batchnorm, apex",
    ),
    NameRecord(
        "torch.nn.Module._replicate_for_data_parallel",
        Use.READ,
        "modules copy themselves for a replica, as under torch's DataParallel; apex.amp's casts go along",
        _NO_REPLICAS,
        f"{_REPLICAS}, apex.amp",
    ),
    NameRecord(
        "torch.nn.modules.batchnorm._BatchNorm",
        Use.READ,
        "base of all batch normalizations: convert_sync_batchnorm takes each",
        "the base class of nn.BatchNorm1d",
        "SyncBatchNorm, apex",
    ),
    NameRecord(
        "torch.nn.modules.batchnorm._BatchNorm._check_input_dim",
        Use.OVERRIDE,
        "SyncBatchNorm takes inputs of any number of dimensions",
        "none: nobody asks",
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
        "torch.nn.parallel._functions.Scatter", Use.READ, "batches onto GPUs", _NO_REPLICAS, f"{_REPLICAS} on GPUs"
    ),
    NameRecord(
        "torch.nn.parallel._functions.Gather", Use.READ, "outputs from GPUs", _NO_REPLICAS, f"{_REPLICAS} on GPUs"
    ),
    NameRecord(
        "torch.utils._pytree.tree_*",
        Use.READ,
        "tensors in containers of containers, also those that scripts have registered with torch",
        "models that take or return containers are refused",
        f"{_DDP}, apex",
    ),
    NameRecord(
        "torch.Optimizer._opt_called",
        Use.ATTRIBUTE,
        "schedulers warn if they step before the optimizer; a step that an overflow skipped counts as one",
        "none: schedulers do not look",
        "apex.amp",
    ),
)

_LOADER = (
    NameRecord(
        "torch.utils.data.DataLoader._get_iterator",
        Use.OVERRIDE,
        "torch's iterators are made over a view of the loader whose data are seeded per sample",
        "lockstep.DataLoader refuses; use torch's with a DistributedSampler",
        "lockstep.DataLoader",
    ),
    NameRecord(
        "torch.utils.data.DataLoader._workers_done_event",
        Use.ATTRIBUTE,
        "of its iterators: workers are told to end before an iterator is collected as part of a reference cycle",
        "torch waits 5 s for each worker then",
        "num_workers above 0",
    ),
    NameRecord(
        "torch.utils.data.DataLoader._index_queues",
        Use.ATTRIBUTE,
        "of its iterators: through these they are told",
        "torch waits 5 s for each worker then",
        "num_workers above 0",
    ),
    NameRecord(
        "torch.utils.data._utils.collate.default_collate_fn_map",
        Use.READ,
        "torch's default collate function stacks tensors in buffers that a worker uses again; only in workers",
        "tensors are copied into such a buffer",
        "num_workers above 0",
    ),
    NameRecord(
        "torch.utils.data.DataLoader.__setattr__",
        Use.BEHAVIOUR,
        "it guards batch_size, drop_last, sampler and dataset; object.__setattr__ goes past it",
        "none: there is no guard to go past",
        "lockstep.DataLoader",
    ),
)

RECORDS = (*_AUTOGRAD, *_TENSORS, *_MODULES, *_LOADER)
