"""Pictures of partitioned models and of their weights.

draw(pm).save("model.svg")                      the model over its ranks, coloured by stage; .dot() for Graphviz
print(draw_weight(pm, "blocks.0.up.weight"))    which rank holds which block
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cost_models.text_files import write_text
from partitioner.model.partitioned_model import PartitionedModel
from partitioner.reports.pictures.blocks import BlockTable, blocks_svg, blocks_text, held_blocks
from partitioner.reports.pictures.diagram import Diagram
from partitioner.reports.pictures.diagram_svg import diagram_svg
from partitioner.reports.pictures.dot import dot_text
from partitioner.reports.pictures.partition_diagram import partition_diagram
from passes.ir.arguments.checked import at_least, checked_arguments
from passes.ir.errors import ConfigError


@dataclass(frozen=True)
class Drawing:
    """A picture of a partitioned model, drawn from a diagram; notebooks show it."""

    diagram: Diagram

    def svg(self) -> str:
        """Return the picture as SVG, light or dark as the page is; nothing needs to be installed."""
        return diagram_svg(self.diagram)

    def dot(self) -> str:
        """Return the picture as text for Graphviz: ``dot -Tpdf model.dot``."""
        return dot_text(self.diagram)

    @checked_arguments()
    def save(self, path: str | Path) -> None:
        """Write a file: ``.svg``, or ``.dot``."""
        _save(path, {".svg": self.svg, ".dot": self.dot})

    def _repr_svg_(self) -> str:
        return self.svg()


@checked_arguments({"depth": at_least(1)})
def draw(pm: PartitionedModel, *, depth: int | None = None, ranks: Sequence[int] | None = None) -> Drawing:
    """Draw the model over its ranks: modules coloured by stage, messages and collectives between devices with their bytes in a step.

    Args:
        depth: of the modules that become boxes: at 1 ``blocks``, at 2 ``blocks.0``; None: the deepest at which a rank fits a page.
        ranks: those that are drawn; None: all, or the first eight of more.

    Raises:
        ConfigError: a rank that is not there, or a depth below 1.
    """
    wrong = [rank for rank in ranks or () if not 0 <= rank < pm.plan.n_ranks]
    if wrong:
        raise ConfigError(f"there is no rank {wrong[0]}", remedy=f"ranks are 0 to {pm.plan.n_ranks - 1}")
    return Drawing(partition_diagram(pm.explained(), depth, ranks))


@dataclass(frozen=True)
class WeightDrawing:
    """A table of the blocks of a tensor and the ranks that hold them; it prints, and notebooks show the picture."""

    table: BlockTable

    def svg(self) -> str:
        """Return the blocks as SVG, in proportion, light or dark as the page is."""
        return blocks_svg(self.table)

    @checked_arguments()
    def save(self, path: str | Path) -> None:
        """Write a file: ``.svg``, or ``.txt``."""
        _save(path, {".svg": self.svg, ".txt": lambda: f"{self}\n"})

    def __str__(self) -> str:
        return blocks_text(self.table)

    def _repr_svg_(self) -> str:
        return self.svg()


@checked_arguments()
def draw_weight(pm: PartitionedModel, name: str) -> WeightDrawing:
    """Draw which rank holds which block of a parameter or buffer, by its name in the original ``state_dict()``.

    Raises:
        ConfigError: the model has no such tensor.
    """
    explained = pm.explained()
    graph = explained.graph
    tensors = graph.weights
    by_name = {original: placeholder for placeholder, original in tensors.items()}
    placeholder = by_name.get(graph.aliases.get(name, name))
    if placeholder is None:
        near = difflib.get_close_matches(name, by_name, n=3, cutoff=0.4) or sorted(by_name)[:3]
        raise ConfigError(f"the model has no parameter or buffer {name!r}", remedy=f"it has {', '.join(near)} ...")
    return WeightDrawing(held_blocks(explained, placeholder, name))


def _save(path: str | Path, forms: Mapping[str, Callable[[], str]]) -> None:
    """Write a drawing in the form that a file's name ends with."""
    form = forms.get(Path(path).suffix)
    if form is None:
        raise ConfigError(f"a drawing cannot be saved as {Path(path).name}", remedy=f"name the file {' or '.join(forms)}")
    write_text(path, form(), "the drawing")
