"""Write the parts of these pages that come from the code: docs/reference, the table of phases, with --pictures the drawings.

python docs/generate.py
python docs/generate.py --pictures
"""

from __future__ import annotations

import argparse
import ast
import functools
import inspect
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import experts
import torch
from gpt3 import LENGTH, SHAPES, STATE_BYTES
from net import factory
from torch import nn

import partitioner
from cost_models.hardware.clusters import Cluster
from cost_models.hardware.units import format_bytes, format_flops
from partitioner import Constraints, PartitionedModel, draw, draw_weight, partition
from partitioner.model.inspection.inspected_model import InspectedModel
from partitioner.model.module.model_state import ModelState
from partitioner.reports.explain.timetable import timetable
from partitioner.schedules.catalog import SCHEDULES, make_schedule
from partitioner.tracing.export.replaced import REPLACED
from passes.normalize.order import NORMALIZE
from passes.pipeline import PHASES
from passes.rules.registry import RULES, Rule

DOCS = Path(__file__).parent


def tables() -> dict[str, str]:
    """File in docs/reference -> its text."""
    return {
        "api.md": api(),
        "operations.md": operations(),
        "passes.md": passes(),
        "schedules.md": schedules(),
        "machines.md": machines(),
        "gpt3.md": gpt3(),
        "torch.md": replaced_names(),
        "../architecture.md": with_generated(DOCS / "architecture.md", "phases", phases()),
    }


def with_generated(file: Path, name: str, text: str) -> str:
    """Return a page with another text between the comments ``<!-- name -->`` and ``<!-- end -->``."""
    before, begin, rest = file.read_text(encoding="utf-8").partition(f"<!-- {name}: by docs/generate.py -->\n")
    _, end, after = rest.partition("<!-- end -->\n")
    return f"{before}{begin}{text}\n{end}{after}"


def table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a table of Markdown."""
    lines = [heading, ["---"] * len(heading), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def page(title: str, lead: str, *parts: str) -> str:
    return "\n\n".join([f"# {title}", lead, *parts]) + "\n"


def first_line(documented: object) -> str:
    return (inspect.getdoc(documented) or "").partition("\n")[0]


# -- what users call -------------------------------------------------------------------------------------------------------------------


def api() -> str:
    """Return every public name, and every method of a partitioned model."""
    names = [(f"`{name}`", first_line(getattr(partitioner, name))) for name in sorted(partitioner.__all__, key=str.lower)]
    members = dict(item for kind in (ModelState, InspectedModel, PartitionedModel) for item in vars(kind).items())
    own = [
        (name, member)
        for name, member in members.items()
        if not name.startswith("_") and (callable(member) or isinstance(member, property))
    ]
    methods = [(f"`pm.{name}{'' if isinstance(member, property) else '()'}`", first_line(member)) for name, member in sorted(own)]
    lead = "What `import partitioner` offers. `help(name)` in Python shows arguments, results and errors of each."
    return page("Names", lead, table(("name", "what it is"), names), "## A partitioned model", table(("call", "gives"), methods))


# -- operations ------------------------------------------------------------------------------------------------------------------------


def operations() -> str:
    """Return every operation that may be cut, by its rule."""
    by_rule: dict[str, list[str]] = {}
    for operator, rule in RULES.items():
        by_rule.setdefault(words_of(rule), []).append(str(operator).removeprefix("aten."))
    rows = [(rule, ", ".join(f"`{name}`" for name in sorted(names))) for rule, names in by_rule.items()]
    lead = (
        f"{len(RULES)} operations of PyTorch, each with the loops that it is: terms for its operands, an arrow, terms for its results. "
        "An axis of the same name is the same loop; one that is missing on the right is contracted. `passes/rules/language.py` explains "
        "every mark, and a test cuts random operands of every line and compares. An operation that is not here is computed whole on every "
        "rank of a mesh, and named in the notes of `pm.explain()`."
    )
    return page("Operations", lead, table(("loops", "operations"), rows))


def words_of(rule: Rule) -> str:
    """Return a rule's line; for a function, the first line of its docstring."""
    return f"`{rule}`" if isinstance(rule, str) else first_line(rule).rstrip(".") or "by the call's arguments"


# -- passes ----------------------------------------------------------------------------------------------------------------------------


