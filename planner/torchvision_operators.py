"""torchvision beside a torch that its compiled operators were not made for, as with a CPU torch and a wheel for CUDA.

There `import torchvision` raises `operator torchvision::nms does not exist`, and with it the import of most models of
transformers and timm, none of which calls the operator: torchvision registers shapes for it whether or not it loaded.
"""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_NEEDS_OPERATORS = "torchvision._meta_registrations"  # the module that asks for them, after torchvision.extension
_OPERATORS = ("nms", "qnms")
_declared: list[Any] = []  # a Library takes its operators with it when it is collected


def declare_missing_operators() -> None:
    """Have `import torchvision` declare the operators that it needs and whose library it could not load.

    Nothing is imported and nothing changes until then, nor where they loaded or the user's own file declared them.
    """
    if not any(isinstance(finder, _BeforeTorchvision) for finder in sys.meta_path):
        sys.meta_path.insert(0, _BeforeTorchvision())


class _BeforeTorchvision(MetaPathFinder):
    """Finds no module; declares the operators at the moment in which torchvision is about to ask for them."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == _NEEDS_OPERATORS and not _loaded(sys.modules.get("torchvision.extension")):
            import torch

            library: Any = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
            for name in _OPERATORS:
                try:
                    library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
                except RuntimeError:  # declared before, by the model file
                    continue
            _declared.append(library)
        return None


def _loaded(extension: ModuleType | None) -> bool:
    has_operators = getattr(extension, "_has_ops", None)
    return not callable(has_operators) or bool(has_operators())
