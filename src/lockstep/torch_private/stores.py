"""Classes that `torch.distributed` offers at run time and keeps from type checkers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    from torch._C._distributed_c10d import FileStore as FileStore
    from torch._C._distributed_c10d import GradBucket as GradBucket
    from torch._C._distributed_c10d import HashStore as HashStore
    from torch._C._distributed_c10d import PrefixStore as PrefixStore
    from torch._C._distributed_c10d import Store as Store
    from torch._C._distributed_c10d import TCPStore as TCPStore
    from torch._C._distributed_c10d import Work as Work
else:
    FileStore, HashStore, PrefixStore, TCPStore = dist.FileStore, dist.HashStore, dist.PrefixStore, dist.TCPStore
    GradBucket, Store, Work = dist.GradBucket, dist.Store, dist.Work

__all__ = ["FileStore", "GradBucket", "HashStore", "PrefixStore", "Store", "TCPStore", "Work"]
