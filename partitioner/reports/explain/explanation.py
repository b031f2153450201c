"""``pm.explain()``: a plan in words and tables: stages, schedule, communication with its reasons, predicted time and its bound."""

from __future__ import annotations

import itertools
import re
import textwrap
from collections import Counter
from collections.abc import Sequence
from typing import TypeVar

from cost_models.hardware.units import format_bytes, format_flops, format_seconds
from cost_models.simulator.result import Simulation
from partitioner.options.batch_statistics import microbatch_effects
from partitioner.planner.search.describe import recomputed_regions
from partitioner.reports.communication.collectives import collectives_of_classes
from partitioner.reports.communication.planned import planned_communication, planned_transfers
from partitioner.reports.communication.summary import transfers
from partitioner.reports.communication.transfer import Transfer
from partitioner.reports.explain.choices import axes_proof, contenders_section, front_section, fullest_rank
from partitioner.reports.explain.clocks import clocks, stage_seconds
from partitioner.reports.explain.sharding import activations_section, axes_section, halos_section, parameters_section, regions_section
from partitioner.reports.explain.step_memory import peaks_of_step, saved_bytes
from partitioner.reports.explain.timetable import timetable
from partitioner.reports.module_names import module_range
from partitioner.reports.sources import Explained
from partitioner.reports.tables.devices import headline
from partitioner.reports.tables.table import Table, align
from partitioner.schedules.catalog import find_schedule, interleaves
from partitioner.schedules.kind import peak_in_flight
from passes.ir.comm.microbatch import microbatch_sizes
from passes.ir.mesh import SEQUENCE, mesh_words, rank_list, rank_numbers
from passes.ir.plan import Plan

_WIDTH = 132
_TERMINAL = 140

_Row = TypeVar("_Row")

_WIDE_GAP = 0.1
"""Relative time that another plan could save above which the explanation begins with it."""


def explanation(explained: Explained, simulation: Simulation | None = None) -> str:
    """Return the text of ``pm.explain()`` for a terminal of 140 columns; ``simulation``: of a step, if one was made."""
    lines = [headline(explained.name, explained.plan, training=explained.graph.training), ""]
    lines += [f"  {line}" for line in _paragraphs(summary(explained, simulation))]
    for title, body in sections(explained):
        lines += ["", title, *(f"  {line}" for line in (body.lines(_TERMINAL - 2) if isinstance(body, Table) else body))]
    return "\n".join(lines)


def sections(explained: Explained) -> list[tuple[str, Table | Sequence[str]]]:
    """Return the sections of the explanation, titles with tables or lines; empty ones are left out."""
    notes = [textwrap.fill(note, _WIDTH - 6, subsequent_indent="     ") for note in notes_of(explained)]
    every: tuple[tuple[str, Table | Sequence[str] | None], ...] = (
        ("PLANS", contenders_section(explained.plan)),
        ("TIME AGAINST MEMORY", front_section(explained.plan)),
        ("AXES", axes_section(explained) if explained.is_cut else None),
        ("REGIONS", regions_section(explained) if explained.is_cut else None),
        ("HALOS", halos_section(explained.plan)),
        ("PARAMETERS", parameters_section(explained) if explained.is_cut else None),
        ("STAGES", _stages(explained)),
        ("ACTIVATIONS", None if explained.is_long else activations_section(explained)),
        ("MEMORY", _memory(explained)),
        ("COMMUNICATION", _communication(explained)),
        ("TIED PARAMETERS", _tied(explained)),
        ("SCHEDULE", _schedule(explained)),
        ("NOTES", [f"{index}. {note}" for index, note in enumerate(notes, start=1)]),
    )
    return [(title, body) for title, body in every if body]


