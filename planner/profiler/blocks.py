"""Chooses which module calls stay whole: the layers a plan assigns to stages.

A module is opened only where that exposes cuts. What stays whole is a *block*: a member of a family of equal siblings
(the 32 decoder layers), and everything that holds no block.
"""

from collections.abc import Iterable

from torch import nn

from planner.arguments import ParamRef, Ref, leaves
from planner.errors import UsageError
from planner.profiler.recording import Call, Unsupported, is_leaf


def find_blocks(model: nn.Module) -> frozenset[str]:
    """Return the names of the modules that are blocks: siblings of one class of which at least two are equal.

    Siblings are the members of a list, or composite attributes of one module. A list of composite members of one class
    counts too where no two are equal and not all hold blocks (one layer; a first one with parameters of its own).
    A class that is a family in one list is one in every list: of a network's stages, some may
    have no two equal blocks. The blocks inside a block are not listed.
    """
    families = {
        family
        for module in model.modules()
        if _is_list(module)
        for family in _families(module)
        if not issubclass(family, _LISTS) and not _holds_itself(model, family)
    }
    found: set[str] = set()
    _collect_blocks(model, "", families, found)
    return frozenset(found)


_LISTS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, _LISTS)


def _families(module: nn.Module) -> set[type[nn.Module]]:
    """Return the classes of which a module has two equal children."""
    equal: dict[tuple[type[nn.Module], object], int] = {}
    for child in module.children():
        if _is_list(module) or not is_leaf(child):
            equal[_signature(child)] = equal.get(_signature(child), 0) + 1
    return {family for (family, _), count in equal.items() if count >= 2}


def _holds_itself(model: nn.Module, family: type[nn.Module]) -> bool:
    """Return whether a module of a class stands inside another of it: then the outer one is not a block for it."""
    instances = [module for module in model.modules() if type(module) is family]
    return any(type(inner) is family for module in instances for inner in list(module.modules())[1:])


def _collect_blocks(module: nn.Module, name: str, families: set[type[nn.Module]], found: set[str]) -> None:
    children = [
        (f"{name}.{child_name}" if name else child_name, child) for child_name, child in module.named_children()
    ]
    own = _families(module)
    for child_name, child in children:
        in_family = type(child) in own or (_is_list(module) and type(child) in families and not is_leaf(child))
        if in_family and (_is_list(module) or not is_leaf(child)) and not isinstance(child, nn.ModuleList):
            found.add(child_name)
            continue
        _collect_blocks(child, child_name, families, found)
    if isinstance(module, nn.ModuleList) and len({type(child) for _, child in children}) == 1:
        inside = [{block for block in found if block.startswith(f"{child_name}.")} for child_name, _ in children]
        whole = [child_name in found for child_name, _ in children]
        if not all(inside) and not any(whole) and not is_leaf(children[0][1]):
            found.difference_update(*inside)
            found.update(child_name for child_name, _ in children)


def _signature(module: nn.Module) -> tuple[type[nn.Module], object]:
    shapes = tuple((name, tuple(param.shape)) for name, param in module.named_parameters(remove_duplicate=False))
    return (type(module), shapes)


def select_calls(
    model: nn.Module, calls: Iterable[Call], chosen: tuple[str, ...] = (), opened: frozenset[str] = frozenset()
) -> list[Call]:
    """Return the calls of a forward with every composite module that exposes cuts replaced by its own calls.

    `chosen` names containers whose members are the blocks, as in `--blocks model.layers`; else `find_blocks` tells.
    The modules `opened` are replaced by their calls in any case.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    if chosen:
        for name in chosen:
            if name not in modules:
                raise UsageError(
                    f"--blocks names {name!r}, which is no module of the model",
                    hint="names are those of named_modules()",
                )
            if not any(True for _ in modules[name].children()) or is_leaf(modules[name]):
                raise UsageError(
                    f"--blocks names {name!r}, a {type(modules[name]).__name__}, which has no layers inside",
                    hint="name a list of layers, like model.layers",
                )
        blocks = frozenset(f"{name}.{child}" for name in chosen for child, _ in modules[name].named_children())
    else:
        blocks = find_blocks(model)
    return list(_select(list(calls), modules, blocks, opened))


def _select(
    calls: list[Call], modules: dict[str, nn.Module], blocks: frozenset[str], opened: frozenset[str]
) -> Iterable[Call]:
    for call in calls:
        opens = call.kind == "module" and not call.leaf and _opens(call, modules[call.target], blocks)
        asked = call.kind == "module" and call.target in opened and bool(call.body)
        if opens or asked or (call.kind == "module" and reads_beside(call)):
            yield from _select(call.body, modules, blocks, opened)
        else:
            yield call


def _opens(call: Call, module: nn.Module, blocks: frozenset[str]) -> bool:
    """Return whether a composite module's call is replaced by its body."""
    if (
        call.escapes
        or hidden_inputs(call)
        or any(isinstance(leaf, Unsupported) for leaf in leaves((call.args, call.kwargs, call.result)))
    ):
        return True  # it can't be called from other code: it takes or returns what no program holds
    if module._forward_hooks or module._forward_pre_hooks or call.target in blocks:
        return False
    prefix = f"{call.target}."
    return isinstance(module, nn.Sequential) or any(block.startswith(prefix) for block in blocks)


def hidden_inputs(call: Call) -> set[str]:
    """Return the values that a module's body reads and that reach it by another way than its arguments."""
    known = {leaf.name for leaf in leaves((call.args, call.kwargs)) if isinstance(leaf, Ref)}
    hidden: set[str] = set()

    def visit(calls: list[Call]) -> None:
        for inner in calls:
            if not inner.leaf and inner.kind == "module":
                visit(inner.body)
            else:
                hidden.update(
                    leaf.name
                    for leaf in leaves((inner.args, inner.kwargs))
                    if isinstance(leaf, Ref) and leaf.name not in known
                )
            known.update(leaf.name for leaf in leaves(inner.result) if isinstance(leaf, Ref))

    visit(call.body)
    return hidden


def reads_beside(call: Call) -> bool:
    """Return whether a module's body calls a module, or reads a parameter, that is not its own nor an argument: one
    that it keeps in a list of its own, say. Called whole it would hide from its stage what it reads.
    """
    prefix = f"{call.target}."
    passed = {leaf.name for leaf in leaves((call.args, call.kwargs)) if isinstance(leaf, ParamRef)}

    def visit(calls: list[Call]) -> bool:
        for inner in calls:
            named = [leaf.name for leaf in leaves((inner.args, inner.kwargs)) if isinstance(leaf, ParamRef)]
            named += [inner.target] if inner.kind == "module" else []
            if any(name not in passed and not name.startswith(prefix) for name in named) or visit(inner.body):
                return True
        return False

    return visit(call.body)


def open_calls(calls: Iterable[Call]) -> list[Call]:
    """Return the calls with every composite module replaced by its body, down to the leaves."""
    opened: list[Call] = []
    for call in calls:
        opened.extend(open_calls(call.body) if call.kind == "module" and not call.leaf else [call])
    return opened
