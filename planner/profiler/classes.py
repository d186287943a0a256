"""Opens each layer class once: the body of its module, and how that can be divided by tensor parallelism."""

import inspect
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from planner.arguments import ParamRef, Ref, leaves, map_argument
from planner.profiler.blocks import hidden_inputs, open_calls
from planner.profiler.capture import Capture
from planner.profiler.divisible import kind_of
from planner.profiler.layers import build_program
from planner.profiler.plain_tensors import constants
from planner.profiler.recording import Call
from planner.program import Program, Tensor
from planner.sharding import Sharding
from planner.tp_rules import LayerBody, ModuleInfo, TpRule, find_shardings, layer_rules, standalone_sharding

# torch's own modules that map every element by itself, by their documentation.
_ELEMENTWISE = (
    *(nn.Dropout, nn.AlphaDropout, nn.Identity, nn.GELU, nn.SiLU, nn.ReLU, nn.ReLU6, nn.ELU, nn.SELU, nn.CELU, nn.Mish),
    *(
        nn.LeakyReLU,
        nn.Tanh,
        nn.Sigmoid,
        nn.LogSigmoid,
        nn.Hardswish,
        nn.Hardsigmoid,
        nn.Hardtanh,
        nn.Softplus,
        nn.Softsign,
    ),
)


@dataclass(frozen=True)
class OpenedClass:
    """The body of a layer class, None where it is one leaf module; `signature` names what it is called with."""

    body: Program | None
    signature: tuple[tuple[str, Any], ...]
    modules: dict[str, ModuleInfo]
    parameter_shapes: dict[str, tuple[int, ...]]


def open_class(capture: Capture, call: Call) -> OpenedClass:
    """Return the opened body of the layer class that a module call stands for."""
    module = capture.model.get_submodule(call.target)
    shapes = {
        name: tuple(tensor.shape)
        for name, tensor in (*module.named_parameters(remove_duplicate=False), *constants(module).items())
    }
    call = _opened_leaves(capture.model, call)
    if call.leaf:
        return OpenedClass(None, (), {"": _module_info(capture, call, module)}, shapes)
    call = _pass_parameters(_localized(capture.model, call))
    if hidden_inputs(call):  # parameters of other modules that reach it by another way than its arguments
        return OpenedClass(None, (), {"": ModuleInfo(kind="opaque", parameters=shapes)}, shapes)
    calls = open_calls([call])
    if any(inner.kind == "draw" or (inner.opaque and inner.kind != "module") for inner in calls):
        return OpenedClass(None, (), {"": ModuleInfo(kind="opaque", parameters=shapes)}, shapes)
    signature = _signature(call, module)
    inputs = _input_names(signature)
    tensors = {**capture.tensors, **_foreign_tensors(capture.model, inputs)}
    body = build_program(calls, inputs, call.result, tensors, relative_to=call.target)
    named = tuple(
        (name, map_argument(value, lambda leaf: Ref(inputs[leaf.name]) if isinstance(leaf, Ref) else leaf))
        for name, value in signature
    )
    modules: dict[str, ModuleInfo] = {}
    for inner in calls:
        if inner.kind == "module":
            relative = "" if inner.target == call.target else inner.target.removeprefix(f"{call.target}.")
            modules[relative] = _module_info(capture, inner, capture.model.get_submodule(inner.target))
    return OpenedClass(body, named, modules, shapes)