def summary(explained: Explained, simulation: Simulation | None = None) -> list[tuple[str, str]]:
    """Return the plan in a few words, as (name, text): ``("mesh", "data 2 x tensor 2, on cuda:0, ...")``.

    First comes what decides: the mesh, the time, the memory, the bottleneck, the runner-up; before them, how far a search is from a proof.

    If a simulated step is given, its time stands beside the planner's, with the reasons for a difference.
    """
    plan = explained.plan
    pairs = [
        ("gap", _gap_words(plan)),
        ("mesh", f"{mesh_words(explained.mesh, plan.replicas)}, {_devices(plan.devices, explained.planned_for)}"),
        ("step", f"{format_seconds(plan.step_time)} predicted" if simulation is None else clocks(plan, simulation)),
        ("memory", fullest_rank(plan.memory, explained.limits)),
        ("over limit", simulation.over_limit_words if simulation is not None else ""),
        ("bound by", _bound_by(explained)),
        ("runner-up", plan.prediction.runner_up or "there was no other choice"),
        ("schedule", _schedule_words(explained) if len(plan.stages) > 1 else ""),
        ("batch", _batch_words(plan)),
        ("sizes", _size_words(plan)),
        ("tiles", f"{' x '.join(map(str, plan.tiles))}, sequential" if plan.tiles else ""),
        ("attention", _ATTENTION[plan.attention] if any(name == SEQUENCE for name, _ in plan.mesh) else ""),
        ("recompute", _recompute_words(plan) if explained.schedule is not None else ""),
        ("sums", f"of parameters' gradients over ranks: in {plan.reduce_dtype}, by reduce_dtype=" if plan.reduce_dtype else ""),
        ("idle", _idle(plan, simulation)),
        ("calls", _memory_of_calls(explained)),
        ("searched", plan.prediction.searched),
        ("axes", axes_proof(plan)),
    ]
    return [(name, text) for name, text in pairs if text]


def _gap_words(plan: Plan) -> str:
    """Say how much faster another plan could be; empty if that is little."""
    gap = plan.prediction.gap or 0.0
    if gap <= _WIDE_GAP:
        return ""
    return f"not proved: another plan could take up to {100 * gap:.2g} % less time; time_limit= lets the search go on"


def _memory_of_calls(explained: Explained) -> str:
    """Format ``"1.66 MiB on rank 1, the fullest, by pm(...) and backward(): all forwards first"``; empty where the schedule is kept."""
    plan = explained.plan
    if explained.schedule is None or not interleaves(plan):
        return ""
    return f"{fullest_rank(plan.call_memory, explained.limits)}, by pm(...) and backward(): all forwards come first"


_ATTENTION = {
    "gather": "gather: each rank has its queries, and gathers keys and values",
    "ulysses": "ulysses: ranks exchange their part of the sequence for a part of the heads, and back",
    "ring": "ring: keys and values go round the ranks",
    "zigzag": "zigzag: keys and values go round the ranks, each of which has an early and a late piece of the sequence",
}
"""``Plan.attention`` in words."""


def _schedule_words(explained: Explained) -> str:
    """Format the schedule: ``"1F1B (Narayanan et al. 2021), 1 stage on each device"``."""
    plan = explained.plan
    if explained.schedule is None:
        return "none: a forward alone, stages one after the other"
    count = len(plan.stages) * explained.mesh.cutting.size // plan.n_ranks
    stages = f"{count} stage{'s' if count > 1 else ''} on each device"
    if plan.replicas:
        stages = f"stages on {' + '.join(map(str, plan.replicas))} ranks, which share microbatches round-robin"
    return f"{plan.schedule} ({find_schedule(plan.schedule).source.partition(',')[0]}), {stages}"


def _size_words(plan: Plan) -> str:
    """Format ``"priced for length 128; inputs of other sizes run by the same plan"``; empty if no size is open."""
    if not plan.prediction.sizes:
        return ""
    sizes = ", ".join(f"{name} {size}" for name, size in plan.prediction.sizes)
    return f"priced for {sizes}; inputs of other sizes run by the same plan"


def _batch_words(plan: Plan) -> str:
    """Format the batch: ``"8 rows in 4 microbatches of 2 rows each"``."""
    if plan.n_microbatches == 1:
        return f"{plan.batch_size} rows in 1 microbatch"
    rows = microbatch_sizes(plan.batch_size, plan.n_microbatches)
    sizes = f"{rows[0]}" if len(set(rows)) == 1 else f"{rows[0]} or {rows[-1]}"
    return f"{plan.batch_size} rows in {plan.n_microbatches} microbatches of {sizes} rows each"


def _recompute_words(plan: Plan) -> str:
    if plan.tiles:
        return "every tile" + ("" if plan.recompute == "none" else f"; of what is computed whole, {plan.recompute}")
    if plan.recompute == "none":
        return "nothing: all that the backward reads is kept"
    return (recomputed_regions(plan) or plan.recompute) + _selected_words(plan.recomputed)


def _selected_words(recomputed: Sequence[str]) -> str:
    """Format the operations that ``"selective"`` recomputes: ``": 26 operations (gelu 12, layer_norm 12, embedding 2)"``."""
    if not recomputed:
        return ""
    kinds = Counter(re.sub(r"(_\d+)+$", "", name) for name in recomputed if not name.startswith("getitem"))
    ordered = sorted(kinds.items(), key=lambda item: (-item[1], item[0]))
    words = [f"{kind} {count}" for kind, count in ordered[:_MOST_KINDS]] + ["..."] * (len(ordered) > _MOST_KINDS)
    return f": {kinds.total()} operations ({', '.join(words)})"


