"""Records one forward of a model as a tree of calls.

Two hooks see everything that happens between modules: `nn.Module.__call__` is wrapped for the modules of the model,
and a `TorchFunctionMode` sees every call of a torch function or tensor method outside the leaf modules. A composite
module's call holds the calls of its own forward in `body`, so that it can be kept as one call or opened.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from planner.arguments import ParamRef, Ref, leaves
from planner.errors import CaptureError
from planner.profiler.buffers import Buffers
from planner.profiler.checks import FAKE_HINT, Checks
from planner.profiler.conversions import converted_modules
from planner.profiler.drawn import Drawn, conversion, tensor_of, watched
from planner.profiler.functions import OPAQUE_FUNCTION, Draws, Run, seen_functions
from planner.profiler.recording import Call, Recording, UnrecordableError, Unsupported, is_leaf
from planner.profiler.targets import target_of
from planner.profiler.torch_internals import LOSS_MODULE, unrecorded
from planner.profiler.value_checks import caller, drop_unread, passing_value
from planner.profiler.values import LOSS, flatten, fresh
from planner.profiler.whole import CannotRunError, WholeRuns

# Calls that turn a tensor into a Python value: under fake tensors they raise; with real ones they would bake a branch.
_COMPARISONS = {"lt", "le", "gt", "ge", "__lt__", "__le__", "__gt__", "__ge__"}
_IN_PLACE_DUNDERS = {
    "__iadd__",
    "__isub__",
    "__imul__",
    "__itruediv__",
    "__ior__",
    "__iand__",
    "__ixor__",
    "__ifloordiv__",
}
_HOOKS = {"register_hook", "register_post_accumulate_grad_hook"}
_FROM_DATA = {"tensor", "as_tensor", "asarray", "new_tensor"}


class _Recorder(Checks, TorchFunctionMode):
    def __init__(self, model: nn.Module, whole: WholeRuns, empty_caches: Callable[[], None]) -> None:
        super().__init__(model)
        self.whole = whole
        self.empty_caches = empty_caches
        self.buffers = Buffers(model)
        self.in_leaf = False
        self.draws = Draws()
        self.uniform: dict[int, Call] = {}  # tensors that are one uniform random number
        self.chances: dict[int, float] = {}  # comparisons of one, with the probability that they are true
        self.random: set[int] = set()  # tensors that come of random numbers alone
        self.takes_unlikely, self.skip_next = False, 0.0
        self.decisions: dict[str, None] = {}
        self.checked: set[str] = set()
        self.check_locations: dict[str, None] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.in_leaf:
            return func(*args, **kwargs)
        self.check_random()
        name = getattr(func, "__name__", str(func))
        if any(isinstance(item, Drawn) for item in (*args, *kwargs.values())):
            return self._make_drawn(func, args, kwargs)
        if name in _HOOKS:
            self.check_hook(name)
        if name == "__set__" and func.__self__ is torch.Tensor.data:
            self.check_data(args[0])
        if name == "__bool__" and id(args[0]) in self.chances:
            return self._decide(self.chances[id(args[0])])
        drawn, versions = self.draws.count, self._versions((args, kwargs))
        try:
            result = func(*args, **kwargs)
        except Exception as error:
            if name in ("__bool__", "item") and (passes := passing_value(caller(1))) is not None:
                return self._passed(args[0], passes)
            self.check_values(name, error, random=bool(args) and id(args[0]) in self.random)
            raise
        if not (name == "__setitem__" or any(isinstance(item, torch.Tensor) for item in flatten(result))):
            return result
        kind, target = target_of(func, name)
        if kind == "skip":
            return result
        self.check_autocast()
        if target == "new" and all(isinstance(item, int | torch.Size) for item in args[1:]):
            target = "new_empty"  # of which it is the older name
        self.check_name(kind, target)
        known = {id(item) for item in flatten((args, kwargs)) if isinstance(item, torch.Tensor)}
        call = self.add(kind, target, tuple(args), kwargs)
        if name in _FROM_DATA and any(type(item).__module__ == "numpy" for item in args[:2]):
            call.kwargs.setdefault("dtype", self.encode(result.dtype))  # numpy's, which lists don't tell
        call.random = self.draws.count > drawn
        call.in_place = (
            name in _IN_PLACE_DUNDERS
            or name == "__setitem__"
            or (name.endswith("_") and not name.endswith("__"))
            or kwargs.get("inplace") is True
            or any(id(item) in known for item in flatten(kwargs.get("out")))
            or bool(self._changed(versions))
        )
        if not call.in_place:
            result = fresh(result, known)
        elif args and isinstance(args[0], torch.Tensor):
            with unrecorded():
                if name != "requires_grad_":  # writes nothing
                    self.buffers.note_write(args[0])
                    self.parameters.check_write(args[0], self.location())
        if call.in_place and any(id(args[0]) == constant for _, constant, _ in self.constants):
            raise self._unknown_tensor(args[0])
        call.result = self.encode(result, defining=True)
        if name == "__setitem__":
            call.result = call.args[0]
        self.frames[-1].append(call)
        if isinstance(result, torch.Tensor):
            only_random = (call.random or bool(known)) and known <= self.random
            (self.random.add if only_random else self.random.discard)(id(result))
        self._note_chance(call, name, args, result)
        return result

    def begin_draw(self, target: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
        """Return the call of a function that draws random numbers; None where nothing is recorded."""
        if self.in_leaf:
            return None
        self.check_random()
        return self.add("draw", target, args, kwargs)

    def _make_drawn(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the tensor made of what a function drew: the call of that function becomes part of the program."""
        options = conversion(func, args, kwargs)
        if options is None:
            self.python_random.spoil()
            self.check_random()
        [drawn] = args
        if drawn.tensor is None:
            drawn.call.random, drawn.call.result = True, self.encode(tensor_of(drawn), defining=True)
            self.frames[-1].append(drawn.call)
        return self.__torch_function__(torch.Tensor.to, (), (tensor_of(drawn),), options)

    def _note_chance(self, call: Call, name: str, args: Any, result: Any) -> None:
        """Keep which tensors are one uniform random number, and with which probability a comparison of one is true."""
        if name == "rand" and isinstance(result, torch.Tensor) and result.dim() == 0:
            self.uniform[id(result)] = call
        elif name in _COMPARISONS and len(args) == 2 and id(args[0]) in self.uniform and type(args[1]) in (int, float):
            below = min(max(float(args[1]), 0.0), 1.0)
            self.chances[id(result)] = below if name.strip("_") in ("lt", "le") else 1.0 - below
            for drawn in (self.uniform.pop(id(args[0])), call):  # a decision of Python's, no part of a program
                self.frames[-1].remove(drawn)

    def _decide(self, probability: float) -> bool:
        """Return the likelier outcome, in which the next module runs that the other one leaves out; else the other."""
        likely = probability > 0.5
        self.decisions[self.location()] = None
        if self.takes_unlikely:
            return not likely
        self.skip_next = min(probability, 1.0 - probability)
        return likely

    def _versions(self, given: Any) -> list[tuple[torch.Tensor, int]]:
        """Return the tensors among arguments that are values, each with how often it was written in place so far."""
        with unrecorded():
            return [
                (item, item._version)
                for item in flatten(given)
                if isinstance(item, torch.Tensor) and id(item) in self.values
            ]

    def _changed(self, versions: list[tuple[torch.Tensor, int]]) -> tuple[Ref, ...]:
        """Return the values that were written in place since."""
        with unrecorded():
            return tuple(
                dict.fromkeys(Ref(str(self.bind(item))) for item, before in versions if item._version > before)
            )

    def _passed(self, condition: torch.Tensor, passes: bool) -> bool:
        """Note that a check of values was passed and is not part of the program; return the truth of its condition."""
        if id(condition) in self.values:
            self.checked.add(str(self.values[id(condition)]))
        self.check_locations[self.location()] = None
        return passes

    def call_function(self, function: type, apply: Run, args: Any, kwargs: Any) -> Any:
        """Apply a custom autograd function; what it does inside is not recorded."""
        if self.in_leaf:
            return apply(*args, **kwargs)
        self.check_autocast()
        call = self.add("function", f"{function.__qualname__}.apply", args, kwargs)
        call.opaque = OPAQUE_FUNCTION
        self.in_leaf, drawn = True, self.draws.count
        try:
            result = apply(*args, **kwargs)
        except Exception as error:
            self.in_leaf = False
            self.check_values(call.target, error)
            raise
        finally:
            self.in_leaf = False
        call.random = self.draws.count > drawn
        known = {id(item) for item in flatten((args, kwargs)) if isinstance(item, torch.Tensor)}
        with unrecorded():
            result = fresh(result, known)
        call.result = self.encode(result, defining=True)
        self.frames[-1].append(call)
        return result

    def call_module(self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Run a module's call, recording it; inside a leaf nothing is recorded."""
        name = self.name_here(self.names.get(id(module), [""]))
        if self.in_leaf or not name or isinstance(module, LOSS_MODULE):  # a loss is seen as the function it calls
            return original(module, *args, **kwargs)
        self.check_random()
        self.check_autocast()
        call = self.add("module", name, args, kwargs)
        given = leaves((call.args, call.kwargs))
        own = not type(module).__module__.startswith("torch.")
        # What no program can hold (a module, say) can't be passed to a leaf: its code is opened, as a composite's is.
        call.leaf = is_leaf(module) and not (own and any(isinstance(leaf, Unsupported) for leaf in given))
        call.skipped_with, self.skip_next = self.skip_next, 0.0
        self.in_leaf = call.leaf and not own
        self.frames.append(call.body)
        self.scopes.append(name)
        drawn, versions = self.draws.count, self._versions((args, kwargs))
        self.empty_caches()
        try:
            result = self._run_module(original, module, call, args, kwargs)
            self.write_buffers(name, module)
        finally:
            self.empty_caches()
            self.frames.pop()
            self.scopes.pop()
            self.in_leaf = False
        call.random = self.draws.count > drawn
        call.written = self._changed(versions)
        call.in_place = bool(call.written)
        if call.leaf:
            known = {id(item) for item in flatten((args, kwargs)) if isinstance(item, torch.Tensor)}
            with unrecorded():  # not a call of the model's
                result = fresh(result, known)
        call.result = self.encode(result, defining=True)
        self.frames[-1].append(call)
        return result

    def _run_module(self, original: Callable[..., Any], module: nn.Module, call: Call, args: Any, kwargs: Any) -> Any:
        """Return what a module's call gives; where a statement of its code can't be recorded, what real data give."""
        try:
            result = original(module, *args, **kwargs)
            self.check_random(module)
            return result
        except Exception as error:
            reason = self.unrecordable(call.target, error)
            if reason is None:
                raise
            call.leaf, call.opaque = True, reason.message
            call.body.clear()
            self.in_leaf = True
            try:
                result = self.whole.run(call.target, module, args, kwargs)
                call.draws_outside = self.python_random.drew()
                return result
            except CannotRunError as refusal:
                if not isinstance(error, CaptureError) and reason.hint == FAKE_HINT:
                    raise error from None  # it may be wrong with real tensors too
                message = f"{reason.message}\n{call.target} can't be called whole: {refusal}"
                raise UnrecordableError(message, hint=reason.hint) from error

    def rename(self, old: torch.Tensor, new: torch.Tensor) -> None:
        """Know a parameter or buffer by another tensor, into which the forward converted it."""
        if id(old) in self.params:
            self.kept.append(new)
            self.params[id(new)] = self.params[id(old)]

    def write_buffers(self, name: str, module: nn.Module) -> None:
        """Record that the buffers a module replaced take the new values in place."""
        for inner_name, inner in module.named_modules(prefix=name) if self.in_leaf else [(name, module)]:
            for old, new in self.buffers.restore(inner_name, inner, self.location()):
                if not self.in_leaf:
                    call = self.add("method", "copy_", (old, new), {})
                    call.in_place, call.result = True, call.args[0]
                    # as early as it can be: behind all that makes the new value or reads the old one
                    frame, names = self.frames[-1], {ParamRef(name) for name in self.params[id(old)]}
                    behind = [i for i, made in enumerate(frame) if _touches(made, names, call.args[1])]
                    frame.insert(behind[-1] + 1 if behind else 0, call)


def _touches(call: Call, old: set[ParamRef], new: Any) -> bool:
    """Return whether a call reads or writes a buffer, by any of its names, or makes the value that replaces it."""
    found = {leaf for leaf in leaves((call.args, call.kwargs, call.result)) if isinstance(leaf, ParamRef)}
    return bool(found & old) or new in leaves(call.result) or any(_touches(inner, old, new) for inner in call.body)


@contextmanager
def _patched_module_call(recorder: _Recorder) -> Iterator[None]:
    original = nn.Module.__call__

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return recorder.call_module(original, module, args, kwargs)

    nn.Module.__call__ = call  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__call__ = original  # type: ignore[method-assign]


def record(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    inputs: dict[str, torch.Tensor],
    targets: dict[str, torch.Tensor],
    loss: Callable[[Any], Any] | None,
    whole: WholeRuns,
    begin: Callable[[], None],
    *,
    empty_caches: Callable[[], None] = lambda: None,
    takes_unlikely: bool = False,
    drawing: tuple[str, ...] = (),
) -> Recording:
    """Return the recording of `model(*args, **kwargs)` and of `loss(output)`.

    `inputs` names the tensors among the arguments, `targets` those that the loss reads beside the output. Call it under
    the fake-tensor mode that the tensors belong to. `whole` runs modules whose code looks at values, `begin` is called
    first, `empty_caches` where the code of a module begins. Where Python decides by a uniform random number what runs,
    the likelier way is taken, or with `takes_unlikely` the other one. `drawing` are the functions of the model's code
    ('module:function') whose random numbers become draws.
    """
    recorder = _Recorder(model, whole, empty_caches)
    recorder.takes_unlikely = takes_unlikely
    named = {name: recorder.bind(tensor) for name, tensor in inputs.items()}
    hooks = (_patched_module_call(recorder), seen_functions(recorder.call_function), converted_modules(recorder.rename))
    kept = recorder.parameters.kept(recorder.location)
    drawn = watched(model, drawing, recorder.python_random, recorder.begin_draw)
    with recorder.draws, recorder.autocasts.seen(), hooks[0], hooks[1], hooks[2], kept, drawn, recorder:
        with unrecorded():
            begin()
        output = model(*args, **kwargs)
        recorder.check_random(model)
        whole.check_left()
        for name, module in model.named_modules():
            recorder.write_buffers(name, module)
        calls = recorder.frames[0]
        recorder.frames[0] = []
        structure = recorder.encode(output, defining=True)
        asked = {name: recorder.bind(tensor) for name, tensor in targets.items()}
        recorder.root = LOSS
        scalar = recorder.encode(loss(output), defining=True) if loss is not None else structure
    if recorder.checked:
        drop_unread((calls, recorder.frames[0]), (structure, scalar), recorder.checked)
    return Recording(
        inputs=named,
        targets=asked,
        calls=calls,
        output=structure,
        loss_calls=recorder.frames[0],
        decisions=tuple(recorder.decisions),
        loss=scalar,
        tensors=recorder.tensors,
        constants=tuple((location, values) for location, _, values in recorder.constants),
        updated_buffers=recorder.buffers.updated(),
        checks=tuple(recorder.check_locations),
    )
