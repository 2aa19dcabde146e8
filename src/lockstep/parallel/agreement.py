"""Checks that all ranks hold the same model, and broadcasts rank 0's tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from lockstep.comm.wording import describe_tensor
from lockstep.errors import ModelMismatch

__all__ = ["broadcast_tensors", "check_same_model"]

# Tensors are broadcast in groups of this size, so that many small ones cost one call.
_GROUP_BYTES = 32 << 20


def check_same_model(
    tensors: Mapping[str, torch.Tensor],
    settings: Mapping[str, object],
    group: dist.ProcessGroup,
    device: torch.device,
) -> None:
    """Compare names, shapes, dtypes, memory formats and requires_grad over ranks, and settings. Collective.

    Args:
        tensors: name -> parameter or buffer, in order.
        settings: name -> value, in order, of whatever else ranks must agree on.
        group: the ranks that compare.
        device: where the group's collectives want their tensors.

    Raises:
        ModelMismatch: on every rank; names the first entry that differs, on both sides.
    """
    lines = [f"{name}: {_describe(tensor)}" for name, tensor in tensors.items()]
    lines += [f"{name}={value}" for name, value in settings.items()]
    text = "\n".join(lines).encode()
    digest = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
    own = torch.tensor([digest, len(text)], dtype=torch.int64, device=device)
    rows = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(rows, own, group=group)
    summaries = torch.stack(rows).cpu()
    if bool((summaries[:, 0] == summaries[0, 0]).all()):
        return
    texts = _gather_texts(text, summaries[:, 1].tolist(), group, device)
    reference = texts[0].split("\n")
    for rank, other_text in enumerate(texts):
        other = other_text.split("\n")
        for index in range(max(len(reference), len(other))):
            here = reference[index] if index < len(reference) else "nothing more"
            there = other[index] if index < len(other) else "nothing more"
            if here != there:
                ranks = dist.get_process_group_ranks(group)
                raise ModelMismatch(
                    f"ranks hold different models. First difference: rank {ranks[0]} has {here or 'nothing'}; rank "
                    f"{ranks[rank]} has {there or 'nothing'}. Build the same model on every rank, and wrap it with the "
                    "same arguments"
                )


def _describe(tensor: torch.Tensor) -> str:
    text = describe_tensor(tensor)
    if not tensor.requires_grad:
        return f"{text} (no gradient)"
    # Gradients lie in the buckets in the order of memory.
    laid_out = torch.empty_like(tensor, device="meta")
    return text if laid_out.is_contiguous() else f"{text} with strides {list(laid_out.stride())}"


def _gather_texts(text: bytes, lengths: Sequence[int], group: dist.ProcessGroup, device: torch.device) -> list[str]:
    padded = torch.zeros(max(max(lengths), 1), dtype=torch.uint8, device="cpu")
    if text:
        padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    own = padded.to(device)
    rows = [torch.empty_like(own) for _ in lengths]
    dist.all_gather(rows, own, group=group)
    return [bytes(row[:length].cpu().numpy()).decode() for row, length in zip(rows, lengths, strict=True)]


def broadcast_tensors(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup, source: int | None = None) -> None:
    """Overwrite `tensors` by those of one rank. Collective.

    Args:
        tensors: the same list of shapes and dtypes on all ranks.
        group: the ranks that take part.
        source: rank in the group whose tensors all get; default the first.

    Writes through `.data`, so that a tensor which autograd has saved may be overwritten: the running
    statistics of batch normalisation, which its backward pass does not use.
    """
    if group.size() == 1:
        return
    source_in_group = source or 0
    global_source = dist.get_process_group_ranks(group)[source_in_group]
    by_kind: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel() > 0:
            by_kind.setdefault((tensor.dtype, tensor.device), []).append(tensor.data)
    for members in by_kind.values():
        for batch in _batches(members):
            flat = torch.cat([tensor.reshape(-1) for tensor in batch])
            dist.broadcast(flat, global_source, group=group)
            if group.rank() != source_in_group:
                pieces = torch.split(flat, [tensor.numel() for tensor in batch])
                for tensor, piece in zip(batch, pieces, strict=True):
                    tensor.copy_(piece.view(tensor.shape))


def _batches(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    batches: list[list[torch.Tensor]] = [[]]
    size = 0
    for tensor in tensors:
        num_bytes = tensor.numel() * tensor.element_size()
        if batches[-1] and size + num_bytes > _GROUP_BYTES:
            batches.append([])
            size = 0
        batches[-1].append(tensor)
        size += num_bytes
    return batches
