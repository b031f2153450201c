"""A strategy of Lightning's Trainer that partitions the modules which the steps of a LightningModule call.

Trainer(strategy=PartitionStrategy(devices=4, mode="fsdp")).fit(lightning_module, loader)

setup      first batch -> the modules that training_step calls -> partition() -> put in their place -> configure_optimizers()
steps      training_step and validation_step of the user, with the loss, self.log and all hooks, as they are written
teardown   the LightningModule has its own modules again, with the trained values
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from partitioner.api import partition
from partitioner.integrations.interface import checked_options, losses_in_steps, share_random_states
from partitioner.integrations.lightning.called_modules import ModuleCall, called_modules
from partitioner.integrations.lightning.clip_norm import clip_norm, has_whole_models
from partitioner.integrations.lightning.copies import copy_average, is_copy, refuse_copies_inside, refuse_reset_statistics, uncalled_copies
from partitioner.integrations.lightning.first_batch import STEPS, first_batch
from partitioner.integrations.lightning.optimizer_states import has_other_stages, load_optimizer_state, optimizer_state
from partitioner.integrations.lightning.partitioned_module import Replacement, refuse_shared, traceable
from partitioner.integrations.lightning.processes import Processes, reduced
from partitioner.model.partitioned_model import PartitionedModel
from partitioner.runtime import torchrun
from passes.ir.errors import ConfigError, first_few
from passes.ir.plan import Plan
from passes.ir.torch_private import pytree

_GIVEN = {
    "model": "it is what the steps of the LightningModule call",
    "example_inputs": "they are those of the first batch, or the LightningModule's example_input_array",
    "example_kwargs": "they are those of the first batch",
    "training": "the Trainer sets it",
    "precision": 'pass it to the Trainer: Trainer(precision="bf16-mixed")',
}
"""Arguments of ``partition`` that are no options, and their replacements."""

_NOT_PLANNED = {"inputs", "batchnorm", "batch_dims"}
"""Options that a plan does not decide."""


class TrainerPartition(Processes):
    """Partition the modules that the steps of a LightningModule call, and train it on all devices.

    Args:
        devices: as ``partition`` takes them; None: those of the Trainer, ``Trainer(devices=4)``.
        mode: as ``partition`` takes it.
        accelerator, cluster_environment, checkpoint_io, precision_plugin: as other strategies take them.
        options: further arguments of ``partition``: ``n_microbatches``, ``schedule``, ``constraints``, ``inputs``, ...
    """

    strategy_name = "partitioner"
    precision_plugin: Any
    lightning_module: Any
    optimizers: Sequence[Any]
    checkpoint_io: Any
    model: Any

    def __init__(
        self,
        devices: Any = None,
        mode: Any = "auto",
        *,
        accelerator: Any = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        **options: Any,
    ) -> None:
        cast(Any, super()).__init__(
            accelerator=accelerator,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self._options = {"mode": mode, **checked_options(options, _GIVEN, "PartitionStrategy")}
        self._devices = devices
        self._replacements: list[Replacement] = []
        self._copies: list[Replacement] = []
        self._is_in = False
        self._has_failed = False

    # -- set up and tear down ------------------------------------------------------------------------------------------------------

    @property
    def partitioned_models(self) -> tuple[PartitionedModel, ...]:
        """The partitioned models: one, unless the steps call several modules one by one."""
        return tuple(replacement.model for replacement in self._replacements)

    @property
    def is_distributed(self) -> bool:
        """Whether each process reads its own rows, so that Lightning gives loaders a distributed sampler and averages what is logged."""
        return self._options.get("inputs") == "local" and torchrun.is_launched()

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Arguments of the sampler for processes that each read their own rows."""
        model = self.partitioned_models[0]
        return {"num_replicas": model.data_parallel_size, "rank": model.data_parallel_rank}

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Whether a checkpoint is loaded into the partitioned model: where a callback may keep averages of parts of parameters."""
        return bool(self._callbacks("WeightAveraging")) and (torchrun.is_launched() or self.root_device.type != "cpu")

    def setup_environment(self) -> None:
        """Join the other processes; their random states become those of rank 0, if all read the same batches."""
        cast(Any, super()).setup_environment()
        if torchrun.is_launched() and not self.is_distributed:
            share_random_states()

    def setup(self, trainer: Any) -> None:
        """Partition what the steps call, then make the optimizers."""
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(self.model)
        function = str(trainer.state.fn.value)
        self._partition(trainer, function)
        self._clip_over_all_processes()
        if function == "fit":
            self._average_parts(trainer)
            self._summarize_before(trainer)
            cast(Any, self).setup_optimizers(trainer)
            self._refuse_optimizers_of_copies()
        cast(Any, self).setup_precision_plugin()

    def model_to_device(self) -> None:
        """Move what is not partitioned to the device of this process."""
        partitioned = set().union(*(set(model.modules()) for model in self.partitioned_models))
        for module in self.lightning_module.modules():
            if module not in partitioned and module is not self.lightning_module and not any(m in partitioned for m in module.modules()):
                module.to(self.root_device)

    def on_exception(self, exception: BaseException) -> None:
        """Remember that the processes do not act together any more."""
        self._has_failed = True

    def teardown(self) -> None:
        """Give the LightningModule its own modules again, with the trained values; unless processes have failed, which cannot gather."""
        if self._is_in and not (self._has_failed and torchrun.is_launched()):
            self._take_out()
            for replacement in self._replacements:
                replacement.copy_back()
        for part in (self.cluster_environment, self.precision_plugin, self.accelerator, self.checkpoint_io):
            if part is not None:
                part.teardown()

    def _partition(self, trainer: Any, function: str) -> None:
        """Replace each module that a step calls by a partitioned model; those of an earlier run are used again."""
        self._has_failed = False
        root = self.lightning_module
        calls = self._calls(trainer, function)
        _refuse_apart(root, calls, self._options)
        known = {replacement.module: replacement for replacement in self._replacements if replacement.root is root}
        replacements: list[Replacement] = []
        for call in calls:
            replacement = known.get(call.module)
            plan = _plan_of_student(call.module, replacements)
            if replacement is None or not _same_parameters(replacement) or plan not in (None, replacement.model.plan):
                replacement = Replacement(root, call, self._partitioned(call, function, plan))
            else:
                replacement.copy_values()
            replacements.append(replacement)
        self._copies = self._partitioned_copies(replacements, known) if function == "fit" else []
        self._replacements = [*replacements, *self._copies]
        self._put_in()
        self.model_to_device()
        self._refuse_stages_apart()

    def _partitioned_copies(self, called: Sequence[Replacement], known: Mapping[nn.Module, Replacement]) -> list[Replacement]:
        """Partition the copies of called modules that no step calls, such as an averaged teacher, by the plan of the called one.

        A called module that every process holds whole needs no partitioned copy.
        """
        root = self.lightning_module
        copies = []
        for student in called:
            if has_whole_models([student.model]):
                continue
            refuse_copies_inside(student.model, student.path)
            for path, module in uncalled_copies(root, student.module, [each.module for each in called]):
                copied = known.get(module)
                if copied is None or not _same_parameters(copied) or copied.model.plan != student.model.plan:
                    call = dataclasses.replace(student.call, path=path, module=module)
                    copied = Replacement(root, call, self._partitioned(call, "fit", student.model.plan))
                else:
                    copied.copy_values()
                copies.append(copied)
        return copies

    def _partitioned(self, call: ModuleCall, function: str, plan: Plan | None) -> PartitionedModel:
        """Partition one module for the inputs that a step has passed to it; by a plan, if it is to have that of another module."""
        is_mixed = str(self.precision_plugin.precision).endswith("-mixed")
        options = (
            self._options if plan is None else {"plan": plan, **{name: self._options[name] for name in _NOT_PLANNED & self._options.keys()}}
        )
        return partition(
            traceable(self.lightning_module, call),
            self._partition_devices(),
            example_inputs=call.args,
            example_kwargs=dict(call.kwargs),
            training=None if function == "fit" else False,
            precision=self.precision_plugin.precision if is_mixed else None,
            **options,
        )

    def _partition_devices(self) -> Any:
        """Return the device of each rank: those of the strategy, or of the Trainer."""
        kind = self.root_device.type
        if self._devices is not None:
            return [kind] * self._devices if isinstance(self._devices, int) and kind == "cpu" and self._devices > 0 else self._devices
        if torchrun.is_launched():
            return [kind] * torchrun.world_size()
        return [str(device) for device in self.parallel_devices or [self.root_device]]

    def _calls(self, trainer: Any, function: str) -> list[ModuleCall]:
        """Return the modules that the step calls on the first batch; with no batch, ``forward`` on ``example_input_array``."""
        root = self.lightning_module
        step = getattr(root, STEPS[function])
        batch = None if "dataloader_iter" in inspect.signature(step).parameters else first_batch(trainer, function)
        calls: list[ModuleCall] = []
        if batch is not None:
            if self.is_distributed:
                batch = _rows_of_all(batch, torchrun.world_size())
            with self._step_context(function):
                calls = called_modules(root, lambda: step(*_step_arguments(step, batch)), _while_recorded(root))
        elif root.example_input_array is not None:
            calls = called_modules(root, lambda: _call_with(root, root.example_input_array), {})
        if not calls:
            why = "no batch can be read from a copy of its loader" if batch is None else f"{step.__name__} calls no module with parameters"
            raise ConfigError(
                f"nothing of the {type(root).__name__} could be partitioned: {why}",
                remedy="set self.example_input_array in the LightningModule, the inputs of its forward, and call self(...) in the step",
            )
        return calls

    def _step_context(self, function: str) -> contextlib.AbstractContextManager[None]:
        """Return the precision in which a step runs."""
        name = {"fit": "train", "validate": "val"}.get(function, function)
        context: contextlib.AbstractContextManager[None] = getattr(self.precision_plugin, f"{name}_step_context")()
        return context

    def _refuse_stages_apart(self) -> None:
        """Raise ConfigError for models that several processes could not train or save as one process does."""
        if not torchrun.is_launched():
            return
        called = [replacement for replacement in self._replacements if replacement not in self._copies]
        staged = any(has_other_stages(replacement.model) for replacement in called)
        if len(called) > 1 and staged:
            names = first_few([replacement.path or "forward" for replacement in called])
            raise ConfigError(
                f"the step calls {names} one by one, and a pipeline over processes needs one model",
                remedy="write a forward of the LightningModule that calls them all, and call self(...) in the step; or choose another mode",
            )
        partitioned = {id(parameter) for model in self.partitioned_models for parameter in model.parameters()}
        others = [name for name, each in self.lightning_module.named_parameters() if each.requires_grad and id(each) not in partitioned]
        if others and self.is_distributed:
            raise ConfigError(
                f"{first_few(others)} would be trained on each process's own rows: no module that the step calls has them",
                remedy='read them in forward, and call self(...) in the step; or pass the whole batch everywhere: inputs="global"',
            )

    def _refuse_optimizers_of_copies(self) -> None:
        """Raise ConfigError for an optimizer of several pipelines over processes, whose state could not be saved as one."""
        given = {id(parameter) for optimizer in self.optimizers for group in optimizer.param_groups for parameter in group["params"]}
        for copied in self._copies:
            names = [name for name, parameter in copied.model.named_parameters() if id(parameter) in given]
            if names and has_other_stages(copied.model):
                raise ConfigError(
                    f"an optimizer has {copied.path}.{names[0]}, and training_step does not call {copied.path}",
                    remedy="give it the parameters of the modules that training_step calls: self."
                    f"{self._replacements[0].path or 'layer'}.parameters(), in place of self.parameters()",
                )

    def _put_in(self) -> None:
        for replacement in self._replacements:
            replacement.put_in()
        self._is_in = True

    def _take_out(self) -> None:
        for replacement in reversed(self._replacements):
            replacement.take_out()
        self._is_in = False

    # -- callbacks -----------------------------------------------------------------------------------------------------------------

    def _callbacks(self, name: str) -> list[Any]:
        """Return the callbacks of a class of Lightning's."""
        kind = getattr(_callbacks_of(self.package), name, ())
        return [callback for callback in self.lightning_module.trainer.callbacks if isinstance(callback, kind)]

    def _average_parts(self, trainer: Any) -> None:
        """Let callbacks that average weights, and have copied the LightningModule, keep averages sharded as the parameters."""
        stochastic = self._callbacks("StochasticWeightAveraging")
        for model in self.partitioned_models if stochastic else ():
            refuse_reset_statistics(model)
        if has_whole_models(self.partitioned_models):
            return
        for callback in self._callbacks("WeightAveraging"):
            callback.setup(trainer, self.lightning_module, "fit")
        for callback in stochastic:
            copy_average(callback, trainer, self.root_device)

    def _summarize_before(self, trainer: Any) -> None:
        """Let summaries of the model, which hook its layers, look at the LightningModule's own modules."""
        kind = _callbacks_of(self.package).ModelSummary
        for callback in trainer.callbacks:
            if isinstance(callback, kind) and "on_fit_start" not in vars(callback):
                callback.on_fit_start = functools.partial(self._summarize, callback)

    def _summarize(self, callback: Any, trainer: Any, module: Any) -> None:
        """Run a summary of the unpartitioned model."""
        del callback.on_fit_start
        if not self._is_in:
            callback.on_fit_start(trainer, module)
            return
        example, is_here = module.example_input_array, self.root_device.type == "cpu"
        self._take_out()
        try:
            module.example_input_array = example if is_here else None
            callback.on_fit_start(trainer, module)
        finally:
            module.example_input_array = example
            self._put_in()

    # -- steps ---------------------------------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run a step, by the schedule of a pipeline where the model returns the loss."""
        with losses_in_steps(self._trained_models):
            return cast(Any, super()).training_step(*args, **kwargs)

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Accumulate gradients without communication."""
        with contextlib.ExitStack() as stack:
            for model in self.partitioned_models:
                stack.enter_context(model.no_sync())
            yield

    def _clip_over_all_processes(self) -> None:
        """Let the precision plugin take the norm of gradients over all processes."""
        plugin = self.precision_plugin

        def clip_grad_by_norm(optimizer: Any, clip_val: float) -> None:
            clip_norm(self.partitioned_models, plugin.main_params(optimizer), clip_val)

        plugin.clip_grad_by_norm = clip_grad_by_norm

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return a value over all processes: where all read the same batches, all have the same one."""
        return reduced(tensor, reduce_op) if isinstance(tensor, Tensor) and self.is_distributed else tensor

    # -- checkpoints ---------------------------------------------------------------------------------------------------------------

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the whole state of an optimizer, as one process has it."""
        return optimizer_state(self._trained_models, getattr(optimizer, "optimizer", optimizer))

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the states of all optimizers."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            load_optimizer_state(self._trained_models, optimizer, state)

    @property
    def _trained_models(self) -> list[PartitionedModel]:
        """The partitioned models that the steps call."""
        return [replacement.model for replacement in self._replacements if replacement not in self._copies]


def _callbacks_of(package: str) -> Any:
    """Return the module with the callbacks of a package of Lightning."""
    return importlib.import_module(f"{package}.callbacks")


def _same_parameters(replacement: Replacement) -> bool:
    """Return whether the module of an earlier run has parameters of the same dtypes, and the same of them train."""
    pairs = zip(replacement.model.traced.original.parameters(), replacement.module.parameters(), strict=True)
    return all(one.dtype == other.dtype and one.requires_grad == other.requires_grad for one, other in pairs)


def _plan_of_student(module: nn.Module, others: Sequence[Replacement]) -> Plan | None:
    """Return the plan of a module that a frozen one is built like, whose parameters a script may average into it; None if there is none."""
    if any(parameter.requires_grad for parameter in module.parameters()):
        return None
    return next((other.model.plan for other in others if is_copy(module, other.module)), None)


def _refuse_apart(root: nn.Module, calls: Sequence[ModuleCall], options: Mapping[str, Any]) -> None:
    """Raise ConfigError for modules that cannot be partitioned one by one."""
    if len(calls) < 2 and not calls[0].path:
        return
    refuse_shared(root, {call.path: call for call in calls})
    if len(calls) > 1 and options.get("plan") is not None:
        raise ConfigError(
            f"plan= is of one model, and the step calls {first_few([call.path for call in calls])} one by one",
            remedy="call self(...) in the step, whose forward calls them all",
        )


def _call_with(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple | list) else model(inputs)


def _step_arguments(step: Callable[..., Any], batch: Any) -> tuple[Any, ...]:
    """Return the arguments of a step: the batch, its index, and that of its loader, as many as it takes."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    count = sum(parameter.kind in kinds for parameter in inspect.signature(step).parameters.values())
    return (batch, 0, 0)[: max(count, 1)]


