"""Tensor-parallel rules: which parameters of a layer can be divided over ranks, and what that changes in its code.

The rules follow from the layer's recorded body, never from class names: the state of every value (replicated, or
divided along one dimension) is propagated through the operations, and shape constants are rewritten where the
propagation says that their dimension is divided.
"""

from planner.tp_rules.apply import ENTERED, rewrite_node
from planner.tp_rules.search import find_shardings, standalone_sharding
from planner.tp_rules.state import ModuleInfo, Shard

__all__ = ["ENTERED", "ModuleInfo", "Shard", "find_shardings", "rewrite_node", "standalone_sharding"]
