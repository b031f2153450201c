"""Simulate inference for batches of several sizes: latency against throughput.

a model that generates     prompt in chunks, then token after token     first token, time per token, tokens a second
any other                  one forward                                  latency, rows a second

The programs are those that ``pm.generate`` and ``pm(...)`` run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from cost_models.cost_model import Roofline
from cost_models.hardware.clusters import Cluster
from cost_models.hardware.units import format_bytes, format_seconds
from cost_models.simulator.result import Simulation
from cost_models.simulator.simulate import simulate_programs
from partitioner.model.generation.decoder import Decoder
from partitioner.model.generation.generate import most_positions
from partitioner.model.inspection.simulate import machine_of
from partitioner.options.arguments import EXAMPLES, VALUES
from partitioner.runtime.executor import ProgramSet
from partitioner.specialize.trace import Trace
from passes.ir.arguments.checked import Rule, at_least, each_of
from passes.ir.errors import ConfigError

INFERENCE_VALUES: Mapping[str, Rule] = MappingProxyType(
    {
        "batches": each_of(at_least(1)),
        "prompt": at_least(1),
        "new_tokens": at_least(1),
        "cluster": VALUES["cluster"],
    }
)
"""Argument of ``simulate_inference`` -> check of its value."""

INFERENCE_EXAMPLES: Mapping[str, str] = MappingProxyType(
    {
        "batches": "(1, 8, 64)",
        "prompt": "512, or leave it out",
        "new_tokens": "128, or leave it out",
        "cluster": EXAMPLES["cluster"],
    }
)
"""Argument -> an example of its value, for error messages."""

_HEADINGS = ("batch", "first token", "per token", "latency", "throughput", "peak memory")


@dataclass(frozen=True)
class SimulatedBatch:
    """One batch on a clock.

    Attributes:
        rows: of the batch, over all devices.
        new_tokens: of each row; 0 for a model that does not generate.
        latency: seconds until the last token, or the result, is there.
        first_token: seconds until the first token is there; the latency of a model that does not generate.
        peak_memory: for each device, the most bytes that it holds at once: weights, caches and activations.
    """

    rows: int
    new_tokens: int
    latency: float
    first_token: float
    peak_memory: tuple[int, ...]

    @property
    def per_token(self) -> float:
        """Seconds between one token and the next; 0.0 for less than two tokens."""
        return (self.latency - self.first_token) / (self.new_tokens - 1) if self.new_tokens > 1 else 0.0

    @property
    def throughput(self) -> float:
        """Tokens a second of all rows together; rows a second for a model that does not generate."""
        return self.rows * max(1, self.new_tokens) / self.latency if self.latency else 0.0


@dataclass(frozen=True)
class InferenceTable:
    """Latency and throughput of batches of several sizes; ``str()`` is a table.

    Attributes:
        batches: in the order in which they were asked for.
        prompt: tokens of each row that are given; 0 for a model that does not generate.
    """

    batches: tuple[SimulatedBatch, ...]
    prompt: int

    def __str__(self) -> str:
        generates = any(each.new_tokens for each in self.batches)
        rows = [_HEADINGS, *(_cells(each, "tokens/s" if each.new_tokens else "rows/s") for each in self.batches)]
        shown = rows if generates else [(row[0], *row[3:]) for row in rows]
        widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in shown]
        asked = f"prompts of {self.prompt} tokens, {self.batches[0].new_tokens} new tokens a row" if generates else "one forward a batch"
        return "\n".join([asked, "", *lines])


def _cells(batch: SimulatedBatch, unit: str) -> tuple[str, ...]:
    times = (format_seconds(each) for each in (batch.first_token, batch.per_token, batch.latency))
    return str(batch.rows), *times, f"{batch.throughput:,.1f} {unit}", format_bytes(max(batch.peak_memory, default=0))


def simulate_inference(
    trace: Trace,
    decoders: list[Decoder],
    batches: Sequence[int],
    prompt: int | None,
    new_tokens: int | None,
    cluster: Cluster | str | None,
) -> InferenceTable:
    """Simulate batches; see ``PartitionedModel.simulate_inference``.

    Args:
        trace: of the model in evaluation mode.
        decoders: the one decoder of the model, or none before it is needed.
    """
    machine = machine_of(trace, cluster)
    parts = trace.programs.rows.count
    uneven = [each for each in batches if each % parts]
    if not batches or uneven:
        said = "no batch is given" if not batches else f"{parts} ranks share the rows of a batch, and {uneven[0]} rows do not divide"
        raise ConfigError(said, remedy=f"batches=({parts}, {2 * parts}, {4 * parts})")
    if not hasattr(trace.original, "generate"):
        if prompt is not None or new_tokens is not None:
            raise ConfigError(f"{trace.name} generates no tokens", remedy="leave out prompt and new_tokens")
        return InferenceTable(tuple(_forward(trace, machine, each) for each in batches), 0)
    return _generation(trace, decoders, batches, prompt or 128, new_tokens or 128, machine)


def _forward(trace: Trace, machine: Cluster, rows: int) -> SimulatedBatch:
    """Simulate a forward."""
    simulation = _simulated(trace, machine, trace.programs.get(trace.programs.request(rows)), rows)
    return SimulatedBatch(rows, 0, simulation.step_time, simulation.step_time, simulation.peak_memory)


def _generation(
    trace: Trace, decoders: list[Decoder], batches: Sequence[int], prompt: int, new_tokens: int, machine: Cluster
) -> InferenceTable:
    """Simulate the chunks of a prompt, and a token after it, which every further token repeats."""
    limit = most_positions(trace.original)
    length = prompt + new_tokens
    if limit is not None and length > limit:
        raise ConfigError(
            f"a prompt of {prompt} and {new_tokens} new tokens are more than the {limit} positions of the model",
            remedy=f"prompt and new_tokens of {limit} together at most",
        )
    if not decoders:
        decoders.append(Decoder(trace, limit))
    found = []
    for rows in batches:
        prefilled, decoded = (
            [_simulated(trace, machine, each, rows) for each in decoders[0].forwards(start, end, length, rows)]
            for start, end in ((0, prompt), (prompt, prompt + 1))
        )
        first, per_token = (sum(each.step_time for each in part) for part in (prefilled, decoded))
        latency = first + (new_tokens - 1) * per_token
        found.append(SimulatedBatch(rows, new_tokens, latency, first, _highest([*prefilled, *decoded])))
    return InferenceTable(tuple(found), prompt)


def _simulated(trace: Trace, machine: Cluster, programs: ProgramSet, rows: int) -> Simulation:
    assumed, parts = trace.assumed, trace.programs.rows.count
    return simulate_programs(programs.programs, machine, assumed.cost_model or Roofline(), rows, n_row_parts=parts)


def _highest(simulations: Iterable[Simulation]) -> tuple[int, ...]:
    """Return the highest peak of each device."""
    return tuple(max(peaks) for peaks in zip(*(each.peak_memory for each in simulations), strict=True))
