"""`train complete SHELL`: print a shell's completion script, and answer the requests of that script.

The script passes the line up to the cursor, which is split into words here, the same for all shells. A candidate is a
whole word: a verb, flag, option, key, value or file. If it ends in `=`, `.` or `/`, the shell adds no space after it.
Nothing is composed.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer_cli.commands.choices import EXPERIMENT, keys, options_of, read_settings, values_of
from trainer_cli.commands.command_line import actions_of, listed_verbs, parser_of
from trainer_cli.commands.docs import find_pages
from trainer_cli.config import SearchPath
from trainer_cli.errors import UserError
from trainer_cli.schema import RESUME_WORDS

EXAMPLES = """examples:
  train complete bash     in ~/.bashrc:  eval "$(train complete bash)"
  train complete zsh      in ~/.zshrc:   eval "$(train complete zsh)"
"""
LINE, BREAKS = "TRAIN_COMPLETE_LINE", "TRAIN_COMPLETE_BREAKS"
"""Environment variables for the line up to the cursor, and the characters after which bash begins a new word."""

# An unfinished candidate (of an option, a key, a folder) gets no space after it, any other does. Within quotes bash
# must know that these are files, or it would close the quotes after each folder.
BASH = f"""_train_complete() {{
    local word about end
    COMPREPLY=()
    while IFS=$'\\t' read -r word about; do
        case "$word" in
            *= | *. | */) end="" ;;
            *) end=" " ;;
        esac
        case "${{COMP_WORDS[COMP_CWORD]}}" in
            [\\"\\']*) compopt -o filenames 2>/dev/null; word="${{word%/}}" end="" ;;
            \\~/*) printf -v word '~/%q' "${{word#\\~/}}" ;;
            *) printf -v word '%q' "$word" ;;
        esac
        COMPREPLY+=("$word$end")
    done < <({LINE}="${{COMP_LINE:0:COMP_POINT}}" {BREAKS}="$COMP_WORDBREAKS" \\
        "${{1/#\\~/$HOME}}" complete --answer 2>/dev/null)
}}
complete -o nospace -F _train_complete train
"""
ZSH = f"""_train() {{
    local word about
    local -a done todo done_shown todo_shown raw
    [[ "$PREFIX" == \\~* ]] && raw=(-Q)
    while IFS=$'\\t' read -r word about; do
        case "$word" in
            *= | *. | */) todo+=("$word") todo_shown+=("$word${{about:+  $about}}") ;;
            *) done+=("$word") done_shown+=("$word${{about:+  $about}}") ;;
        esac
    done < <({LINE}="${{(j: :)words[1,CURRENT-1]}} $QIPREFIX$PREFIX" "${{~words[1]}}" complete --answer 2>/dev/null)
    (( $#done )) && compadd $raw -l -d done_shown -a done
    (( $#todo )) && compadd $raw -S '' -l -d todo_shown -a todo
    (( $#done + $#todo ))
}}
(( $+functions[compdef] )) || {{ autoload -Uz compinit && compinit }}
compdef _train train
"""
SCRIPTS = {"bash": BASH, "zsh": ZSH}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the verb."""
    parser.add_argument("shell", nargs="?", choices=tuple(SCRIPTS), metavar="SHELL", help="bash or zsh")
    parser.add_argument("--answer", action="store_true", help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Print the script of a shell; or, for that script, the candidates for a line."""
    if args.answer:
        print(answer(os.environ.get(LINE, ""), os.environ.get(BREAKS, ""), Path.cwd()), end="")
    elif args.shell is None:
        raise UserError("which shell?", cure=f"Write one of: {', '.join(SCRIPTS)}.")
    else:
        sys.stdout.write(SCRIPTS[args.shell])
    return 0


def answer(line: str, breaks: str, cwd: Path) -> str:
    """A line for each candidate: its text after the last break, a tab, and its description."""
    words, kept = split(line, breaks)
    # A control character in a name would break the protocol of lines.
    printable = [candidate for candidate in candidates(words, cwd) if candidate.word.isprintable()]
    return "".join(f"{candidate.word[kept:]}\t{' '.join(candidate.about.split())}\n" for candidate in printable)


SUBMIT = (
    "slurm", "local", "timeout_min=", "nodes=", "tasks_per_node=", "gpus_per_node=", "cpus_per_task=", "mem_gb=",
    "partition=", "account=", "qos=", "constraint=", "signal_delay_s=",
)  # fmt: skip
"""Values of `--submit`: the clusters, and the parameters that most clusters need."""
_PATHS = ("ckpt", "resume", "run_dir", "validate.folder")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A word and its description, if any."""

    word: str
    about: str = ""


def split(line: str, breaks: str = "") -> tuple[list[str], int]:
    """Split a line that ends at the cursor into words without quotes and backslashes; the last may be empty.

    Also returns how many characters of the last word the shell keeps: up to the last of `breaks`, or the last quote.
    """
    words, kept = [""], 0
    # `begun`: the last word has begun, be it by an empty pair of quotes.
    quote, escaped, begun = "", False, False
    for letter in line:
        if escaped:
            words[-1] += letter
            escaped = False
        elif letter == "\\" and quote != "'":
            escaped = begun = True
        elif quote and letter == quote:
            quote, kept = "", len(words[-1])
        elif not quote and letter in "'\"":
            quote, begun, kept = letter, True, len(words[-1])
        elif not quote and letter.isspace():
            if words[-1] or begun:
                words.append("")
            begun, kept = False, 0
        else:
            words[-1] += letter
            if not quote and letter in breaks:
                kept = len(words[-1])
    return words, kept


def candidates(words: Sequence[str], cwd: Path) -> list[Candidate]:
    """The candidates for the last word; the first word is the command."""
    if len(words) < 2:
        return []
    current = words[-1]
    # Each word once: a key of the schema may be one of the chosen option too.
    by_word = {candidate.word: candidate for candidate in _find_candidates(words[1:-1], current, cwd)}
    return [by_word[word] for word in sorted(by_word) if word.startswith(current)]


def _find_candidates(before: Sequence[str], current: str, cwd: Path) -> Iterator[Candidate]:
    """Candidates for the word `current` after the words `before`; some may not begin as it does."""
    if not before or before == ["help"]:
        yield from (Candidate(name, verb.summary) for name, verb in listed_verbs().items())
        if not before:
            yield from (Candidate(flag) for flag in ("--help", "--version"))
        return
    verb = listed_verbs().get(before[0])
    if verb is None:
        return
    parser = parser_of(before[0], verb)
    # An action has flags and arguments of its own.
    action_parser = actions_of(parser).get(before[1]) if len(before) > 1 else None
    if action_parser is not None:
        parser, before = action_parser, before[1:]
    actions = {flag: action for action in parser._actions for flag in action.option_strings}
    flag, equals, value = current.partition("=")
    previous = actions.get(before[-1])
    if current.startswith("-") and equals and flag in actions:
        for candidate in _argument_candidates(actions[flag], value, before, cwd):
            yield Candidate(f"{flag}={candidate.word}", candidate.about)
    elif previous is not None and previous.nargs not in (0, "?"):
        yield from _argument_candidates(previous, current, before, cwd)
    elif current.startswith("-"):
        shown = {name: action for name, action in actions.items() if action.help != argparse.SUPPRESS}
        yield from (Candidate(name, action.help or "") for name, action in shown.items() if name.startswith("--"))
    else:
        yield from _positional_candidates(parser, before[1:], current, cwd)


def _argument_candidates(
    action: argparse.Action, current: str, before: Sequence[str], cwd: Path
) -> Iterator[Candidate]:
    """The values of an argument, as far as its type or its name tells them."""
    if action.choices is not None:
        yield from (Candidate(str(choice)) for choice in action.choices)
    elif action.dest == "config_name":
        yield from map(Candidate, _find_search_path(before, cwd).primaries())
    elif action.dest == "submit":
        yield from map(Candidate, SUBMIT)
        yield from (file for file in _file_candidates(current, cwd) if file.word.endswith((".yaml", ".yml", "/")))
    elif action.dest == "page":
        yield from map(Candidate, find_pages())
    elif action.type is Path:
        yield from _file_candidates(current, cwd, folders=action.dest.endswith("dir"))


def _positional_candidates(
    parser: argparse.ArgumentParser, before: Sequence[str], current: str, cwd: Path
) -> Iterator[Candidate]:
    """The values of the first positional argument that has none yet."""
    values = [word for word in before if not word.startswith("-")]
    for action in parser._actions:
        if action.option_strings:
            continue
        if action.dest == "overrides":
            yield from _override_candidates(_find_search_path(before, cwd), before, current, cwd)
        elif values and action.nargs not in ("+", "*"):
            values.pop(0)
            continue
        elif action.dest == "group":
            yield from map(Candidate, _find_search_path(before, cwd).groups())
        else:
            yield from _argument_candidates(action, current, before, cwd)
        return


def _find_search_path(before: Sequence[str], cwd: Path) -> SearchPath:
    """The folders of configs, also the one of `--config-dir` if the line has it."""
    config_dir: Path | None = None
    for index, word in enumerate(before):
        flag, equals, value = word.partition("=")
        if flag in ("--config-dir", "-cd"):
            config_dir = Path(value if equals else [*before, ""][index + 1]).expanduser()
    if config_dir is not None and not (cwd / config_dir).is_dir():
        # A folder that is still being typed must not end the completion.
        config_dir = None
    return SearchPath.without_own(config_dir, cwd)


def _override_candidates(search: SearchPath, before: Sequence[str], current: str, cwd: Path) -> Iterator[Candidate]:
    """Experiments, groups and keys; after an equals sign the values of the key."""
    sign = current[: len(current) - len(current.lstrip("+~"))]
    key, equals, value = current[len(sign) :].partition("=")
    settings = read_settings(search, "config", before)
    if equals:
        for candidate in _value_candidates(search, settings, key, value, cwd):
            yield Candidate(f"{sign}{key}={candidate.word}", candidate.about)
        return
    end = "" if sign == "~" else "="
    experiments = options_of(search, EXPERIMENT)
    if not sign and experiments.keys().isdisjoint(before):
        yield from (Candidate(name, SearchPath.describe_file(file)) for name, file in experiments.items())
    for name in search.groups():
        yield Candidate(f"{sign}{name}{end}")
    if sign == "+":
        # `+` adds what does not exist yet, and every key exists.
        return
    for name in [*keys(), *settings]:
        # Keys such as _target_ are chosen with an option, not typed.
        if not name.startswith(key) or name.endswith("_"):
            continue
        # Complete up to the next dot: hundreds of keys at once are no help.
        dot = name.find(".", len(key))
        if dot >= 0:
            yield Candidate(sign + name[: dot + 1])
        else:
            yield Candidate(sign + name + end, keys()[name].meaning if name in keys() else "")


def _value_candidates(
    search: SearchPath, settings: Mapping[str, object], key: str, value: str, cwd: Path
) -> Iterator[Candidate]:
    """The values that a key may have, among which the shell chooses those that begin with `value`."""
    if key in search.groups() or search.is_group(key):
        options = options_of(search, key)
        yield from (Candidate(option, SearchPath.describe_file(file)) for option, file in options.items())
        return
    if key == "resume":
        yield from map(Candidate, RESUME_WORDS)
    if key in keys():
        yield from map(Candidate, values_of(keys()[key].kind))
    else:
        yield from map(Candidate, values_of(type(settings.get(key))))
    # A text argument of a component may be a path.
    may_be_path = key in settings and key not in keys() and isinstance(settings[key], str | None)
    if key in _PATHS or may_be_path:
        yield from _file_candidates(value, cwd)


def _file_candidates(current: str, cwd: Path, *, folders: bool = False) -> Iterator[Candidate]:
    """Entries of the folder that is typed so far; hidden ones only after their dot is typed."""
    parent, slash, start = current.rpartition("/")
    folder = cwd / Path(parent + slash).expanduser()
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return
    for entry in entries:
        if entry.name.startswith(".") and not start.startswith("."):
            continue
        if entry.is_dir():
            yield Candidate(f"{parent}{slash}{entry.name}/")
        elif not folders:
            yield Candidate(f"{parent}{slash}{entry.name}")