_MOST_KINDS = 6
"""Limit of the kinds of recomputed operations that are named."""


def _idle(plan: Plan, simulation: Simulation | None) -> str:
    """Return the share of the ranks' time in which they compute nothing, by the clock of the report."""
    if simulation is not None:
        return f"{100 * simulation.bubble_fraction:.0f} % of the ranks' time: they compute nothing (simulated)"
    share = round(100 * (1 - stage_seconds(plan) / plan.step_time)) if plan.step_time and len(plan.stages) > 1 else 0
    return f"{share} % of the ranks' time: they wait for other stages (predicted)" if share > 0 else ""


def _bound_by(explained: Explained) -> str:
    """Return the bottleneck of the step, "on rank 1": the planner's positions in one pipeline are replaced by ranks of the mesh."""
    if not explained.is_cut:
        return explained.plan.prediction.bound_by

    def on_mesh_ranks(match: re.Match[str]) -> str:
        places = [int(place) for place in re.findall(r"[0-9]+", match[0])]
        return f"on {rank_list(explained.ranks_at(places))}"

    return re.sub(r"\bon ranks? \d+( and \d+)*\b", on_mesh_ranks, explained.plan.prediction.bound_by)


def _devices(devices: Sequence[str], planned_for: str) -> str:
    """Format ``"on cuda:0, cuda:1"``; ``"every rank on cpu"``; ``"planned for 2 x h100, run on cpu"``."""
    if planned_for:
        return f"planned for {planned_for}, run on {', '.join(dict.fromkeys(devices))}"
    return f"every rank on {devices[0]}" if len(devices) > 1 and len(set(devices)) == 1 else f"on {', '.join(devices)}"


def _paragraphs(pairs: Sequence[tuple[str, str]]) -> list[str]:
    """Format (name, text) pairs as lines: names on the left, texts wrapped on the right."""
    width = max(len(name) for name, _ in pairs) + 2
    lines = []
    for name, text in pairs:
        lines += textwrap.wrap(text, _WIDTH - 2, initial_indent=f"{name:<{width}}", subsequent_indent=" " * width)
    return lines


def _stages(explained: Explained) -> Table:
    heading = ("stage", _rank_heading(explained), "modules", "parameters", "size", "work forward", "time forward", "time backward")
    every = [
        (
            f"{stage.parameter_count:,}",
            format_bytes(stage.parameter_bytes),
            format_flops(stage.flops),
            format_seconds(stage.forward_time),
            format_seconds(stage.backward_time),
        )
        for stage in explained.plan.stages
    ]
    rows = []
    for indices in _equal_runs(every):
        stages = [explained.plan.stages[index] for index in indices]
        ranks = sorted({rank for stage in stages for rank in stage.ranks})
        modules = module_range([module for stage in stages for module in stage.modules])
        rows.append((_from_to(indices), _ranks(explained, ranks), modules, *every[indices[0]]))
    parts = "; on a mesh all numbers are of the part of the first rank" if explained.is_cut else ""
    return Table([heading, *rows], ">><>>>>>", f"work and times are of one microbatch; times are predicted{parts}")


_MOST_ROWS = 12
"""Rows of stages or ranks above which equal ones share a row, or those in the middle are left out."""


def _equal_runs(rows: Sequence[_Row]) -> list[list[int]]:
    """Return the indices of rows that are equal and follow each other; of few rows, each alone."""
    if len(rows) <= _MOST_ROWS:
        return [[index] for index in range(len(rows))]
    return [list(run) for _, run in itertools.groupby(range(len(rows)), rows.__getitem__)]


def _from_to(indices: Sequence[int]) -> str:
    """Format indices: ``"3"`` or ``"1 to 14"``."""
    return str(indices[0]) if len(indices) == 1 else f"{indices[0]} to {indices[-1]}"


def _ends(rows: Sequence[_Row], left_out: _Row) -> list[_Row]:
    """Return the first and the last of many rows."""
    half = _MOST_ROWS // 2
    return [*rows[:half], left_out, *rows[-half:]] if len(rows) > _MOST_ROWS else list(rows)


def _rank_heading(explained: Explained) -> str:
    return "ranks" if explained.is_cut or explained.plan.replicas else "rank"


def _ranks(explained: Explained, places: Sequence[int]) -> str:
    """Return the ranks at pipeline positions as text: ``"0-3"``, or ``"0, 2"``."""
    return rank_numbers(explained.ranks_at(places))


