"""A pipeline schedule as data: the actions of each rank, in order.

Actions are written in the grammar of ``torch.distributed.pipelining``: the stage, a letter, the microbatch.

    2F0    forward of stage 2 on microbatch 0
    1B3    whole backward of stage 1 on microbatch 3
    1I3    its input-gradient half (the previous stage waits for it)
    0W2    the weight-gradient half (no other stage waits for it)
"""

from __future__ import annotations

import enum
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from passes.ir.arguments.checked import checked_arguments, checked_names
from passes.ir.errors import ConfigError


class ActionKind(enum.Enum):
    """The computation of an action."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"


_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")


class Action(NamedTuple):
    """One computation of one stage on one microbatch.

    >>> str(Action(2, ActionKind.FORWARD, 0)), Action.parse("1B3").microbatch
    ('2F0', 3)
    """

    stage: int
    kind: ActionKind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"

    @staticmethod
    def parse(text: str) -> Action:
        """Parse one action; raises ConfigError for any other text."""
        match = _ACTION.fullmatch(text.strip())
        if match is None:
            raise ConfigError(f"{text!r} is not a schedule action", remedy="write stage, letter, microbatch: 2F0, 1B3, 1I3, 0W2")
        return Action(int(match[1]), ActionKind(match[2]), int(match[3]))


_EXAMPLES = {
    "text": '"0F0,0F1,0B0,0B1"',
    "name": '"mine", or leave it out',
    "stage_ranks": "((0,), (1,)), or leave it out",
    "n_microbatches": "2, or leave it out",
}


@checked_names
@dataclass(frozen=True)
class Schedule:
    """The actions of every rank, in order.

    Attributes:
        name: ``"1F1B"``, ``"ZBV"``, ...
        n_microbatches: number of microbatches of a step.
        stage_ranks: for each stage, the ranks that run it: microbatches are distributed to these round-robin.
        actions: for each rank, its actions in order. Communication is not listed: it follows from the graph.
    """

    name: str
    n_microbatches: int
    stage_ranks: tuple[tuple[int, ...], ...]
    actions: tuple[tuple[Action, ...], ...]

    @property
    def n_stages(self) -> int:
        return len(self.stage_ranks)

    @property
    def n_ranks(self) -> int:
        return len(self.actions)

    @property
    def splits_backward(self) -> bool:
        """Whether some backward is split into two halves (I and W)."""
        return any(action.kind is ActionKind.BACKWARD_WEIGHT for action in self)

    def __iter__(self) -> Iterator[Action]:
        for rank_actions in self.actions:
            yield from rank_actions

    def to_text(self) -> str:
        """Return one line a rank, actions separated by commas: torch's CSV.

        >>> print(Schedule("GPipe", 1, ((0,), (1,)), ((Action(0, ActionKind.FORWARD, 0),), (Action(1, ActionKind.FORWARD, 0),))).to_text())
        0F0
        1F0
        """
        return "\n".join(",".join(str(action) for action in rank_actions) for rank_actions in self.actions)

    @staticmethod
    @checked_arguments(examples=_EXAMPLES)
    def parse(
        text: str, *, name: str | None = None, stage_ranks: tuple[tuple[int, ...], ...] | None = None, n_microbatches: int | None = None
    ) -> Schedule:
        """Parse the text of ``to_text``; skip empty cells, which torch writes for idle steps.

        Args:
            text: one line a rank, actions separated by commas.
            name: None: one that is made from the text, and is the same for an equal text.
            stage_ranks: for each stage, the ranks that run it; None: those whose lines have its actions.
            n_microbatches: None: those of the actions.

        Raises:
            ConfigError: the text has something else than actions, no action of some stage, or one that ``stage_ranks`` or
                ``n_microbatches`` leave out.
        """
        actions = tuple(tuple(Action.parse(cell) for cell in line.split(",") if cell.strip()) for line in text.strip().splitlines())
        stage_ranks = _ranks_of_stages(actions) if stage_ranks is None else stage_ranks
        if n_microbatches is None:
            n_microbatches = 1 + max(action.microbatch for of_rank in actions for action in of_rank)
        for rank, of_rank in enumerate(actions):
            for action in of_rank:
                is_placed = action.stage < len(stage_ranks) and rank in stage_ranks[action.stage]
                if not is_placed or action.microbatch >= n_microbatches:
                    raise ConfigError(
                        f"the text of a schedule runs {action} on rank {rank}, which does not fit stage_ranks={stage_ranks} and "
                        f"n_microbatches={n_microbatches}",
                        remedy="leave stage_ranks= and n_microbatches= out: the text says both",
                    )
        if name is None:
            digest = hashlib.sha256(Schedule("", n_microbatches, stage_ranks, actions).to_text().encode()).hexdigest()
            name = f"custom-{digest[:8]}"
        return Schedule(name, n_microbatches, stage_ranks, actions)


def _ranks_of_stages(actions: tuple[tuple[Action, ...], ...]) -> tuple[tuple[int, ...], ...]:
    """Return for each stage the ranks that run it, in the order of their first microbatches, as round-robin ranks share them."""
    first: dict[int, dict[int, int]] = {}
    for rank, of_rank in enumerate(actions):
        for action in of_rank:
            ranks = first.setdefault(action.stage, {})
            ranks[rank] = min(action.microbatch, ranks.get(rank, action.microbatch))
    missing = sorted(set(range(1 + max(first, default=0))) - first.keys())
    if missing:
        raise ConfigError(
            f"the text of a schedule has no action of stage {missing[0]}",
            remedy="write one line for each rank, of actions such as 0F0,0B0; stages are numbered from 0",
        )
    return tuple(tuple(sorted(first[stage], key=first[stage].__getitem__)) for stage in sorted(first))
