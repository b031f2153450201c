"""Put the page together: summary, plan, devices, drawing, memory, communication, timeline, formulas, programs."""

from __future__ import annotations

import importlib.resources
from collections.abc import Sequence
from html import escape
from pathlib import Path

from cost_models.simulator.simulation import Simulation
from cost_models.units import format_bytes, format_seconds
from partitioner.drawing.blocks import blocks_svg
from partitioner.drawing.held import cut_weights
from partitioner.drawing.partition_diagram import partition_diagram
from partitioner.drawing.svg import diagram_svg
from partitioner.page.communication_matrix import matrix_html
from partitioner.page.mathml import formulas_html
from partitioner.page.memory_bars import bars_html
from partitioner.page.program_html import program_html
from partitioner.page.stage_formulas import stage_formulas
from partitioner.reports.comments import comment_programs
from partitioner.reports.devices import DeviceTable
from partitioner.reports.explained import Explained
from partitioner.reports.explanation import notes_of, sections, summary
from partitioner.reports.table import Table
from passes.ir.errors import ConfigError

__all__ = ["page_html", "save_page"]

_PROGRAMS = 16
"""Programs that are written out in full."""

_FOOTER = "times and memory are predicted: the plan's by the planner, the others by simulating the programs."

_WEIGHTS = 4
"""Weights that are drawn: one for each way in which ranks hold them."""


def save_page(path: str | Path, explained: Explained, devices: DeviceTable, simulation: Simulation) -> None:
    """Write the page; see ``page_html``.

    Raises:
        ConfigError: the file cannot be written.
    """
    text = page_html(explained, devices, simulation)
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        problem = f"the report cannot be written to {path}: {error.strerror}"
        raise ConfigError(problem, remedy="name a file in a folder that is there") from error


def page_html(explained: Explained, devices: DeviceTable, simulation: Simulation) -> str:
    """The report of one partition as a single HTML file: no scripts, styles, fonts or pictures from elsewhere.

    Args:
        explained: the model.
        devices: a line for each rank.
        simulation: of a step.
    """
    parts = (
        ("Plan", _plan(explained)),
        ("Devices", f'<div class="wide">{devices.html()}</div>'),
        ("Drawing", f'<div class="wide">{diagram_svg(partition_diagram(explained))}</div>'),
        ("Weights", _weights(explained)),
        ("Timeline", f'<div class="wide">{simulation.timeline.svg()}</div>'),
        ("Memory", bars_html(simulation.memory)),
        ("Communication", _communication(explained, simulation)),
        ("Formulas", formulas_html(stage_formulas(explained), "b: the rows of a microbatch; all is of one microbatch")),
        ("Programs", _programs(explained)),
        ("Notes", _notes(explained)),
    )
    shown = [(title, body) for title, body in parts if body]
    links = "".join(f'<a href="#{title.lower()}">{title}</a>' for title, _ in shown)
    bodies = "".join(f'<section id="{title.lower()}"><h2>{title}</h2>{body}</section>' for title, body in shown)
    return (
        f"{_head(devices.headline)}<body>\n"
        f"<header><h1>{escape(explained.name)}</h1><p>{escape(devices.headline)}</p>{_tiles(simulation)}</header>\n"
        f"<main><nav>{links}</nav>{bodies}</main>\n"
        f"<footer>plan {explained.plan.hash}; {_FOOTER}</footer>\n<script>\n{_file('script.js')}</script>\n</body>\n</html>\n"
    )


def _head(title: str) -> str:
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<style>\n{_file("style.css")}</style>\n</head>\n'
    )


def _file(name: str) -> str:
    return importlib.resources.files("partitioner.page").joinpath(name).read_text(encoding="utf-8")


def _tiles(simulation: Simulation) -> str:
    """The four numbers that one looks for first."""
    tiles = (
        (format_seconds(simulation.step_time), "a step, simulated"),
        (f"{simulation.bubble_fraction:.1%}", "of all devices' time idle"),
        (format_bytes(max(simulation.peak_memory, default=0)), "peak of the fullest device"),
        (format_bytes(sum(simulation.communication.values())), "sent in a step"),
        (f"{simulation.throughput:,.0f}", "rows a second"),
    )
    return f'<div class="tiles">{"".join(f"<div class=tile><b>{number}</b><span>{words}</span></div>" for number, words in tiles)}</div>'


def _plan(explained: Explained) -> str:
    pairs = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in summary(explained))
    return f"<dl>{pairs}</dl>" + _tables(explained, ("AXES", "PARAMETERS", "ACTIVATIONS", "STAGES", "TIED PARAMETERS", "SCHEDULE"))


def _tables(explained: Explained, titles: Sequence[str]) -> str:
    found = dict(sections(explained))
    return "".join(f'<h3>{title.capitalize()}</h3><div class="wide">{_body(found[title])}</div>' for title in titles if title in found)


def _body(body: Table | Sequence[str]) -> str:
    return body.html() if isinstance(body, Table) else f"<pre>{escape(chr(10).join(body))}</pre>"


def _weights(explained: Explained) -> str:
    drawings = "".join(blocks_svg(table) for table in cut_weights(explained, _WEIGHTS))
    return f'<div class="weights">{drawings}</div>' if drawings else ""


def _communication(explained: Explained, simulation: Simulation) -> str:
    return f'<div class="wide">{matrix_html(simulation.communication, explained.mesh.size)}</div>' + _tables(explained, ("COMMUNICATION",))


def _programs(explained: Explained) -> str:
    graphs = comment_programs(explained)
    search = '<div class="search"><input id="search" type="search" placeholder="all_reduce blocks.0 ..." aria-label="search the programs">'
    search += '<span id="count" class="lead"></span></div>'
    programs = "".join(
        program_html(f"rank {rank} on {explained.plan.devices[rank]}", graph.print_readable(print_output=False), is_open=rank == 0)
        for rank, graph in enumerate(graphs[:_PROGRAMS])
    )
    left_out = len(graphs) - _PROGRAMS
    more = f'<p class="footnote">{left_out} more ranks run programs like these: pm.graph(rank) prints them.</p>' if left_out > 0 else ""
    return f"{search}{programs}{more}"


def _notes(explained: Explained) -> str:
    notes = "".join(f"<li>{escape(note)}</li>" for note in notes_of(explained))
    return f"<ol>{notes}</ol>" if notes else ""
