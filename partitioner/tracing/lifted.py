"""Read the signature of an exported program: what each placeholder stands for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind

from passes.ir.errors import TraceError

__all__ = ["Lifted", "read_signature", "refuse_learned_constants"]


@dataclass(frozen=True)
class Lifted:
    """What the placeholders of a graph stand for.

    Attributes:
        parameters: placeholder -> name in the model.
        buffers: placeholder -> name in the model.
        constants: placeholder -> tensor.
        inputs: for each leaf of the inputs, its placeholder; None when it is no tensor.
    """

    parameters: Mapping[str, str]
    buffers: Mapping[str, str]
    constants: Mapping[str, Tensor]
    inputs: tuple[str | None, ...]

    @property
    def without_gradient(self) -> frozenset[str]:
        """Placeholders that never require a gradient."""
        return frozenset(self.buffers) | frozenset(self.constants)


def read_signature(program: ExportedProgram) -> Lifted:
    """What each placeholder of an exported program stands for.

    Raises:
        TraceError: the program holds something that is neither a tensor nor a plain value.
    """
    parameters: dict[str, str] = {}
    buffers: dict[str, str] = {}
    constants: dict[str, Tensor] = {}
    inputs: list[str | None] = []
    for spec in program.graph_signature.input_specs:
        if spec.kind is InputKind.USER_INPUT:
            inputs.append(None if isinstance(spec.arg, ConstantArgument) else spec.arg.name)
        elif spec.kind is InputKind.PARAMETER:
            parameters[spec.arg.name] = str(spec.target)
        elif spec.kind is InputKind.BUFFER:
            buffers[spec.arg.name] = str(spec.target)
        elif spec.kind is InputKind.CONSTANT_TENSOR:
            constant = program.constants[str(spec.target)]
            assert isinstance(constant, Tensor)
            constants[spec.arg.name] = constant
        else:
            raise TraceError(
                f"the model uses {spec.target}, an object that is no tensor ({spec.kind.name.lower()})",
                remedy="compute with tensors; keep other objects out of forward",
            )
    return Lifted(parameters, buffers, constants, tuple(inputs))


def refuse_learned_constants(lifted: Lifted) -> None:
    """Raise TraceError when a tensor of the model's code requires a gradient: nobody would give it one."""
    for name, constant in lifted.constants.items():
        if constant.requires_grad:
            raise TraceError(
                f"the model computes with a tensor of shape {tuple(constant.shape)} ({name}) that requires a gradient but is no parameter",
                remedy="make it a parameter, self.weight = nn.Parameter(...), or detach it",
            )
