"""The file a user hands in: `build_model`, `example_inputs(batch_size)` and, where needed, a loss.

Importing a user's file runs it, as `python model.py` would, except that `__name__` is not `"__main__"`. Nothing here
imports torch; a Hugging Face configuration is handled by `planner.hugging_face`.
"""

import ast
import hashlib
import importlib.util
import re
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from planner.errors import CaptureError, PlannerError, UsageError
from planner.example_rows import for_any_rows, takes_rows
from planner.torchvision_operators import declare_missing_operators

_SPEC = re.compile(r"(?P<path>.+):(?P<name>[^\W\d]\w*)")


@dataclass(frozen=True, kw_only=True)
class ModelFile:
    """The functions of a model file; `loss_fn` and `example_target` are None where the file has none.

    `notes` is what a user should know of how they are called.
    """

    path: Path
    build: Callable[[], Any]
    example_inputs: Callable[[int], Any]
    loss_fn: Callable[..., Any] | None = None
    example_target: Callable[[int], Any] | None = None
    build_function: str = "build_model"
    inputs_function: str = "example_inputs"
    notes: tuple[str, ...] = ()


def load_model_file(spec: str, *, inputs: str | None = None) -> ModelFile:
    """Return the functions of `model.py`, `model.py:make`, or a Hugging Face `config.json` or its folder.

    `inputs` names the function of example inputs. UsageError where the file or a function is missing, CaptureError
    with the file's own line where importing it raises.
    """
    path, build_function = split_spec(spec)
    declare_missing_operators()
    if path.is_dir() or path.suffix == ".json":
        from planner.hugging_face import hugging_face_model

        return hugging_face_model(path)
    inputs_function = inputs or "example_inputs"
    tree = _parse(path)
    for name in (build_function, inputs_function):
        if name not in _defined_names(tree) and not _has_star_import(tree):
            raise _missing_function(path, tree, name, build_function, inputs_function)
    module = _import(path)
    functions = {}
    for name in (build_function, inputs_function):
        function = getattr(module, name, None)
        if not callable(function):
            raise _missing_function(path, tree, name, build_function, inputs_function)
        functions[name] = function
    target = _optional_function(module, path, "example_target")
    fixed = [name for name in (inputs_function, "example_target") if not takes_rows(getattr(module, name, len))]
    return ModelFile(
        path=path,
        build=functions[build_function],
        example_inputs=for_any_rows(functions[inputs_function], path),
        loss_fn=_optional_function(module, path, "loss_fn"),
        example_target=None if target is None else for_any_rows(target, path),
        build_function=build_function,
        inputs_function=inputs_function,
        notes=tuple(
            f"{name}() takes no number of rows: those that it returns, along dimension 0, are repeated"
            for name in fixed
        ),
    )


def _optional_function(module: ModuleType, path: Path, name: str) -> Callable[..., Any] | None:
    """Return a function that a model file may have, or None; CaptureError where the name is something else."""
    found: Callable[..., Any] | None = getattr(module, name, None)
    if found is not None and not callable(found):
        raise CaptureError(
            f"{path.name}: {name} is of type {type(found).__name__}, not a function",
            hint=f"write it as `def {name}(...)`, or give it another name",
        )
    return found


def split_spec(spec: str) -> tuple[Path, str]:
    """Return the path and the build function of `model.py` or `model.py:make`; UsageError if there is no such file."""
    path, build_function = Path(spec), "build_model"
    if not path.exists() and (match := _SPEC.fullmatch(spec)):
        path, build_function = Path(match["path"]), match["name"]
    if not path.exists():
        raise UsageError(
            f"model file {str(path)!r} does not exist",
            hint="give the path of a Python file with build_model(), or of a Hugging Face config.json",
        )
    return path.resolve(), build_function


def split_arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return what `example_inputs` gave as positional and keyword arguments of the model.

    Takes a tuple or list, a dict, a pair (tuple, dict), or one tensor; CaptureError for anything else.
    """
    if isinstance(inputs, dict):
        return (), inputs
    if isinstance(inputs, tuple | list):
        if len(inputs) == 2 and isinstance(inputs[0], tuple) and isinstance(inputs[1], dict):
            return inputs[0], inputs[1]
        return tuple(inputs), {}
    if hasattr(inputs, "shape") and hasattr(inputs, "dtype"):
        return (inputs,), {}
    raise CaptureError(
        f"example_inputs returned {type(inputs).__name__}, not arguments for the model",
        hint="return a tuple of positional or a dict of keyword arguments",
    )


def model_hash(model: Any) -> str:
    """Return 16 hex digits over the names and shapes of a model's parameters and buffers, ties included, in order."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    text = "\n".join(f"{name} {tuple(tensor.shape)}" for name, tensor in named)
    return hashlib.sha256(text.encode()).hexdigest()[:16]  # an emitted plan computes the same in `setup`


