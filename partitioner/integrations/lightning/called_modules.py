"""Find the modules that a step of a LightningModule calls, with the inputs that it passes: these modules are partitioned.

    def training_step(self, batch, batch_idx):
        loss = cross_entropy(self.net(batch[0]), batch[1])      net                    the step, and the loss, run as they are written

    def forward(self, x):
        return self.head(self.norm(self.encoder(x)))            the LightningModule itself: its forward is one graph

    z = self.encoder(x); y = self.decoder(z)                    encoder, decoder       each a model of its own

The step runs until modules with all parameters have been called: with one module, until it is called, and computes nothing.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from partitioner.tracing.restore import preserve


@dataclass(frozen=True, eq=False)
class ModuleCall:
    """The first call of a module by a step.

    Attributes:
        path: name of the module; empty for the LightningModule.
        module: what was called.
        args: positional inputs.
        kwargs: keyword inputs.
    """

    path: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def parameters(self) -> set[int]:
        """Return the identities of its parameters."""
        return {id(parameter) for parameter in self.module.parameters()}


class _AllCalledError(Exception):
    """Ends a step: modules with all parameters have been called."""


def called_modules(model: nn.Module, step: Callable[[], Any], replaced: Mapping[str, Any]) -> list[ModuleCall]:
    """Run a step, without gradients, and return the outermost modules with parameters that it calls, in order.

    Where ``forward`` of the model calls several modules, and the step no others, it is the model that was called. Attributes, tensors and
    random states are restored.

    Args:
        replaced: attributes that the model has while the step runs: what logs, and what trains.
    """
    recorder = _Recorder(model)
    tensors = [value for module in model.modules() for value in (*vars(module).values(), *module.buffers(recurse=False))]
    values = [(tensor, tensor.clone()) for tensor in tensors if isinstance(tensor, Tensor) and not tensor.is_meta]
    with preserve(model), random_state_kept(), torch.no_grad():
        vars(model).update(replaced)
        with contextlib.suppress(_AllCalledError), recorder.recording():
            step()
        for tensor, value in values:
            tensor.copy_(value)
    return recorder.called()


@dataclass
class _Recorder:
    """Records calls by hooks on all modules with parameters."""

    model: nn.Module
    calls: list[ModuleCall] = field(default_factory=list)
    of_forward: list[ModuleCall] = field(default_factory=list)
    forward_call: ModuleCall | None = None
    depth: int = 0
    in_forward: bool = False

    def called(self) -> list[ModuleCall]:
        """Return the calls of a step that has ended: that of the model, if all others are in its ``forward`` and are not just one."""
        is_one_module = len(self.calls) == 1 and self._covered(self.calls, only_trainable=True)
        if self.forward_call is not None and not is_one_module and all(call in self.of_forward for call in self.calls):
            return [self.forward_call]
        return self.calls

    def _covered(self, calls: list[ModuleCall], *, only_trainable: bool = False) -> bool:
        """Return whether the called modules have all parameters of the model, or all that train."""
        seen = set[int]().union(*(call.parameters() for call in calls))
        return all(id(each) in seen for each in self.model.parameters() if each.requires_grad or not only_trainable)

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record the calls inside."""
        handles = []
        for path, module in self.model.named_modules():
            if module is not self.model and next(module.parameters(), None) is not None:
                before, after = self._before(path), self._after
                handles.append(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
                handles.append(module.register_forward_hook(after, always_call=True))
        forward = self.model.forward
        vars(self.model)["forward"] = self._recorded(forward)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _recorded(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``forward`` of the model, which records its inputs."""

        def recorded(*args: Any, **kwargs: Any) -> Any:
            if self.forward_call is None:
                self.forward_call = ModuleCall("", self.model, args, kwargs)
            self.in_forward = True
            try:
                return forward(*args, **kwargs)
            finally:
                self.in_forward = False

        return recorded

    def _before(self, path: str) -> Callable[..., None]:
        """Return the hook before a module runs."""

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self.depth == 0 and all(call.module is not module for call in self.calls):
                call = ModuleCall(path, module, args, kwargs)
                self.calls.append(call)
                if self.in_forward:
                    self.of_forward.append(call)
                if self._covered(self.calls):
                    raise _AllCalledError
            self.depth += 1

        return hook

    def _after(self, *_args: Any) -> None:
        self.depth -= 1


@contextlib.contextmanager
def random_state_kept() -> Iterator[None]:
    """Restore the random states of torch, Python and NumPy on exit."""
    numpy = sys.modules.get("numpy")
    states = random.getstate(), None if numpy is None else numpy.random.get_state()
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(states[0])
        if numpy is not None:
            numpy.random.set_state(states[1])