def _schedule(explained: Explained) -> list[str]:
    """Draw the schedule of one pipeline; its lines are "places" if several ranks share a stage, else ranks."""
    if explained.schedule is None:
        return []
    *lines, words = timetable(explained.schedule, _WIDTH - 2)
    lines = [*_ends(lines, "..."), words]
    return [re.sub(r"^rank", "place", line) for line in lines] if explained.is_cut else lines


def _memory(explained: Explained) -> Table:
    """Return the table of activation memory: saved bytes by stage, microbatches in flight from the schedule."""
    plan = explained.plan
    if explained.schedule is None:
        peaks = [(str(rank), format_bytes(peak)) for rank, peak in enumerate(plan.memory)]
        return Table([("rank", "predicted peak"), *_ends(peaks, ("...", ""))], ">>")
    peaks_of_ranks = peaks_of_step(plan, explained.schedule)
    heading = ("stage", _rank_heading(explained), "kept a microbatch", "microbatches held", "kept at most", "peak of the rank")
    rows: list[tuple[str, ...]] = []
    for index, (stage, saved, count) in enumerate(
        zip(plan.stages, _saved_bytes(explained), peak_in_flight(explained.schedule), strict=True)
    ):
        peak = format_bytes(peaks_of_ranks[explained.ranks_at(stage.ranks[:1])[0]])
        rows.append((str(index), _ranks(explained, stage.ranks), format_bytes(saved), str(count), format_bytes(saved * count), peak))
    source = "predicted" if explained.is_long else "read from the graphs"
    footnote = f"kept: for the backward, {source}; peak: predicted, with parameters, gradients and optimizer states"
    if peaks_of_ranks != plan.memory:
        footnote += "; the last step took a loss of all rows, for which every stage holds all microbatches"
    return Table([heading, *_ends(rows, ("...",) + ("",) * 5)], ">>>>>>", footnote)


def _saved_bytes(explained: Explained) -> list[int]:
    """Return the bytes that a rank of each stage saves of one microbatch for its backward."""
    if explained.is_long:
        return [stage.activation_bytes for stage in explained.plan.stages]
    return [saved_bytes(explained.lowered, training, explained.plan) for training in explained.lowered.training]


def _communication(explained: Explained) -> Table | Sequence[str]:
    mesh, is_training = explained.mesh if explained.is_cut else None, explained.schedule is not None
    every: Sequence[Transfer]
    if explained.is_long:
        every = planned_transfers(explained.plan, planned_communication(explained))
    else:
        every = transfers(explained.lowered, explained.classes, mesh, collectives_of_classes(explained))
    if not every:
        return ["none: everything runs on one rank"]
    heading = ("value", "one message", "bytes", "messages", "from", "to", "why")
    rows = [(one.value, one.shape, format_bytes(one.bytes), str(one.times), one.source, one.destination, one.reason) for one in every]
    step = "step" if is_training else "forward"
    totals = ("total", "", format_bytes(sum(one.bytes for one in every)), str(sum(one.times for one in every)), "", "", "")
    footnote = f"bytes and messages are of a whole {step}{', predicted' if explained.is_long else ''}; "
    footnote += "x -> y: y reads what x computes" + ("; x <- y: its gradient goes back" if is_training else "")
    return Table([heading, *rows, totals], "<<>><<<", footnote)


def _tied(explained: Explained) -> list[str]:
    """List the parameters that have several names or are held by several stages, with the ranks that hold them."""
    graph = explained.graph
    place_of = {rank: place for place, ranks in enumerate(explained.ranks_at_places) for rank in ranks}
    rows = []
    for placeholder, name in graph.parameters.items():
        held = explained.blocks.get(placeholder, {})
        places = {place_of[rank] for rank in held}
        holders = {stage.ranks for stage in explained.plan.stages if not places.isdisjoint(stage.ranks)}
        aliases = [alias for alias, first in graph.aliases.items() if first == name]
        reason = f"also {', '.join(aliases)}" if aliases else "read by several stages"
        if len(holders) > 1:
            rows.append((name, reason, f"held by {rank_list(sorted(held))}, gradients are summed in training"))
        elif aliases:
            rows.append((name, reason, f"held by {rank_list(sorted(held) or (0,))}"))
    return align(rows, "<<<") if rows else []


def notes_of(explained: Explained) -> list[str]:
    """Return the notes of the plan, the effects of microbatches and the notes of the graph, without duplicates."""
    effects = microbatch_effects(explained.graph.mixing, explained.plan.n_microbatches)
    return list(dict.fromkeys((*explained.plan.notes, *effects, *explained.graph.notes)))
