"""Tensor-parallel rules: which parameters of a layer can be divided over ranks, and what that changes in its code.

The rules follow from the layer's recorded body, never from class names. What every operation can do with divided
values becomes a table (`tables`); an integer program (`integer_program`) finds the best ways to run the whole layer
(`candidates`), and shape constants are rewritten where the propagation says that their dimension is divided.
"""

from planner.tp_rules.apply import moves_after, rewrite_node, rewrite_output
from planner.tp_rules.candidates import find_shardings, refusals
from planner.tp_rules.layer import LayerBody, live_nodes
from planner.tp_rules.overrides import OPTION, StyleRule, TpRule, layer_rules, parse_rules
from planner.tp_rules.standalone import standalone_sharding
from planner.tp_rules.state import ModuleInfo, Shard

__all__ = [
    "OPTION",
    "LayerBody",
    "ModuleInfo",
    "Shard",
    "StyleRule",
    "TpRule",
    "find_shardings",
    "layer_rules",
    "live_nodes",
    "moves_after",
    "parse_rules",
    "refusals",
    "rewrite_node",
    "rewrite_output",
    "standalone_sharding",
]
