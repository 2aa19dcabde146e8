"""What a script sees of CUDA; each line of it holds on a machine with that many GPUs."""

import copy
import gc
import io
import multiprocessing
import os
import pickle
import warnings

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import nn


def before_it_is_used():
    """CUDA comes up when it is first used; until then a process may choose which GPUs it sees."""
    assert not torch.cuda.is_initialized()
    assert torch.cuda.memory_stats() == {}
    everything = os.environ.pop("CUDA_VISIBLE_DEVICES")
    assert torch.cuda.device_count() == 2 == len(everything.split(","))
    for text, count in (("1", 1), ("", 0), ("1,0,7,0", 2), (everything, 2)):
        os.environ["CUDA_VISIBLE_DEVICES"] = text
        assert torch.cuda.device_count() == count
        assert torch.cuda.is_available() == (count > 0)
    torch.manual_seed(1)
    assert not torch.cuda.is_initialized()
    torch.ones(1).cuda()
    assert torch.cuda.is_initialized()
    os.environ["CUDA_VISIBLE_DEVICES"] = "0"
    assert torch.cuda.device_count() == 2


def in_a_forked_process(queue):
    try:
        torch.ones(1).cuda()
    except RuntimeError as error:
        queue.put(str(error))


def forks():
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    process = context.Process(target=in_a_forked_process, args=(queue,))
    process.start()
    process.join()
    assert "Cannot re-initialize CUDA in forked subprocess" in queue.get()
    assert process.exitcode == 0


def devices_and_moves():
    assert torch.cuda.is_available()
    assert torch.cuda.device_count() == 2
    assert torch.cuda.get_device_properties(0).total_memory == 64 * 2**20
    torch.cuda.set_device(1)
    host = torch.arange(4.0)
    assert host.cuda().device == torch.device("cuda:1") == host.to("cuda").device
    assert host.to(0).get_device() == 0 == torch.device(0).index
    assert host.device.type == "cpu"
    assert host.cuda().cpu().equal(host)
    moved = host.cuda()
    assert moved.to("cuda:1") is moved
    moved += 1
    assert host.tolist() == [0, 1, 2, 3]
    assert moved.type() == "torch.cuda.FloatTensor"
    assert moved.type(torch.DoubleTensor).device.type == "cpu"
    assert host.type("torch.cuda.HalfTensor").dtype is torch.float16
    with torch.cuda.device(0):
        assert torch.zeros(2, device="cuda").device.index == 0
    assert torch.tensor([1, 2], device=0).device.index == 0
    assert moved.new_zeros(3).device.index == 1
    assert torch.zeros_like(moved, device="cpu").device.type == "cpu"
    assert (moved[1:3] * 2).sum().device.index == 1
    assert host.pin_memory().is_pinned()
    assert copy.deepcopy(moved).device.index == 1
    with pytest.raises(TypeError, match=r"Use Tensor\.cpu"):
        moved.numpy()
    assert isinstance(moved.cpu().numpy(), numpy.ndarray)
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        host.cuda(2)


def classes_in_annotations():
    """Libraries are imported that speak of what they may never use."""
    for kind in (torch.cuda.CUDAGraph, torch.cuda.graph, torch.cuda.Stream, torch.device, torch.Generator):
        assert isinstance(None, kind | None)
        assert not isinstance(3, kind)
    for make in (torch.cuda.CUDAGraph, lambda: torch.cuda.graph(None)):
        with pytest.raises(NotImplementedError, match="records GPU kernels, but a rehearsal has none"):
            make()


def modules_and_gradients():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 2))
    optimizer = torch.optim.Adam(model.parameters())  # made before the model moves, and still right
    model.cuda(0)
    inputs = torch.randn(3, 1, 4, 4)
    with pytest.raises(RuntimeError, match="found at least two devices, cuda:0 and cpu"):
        model(inputs)
    with torch.amp.autocast("cuda"):
        outputs = model(inputs.cuda(0))
        assert torch.is_autocast_enabled()
    assert outputs.dtype is torch.float16
    scaler = torch.amp.GradScaler("cuda", init_scale=128.0)
    scaler.scale(nn.functional.cross_entropy(outputs, torch.tensor([0, 1, 0], device="cuda:0"))).backward()
    assert {parameter.grad.device.index for parameter in model.parameters()} == {0}
    before = model[0].weight.detach().clone()
    scaler.step(optimizer)
    assert not before.equal(model[0].weight)
    first = torch.ones(2, 2, device="cuda:0", requires_grad=True)
    (first.to("cuda:1") * 2).sum().backward()
    assert first.grad.device.index == 0


