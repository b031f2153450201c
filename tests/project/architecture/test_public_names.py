"""Every public name is typed and documented: all without an underscore that a module defines, and what ``__all__`` lists exists."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.project.architecture.imports import imports_of
from tests.project.architecture.source_tree import Source, package_sources, report

Function = ast.FunctionDef | ast.AsyncFunctionDef


def test_listed_names_exist() -> None:
    offences = []
    for source in package_sources():
        known = definitions(source.tree).keys() | imported(source.tree)
        offences += [f"{source.path}:1: {name}" for name in exported(source.tree) or () if name not in known]
    assert not offences, report(offences, "define the name or take it out of __all__")


def test_public_names_are_documented() -> None:
    offences = [f"{source.at(node)}: {name}" for source, name, node in public_definitions() if not is_documented(source.tree, node)]
    assert not offences, report(offences, "add a docstring: meaning, shapes, units, errors (below a constant, a string)")


def test_public_names_are_annotated() -> None:
    offences = []
    for source, name, node in public_definitions():
        for qualified, function in public_functions(name, node):
            if missing := unannotated(function):
                offences.append(f"{source.at(function)}: {qualified}: {', '.join(missing)}")
    assert not offences, report(offences, "annotate every parameter and the result")


def public_definitions() -> Iterator[tuple[Source, str, ast.stmt]]:
    """Yield functions and classes without a leading underscore, and constants that another module imports."""
    taken = {found.full_name for source in package_sources() for found in imports_of(source)}
    for source in package_sources():
        for name, node in definitions(source.tree).items():
            if f"{source.module}.{name}" in taken or (isinstance(node, Function | ast.ClassDef) and not name.startswith("_")):
                yield source, name, node


def exported(tree: ast.Module) -> list[str] | None:
    """Return the names in ``__all__``; None when there is none."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["__all__"]:
            return list(ast.literal_eval(node.value))
    return None


def definitions(tree: ast.Module) -> dict[str, ast.stmt]:
    """Return name -> statement, of a module's top-level definitions."""
    found: dict[str, ast.stmt] = {}
    for node in tree.body:
        if isinstance(node, Function | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found.update({target.id: node for target in targets if isinstance(target, ast.Name)})
    found.pop("__all__", None)
    return found


def imported(tree: ast.Module) -> set[str]:
    """Return names that a module takes from elsewhere, those that it imports when they are first used included."""
    typed = [node for block in tree.body if isinstance(block, ast.If) for node in block.body]
    imports = [node for node in (*tree.body, *typed) if isinstance(node, ast.Import | ast.ImportFrom)]
    return {(alias.asname or alias.name).split(".")[0] for node in imports for alias in node.names}


def is_documented(tree: ast.Module, node: ast.stmt) -> bool:
    """Return whether a function or class has a docstring, or a string stands directly after an assignment."""
    if isinstance(node, Function | ast.ClassDef):
        return ast.get_docstring(node) is not None
    behind = tree.body[tree.body.index(node) + 1 :][:1]
    return any(isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant) and isinstance(one.value.value, str) for one in behind)


def public_functions(name: str, node: ast.stmt) -> Iterator[tuple[str, Function]]:
    """Yield the function itself, or the public methods of a class."""
    if isinstance(node, Function):
        yield name, node
    elif isinstance(node, ast.ClassDef):
        for member in node.body:
            if isinstance(member, Function) and (member.name.startswith("__") or not member.name.startswith("_")):
                yield f"{name}.{member.name}", member


def unannotated(function: Function) -> list[str]:
    """Return parameters without a type, and ``return``; ``self`` and ``cls`` need none."""
    arguments = function.args
    parameters = [*arguments.posonlyargs, *arguments.args, arguments.vararg, *arguments.kwonlyargs, arguments.kwarg]
    missing = [one.arg for one in parameters if one is not None and one.annotation is None and one.arg not in ("self", "cls")]
    return missing + (["return"] if function.returns is None else [])


def test_unannotated_parameters_are_found() -> None:
    function = ast.parse("def f(self, a, b: int, *rest, c: int = 0, **more: int): ...").body[0]
    assert isinstance(function, ast.FunctionDef)
    assert unannotated(function) == ["a", "rest", "return"]