def _while_recorded(root: Any) -> dict[str, Any]:
    """Return attributes of a LightningModule with which a step can run before there is anything to train."""

    def nothing(*_args: Any, **_kwargs: Any) -> None:
        """Log nothing, train nothing."""

    names = ("log", "log_dict", "manual_backward", "toggle_optimizer", "untoggle_optimizer", "clip_gradients")
    replaced: dict[str, Any] = dict.fromkeys(names, nothing)
    if not root.automatic_optimization:
        count = _optimizer_count(root.configure_optimizers())
        stand_ins = [_NoOptimizer() for _ in range(count)]
        replaced["optimizers"] = lambda *_args, **_kwargs: stand_ins[0] if count == 1 else stand_ins
        replaced["lr_schedulers"] = nothing
    return replaced


def _optimizer_count(configured: Any) -> int:
    """Return the number of optimizers that ``configure_optimizers`` has made."""
    if isinstance(configured, tuple | list):
        first = configured[0] if configured else None
        return len(first) if isinstance(first, list | tuple) else len(configured)
    return 1


class _NoOptimizer:
    """Stands for an optimizer while calls are recorded."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_args, **_kwargs: contextlib.nullcontext()


def _rows_of_all(batch: Any, count: int) -> Any:
    """Return a batch of as many rows as all processes read together."""
    return pytree.tree_map_only(Tensor, lambda leaf: torch.cat([leaf] * count) if leaf.dim() else leaf, batch)