def user_error(
    error: BaseException, path: Path, what: str, *, function: Callable[..., Any] | None = None, hint: str = ""
) -> PlannerError:
    """Return a CaptureError for what the user's code raised while `what` happened, with the last line of their file.

    `function` is the one that was called: where no line of the file was reached, its first one is told.
    """
    if isinstance(error, PlannerError):
        return error
    kind, where = type(error).__name__, path.name
    code = getattr(function, "__code__", None)
    if isinstance(error, SyntaxError) and error.filename == str(path):
        where += f" line {error.lineno}"
    else:
        lines = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        if lines:
            where += f" line {lines[-1].lineno}, in {lines[-1].name}"
        elif code is not None and code.co_filename == str(path):
            where += f" line {code.co_firstlineno}"
    message = str(error) or "(no message)"
    return CaptureError(
        f"{where}: {what} raised {kind}: {message}",
        hint=hint or gpu_hint(error) or f"correct {path.name}, then try again",
    )


def gpu_hint(error: BaseException) -> str:
    """Return what to do about an error that comes from code for a GPU; nothing for others."""
    if not any(word in f"{type(error).__name__} {error}" for word in ("CUDA", "cuda", "NVIDIA", "DeviceMismatch")):
        return ""
    return (
        "planner runs this code without a GPU: build the model on the CPU, make tensors in forward where the inputs "
        'are (device=x.device), and put what needs a GPU under `if __name__ == "__main__":`'
    )


def _parse(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_bytes(), filename=str(path))
    except (SyntaxError, ValueError) as error:
        raise user_error(error, path, "reading it") from None
    except OSError as error:
        raise UsageError(f"model file {str(path)!r} can't be read: {error.strerror}", hint="check the path") from None


def _import(path: Path) -> ModuleType:
    name = f"planner_model_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"model file {str(path)!r} is not a Python file", hint="give a file that ends in .py")
    module = importlib.util.module_from_spec(spec)
    folder, arguments = str(path.parent), sys.argv
    if folder in sys.path:
        sys.path.remove(folder)
    sys.path.insert(0, folder)  # stays: functions of the file may import their neighbours when they are called
    sys.modules[name] = module  # dataclasses and pickle look their module up by name
    sys.argv = [str(path)]
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        hint = ""
        if isinstance(error, SystemExit):
            hint = f'planner imports {path.name}: put what runs it as a script under `if __name__ == "__main__":`'
        raise user_error(error, path, "importing it", hint=hint) from error
    finally:
        sys.argv = arguments
    return module


def _defined_names(tree: ast.Module) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update((alias.asname or alias.name).split(".")[0] for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def _has_star_import(tree: ast.Module) -> bool:
    return any(isinstance(node, ast.ImportFrom) and node.names[0].name == "*" for node in ast.walk(tree))


def module_classes(tree: ast.Module) -> list[ast.ClassDef]:
    """Return the nn.Module classes of a parsed file, those built by none of the others first."""
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}

    def is_module(node: ast.ClassDef, depth: int = 0) -> bool:
        bases = [ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases]
        return depth < 20 and any(
            base.endswith(("Module", "PreTrainedModel", "Sequential", "ModuleList"))
            or (base in classes and is_module(classes[base], depth + 1))
            for base in bases
        )

    found = [node for node in classes.values() if is_module(node)]
    used = {
        name.id
        for node in classes.values()
        for name in ast.walk(node)
        if isinstance(name, ast.Name) and name.id in classes and name.id != node.name
    }
    return sorted(found, key=lambda node: node.name in used)


def _missing_function(
    path: Path, tree: ast.Module, missing: str, build_function: str, inputs_function: str
) -> UsageError:
    classes = module_classes(tree)
    names = ", ".join(node.name for node in classes)
    found = f"; its nn.Module classes: {names}" if names else "; it has no nn.Module class either"
    lines = []
    if missing == build_function or build_function not in _defined_names(tree):
        make = f"{classes[0].name}({_required(classes[0], '__init__')})" if classes else "YourModel()"
        lines += [f"def {build_function}():", f"    return {make}", ""]
    if inputs_function not in _defined_names(tree):
        names = _required(classes[0], "forward") if classes else ""
        comment = f"  # the arguments of forward: {names}" if names else ""
        lines += [f"def {inputs_function}(batch_size):", f"    return (torch.randn(batch_size, 16),){comment}", ""]
    shown = "\n".join(f"    {line}".rstrip() for line in lines).rstrip()
    option = f"{path.name}:NAME" if missing == build_function else "--inputs NAME"
    return UsageError(
        f"{path.name} has no function {missing!r}{found}",
        hint=f"add these lines to {path.name} (or name another function as {option}):\n\n{shown}\n",
    )


def _required(node: ast.ClassDef, method: str) -> str:
    function = next((item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == method), None)
    if function is None:
        return ""
    positional = function.args.posonlyargs + function.args.args
    return ", ".join(argument.arg for argument in positional[1 : len(positional) - len(function.args.defaults)])
