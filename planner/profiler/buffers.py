"""Follows the buffers that a forward updates: written in place, or replaced by a new tensor (`self.mean = ...`)."""

from collections.abc import Iterator

import torch
from torch import nn

from planner.errors import CaptureError
from planner.units import counted


class Buffers:
    """The buffers of a model at the beginning of a forward."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._held = {
            (id(module), key): buffer
            for module in model.modules()
            for key, buffer in module._buffers.items()
            if buffer is not None
        }
        self._versions = {id(buffer): buffer._version for buffer in self._held.values()}
        self._storages: dict[int, list[torch.Tensor]] = {}
        for buffer in self._held.values():
            self._storages.setdefault(_storage(buffer), []).append(buffer)
        self._changed: set[int] = set()

    def restore(self, name: str, module: nn.Module, location: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield (buffer, what took its place) for every buffer that a module replaced, when the buffer is back.

        The caller copies the values: a program writes buffers in place, so that the next microbatch finds them.
        """
        for key, new in module._buffers.items():
            old = self._held.get((id(module), key))
            if old is None or new is old:
                continue
            if new is not None and _is_same(old, new):  # moved to where it was: `self.table = self.table.to(device)`
                module._buffers[key] = old
                continue
            where = f"{name}.{key}" if name else key
            if new is None or new.shape != old.shape or new.dtype != old.dtype:
                before, after = _shown(old), "None" if new is None else _shown(new)
                raise CaptureError(
                    f"{location}: forward replaces buffer {where!r}, {before}, by {after}",
                    hint="keep the shape and dtype of buffers, or pass what changes as an input and an output",
                )
            if new.requires_grad:
                raise CaptureError(
                    f"{location}: forward replaces buffer {where!r} by a value that has a gradient, so the next batch "
                    "would go back through this one",
                    hint="detach what a buffer keeps: self.buffer = value.detach()",
                )
            module._buffers[key] = old
            self._changed.add(id(old))
            yield old, new

    def note_write(self, target: torch.Tensor) -> None:
        """Note a write in place, which the version of a buffer does not tell where it goes through `buffer.data`."""
        self._changed.update(id(buffer) for buffer in self._storages.get(_storage(target), ()))

    def updated(self) -> tuple[str, ...]:
        """Return the names of the buffers that the forward changed, every name of each."""
        changed = {id(buffer) for buffer in self._held.values() if buffer._version > self._versions[id(buffer)]}
        changed |= self._changed
        for module in self._model.modules():  # their kernels write without telling
            if isinstance(module, nn.modules.batchnorm._NormBase) and module.training and module.track_running_stats:
                changed |= {id(module.running_mean), id(module.running_var)}
        named = self._model.named_buffers(remove_duplicate=False)
        return tuple(name for name, buffer in named if id(buffer) in changed)


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _is_same(old: torch.Tensor, new: torch.Tensor) -> bool:
    """Return whether a tensor is a view of all of another one, in its order."""
    layouts = [(t.dtype, t.shape, t.stride(), t.storage_offset()) for t in (old, new)]
    return layouts[0] == layouts[1] and _storage(old) == _storage(new) and not new.requires_grad


def _shown(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"


def update_notes(model: nn.Module, updated: tuple[str, ...]) -> list[str]:
    """Return what to tell of buffers that forward updates; running statistics of norms are told elsewhere."""
    statistics = {
        f"{name}.{key}" if name else key
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, nn.modules.batchnorm._NormBase)
        for key in module._buffers
    }
    others = [name for name in updated if name not in statistics]
    if not others:
        return []
    count = len(others) - 1
    shown = f"{others[0]!r}" + (f" and {counted(count, 'other')}" if count else "")
    return [
        (
            f"forward updates {shown}: microbatches do so one after another, as in one process, but with dp_degree "
            "over 1 every replica updates its own from its own rows alone; --pin dp_degree=1 avoids that"
        )
    ]