def what_was_left_on_the_host():
    f = nn.functional
    gpu, host, number = torch.rand(3, device="cuda:0"), torch.rand(3), torch.tensor(2.0)
    refused = (
        lambda: gpu + host,
        lambda: host * gpu,
        lambda: host / gpu.cuda(1),
        lambda: gpu.clone().__isub__(host),
        lambda: gpu == host,
        lambda: torch.cat([gpu, host]),
        lambda: torch.stack([gpu, host]),
        lambda: torch.where(host > 0, gpu, gpu),
        lambda: f.l1_loss(gpu, host),
        lambda: nn.L1Loss()(gpu, host),
        lambda: f.smooth_l1_loss(gpu, host),
        lambda: f.binary_cross_entropy(gpu, host),
        lambda: f.binary_cross_entropy_with_logits(gpu, host),
    )
    for compute in refused:
        with pytest.raises(RuntimeError, match="found at least two devices"):
            compute()
    assert (gpu + number).equal(number + gpu)
    assert torch.where(gpu > 0, gpu, number).is_cuda
    assert host.add_(1).add(gpu.cpu()).device.type == "cpu"
    assert torch.stft(gpu.repeat(20), 16, return_complex=True).is_cuda  # makes its window by itself
    assert torch.vmap(lambda row: row + gpu)(torch.rand(2, 3, device="cuda:0")).shape == (2, 3)
    gpu.requires_grad_().cumsum(0).prod().backward()
    assert gpu.grad.is_cuda
    traced = torch.fx.symbolic_trace(WithCat())
    assert traced(gpu).shape == (6,)


class WithCat(nn.Module):
    def forward(self, inputs):
        return torch.cat([inputs + 1, inputs == inputs.mean()])


def casts():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)).cuda(0)
    model.to(torch.float16)
    assert (model[1].weight.dtype, model[1].num_batches_tracked.dtype) == (torch.float16, torch.int64)
    model.to(memory_format=torch.channels_last)
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
    model.to("cuda:1", torch.float32, non_blocking=True)
    assert (model[0].weight.device.index, model[0].weight.dtype) == (1, torch.float32)
    assert torch.ones(1).to(model[0].weight).type() == "torch.cuda.FloatTensor"
    with torch.device("cuda"):
        assert torch.ones(1).half().type() == "torch.cuda.HalfTensor"
        assert torch.ones(1).to(torch.float64, copy=True).type() == "torch.cuda.DoubleTensor"

    square = torch.ones(2, 2, device="cuda")
    with torch.inference_mode():  # where operators come whole
        copies = square.double(), square.t().reshape(4), square.T.contiguous()
        assert {each.device for each in copies} == {square.device}
        assert (square.cpu().double().device.type, square[0].to("cpu", torch.float64).device.type) == ("cpu", "cpu")
    torch.set_autocast_enabled("cuda", True)
    assert torch.is_autocast_enabled("cuda")
    assert not torch.is_autocast_enabled("cpu")
    assert (square @ square).dtype is torch.float16
    assert (square.cpu() @ square.cpu()).dtype is torch.float32  # casts are for GPUs
    assert square.half().softmax(0).dtype is torch.float32
    assert torch.einsum("ij,jk->ik", square, square).dtype is torch.float16
    with pytest.raises(RuntimeError, match="unsafe to autocast"):
        nn.functional.binary_cross_entropy(square, square)
    with torch.autocast("cpu"):
        assert (square.cpu() @ square.cpu()).dtype is torch.bfloat16
        assert (square @ square).dtype is torch.float16
    torch.set_autocast_enabled(False)
    assert (square @ square).dtype is torch.float32
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert torch.get_autocast_dtype("cuda") is torch.get_autocast_gpu_dtype() is torch.bfloat16
        layer, seen = nn.Linear(2, 2).cuda(), []
        layer.register_forward_pre_hook(lambda module, inputs: seen.append(torch.get_autocast_dtype("cuda")))
        outputs = torch.utils.checkpoint.checkpoint(layer, square.requires_grad_(), use_reentrant=False)
    outputs.sum().backward()
    assert seen == [torch.bfloat16] * 2  # computed again in the same dtype
    assert torch.get_autocast_dtype("cuda") is torch.float16


