"""Shell completion: scripts for bash and zsh that complete commands, options and choices, made from the parsers.

A script holds all words, so completing starts no Python. Values without choices complete as files.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from shlex import quote

SHELLS = ("bash", "zsh")
HELP = "print a script that completes commands and options in a shell: source <(PROGRAM completion bash)"
Words = Mapping[str, Mapping[str, tuple[str, ...]]]  # command -> option -> its choices, if any

_BASH = """{name}() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} words=
  if (( COMP_CWORD == 1 )); then words={commands}
  else case "${{COMP_WORDS[1]}} ${{COMP_WORDS[COMP_CWORD-1]}}" in
{choices}
    *) [[ $word == -* ]] && case "${{COMP_WORDS[1]}}" in
{options}
    esac ;;
  esac; fi
  COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F {name} {program}
"""
_ZSH = """#compdef {program}
{name}() {{
  local words_here=
  if (( CURRENT == 2 )); then words_here={commands}
  else case "$words[2] $words[CURRENT-1]" in
{choices}
    *) [[ $words[CURRENT] == -* ]] && case "$words[2]" in
{options}
    esac ;;
  esac; fi
  if [[ -n $words_here ]]; then compadd -- ${{=words_here}}; else _files; fi
}}
(( $+functions[compdef] )) || {{ autoload -Uz compinit && compinit; }}
compdef {name} {program}
"""


def add_completion(parser: argparse.ArgumentParser) -> None:
    """Add the argument of the command `completion`."""
    parser.add_argument("shell", choices=SHELLS, help="the shell that reads the script")


def words_of(parser: argparse.ArgumentParser) -> dict[str, tuple[str, ...]]:
    """Return the options of one command, each with its choices."""
    return {
        name: tuple(map(str, action.choices or ()))
        for action in parser._actions
        for name in action.option_strings
        if name.startswith("--")
    }


def commands_of(parser: argparse.ArgumentParser) -> dict[str, dict[str, tuple[str, ...]]]:
    """Return the options of every command of a parser."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return {name: words_of(command) for name, command in action.choices.items()}
    return {}


def script(program: str, shell: str, words: Words, more: Iterable[str] = ()) -> str:
    """Return a completion script.

    Args:
        program: name of the program.
        shell: one of :data:`SHELLS`.
        words: options and choices of its commands.
        more: names of commands whose options are not known here.
    """
    variable = "words" if shell == "bash" else "words_here"

    def case(pattern: str, offered: Iterable[str]) -> str:
        return f"    {quote(pattern)}) {variable}={quote(' '.join(offered))} ;;"

    choices = [
        case(f"{command} {option}", values)
        for command, options in words.items()
        for option, values in options.items()
        if values
    ]
    return (_BASH if shell == "bash" else _ZSH).format(
        program=program,
        name=f"_{program.replace('-', '_')}",
        commands=quote(" ".join(sorted({*words, *more, "--help", "--version"}))),
        choices="\n".join(choices),
        options="\n".join(case(command, sorted(options)) for command, options in words.items()),
    )
