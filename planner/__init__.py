"""An automatic model-partitioning planner for PyTorch: profile, solve, emit, verify.

The engines are imported where they are used, `planner.solver` or `planner.profiler` for example: importing this
package costs no torch and no solver.
"""

__version__ = "0.1.0"