def passes() -> str:
    """Return every file of passes/ by its phase, with its first line."""
    parts = []
    contracts = tomllib.loads((DOCS.parent / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
    phases = next(contract["layers"] for contract in contracts if contract.get("containers") == ["passes"])
    for phase in reversed(phases[1:]):
        folder = DOCS.parent / "passes" / phase
        files = [file for file in sorted(folder.rglob("*.py")) if file.name != "__init__.py"]
        rows = [(f"`{file.relative_to(folder).as_posix()}`", first_line_of(file)) for file in files]
        parts += [f"## `passes/{phase}/`", first_line_of(folder / "__init__.py"), table(("file", "what it does"), rows), *shown(phase)]
    lead = (
        "The compiler's phases, in the order in which they may build on one another. Below the files of a phase, each pass is shown with a "
        "model, and the graphs before and after: the smallest of its pairs in `tests/passes/`, which tests compare and run. "
        "The order in which they run is in [the architecture map](../architecture.md#the-phases)."
    )
    return page("Passes", lead, *parts)


def shown(phase: str) -> list[str]:
    """Return the smallest pair of each pass of a folder."""
    found: dict[str, list[str]] = {}
    for file, text in pairs().items():
        if file.parts[0] == phase:
            found.setdefault("/".join(file.parts[1:-1]), []).append(text)
    parts = []
    for name, texts in sorted(found.items()):
        title, _, graphs = min(texts, key=len).partition("\n\n")
        parts += [f"### {name}", title, f"```text\n{graphs}\n```"]
    return parts


def phases() -> str:
    """Return the steps of both orders: name, purpose and files."""
    rows = []
    for phase in (*NORMALIZE, *PHASES):
        of_phase = {file: text for file, text in pairs().items() if f'phase="{phase.name}"' in text}
        purpose = first_line(phase.apply) if phase in PHASES else min(of_phase.values(), key=len).partition("\n")[0]
        files = sorted({code_of(file) for file in of_phase}) or [f"passes/{phase.name}/"]
        shown_files = files if len(files) < 3 else [f"passes/{file.parts[0]}/" for file in list(of_phase)[:1]]
        rows.append((f"`{phase.name}`", purpose.partition(". ")[0].rstrip("."), ", ".join(f"`{file}`" for file in shown_files)))
    return table(("phase", "what it does", "files"), rows)


@functools.cache
def pairs() -> dict[Path, str]:
    """Return the executed pairs of graphs before and after a pass: path in tests/passes -> text."""
    folder = DOCS.parent / "tests" / "passes"
    return {file.relative_to(folder): file.read_text(encoding="utf-8").strip() for file in sorted(folder.rglob("*.txt"))}


def code_of(pair: Path) -> str:
    """Return the file, else the folder, of the pass that a pair is of."""
    places = (Path("passes") / place for place in (pair.parent.with_suffix(".py"), pair.parent, pair.parent.parent))
    found = next(place for place in places if (DOCS.parent / place).exists())
    return found.as_posix() + ("" if found.suffix else "/")


def first_line_of(file: Path) -> str:
    return (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").partition("\n")[0]


def replaced_names() -> str:
    """Return every name of torch that is replaced while a model is traced."""
    rows = [(f"`{each.name}`", each.reason.replace("``", "`"), each.since, each.without.replace("``", "`")) for each in REPLACED]
    lead = (
        "A trace replaces these names of torch, in its own thread and until it ends (`partitioner/tracing/export/replaced.py`). A test for "
        "each fails if the entry is removed, or if torch no longer has the name. Calls that torch dispatches to modes of functions are "
        "watched without replacing anything (`partitioner/tracing/export/watched_calls.py`)."
    )
    return page("Names of torch", lead, table(("name", "the replacement", "since torch", "without it"), rows))


# -- schedules and machines ------------------------------------------------------------------------------------------------------------


def schedules() -> str:
    """Draw every schedule for four ranks and four microbatches."""
    parts = []
    for name, kind in SCHEDULES.items():
        drawn = "\n".join(timetable(make_schedule(name, 4, 4), 150, idle=True))
        parts += [f"## {name}", f"{kind.source}.", f"```text\n{drawn}\n```"]
    lead = "`partition(..., schedule=NAME)`. Stage, letter, microbatch, in the grammar of `torch.distributed.pipelining`."
    return page("Schedules", lead, *parts)


def machines() -> str:
    """Return every preset."""
    rows = []
    for name in tomllib.loads((DOCS.parent / "cost_models" / "hardware" / "presets.toml").read_text(encoding="utf-8")):
        cluster = Cluster.preset(name, nodes=2, devices_per_node=2)
        device = cluster.devices[0]
        peaks = ", ".join(f"{dtype} {peak / 1e12:g}" for dtype, peak in device.peak_flops.items())
        links = [f"{link.bandwidth / 1e9:g} GB/s, {link.latency * 1e6:g} us" for link in (cluster.link(0, 1), cluster.link(1, 2))]
        rows.append((f"`{name}`", format_bytes(device.memory_bytes), f"{device.memory_bandwidth / 1e9:g} GB/s", peaks, *links))
    lead = (
        '`cluster="h100:8x8"`, or `Cluster.preset("h100", nodes=8, devices_per_node=8)`. '
        "`cost_models/hardware/presets.toml` names the sources."
    )
    return page("Machines", lead, table(("preset", "memory", "bandwidth", "peak TFLOP/s", "inside a node", "between nodes"), rows))


# -- GPT-3 -----------------------------------------------------------------------------------------------------------------------------

DEVICES = (1, 8, 64, 256, 1024)


def gpt3() -> str:
    """FLOPs of a token, and what each device holds when weights, gradients and optimizer state are cut over all of them."""
    work = [
        (
            shape.name,
            *(str(number) for number in (shape.layers, shape.width, shape.heads)),
            f"{shape.parameters / 1e9:.3f} B",
            *(format_flops(flops) for flops in (shape.weight_flops, shape.attention_flops, shape.weight_flops + shape.attention_flops)),
        )
        for shape in SHAPES
    ]
    memory = [(shape.name, *(format_bytes(shape.parameters * STATE_BYTES / count) for count in DEVICES)) for shape in SHAPES]
    lead = (
        f"The eight shapes of Brown et al., 2020, over sequences of {LENGTH} tokens. A token costs six FLOPs for each weight that"
        " multiplies it, forward and backward, and attention over the whole sequence. Graphs of the models say the same."
    )
    state = (
        f"Weights, gradients and the state of Adam, {STATE_BYTES} bytes a parameter in mixed precision, cut over all devices"
        ' (`mode="fsdp"`). Activations come on top: `pm.simulate()` predicts them.'
    )
    heading = ("model", "layers", "width", "heads", "parameters", "6N", "attention", "FLOPs a token")
    held = ("model", *(f"{count:,} device{'s' if count > 1 else ''}" for count in DEVICES))
    return page("GPT-3 in numbers", lead, table(heading, work), "## Memory of each device", state, table(held, memory))


# -- pictures --------------------------------------------------------------------------------------------------------------------------


def pictures() -> dict[str, Callable[[], str]]:
    """File in docs/pictures -> what draws it."""

    def cut(devices: int, mode: str | Mapping[str, int], **options: Any) -> PartitionedModel:
        model, args = factory(depth=4)
        cluster = f"h100:1x{devices}"
        return partition(model, devices=devices, mode=mode, example_inputs=args, cluster=cluster, progress=False, **options)

    def tiled() -> PartitionedModel:
        layers = (nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.MaxPool2d(2), nn.Conv2d(8, 4, 3))
        image = torch.zeros(2, 3, 32, 32)
        exchanged = Constraints(halo="exchange")
        return partition(
            nn.Sequential(*layers), devices=4, mode={"tile": (2, 2)}, example_inputs=(image,), constraints=exchanged, progress=False
        )

    def routed() -> PartitionedModel:
        mixture, tokens = experts.factory()
        return partition(
            mixture, devices=2, mode="data", example_inputs=tokens, constraints=Constraints(axes={"experts": "data"}), progress=False
        )

    pipeline = {"schedule": "1F1B", "n_microbatches": 4}
    sequence = Constraints(axes={"sequence": "tensor"})
    return {
        "model.svg": lambda: draw(cut(2, "model")).svg(),
        "pipeline.svg": lambda: draw(cut(4, "pipeline", **pipeline)).svg(),
        "timeline.svg": lambda: str(cut(4, "pipeline", **pipeline).simulate().timeline.svg()),
        "data.svg": lambda: draw(cut(2, "data")).svg(),
        "fsdp.svg": lambda: draw(cut(2, "fsdp")).svg(),
        "zero1.svg": lambda: draw(cut(2, "zero1")).svg(),
        "tensor.svg": lambda: draw(cut(2, "tensor")).svg(),
        "sequence.svg": lambda: draw(cut(2, "tensor", constraints=sequence)).svg(),
        "experts.svg": lambda: draw(routed()).svg(),
        "tile.svg": lambda: draw(tiled()).svg(),
        "auto.svg": lambda: draw(cut(4, "auto")).svg(),
        "mesh.svg": lambda: draw(cut(4, {"pipeline": 2, "tensor": 2}, **pipeline)).svg(),
        "weight.svg": lambda: draw_weight(cut(2, "tensor"), "blocks.0.qkv.weight").svg(),
        "weight_fsdp.svg": lambda: draw_weight(cut(4, {"fsdp": 2, "tensor": 2}), "blocks.0.down.weight").svg(),
    }


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    arguments.add_argument("--pictures", action="store_true", help="draw the pictures, too")
    for name, text in tables().items():
        (DOCS / "reference" / name).write_text(text, encoding="utf-8")
    if arguments.parse_args().pictures:
        for name, drawn in pictures().items():
            (DOCS / "pictures" / name).write_text(drawn(), encoding="utf-8")


if __name__ == "__main__":
    main()
