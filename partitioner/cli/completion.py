"""Shell completion of commands, options, and values of options, generated from the parser.

source <(partitioner completion bash)
source <(partitioner completion zsh)
partitioner completion fish | source
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping, Sequence

from partitioner.cli.parser import command_parser
from partitioner.schedules.catalog import SCHEDULES
from passes.ir.mesh import DIMENSIONS

__all__ = ["completion_script", "print_completion"]

_VALUES: Mapping[str, Sequence[str]] = {
    "--mode": ("auto", *DIMENSIONS),
    "--schedule": tuple(SCHEDULES),
    "--recompute": ("none", "selective", "full"),
}
"""Option -> values to complete, for options without ``choices`` in the parser."""


def print_completion(arguments: argparse.Namespace) -> int:
    """Print the script for a shell."""
    print(completion_script(command_parser(), arguments.shell))
    return 0


def completion_script(parser: argparse.ArgumentParser, shell: str) -> str:
    """Return the completion script for one of ``SHELLS``."""
    (subparsers,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))  # noqa: SLF001
    commands = dict(subparsers.choices)
    texts = {action.dest: action.help or "" for action in subparsers._choices_actions}  # noqa: SLF001  argparse has no public access
    if shell == "fish":
        return "\n".join(_fish_lines(commands, texts))
    cases = "\n".join(line for name, command in commands.items() for line in _bash_cases(name, command))
    script = _BASH.format(commands=" ".join(commands), cases=cases)
    return f"autoload -U +X bashcompinit && bashcompinit\n{script}" if shell == "zsh" else script


_BASH = """\
_partitioner() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}}
    COMPREPLY=()
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "{commands}" -- "$word"))
        return
    fi
    case "${{COMP_WORDS[1]}} $before" in
{cases}
    esac
}}
complete -o default -F _partitioner partitioner"""


def _bash_cases(name: str, command: argparse.ArgumentParser) -> list[str]:
    """Return the lines of the script's ``case`` for a command, by the word before the cursor.

    "inspect --mode")    an option with known values completes to these
    "inspect --output")  one that takes any value to nothing, and so to files (``complete -o default``)
    "inspect "*)         anything else to the options, and the values of positional arguments
    """
    lines = []
    for option in _options(command):
        values = _values(option)
        pattern = "|".join(f'"{name} {flag}"' for flag in option.option_strings)
        if values:
            lines.append(f'        {pattern}) COMPREPLY=($(compgen -W "{" ".join(values)}" -- "$word")) ;;')
        elif option.nargs != 0:
            lines.append(f"        {pattern}) ;;")
    flags = " ".join(flag for option in _options(command) for flag in option.option_strings)
    choices = " ".join(value for action in _positionals(command) for value in _values(action))
    words = f"{choices} {flags}".strip()
    lines.append(f'        "{name} "*) [[ "$word" == -* || -n "{choices}" ]] && COMPREPLY=($(compgen -W "{words}" -- "$word")) ;;')
    return lines


def _fish_lines(commands: Mapping[str, argparse.ArgumentParser], texts: Mapping[str, str]) -> list[str]:
    """Return one ``complete`` line for each command, positional argument with known values, and option."""
    lines = [f"complete -c partitioner -n __fish_use_subcommand -f -a {name} -d {shlex.quote(texts.get(name, ''))}" for name in commands]
    for name, command in commands.items():
        complete = f"complete -c partitioner -n '__fish_seen_subcommand_from {name}'"
        lines += [f"{complete} -f -a {shlex.quote(' '.join(values))}" for values in map(_values, _positionals(command)) if values]
        for option in _options(command):
            long_name = next(flag for flag in option.option_strings if flag.startswith("--")).removeprefix("--")
            values = _values(option)
            value_hint = f" -x -a {shlex.quote(' '.join(values))}" if values else " -r"
            argument = value_hint if option.nargs != 0 else ""
            lines.append(f"{complete} -l {long_name}{argument} -d {shlex.quote(' '.join((option.help or '').split()))}")
    return lines


def _options(command: argparse.ArgumentParser) -> list[argparse.Action]:
    return [action for action in command._actions if action.option_strings]  # noqa: SLF001


def _positionals(command: argparse.ArgumentParser) -> list[argparse.Action]:
    return [action for action in command._actions if not action.option_strings]  # noqa: SLF001


def _values(action: argparse.Action) -> list[str]:
    """Return the values that an option or positional argument takes; empty if it takes any."""
    for flag in action.option_strings:
        if flag in _VALUES:
            return list(_VALUES[flag])
    return [str(choice) for choice in action.choices or ()]
