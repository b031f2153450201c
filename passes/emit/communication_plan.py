"""Sends and waits of every rank around each of its actions: the schedule with its communication, as data.

    rank 0   0F0 ─h─>      0F1 ─h─>        <─dh─ 0B0     <─dh─ 0B1
    rank 1        ─h─> 1F0  1B0 ─dh─>  ...

A message carries one value of one microbatch to one rank. On each channel (source, destination) messages are numbered in the order in
which they are sent, and receives are posted in that same order: a transport with tags and one with plain queues both serve.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from passes.autograd.staged_model import SplitModel
from passes.ir.schedule import Action, ActionKind, Schedule

MessageKind = Literal["activation", "gradient", "output", "loss"]


@dataclass(frozen=True)
class Message:
    """One value on its way to one rank.

    Attributes:
        kind: an activation for a later stage or the collector, a gradient for an earlier stage, an output or the loss for every rank.
        value: the node that it is the value, or the gradient, of; ``"loss"``.
        microbatch: None for what belongs to the whole batch.
        consumer: for a gradient, the stage that computed it (-1: the loss); else -1.
        source, destination: ranks.
    """

    kind: MessageKind
    value: str
    microbatch: int | None
    consumer: int
    source: int
    destination: int


@dataclass(frozen=True)
class Item:
    """One action with the messages it waits for and those it sends.

    No action: messages alone, as at the end of the program; or the loss of all rows, where ``takes_loss``.
    """

    action: Action | None
    needs: tuple[Message, ...]
    sends: tuple[Message, ...]
    takes_loss: bool = False


Script = tuple[Item, ...]
"""Items of one rank, in order."""


def step_scripts(lowered: SplitModel, schedule: Schedule, *, of_all_rows: bool = False) -> tuple[Script, ...]:
    """Return a training step: every rank's items, the loss sent to every rank, and new values of written inputs.

    Args:
        of_all_rows: whether the loss is taken once, of the results of all microbatches; the schedule has all forwards first.
    """
    scripts = _scripts_of_one_loss(lowered, schedule) if of_all_rows else _scripts_of_losses(lowered, schedule)
    if not lowered.writes:
        return scripts
    writes = list(_outputs(lowered, schedule.n_microbatches, lowered.writes))
    return tuple((*script, _sharing(writes, rank)) for rank, script in enumerate(scripts))


def _sharing(messages: Sequence[Message], rank: int) -> Item:
    """Return the item in which a rank sends and receives results."""
    received = tuple(message for message in messages if message.destination == rank)
    return Item(None, received, tuple(message for message in messages if message.source == rank))


def _scripts_of_losses(lowered: SplitModel, schedule: Schedule) -> tuple[Script, ...]:
    """Return the items of a step whose collectors compute the loss of each microbatch after its forward."""
    last = Action(lowered.stages[-1].index, ActionKind.FORWARD, schedule.n_microbatches - 1)
    (collector, *more) = lowered.collectors  # several sum their losses over all ranks: no message is needed
    told = [rank for rank in range(lowered.n_ranks) if rank != collector] if not more else []
    loss = {rank: Message("loss", "loss", None, -1, collector, rank) for rank in told}
    scripts = []
    for rank, actions in enumerate(schedule.actions):
        items = [_item(lowered, action, tuple(loss.values()) if action == last else (), with_loss=True) for action in actions]
        scripts.append((*items, Item(None, (loss[rank],) if rank in loss else (), ())))
    return tuple(scripts)


def _scripts_of_one_loss(lowered: SplitModel, schedule: Schedule) -> tuple[Script, ...]:
    """Return the items of a step whose collectors compute one loss of all microbatches, between all forwards and all backwards."""
    first, *more = lowered.collectors  # several all have the loss
    told = [Message("loss", "loss", None, -1, first, rank) for rank in range(lowered.n_ranks) if rank != first and not more]
    outputs = list(_outputs(lowered, schedule.n_microbatches, lowered.returned)) if more else []
    outputs = [message for message in outputs if message.destination in lowered.collectors]
    last = lowered.stages[-1].index
    scripts = []
    for rank, actions in enumerate(schedule.actions):
        forwards = [action for action in actions if action.kind is ActionKind.FORWARD]
        items = [_item(lowered, action) for action in forwards]
        if rank in lowered.collectors:
            results = [action for action in forwards if action.stage == last]
            shared = tuple(message for message in outputs if message.source == rank)
            loss = tuple(message for message in told if message.source == rank)
            gradients = tuple(message for action in results for message in _loss_gradients(lowered, action))
            items += [Item(None, (), shared)] if shared else []
            arriving = tuple(message for message in outputs if message.destination == rank)
            items.append(Item(None, arriving, (*loss, *gradients), takes_loss=True))
        items += [_item(lowered, action) for action in actions if action.kind is not ActionKind.FORWARD]
        scripts.append((*items, Item(None, tuple(message for message in told if message.destination == rank), ())))
    return tuple(scripts)


def sweep_scripts(lowered: SplitModel, n_microbatches: int, kind: ActionKind, *, share_outputs: bool) -> tuple[Script, ...]:
    """Return all forwards (stages ascending) or all backwards (descending), with the outputs sent to every rank if wanted."""
    stages = range(len(lowered.stages)) if kind is ActionKind.FORWARD else reversed(range(len(lowered.stages)))
    actions: list[list[Item]] = [[] for _ in range(lowered.n_ranks)]
    for stage in stages:
        for microbatch in range(n_microbatches):
            actions[lowered.rank_of(stage, microbatch)].append(_item(lowered, Action(stage, kind, microbatch)))
    outputs = list(_outputs(lowered, n_microbatches, lowered.returned)) if share_outputs else []
    pairs = enumerate(actions)
    return tuple((*_start(lowered, n_microbatches, kind, rank), *items, _sharing(outputs, rank)) for rank, items in pairs)


def _outputs(lowered: SplitModel, n_microbatches: int, names: Sequence[str]) -> Iterator[Message]:
    """Yield the messages that bring results to every rank: whole batches, or single microbatches where several ranks collect."""
    has_one_collector = len(lowered.collectors) == 1
    for rank in range(lowered.n_ranks):
        for microbatch in (None,) if has_one_collector else range(n_microbatches):
            source = lowered.rank_of(-1, microbatch or 0)
            if rank != source:
                yield from (Message("output", value, microbatch, -1, source, rank) for value in names)


def _start(lowered: SplitModel, n_microbatches: int, kind: ActionKind, rank: int) -> Script:
    """Return the item before all backwards: collectors send the gradients of results that other ranks computed."""
    if kind is ActionKind.FORWARD or rank not in lowered.collectors:
        return ()
    last = lowered.stages[-1].index
    collected = (microbatch for microbatch in range(n_microbatches) if lowered.rank_of(-1, microbatch) == rank)
    forwards = (Action(last, ActionKind.FORWARD, microbatch) for microbatch in collected)
    return (Item(None, (), tuple(message for action in forwards for message in _loss_gradients(lowered, action))),)


def number_messages(scripts: Sequence[Script]) -> dict[Message, int]:
    """Return the tag of every message: its number on its channel, in the order of sending."""
    counts: dict[tuple[int, int], int] = {}
    tags: dict[Message, int] = {}
    for script in scripts:
        for item in script:
            for message in item.sends:
                channel = (message.source, message.destination)
                tags[message] = counts.get(channel, 0)
                counts[channel] = tags[message] + 1
    return tags


def _item(lowered: SplitModel, action: Action, also: tuple[Message, ...] = (), *, with_loss: bool = False) -> Item:
    if action.kind is ActionKind.FORWARD:
        after = _loss_gradients(lowered, action) if with_loss else ()
        return Item(action, _activations_needed(lowered, action), _activations_sent(lowered, action) + also + after)
    if action.kind is ActionKind.BACKWARD_WEIGHT:
        return Item(action, (), ())
    return Item(action, _gradients_needed(lowered, action), _gradients_sent(lowered, action))


def _consumer_ranks(lowered: SplitModel, value: str, microbatch: int) -> list[int]:
    ranks = {lowered.rank_of(stage.index, microbatch) for stage in lowered.stages if value in stage.values}
    if value in lowered.returned:
        ranks.add(lowered.rank_of(-1, microbatch))
    return sorted(ranks - {lowered.rank_of(lowered.producer(value), microbatch)})


def _activation(lowered: SplitModel, value: str, microbatch: int, destination: int) -> Message:
    return Message("activation", value, microbatch, -1, lowered.rank_of(lowered.producer(value), microbatch), destination)


def _activations_sent(lowered: SplitModel, action: Action) -> tuple[Message, ...]:
    outputs, microbatch = lowered.stages[action.stage].outputs, action.microbatch
    return tuple(_activation(lowered, value, microbatch, rank) for value in outputs for rank in _consumer_ranks(lowered, value, microbatch))


def _activations_needed(lowered: SplitModel, action: Action) -> tuple[Message, ...]:
    """Return the messages with the values that a stage reads; for the last stage also with those that the model returns."""
    rank = lowered.rank_of(action.stage, action.microbatch)
    values = list(lowered.stages[action.stage].values)
    if action.stage == len(lowered.stages) - 1:
        values += [value for value in lowered.returned if value not in values and value not in lowered.stages[action.stage].outputs]
    messages = (_activation(lowered, value, action.microbatch, rank) for value in values)
    return tuple(message for message in messages if message.source != rank)


def differentiated_outputs(lowered: SplitModel) -> tuple[str, ...]:
    """Return the results whose gradients the backward takes, in order."""
    assert lowered.differentiation is not None
    wanted = lowered.differentiation.outputs
    return tuple(
        name for name in lowered.returned if name in wanted and name in lowered.training[lowered.producer(name)].outputs_with_gradient
    )


def gradient_sources(lowered: SplitModel, value: str) -> list[int]:
    """Return the stages that give a gradient of a value, later first; -1 first for the loss."""
    assert lowered.differentiation is not None
    stages = [stage.index for stage in lowered.stages if value in lowered.training[stage.index].arguments_with_gradient]
    return ([-1] if value in lowered.differentiation.outputs else []) + stages[::-1]


def _gradient(lowered: SplitModel, value: str, microbatch: int, consumer: int) -> Message:
    source, destination = (lowered.rank_of(stage, microbatch) for stage in (consumer, lowered.producer(value)))
    return Message("gradient", value, microbatch, consumer, source, destination)


def _gradients_needed(lowered: SplitModel, action: Action) -> tuple[Message, ...]:
    messages = [
        _gradient(lowered, value, action.microbatch, consumer)
        for value in lowered.training[action.stage].outputs_with_gradient
        for consumer in gradient_sources(lowered, value)
    ]
    return tuple(message for message in messages if message.source != message.destination)


def _gradients_sent(lowered: SplitModel, action: Action) -> tuple[Message, ...]:
    produced = lowered.training[action.stage].arguments_with_gradient
    values = [value for value in lowered.stages[action.stage].values if value in produced]
    messages = [_gradient(lowered, value, action.microbatch, action.stage) for value in values]
    return tuple(message for message in messages if message.source != message.destination)


def _loss_gradients(lowered: SplitModel, action: Action) -> tuple[Message, ...]:
    """After the last stage's forward: gradients of outputs that other ranks computed."""
    if lowered.differentiation is None or action.stage != len(lowered.stages) - 1:
        return ()
    messages = [_gradient(lowered, value, action.microbatch, -1) for value in differentiated_outputs(lowered)]
    return tuple(message for message in messages if message.source != message.destination)