def _localized(model: nn.Module, call: Call) -> Call:
    """Return a call in which modules and parameters that are shared with other modules go by their names in this one.

    A recording has one name for each; a module that several blocks share has that of the first block.
    """
    module = model.get_submodule(call.target)
    names: dict[str, torch.Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    modules = {id(inner): name for name, inner in module.named_modules()}
    tensors = {id(tensor): name for name, tensor in [*module.named_parameters(), *module.named_buffers()]}

    def local(owned: dict[int, str], value: object, name: str) -> str:
        return f"{call.target}.{owned[id(value)]}".removesuffix(".") if id(value) in owned else name

    def change(leaf: Any) -> Any:
        return ParamRef(local(tensors, names.get(leaf.name), leaf.name)) if isinstance(leaf, ParamRef) else leaf

    def changed(inner: Call) -> Call:
        target = inner.target
        return replace(
            inner,
            target=local(modules, model.get_submodule(target), target) if inner.kind == "module" else target,
            args=map_argument(inner.args, change),
            kwargs={key: map_argument(item, change) for key, item in inner.kwargs.items()},
            result=map_argument(inner.result, change),
            body=[changed(item) for item in inner.body],
        )

    return replace(changed(call), target=call.target)


def _opened_leaves(model: nn.Module, call: Call) -> Call:
    """Return a call in which modules without submodules are opened where they read matrices of their own.

    Such weights can be divided as those of linear layers; what torch itself or a library makes a layer of stays one.
    """
    body = [_opened_leaves(model, inner) for inner in call.body]
    if call.kind != "module" or not call.leaf:
        return replace(call, body=body)
    module = model.get_submodule(call.target)
    is_known = kind_of(module, call) is not None or type(module).__module__.startswith("torch.")
    hooked = bool(module._forward_hooks or module._forward_pre_hooks)
    opaque = any(inner.opaque for inner in call.body)
    read = {
        leaf.name for inner in call.body for leaf in leaves((inner.args, inner.kwargs)) if isinstance(leaf, ParamRef)
    }
    own = {name: param.dim() for name, param in module.named_parameters(recurse=False)}
    matrices = [name for name, dims in own.items() if dims > 1 and f"{call.target}.{name}" in read]
    return replace(call, body=body, leaf=is_known or hooked or opaque or not matrices)


def _pass_parameters(call: Call) -> Call:
    """Return a call whose body reads parameters of other modules as values: they are among its arguments."""
    prefix = f"{call.target}."

    def change(leaf: Any) -> Any:
        return Ref(leaf.name) if isinstance(leaf, ParamRef) and not leaf.name.startswith(prefix) else leaf

    def changed(inner: Call) -> Call:
        return replace(
            inner,
            args=map_argument(inner.args, change),
            kwargs={key: map_argument(item, change) for key, item in inner.kwargs.items()},
            result=map_argument(inner.result, change),
            body=[changed(item) for item in inner.body],
        )

    return changed(call)


def _foreign_tensors(model: nn.Module, inputs: dict[str, str]) -> dict[str, Tensor]:
    """Return what is known of the parameters among a block's arguments."""
    found = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **constants(model),
    }
    return {
        name: Tensor(
            shape=tuple(found[name].shape),
            dtype=str(found[name].dtype).removeprefix("torch."),
            requires_grad=found[name].requires_grad,
            follows_model_dtype=found[name].is_floating_point(),
        )
        for name in inputs
        if name in found
    }


def _signature(call: Call, module: nn.Module) -> tuple[tuple[str, Any], ...]:
    """Return the arguments of a call by the names of the forward's parameters; *args are named by position."""
    names: list[str] = []
    for name, parameter in inspect.signature(module.forward).parameters.items():
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            names.append(name)
    positional = [
        (names[i] if i < len(names) else f"args_{i - len(names)}", value) for i, value in enumerate(call.args)
    ]
    return (*positional, *call.kwargs.items())


def _input_names(signature: tuple[tuple[str, Any], ...]) -> dict[str, str]:
    """Return names for the values among a call's arguments: the parameter's, with an index inside containers."""
    names: dict[str, str] = {}
    for parameter, value in signature:
        refs = list(dict.fromkeys(leaf.name for leaf in leaves(value) if isinstance(leaf, Ref)))
        for position, number in enumerate(refs):
            names.setdefault(number, parameter if isinstance(value, Ref) else f"{parameter}_{position}")
    return names