@torch.jit.script
def scripted(inputs: torch.Tensor, device: torch.device):
    return inputs + torch.zeros(3, device=device) + torch.rand(1, device=inputs.device)


def recorded_programs():
    inputs = torch.ones(2, 3, device="cuda:1")
    assert scripted(inputs, torch.device("cuda", 1)).device.index == 1
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU()).to("cuda:1")
    assert torch.jit.script(model)(inputs).device.index == 1
    assert torch.jit.trace(model, inputs)(inputs).device.index == 1

    if torch.__version__.startswith("2.6."):
        return  # crashes where it is exported: docs/rehearse.md

    class WithConstants(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = model[0]

        def forward(self, inputs):
            return self.layer(inputs) @ torch.eye(3, device=inputs.device)

    program = torch.export.export(WithConstants(), (inputs,)).module()
    assert program(inputs).device.index == 1
    torch.testing.assert_close(program(inputs), model[0](inputs))


def nested():
    rows = [torch.ones(2, 3), torch.ones(4, 3)]
    layer = nn.Linear(3, 2).to("cuda:1")
    for layout in (torch.strided, torch.jagged):
        made = torch.nested.nested_tensor(rows, device="cuda:1", layout=layout)
        assert made.device.index == 1 == (made * 2).device.index
        assert made.is_cuda
        assert {row.device.index for row in made.unbind()} == {1}
        assert layer(made).device.index == 1
        moved = torch.nested.nested_tensor(rows, layout=layout).cuda(1)
        assert (moved + moved.to("cuda:1")).device.index == 1
        assert moved.cpu().device.type == "cpu"
        assert moved.to_padded_tensor(0.0).shape == (2, 4, 3)
        torch.nested.to_padded_tensor(layer(moved), 0.0).sum().backward()
        assert layer.weight.grad.device.index == 1


def what_is_made_in_between():
    """Tensors that C++ or Python makes on the way lie where they belong."""
    inputs = torch.randn(2, 5, 3, device="cuda:1")
    net = nn.LSTM(3, 4, batch_first=True).to("cuda:1")
    packed = nn.utils.rnn.pack_padded_sequence(inputs, torch.tensor([5, 2]), batch_first=True)
    outputs, lengths = nn.utils.rnn.pad_packed_sequence(net(packed)[0], batch_first=True)
    assert (outputs.device.index, lengths.device.type) == (1, "cpu")
    outputs.sum().backward()
    assert net.weight_hh_l0.grad.device.index == 1
    assert nn.functional.one_hot(torch.tensor([1, 2], device="cuda:1")).device.index == 1
    assert inputs.new_tensor([1.0]).device.index == 1
    assert torch.histc(torch.tensor([1, 1, 2], device="cuda:1"), bins=2, min=1, max=2).tolist() == [2, 1]
    assert torch.ones(1).type_as(inputs).device.index == 1
    assert inputs.type_as(torch.ones(1).double()).device.type == "cpu"
    assert inputs[torch.tensor([0, 1])].device.index == 1  # indices may lie on the host
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).to("cuda:1")
    torch.utils.checkpoint.checkpoint(layer, outputs.detach(), use_reentrant=False).sum().backward()
    assert {parameter.grad.device.index for parameter in layer.parameters()} == {1}
    torch.set_default_device("cuda:0")
    assert nn.Linear(2, 2).weight.device.index == 0 == torch.tensor([1.0]).device.index
    torch.set_default_device("cpu")
    with torch.device("cuda", 1):
        assert torch.zeros(2).device.index == 1
    assert torch.zeros(2).device.type == "cpu"
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert (inputs @ inputs.mT).dtype is torch.bfloat16


