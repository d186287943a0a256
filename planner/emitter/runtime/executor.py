"""The executor: plays the actions of one stage, with point-to-point messages and autograd around them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from planner.emitter.runtime.checks import PlanError, _check_shape
from planner.emitter.runtime.communication import _Channel
from planner.emitter.runtime.counting import _check_loss, _count_step
from planner.emitter.runtime.data_parallel import _release, _set_last_backward, _Touched
from planner.emitter.runtime.stage import PlanStage, Value, _map_tensors


def stage_actions(schedule: str, stage: int, num_stages: int, num_microbatches: int) -> list[tuple[str, int]]:
    """Return a stage's forwards ("F") and backwards ("B") of microbatches, in order.

    1F1B (PipeDream-flush, Narayanan et al. 2021): as many forwards ahead as there are stages behind, then in turn.
    """
    if schedule not in ("1f1b", "gpipe"):
        raise PlanError(f"schedule {schedule!r} can't be run by this plan.py, only 1f1b and gpipe\nhint: solve again")
    ahead = num_microbatches if schedule == "gpipe" else min(num_microbatches, num_stages - stage)
    actions = [("F", microbatch) for microbatch in range(ahead)]
    for microbatch in range(num_microbatches):
        actions.append(("B", microbatch))
        if ahead + microbatch < num_microbatches:
            actions.append(("F", ahead + microbatch))
    return actions


class _Executor:
    """Runs one stage. `received` and `returned` bring values and gradients, `sent` and `back` take them away; channels
    of values are keyed by the other stage.
    """

    def __init__(
        self,
        stage: PlanStage,
        loss_fn: Callable[..., Tensor] | None,
        *,
        is_last: bool,
        num_microbatches: int,
        mixed: bool,
        dp_group: dist.ProcessGroup,
        dp_degree: int,
    ) -> None:
        self.stage, self.loss_fn, self.is_last, self.mixed = stage, loss_fn, is_last, mixed
        self.num_microbatches = num_microbatches
        self.dp_group, self.dp_degree = dp_group, dp_degree
        self.counts: dict[str, Tensor] = {}  # of the step
        self.loss_is_checked = False
        self.touched = _Touched(stage)
        self.received: list[_Channel] = []
        self.sent: list[_Channel] = []
        self.returned: list[_Channel] = []
        self.back: list[_Channel] = []
        self.alive: dict[int, tuple[dict[str, Tensor], dict[str, Tensor | GradientEdge]]] = {}

    def run(
        self,
        actions: Sequence[tuple[str, int]],
        microbatch_of: Callable[[int], tuple[dict[str, Any], Any]],
        counted_of: Callable[[int], tuple[dict[str, Any], Any]],
    ) -> list[Tensor]:
        """Return the loss of every microbatch (on the last stage); gradients are added to the parameters'.

        `counted_of` gives the data that is counted before the first action. What an action receives is asked for one
        action ahead, so that it travels while another computes.
        """
        losses: list[Tensor] = []
        last_backward = max((index for index, (kind, _) in enumerate(actions) if kind == "B"), default=None)
        self.alive.clear()
        self.touched.begin()
        self.counted_of = counted_of
        every = (counted_of(microbatch) for microbatch in range(self.num_microbatches))
        self.counts = _count_step(self.stage, every, self.dp_group, self.dp_degree)
        for index, (kind, microbatch) in enumerate(actions):
            for ahead, _ in actions[index : index + 2] if index == 0 else actions[index + 1 : index + 2]:
                for channel in self.received if ahead == "F" else self.returned:
                    channel.post(self.stage.device)
            if kind == "F":
                losses += self._forward(microbatch, *microbatch_of(microbatch))
            else:
                _set_last_backward(self.stage, index == last_backward)
                self.touched.before_backward(index == last_backward)
                self._backward(microbatch)
        for channel in self.sent + self.back:
            channel.flush()
        _release(self.stage)
        if last_backward is not None:
            self.touched.end(self.dp_group)
        return losses

    def _forward(self, microbatch: int, inputs: dict[str, Any], target: Any) -> list[Tensor]:
        leaves: dict[str, Tensor] = {}
        for channel in self.received:
            leaves |= channel.receive()
        training = torch.is_grad_enabled()
        for value in self.stage.receives:
            leaves[value.name].requires_grad_(training and value.requires_grad)
        output = self.stage(**inputs, **leaves, **{name: self.counts[name] for name in self.stage.forward_counts})
        if self.is_last:
            loss = self._loss(microbatch, output, target)
            if training:
                self.alive[microbatch] = leaves, {"loss": loss / self.num_microbatches}
            return [loss.detach()]
        values = {spec.name: self._check(spec, value) for spec, value in zip(self.stage.sends, output, strict=True)}
        for channel in self.sent:
            channel.send(values)
        if training:  # of what was sent only the place in the graph is kept, not the numbers
            self.alive[microbatch] = leaves, {k: get_gradient_edge(v) for k, v in values.items() if v.requires_grad}
        return []

    def _loss(self, microbatch: int, output: Any, target: Any) -> Tensor:
        if self.mixed:
            output = _map_tensors(lambda x: x.float() if x.is_floating_point() else x, output)
        if self.loss_fn is not None and self.stage.microbatch_loss is not None:
            if not self.loss_is_checked:
                inputs, counted = self.counted_of(microbatch)
                own = self.stage.count_microbatch(*(inputs[name] for name in self.stage.count_inputs), counted)
                _check_loss(self.stage, self.loss_fn, output, target, own)
                self.loss_is_checked = True
            loss = self.stage.microbatch_loss(output, target, *(self.counts[name] for name in self.stage.loss_counts))
        elif self.loss_fn is not None:
            loss = self.loss_fn(output) if target is None else self.loss_fn(output, target)
        else:
            loss = output["loss"] if isinstance(output, dict) and "loss" in output else getattr(output, "loss", output)
        if not isinstance(loss, Tensor) or loss.dim() != 0:
            what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise PlanError(f"the loss is {what}, not a scalar tensor\nhint: give `setup` a loss_fn that returns one")
        return loss

    def _check(self, spec: Value, value: Tensor) -> Tensor:
        """Return what is sent of a value that the stage made: of the shape and dtype that the other side expects."""
        what = f"value {spec.name!r} between stages"
        _check_shape(what, value, spec.shape or ())
        dtype = spec.dtype_in(self.stage.dtype)
        if value.dtype != dtype:
            if not (self.mixed and value.is_floating_point() and dtype.is_floating_point):
                raise PlanError(
                    f"{what} is {value.dtype}, and this plan was made for {dtype}\nhint: profile and solve again"
                )
            value = value.to(dtype)
        if value.requires_grad and not spec.requires_grad:
            raise PlanError(f"{what} needs a gradient, and this plan was made for none\nhint: profile and solve again")
        return value

    def _backward(self, microbatch: int) -> None:
        leaves, roots = self.alive.pop(microbatch)
        gradients: dict[str, Tensor | None] = dict.fromkeys(roots) if self.is_last else {}
        for channel in self.returned:  # a value that went to several stages gets the sum of their gradients
            for name, gradient in channel.receive().items():
                earlier = gradients.get(name)
                gradients[name] = gradient if earlier is None else earlier + gradient
        if names := [name for name in roots if name in gradients]:
            edges: Any = [roots[name] for name in names]
            torch.autograd.backward(edges, [gradients[name] for name in names])
        answers = {name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in leaves.items()}
        for channel in self.back:
            channel.send(answers)
