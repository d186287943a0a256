"""Buffers that forward updates: a microbatch leaves what autograd keeps of an earlier one as it was."""

from typing import Any

from torch import Tensor, nn


def _note_updated(stage: nn.Module, names: tuple[str, ...]) -> None:
    """Note on the modules of a stage which of their buffers forward updates."""
    for name in names:
        path, _, key = name.rpartition(".")
        vars(stage.get_submodule(path)).setdefault("_updated", []).append(key)


def _renew_buffers(module: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    """Put copies in the place of the buffers that a forward updates; return what was there."""
    before: list[tuple[nn.Module, str, Tensor]] = []
    copies: dict[int, Tensor] = {}
    for owner in module.modules():
        for key in vars(owner).get("_updated", ()):
            buffer = owner.get_buffer(key)
            if id(buffer) not in copies:
                copies[id(buffer)] = buffer.detach().clone()
            before.append((owner, key, buffer))
            owner._buffers[key] = copies[id(buffer)]
    return before


class _Replay:
    """A module that backward calls again: with the buffers of its first call, and without updating them twice."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.before: list[tuple[nn.Module, str, Tensor]] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.before is None:
            self.before = _renew_buffers(self.module)
            return self.module(*args, **kwargs)
        now = [(owner, key, owner.get_buffer(key)) for owner, key, _ in self.before]
        for owner, key, buffer in self.before:
            owner._buffers[key] = buffer
        _renew_buffers(self.module)
        try:
            return self.module(*args, **kwargs)
        finally:
            for owner, key, buffer in now:
                owner._buffers[key] = buffer
