"""Put the page together: summary, plan, devices, drawing, memory, communication, timeline, formulas, programs."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import TypeAlias

import sympy
from sympy.printing.mathml import mathml

from cost_models.formulas.step import StepFormula
from cost_models.hardware.units import format_bytes, format_seconds
from cost_models.simulator.result import Simulation
from partitioner.reports.communication.comments import comment_programs
from partitioner.reports.explain.explanation import notes_of, sections, summary
from partitioner.reports.page.bytes_html import bars_html, matrix_html
from partitioner.reports.page.frame import framed, page_file, tiles_html
from partitioner.reports.pictures.blocks import blocks_svg, cut_weights
from partitioner.reports.pictures.diagram_svg import diagram_svg
from partitioner.reports.pictures.partition_diagram import partition_diagram
from partitioner.reports.sources import Explained, RankClass
from partitioner.reports.tables.devices import DeviceTable
from partitioner.reports.tables.table import Table
from passes.ir.comm.primitives import COMMUNICATION
from passes.ir.errors import ConfigError
from passes.ir.mesh import rank_list

_PROGRAMS, _PROGRAM_BYTES = 16, 2_000_000
"""Largest number of programs on a page, and of letters in all but the last of them."""

_FOOTER = "times and memory are predicted: those of plans, stages and devices by the planner, the others by simulating the programs."

_LONG_FORMULAS = '<p class="footnote">pm.cost_formula() has the formulas: those of so many operations take long.</p>'
_LONG_PROGRAMS = '<p class="footnote">pm.graph(rank) has the program of a rank: those of so many operations do not fit a page.</p>'
"""Text in place of sections that would take long for a model of many operations."""

_WEIGHTS = 4
"""Largest number of weights that are drawn, one for each layout."""


def page_html(explained: Explained, devices: DeviceTable, simulation: Simulation, formula: Callable[[], StepFormula]) -> str:
    """Return the report of a partitioned model as a single HTML file, without scripts, styles, fonts or pictures from elsewhere.

    Args:
        formula: returns the formulas of a step. If it raises, the page gives the reason in their place.
    """
    bodies, classes = dict(sections(explained)), explained.rank_classes
    drawing = "" if explained.is_long else f'<div class="wide">{diagram_svg(partition_diagram(explained))}</div>'
    parts = (
        ("Plan", _plan(explained, bodies, simulation)),
        ("Devices", f'<div class="wide">{devices.html()}</div>'),
        ("Drawing", drawing),
        ("Weights", _weights(explained)),
        ("Timeline", f'<div class="wide">{simulation.timeline.svg()}</div>'),
        ("Memory", bars_html([simulation.memory[ranks[0]] for ranks in classes], [rank_list(ranks) for ranks in classes])),
        ("Communication", _communication(explained, bodies, simulation)),
        ("Formulas", _LONG_FORMULAS if explained.is_long else _formulas(formula)),
        ("Programs", _LONG_PROGRAMS if explained.is_long else _programs(explained)),
        ("Notes", _notes(explained)),
    )
    header = f"<h1>{escape(explained.name)}</h1><p>{escape(devices.headline)}</p>{_tiles(simulation)}"
    footer = f"plan {explained.plan.hash}; {_FOOTER}"
    return framed(devices.headline, header, parts, footer, page_file("script.js"))


def _tiles(simulation: Simulation) -> str:
    """Return the main figures: step time, idle share, peak memory, bytes sent, throughput."""
    over = ", over its limit" if simulation.over_limit else ""
    tiles = (
        (format_seconds(simulation.step_time), "a step, simulated"),
        (f"{100 * simulation.bubble_fraction:.0f} %", "of all devices' time idle"),
        (format_bytes(max(simulation.peak_memory, default=0)), f"peak of the fullest device{over}"),
        (format_bytes(sum(simulation.communication.values())), "sent in a step"),
        (f"{simulation.throughput:,.0f}", "rows a second"),
    )
    return tiles_html(tiles)


_Bodies: TypeAlias = Mapping[str, Table | Sequence[str]]
"""The sections of ``explain()``, by title."""


def _plan(explained: Explained, bodies: _Bodies, simulation: Simulation) -> str:
    pairs = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in summary(explained, simulation))
    titles = ("PLANS", "TIME AGAINST MEMORY", "AXES", "PARAMETERS", "ACTIVATIONS", "STAGES", "TIED PARAMETERS", "SCHEDULE")
    return f"<dl>{pairs}</dl>" + _tables(bodies, titles)


def _tables(bodies: _Bodies, titles: Sequence[str]) -> str:
    """Return the sections with these titles."""
    return "".join(f'<h3>{title.capitalize()}</h3><div class="wide">{_body(bodies[title])}</div>' for title in titles if title in bodies)


def _body(body: Table | Sequence[str]) -> str:
    return body.html() if isinstance(body, Table) else f"<pre>{escape(chr(10).join(body))}</pre>"


def _weights(explained: Explained) -> str:
    drawings = "".join(blocks_svg(table) for table in cut_weights(explained, _WEIGHTS))
    return f'<div class="weights">{drawings}</div>' if drawings else ""


def _communication(explained: Explained, bodies: _Bodies, simulation: Simulation) -> str:
    n_ranks = explained.mesh.size
    classes = explained.rank_classes if n_ranks > _CELLS else [(rank,) for rank in range(n_ranks)]
    return f'<div class="wide">{matrix_html(simulation.communication, classes)}</div>' + _tables(bodies, ("COMMUNICATION",))


_CELLS = 64
"""Ranks up to which each has a row of what it sends to each other one; of more, each class of equal ones has."""


def _formulas(formula: Callable[[], StepFormula]) -> str:
    """Return the formulas of a step with the meaning of each symbol; or why there are none."""
    try:
        of_step = formula()
    except ConfigError as error:
        return f'<p class="footnote">{escape(str(error))}</p>'
    moved = {f"bytes that the slowest rank sends along {name}": size for name, size in of_step.bytes_moved.items()}
    formulas = {"step time (s)": of_step.step_time, "memory of the fullest rank (bytes)": of_step.memory, **moved}
    rows = "".join(f"<tr><td>{escape(name)}</td><td>{_typeset(expression)}</td></tr>" for name, expression in formulas.items())
    symbols = str(of_step).partition("\nwhere\n")[2]
    return f'<div class="wide"><table class="formulas">{rows}</table></div><pre>{escape(symbols)}</pre>'


def _typeset(expression: sympy.Expr) -> str:
    """Return a formula as MathML, with spaces between factors: symbols have several letters."""
    text: str = mathml(expression, printer="presentation")
    spaced = text.replace("<mo>&InvisibleTimes;</mo>", '<mspace width="0.2em"/>').replace("<mo>\u2062</mo>", '<mspace width="0.2em"/>')
    return f'<math display="inline">{spaced}</math>'


def _programs(explained: Explained) -> str:
    """Return a search field and the commented programs of the first classes of equal ranks."""
    shown = list[str]()
    for of_class in explained.classes[:_PROGRAMS]:
        if sum(map(len, shown)) >= _PROGRAM_BYTES:
            break
        (graph,) = comment_programs(explained, [of_class.program])
        shown.append(_program_html(_ranks_on(explained, of_class), graph.print_readable(print_output=False), is_open=not shown))
    search = '<div class="search"><input id="search" type="search" placeholder="all_reduce blocks.0 ..." aria-label="search the programs">'
    search += '<span id="count" class="lead"></span></div>'
    return f"{search}{''.join(shown)}{_left_out(explained, len(shown))}"


def _ranks_on(explained: Explained, of_class: RankClass) -> str:
    """Format ``"rank 3 on cuda:3"``; ``"rank 7 on cuda:7, and 7 ranks like it"``."""
    rank, count = of_class.program.rank, len(of_class.ranks) - 1
    alike = f", and {count} rank{'s' if count > 1 else ''} like it" if count else ""
    return f"rank {rank} on {explained.plan.devices[rank]}{alike}"


def _left_out(explained: Explained, n_shown: int) -> str:
    """Name the programs that are not on the page, and the parts that programs of many ranks leave out."""
    n_ranks = sum(len(of_class.ranks) for of_class in explained.classes[n_shown:])
    notes = [f"{n_ranks} more ranks run programs like these: pm.graph(rank) prints them."] if n_ranks else []
    if len(explained.classes) < explained.mesh.size:
        notes.append("Of equal calls of a stage, the first alone is inlined; pm.graph(rank) prints all.")
    return "".join(f'<p class="footnote">{note}</p>' for note in notes)


def _notes(explained: Explained) -> str:
    notes = "".join(f"<li>{escape(note)}</li>" for note in notes_of(explained))
    return f"<ol>{notes}</ol>" if notes else ""


_COMMUNICATION = re.compile(rf"= ({'|'.join(function.__name__ for function in COMMUNICATION)})\(")


def _program_html(title: str, code: str, *, is_open: bool) -> str:
    """Return a program as an expandable section, calls that communicate highlighted."""
    lines = "".join(_line(line) for line in code.strip().splitlines())
    opened = " open" if is_open else ""
    return f'<details{opened}><summary>{escape(title)}</summary><pre class="program">{lines}</pre></details>'


def _line(line: str) -> str:
    """Return a line as a ``<b>`` element with the class ``comment`` or ``communication``, or none."""
    if line.lstrip().startswith("#"):
        return f'<b class="comment">{escape(line)}</b>'
    code, hash_sign, comment = line.partition("  # ")
    kind = ' class="communication"' if _COMMUNICATION.search(code) else ""
    comment_html = f'<span class="comment">{hash_sign}{escape(comment)}</span>' if hash_sign else ""
    return f"<b{kind}>{escape(code) or ' '}{comment_html}</b>"
