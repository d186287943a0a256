"""What no program can hold, told with its statement and what to do: values read, numbers drawn, hooks, casts."""

import sys

import torch
from torch import nn

from planner.errors import CaptureError
from planner.names import function_name, method_name
from planner.profiler.autocast import Autocasts
from planner.profiler.drawn import drawing_functions
from planner.profiler.functions import PythonRandom
from planner.profiler.parameters import Parameters
from planner.profiler.recording import DrewError, UnrecordableError, source_line
from planner.profiler.torch_internals import unrecorded
from planner.profiler.user_code import user_line
from planner.profiler.values import LOSS, Values
from planner.program import NodeKind

_VALUE_READS = {"__bool__", "item", "tolist", "__int__", "__float__", "__index__", "__contains__"}
_VALUE_READS |= {"numpy", "__array__", "__format__"}
# The errors of operators whose results, or their shapes, depend on values; or that fake tensors don't know.
_VALUE_ERRORS = ("DataDependent", "DynamicOutputShape", "UnsupportedOperator")
_READS = "reads the value of a tensor: the code after it depends on the data, so no fixed program computes it"


_READS_RANDOM = "reads a random number: Python decides by it what runs, so no fixed program computes it"
_VALUE_HINT = (
    "compute it with tensor operations (masks, torch.where), so that all data takes the same code; or put it into the "
    "forward of a module that returns the same shapes for all data: that is then called whole"
)
_LOSS_HINT = (
    "return the loss as the tensor that it is, and let all data take the same code: `(x * mask).sum() / mask.sum()` is "
    "the mean of `x[mask]`"
)
_RANDOM_HINT = (
    "a random number decides here what runs: set its probability to 0 in the model's configuration (layerdrop=0.0, "
    "say) to plan the model without it; or let torch.where choose between the two results"
)
FAKE_HINT = "run the model by itself on what example_inputs(2) gives; recording uses fake tensors on the CPU"


class Checks(Values):
    """The values of a forward, with what finds statements that no program can hold."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.model, self.parameters = model, Parameters(model)
        self.python_random, self.autocasts = PythonRandom(), Autocasts()

    def check_random(self, module: nn.Module | None = None) -> None:
        """Raise UnrecordableError where numbers were drawn that are not torch's: a program would keep them for good.

        `module` is the one whose forward has just ended.
        """
        if self.python_random.drew():
            code = type(module).forward.__code__ if module is not None else None
            where = self.location() if code is None else f"{code.co_filename}:{code.co_firstlineno}"
            scope = self.scopes[-1]
            owner = self.model.get_submodule(scope)
            raise DrewError(
                f"{where}: random numbers of Python or numpy were drawn in {scope or self.root}, here or "
                f"just before: a program would have the same ones in every step{source_line(where)}",
                hint="draw them with torch and keep them in tensors (torch.rand, torch.where); or draw in the forward "
                "of a module of its own, which is then called whole",
                functions=tuple(f"{scope}:{name}" for name in drawing_functions(sys._getframe(), owner)),
            )

    def check_autocast(self) -> None:
        """Raise UnrecordableError under an autocast that the forward enables: a program would leave its casts out."""
        if self.autocasts.enabled():
            where = self.location()
            raise UnrecordableError(
                f"{where}: {self.scopes[-1] or self.root} computes this under its own torch.autocast, whose casts "
                f"no program holds{source_line(where)}",
                hint="take torch.autocast out of the forward and plan with `planner solve --precision bf16-mixed`; or "
                "keep it in the forward of a module of its own, which is then called whole",
            )

    def check_data(self, target: torch.Tensor) -> None:
        """Raise CaptureError where a tensor is given other data (`tensor.data = ...`), which no call tells."""
        where = self.location()
        with unrecorded():
            self.parameters.check_write(target, where)
        raise UnrecordableError(
            f"{where}: `.data = ...` in {self.scopes[-1] or self.root} gives a tensor other data{source_line(where)}",
            hint="write in place (tensor.copy_(...), under torch.no_grad()), or go on with a new tensor",
        )

    def check_hook(self, name: str) -> None:
        """Raise UnrecordableError where the gradient of a value is given a function, which no call tells."""
        where = self.location()
        raise UnrecordableError(
            f"{where}: `{name}` in {self.scopes[-1] or self.root} acts on a gradient in backward, which a program does "
            f"not hold{source_line(where)}",
            hint="put that code into the forward of a module of its own, which is then called whole",
        )

    def check_name(self, kind: NodeKind, target: str) -> None:
        """Raise UnrecordableError for a function that no program may call."""
        try:
            if kind in ("function", "method"):
                (function_name if kind == "function" else method_name)(target)
        except ValueError as error:
            where = self.location()
            raise UnrecordableError(
                f"{where}: `{target}` in {self.scopes[-1] or self.root}: {error}{source_line(where)}",
                hint="put that code into the forward of a module of its own, which is then called whole",
            ) from None

    def check_values(self, name: str, error: Exception, *, random: bool = False) -> None:
        """Raise UnrecordableError where an error means that code depends on values, which may be `random` ones."""
        kind = type(error).__name__
        if isinstance(error, CaptureError) or not (name in _VALUE_READS or kind.startswith(_VALUE_ERRORS)):
            return
        where = self.location()
        said = "has no fake, so only real tensors can go through it" if kind.startswith("Unsupported") else _READS
        said = _READS_RANDOM if random else said
        raise UnrecordableError(
            f"{where}: `{name}` in {self.scopes[-1] or self.root} {said}{source_line(where)}",
            hint=_RANDOM_HINT if random else _LOSS_HINT if self.root == LOSS else _VALUE_HINT,
        ) from error

    def unrecordable(self, name: str, error: Exception) -> UnrecordableError | None:
        """Return why a module's code can't be recorded, from the error that it raised; None where it is refused."""
        if isinstance(error, CaptureError):
            return error if isinstance(error, UnrecordableError) else None
        try:
            self.check_values(name, error)
        except UnrecordableError as reason:
            return reason
        where = user_line(error) or name
        return UnrecordableError(
            f"{where}: fake tensors can't go through a statement in {name}: {type(error).__name__}: "
            f"{str(error).partition(chr(10))[0]}{source_line(where)}",
            hint=FAKE_HINT,
        )