def _module_info(capture: Capture, call: Call, module: nn.Module) -> ModuleInfo:
    parameters = {name: tuple(p.shape) for name, p in module.named_parameters(remove_duplicate=False)}
    num_bytes = sum(p.numel() * p.element_size() for p in module.parameters())
    kind = kind_of(module, call)
    if kind is not None and "weight" not in parameters:  # computed, as by weight_norm
        return ModuleInfo(kind="opaque", parameters=parameters, num_bytes=num_bytes)
    if kind is not None:
        out_dim = 1 if kind == "linear" and not isinstance(module, nn.Linear) else 0
        return ModuleInfo(kind=kind, parameters=parameters, num_bytes=num_bytes, weight_out_dim=out_dim)
    if isinstance(module, _ELEMENTWISE):
        additive = isinstance(module, nn.Dropout | nn.Identity)
        return ModuleInfo(kind="elementwise", parameters=parameters, num_bytes=num_bytes, additive=additive)
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        return ModuleInfo(
            kind="normalization",
            parameters=parameters,
            num_bytes=num_bytes,
            normalized_dims=len(module.normalized_shape),
        )
    opaque = any(inner.opaque for inner in call.body)
    if call.leaf and call.body and not opaque and not type(module).__module__.startswith("torch."):
        refs = list(dict.fromkeys(leaf.name for leaf in leaves((call.args, call.kwargs)) if isinstance(leaf, Ref)))
        inputs = {number: f"input_{position}" for position, number in enumerate(refs)}
        body = build_program(call.body, inputs, call.result, capture.tensors, relative_to=call.target)
        kept = {name: tuple(tensor.shape) for name, tensor in constants(module).items()}
        return ModuleInfo(kind="recorded", parameters=parameters, num_bytes=num_bytes, body=body, constants=kept)
    if call.leaf and not parameters and not call.body:
        return ModuleInfo(kind="elementwise" if isinstance(module, nn.Identity) else "opaque", parameters=parameters)
    return ModuleInfo(kind="opaque", parameters=parameters, num_bytes=num_bytes)


def shardings_of(
    capture: Capture,
    call: Call,
    opened: OpenedClass,
    degree: int,
    *,
    rules: tuple[TpRule, ...] = (),
    kept_whole: frozenset[str] = frozenset(),
) -> tuple[Sharding, ...]:
    """Return the ways to divide a layer class over `degree` ranks, best first; empty where nothing divides.

    `rules` are the user's; `kept_whole` names parameters that are read beside the layer. A UsageError names a rule
    that can't be followed.
    """
    layer = layer_body(capture, call, opened, kept_whole)
    asked = layer_rules(layer, call.target, rules)
    if opened.body is not None:
        return find_shardings(layer, degree, asked)
    inputs = tuple(capture.tensors[leaf.name] for leaf in leaves((call.args, call.kwargs)) if isinstance(leaf, Ref))
    if not isinstance(call.result, Ref) or kept_whole:
        return ()
    return standalone_sharding(opened.modules[""], inputs, capture.tensors[call.result.name], degree, asked)


def layer_body(
    capture: Capture, call: Call, opened: OpenedClass, kept_whole: frozenset[str] = frozenset()
) -> LayerBody:
    """Return a layer as the tensor-parallel rules see it."""
    module = capture.model.get_submodule(call.target)
    names: dict[int, list[str]] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    empty = Program(inputs=(), nodes=(), output=None, tensors={})
    return LayerBody(
        body=opened.body or empty,
        modules=opened.modules,
        parameter_shapes=opened.parameter_shapes,
        trainable=frozenset(n for n, p in module.named_parameters(remove_duplicate=False) if p.requires_grad),
        buffers=frozenset(opened.parameter_shapes) - {name for group in names.values() for name in group},
        tied=tuple(tuple(group) for group in names.values() if len(group) > 1),
        kept_whole=kept_whole,
    )