def replicas():
    seen = []

    class Net(nn.Linear):
        def forward(self, inputs):
            seen.append((inputs.device.index, self.weight.device.index, len(inputs)))
            return super().forward(inputs)

    net = Net(4, 2).to("cuda:0")
    inputs = torch.randn(5, 4, device="cuda:0")
    outputs = nn.DataParallel(net, device_ids=[0, 1])(inputs)
    assert sorted(seen) == [(0, 0, 3), (1, 1, 2)]
    outputs.square().sum().backward()
    gradient = net.weight.grad.clone()
    net.zero_grad()
    net(inputs).square().sum().backward()
    torch.testing.assert_close(gradient, net.weight.grad)


def streams_and_memory():
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    stream = torch.cuda.Stream()
    start.record()
    with torch.cuda.stream(stream):
        torch.ones(3, device="cuda")
    torch.cuda.current_stream().wait_stream(stream)
    end.record()
    torch.cuda.synchronize()
    assert start.elapsed_time(end) > 0
    before = torch.cuda.memory_allocated(0)
    block = torch.zeros(2**20, device="cuda:0")
    assert torch.cuda.memory_allocated(0) == before + 4 * 2**20
    assert block[:5].device.index == 0  # a view takes nothing
    assert torch.cuda.memory_allocated(0) == before + 4 * 2**20
    storage = block.untyped_storage()
    storage.resize_(0)  # how memory is given back that others still point to
    assert torch.cuda.memory_allocated(0) == before
    with pytest.raises(torch.cuda.OutOfMemoryError, match=r"allocate 80\.00 MiB"):
        storage.resize_(80 * 2**20)
    storage.resize_(2**20)
    block.resize_(2**20 - 2)
    stats = torch.cuda.memory_stats(0)
    for name in ("allocated_bytes", "active_bytes", "reserved_bytes", "requested_bytes"):
        assert stats[f"{name}.all.current"] == torch.cuda.memory_allocated(0) == before + 4 * 2**20 - 8
    assert stats["active_bytes.all.peak"] == torch.cuda.max_memory_allocated(0)
    assert stats["num_ooms"] == stats["inactive_split_bytes.all.current"] == 0
    with pytest.raises(torch.cuda.OutOfMemoryError, match=r"allocate 64.00 MiB. GPU 0 .* 4.00 MiB is in use"):
        torch.zeros(2**24, device="cuda:0")
    del block, storage
    assert torch.cuda.memory_allocated(0) == before
    assert torch.cuda.max_memory_allocated(0) >= before + 4 * 2**20


def tools_that_look_at_a_gpu():
    assert int(torch.version.cuda.split(".")[0]) >= 11
    torch.cuda.check_error(torch.cuda.cudart().cudaProfilerStart())
    with torch.cuda.profiler.profile():
        torch.cuda.profiler.stop()
    torch.cuda.memory._record_memory_history()
    torch.cuda.memory._dump_snapshot("snapshot.pickle")
    torch.cuda.reset_accumulated_memory_stats()
    assert torch.cuda.memory_snapshot() == []
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        torch.ones(2, device="cuda").exp()
    assert "aten::exp" in profile.key_averages().table(sort_by="cuda_time_total")


