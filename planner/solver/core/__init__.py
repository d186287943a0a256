"""The part of the solver that any price plugs into: down-sets of a graph, and the best chain of stages between them."""
