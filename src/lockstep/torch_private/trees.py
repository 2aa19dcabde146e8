"""torch's functions for nested containers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.torch_private.lookup import need

if TYPE_CHECKING:
    from torch.utils._pytree import tree_flatten as tree_flatten
    from torch.utils._pytree import tree_leaves as tree_leaves
    from torch.utils._pytree import tree_map as tree_map
    from torch.utils._pytree import tree_unflatten as tree_unflatten
else:
    tree_flatten = need("torch.utils._pytree.tree_flatten")
    tree_leaves = need("torch.utils._pytree.tree_leaves")
    tree_map = need("torch.utils._pytree.tree_map")
    tree_unflatten = need("torch.utils._pytree.tree_unflatten")

__all__ = ["tree_flatten", "tree_leaves", "tree_map", "tree_unflatten"]
