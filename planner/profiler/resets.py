"""Opens layers that read attributes which code outside of them sets, as where a model resets the state of its layers.

A plan calls layers, and none of the code between them that sets attributes: a layer called whole finds what it left
there itself at its last call, or was built with. Where that would make another forward of it, the layer is opened down
to the module that the attribute belongs to: the program then holds what a forward reads, and nothing is kept.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from planner.errors import CaptureError
from planner.model_file import ModelFile
from planner.profiler.blocks import open_calls, select_calls
from planner.profiler.capture import Capture
from planner.profiler.hidden import called_whole
from planner.profiler.loss_state import flat
from planner.profiler.merging import ROWS, StructureDiffersError, merge, same_leaf
from planner.profiler.one_recording import record_once
from planner.profiler.recording import Call, Recording
from planner.profiler.state import Attributes, attributes_to_set, state_of
from planner.profiler.whole import plain_attributes, same, set_outside


def open_reset(file: ModelFile, captured: Capture, dtype: torch.dtype | None, blocks: tuple[str, ...]) -> None:
    """Mark the calls that have to be opened because code outside sets what they read; CaptureError where that fails."""
    if not captured.changed_modules:
        return
    _open(file, captured, dtype, lambda: open_calls(captured.calls))  # what a divided layer calls
    _open(file, captured, dtype, lambda: select_calls(captured.model, captured.calls, blocks))


def _open(file: ModelFile, captured: Capture, dtype: torch.dtype | None, select: Callable[[], Iterable[Call]]) -> None:
    """Open calls among those that `select` gives until a model that is called as planned computes what it did."""
    while True:
        called = frozenset(call.target for call in select() if call.kind == "module")
        planned = _AsPlanned(captured.model, called, called_whole(captured.calls))
        where = _difference(file, captured, dtype, planned)
        if not where and not planned.changed_unseen:
            return
        if planned.changed_unseen:
            raise set_outside(planned.changed_unseen)
        opened = [call for call in flat(captured.calls) if call.target in planned.chains and call.kind == "module"]
        if not any(call.leaf or not call.escapes for call in opened) or any(call.opaque for call in opened):
            raise set_outside(planned.changed, where)
        for call in opened:
            call.leaf, call.escapes = False, True


def _difference(file: ModelFile, captured: Capture, dtype: torch.dtype | None, planned: "_AsPlanned") -> str:
    """Return where the first or the second forward of the model called as planned differs from the one recorded."""
    state: Attributes = {}
    for _ in range(2):
        try:
            with planned.active():
                found = record_once(file, captured.model, ROWS[0], dtype, training=True, all_floats=False, state=state)
            merge(captured.base, found, same_leaf)
        except StructureDiffersError as error:
            return error.location
        except CaptureError as error:
            return error.message.partition(": ")[0]
        state = planned.state(found)
    return ""


class _AsPlanned:
    """Calls some modules of a model as a plan does: with the attributes they were built with, or left themselves.

    `changed` names those that code outside had changed, `changed_unseen` those of modules whose code was not recorded
    (torch's, and those that are called `whole`), `chains` the modules from a called one down to their owners.
    """

    def __init__(self, model: nn.Module, called: frozenset[str], whole: Iterable[str]) -> None:
        self.model, self.whole = model, tuple(whole)
        self.names = {id(module): name for name, module in model.named_modules() if name in called}
        self.built = _attributes(model, "")
        self.left: dict[str, Attributes] = {}
        self.changed: set[str] = set()
        self.changed_unseen: set[str] = set()
        self.chains: set[str] = set()
        self.inside = False

    @contextmanager
    def active(self) -> Iterator[None]:
        """Call modules so inside; a recording wraps its own calls around these."""
        original = nn.Module.__call__

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return self._call(original, module, args, kwargs)

        nn.Module.__call__ = call  # type: ignore[method-assign]
        try:
            yield
        finally:
            nn.Module.__call__ = original  # type: ignore[method-assign]

    def _call(self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        if module is self.model:  # a forward begins
            self.left = {name: _attributes(self.model.get_submodule(name), name) for name in self.names.values()}
        name = self.names.get(id(module))
        if name is None or self.inside:
            return original(module, *args, **kwargs)
        self._give_back(name, module)
        self.inside = True
        try:
            return original(module, *args, **kwargs)
        finally:
            self.inside = False
            self.left[name] = _attributes(module, name)

    def _give_back(self, name: str, module: nn.Module) -> None:
        """Give a module and those inside the attributes of its last call."""
        found, left = _attributes(module, name), self.left[name]
        for key in [key for key in {**found, **left} if key not in left or not same(found.get(key), left[key])]:
            owner, attribute = key
            self._note(name, owner, attribute, key in left)
            attributes = vars(self.model.get_submodule(owner))
            if key in left:
                attributes |= plain_attributes({attribute: left[key]})
            else:
                del attributes[attribute]

    def _note(self, name: str, owner: str, attribute: str, was_there: bool) -> None:
        full = f"{owner}.{attribute}".removeprefix(".")
        self.changed.add(full)
        parts = owner.split(".")
        above = len(name.split(".")) if name else 0
        self.chains.update(".".join(parts[:end]) for end in range(max(above, 1), len(parts) + 1))
        # What these modules do is not recorded: whether they read it shows nowhere.
        in_torch = was_there and type(self.model.get_submodule(owner)).__module__.startswith("torch.")
        if in_torch or self._is_whole(owner):
            self.changed_unseen.add(full)

    def _is_whole(self, owner: str) -> bool:
        return any(f"{owner}.".startswith(f"{whole}.") for whole in self.whole)

    def state(self, recording: Recording) -> Attributes:
        """Return the attributes that a second forward finds: those of called modules as their last call left them."""
        kept = {
            key: value
            for left in self.left.values()
            for key, value in left.items()
            if key[1] != "training" and not same(self.built.get(key), value)
        }
        inside = {key for left in self.left.values() for key in left if not self._is_whole(key[0])}
        outside = {key: value for key, value in recording.kept.items() if key not in inside}
        return state_of(
            replace(recording, kept=kept | outside), dict(self.model.named_parameters(remove_duplicate=False))
        )


def _attributes(module: nn.Module, name: str) -> Attributes:
    """Return the attributes of a module and those inside, by the full name of their owner."""
    return {
        (".".join(part for part in (name, owner) if part), key): value
        for owner, inner in module.named_modules()
        for key, value in attributes_to_set(inner).items()
    }