def attention():
    from torch.nn.attention import SDPBackend, sdpa_kernel

    query = torch.randn(1, 2, 3, 4, device="cuda")
    expected = nn.functional.scaled_dot_product_attention(query, query, query)
    for kernel in (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        with sdpa_kernel(kernel):
            torch.testing.assert_close(nn.functional.scaled_dot_product_attention(query, query, query), expected)
            assert not torch.backends.cuda.math_sdp_enabled()


def files_and_random_numbers():
    buffer = io.BytesIO()
    torch.save({"weight": torch.ones(2, device="cuda:1")}, buffer)
    for where, index in ((None, 1), ("cuda:0", 0), ({"cuda:1": "cuda:0"}, 0)):
        buffer.seek(0)
        loaded = torch.load(buffer, map_location=where, weights_only=True)
        assert loaded["weight"].device.index == index
    buffer.seek(0)
    assert torch.load(buffer, map_location="cpu", weights_only=True)["weight"].device.type == "cpu"
    torch.manual_seed(3)
    first, host = torch.randn(2, device="cuda"), torch.randn(2)
    torch.manual_seed(3)
    assert host.equal(torch.randn(2))  # the GPU has a generator of its own
    assert first.equal(torch.randn(2, device="cuda"))
    generator = torch.Generator(device="cuda").manual_seed(1)
    again = pickle.loads(pickle.dumps(generator))
    assert generator.device == again.device == generator.clone_state().device == torch.device("cuda", 0)
    assert torch.randn(1, generator=generator, device="cuda").equal(torch.randn(1, generator=again, device="cuda"))
    assert torch.cuda.default_generators[0].initial_seed() == torch.cuda.initial_seed()
    with pytest.raises(RuntimeError, match="Expected a 'cuda' device type for generator but found 'cpu'"):
        torch.randn(1, generator=torch.Generator(), device="cuda")
    with pytest.raises(RuntimeError, match="Expected a 'cpu' device type for generator but found 'cuda'"):
        torch.ones(1).uniform_(generator=generator)
    # What a checkpoint computes again, it computes with the same random numbers.
    for is_reentrant in (True, False):
        ones = torch.ones(100, device="cuda", requires_grad=True)
        dropped = torch.utils.checkpoint.checkpoint(nn.functional.dropout, ones, use_reentrant=is_reentrant)
        dropped.sum().backward()
        assert ones.grad.equal(dropped)


def what_garbage_refers_to():
    """A storage that only a class refers to, which is a cycle, as `torch.save` leaves behind: tensors have it still."""
    layer = nn.Linear(2, 2).to("cuda:1")
    type("Pickler", (), {"storages": [each.untyped_storage() for each in layer.parameters()]})
    gc.collect()
    assert {parameter.device for parameter in layer.parameters()} == {torch.device("cuda", 1)}
    num_bytes = torch.cuda.memory_allocated(1)
    del layer
    assert torch.cuda.memory_allocated(1) < num_bytes


def sequences():
    """What C++ makes on the host, and what Python reads there."""
    assert next(nn.Linear(2, 2).to(torch.ones(1, dtype=torch.float64).cuda()).parameters()).device.type == "cuda"
    assert torch.cuda.get_device_properties(0).L2_cache_size > 0
    assert torch.cuda.nvtx.range("step")(lambda: torch.backends.cudnn.version())() > 8000
    rows = [torch.ones(2, 3).cuda(), torch.ones(1, 3).cuda()]
    assert nn.utils.rnn.pad_sequence(rows, batch_first=True).device == rows[0].device


def what_few_scripts_use():
    """Names of newer torch, layouts, options of nccl."""
    stream, event = torch.Stream(device="cuda"), torch.Event("cuda", enable_timing=True)
    with stream:
        event.record(stream)
    assert stream.query()
    assert event.device.type == "cuda"
    images = torch.ones(2, 3, 4, 4).cuda(memory_format=torch.channels_last)
    assert images.is_contiguous(memory_format=torch.channels_last)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR")
        rows = torch.eye(4).to_sparse_csr().cuda()
    assert (rows @ images[0, 0]).device == rows.device == images.device
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.max_ctas = 4
    assert options.is_high_priority_stream


if __name__ == "__main__":
    torch.cuda.empty_cache()
    torch._C._cuda_clearCublasWorkspaces()  # as Lightning does
    before_it_is_used()
    forks()
    tools_that_look_at_a_gpu()
    attention()
    sequences()
    what_few_scripts_use()
    files_and_random_numbers()
    what_garbage_refers_to()
    streams_and_memory()
    devices_and_moves()
    classes_in_annotations()
    modules_and_gradients()
    what_was_left_on_the_host()
    casts()
    what_is_made_in_between()
    recorded_programs()
    nested()
    replicas()
    print("all of it holds")
