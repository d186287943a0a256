"""The helper section of every emitted plan, as real Python files: written into plan.py, never imported by planner.

The emitter joins `FILES` in order: plain imports are hoisted and merged, imports from this package are dropped, and
each file's docstring becomes a comment. `generated` only tells type checkers what the emitter puts beside them.
"""

FILES = (
    "checks",
    "communication",
    "tensor_parallel",
    "buffers",
    "generators",
    "stage",
    "build",
    "data_parallel",
    "counting",
    "executor",
    "ranks",
    "inputs",
    "runtime",
)
