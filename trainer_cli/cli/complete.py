"""`train complete SHELL`: the script that makes a shell complete `train`, and the answers that it asks for.

The script hands over the line up to the cursor; splitting it into words is done here, the same for all shells.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from trainer_cli.errors import UserError

EXAMPLES = """examples:
  train complete bash     in ~/.bashrc:  eval "$(train complete bash)"
  train complete zsh      in ~/.zshrc:   eval "$(train complete zsh)"
"""
LINE, BREAKS = "TRAIN_COMPLETE_LINE", "TRAIN_COMPLETE_BREAKS"
"""What the scripts hand over: the line up to the cursor, and the characters after which bash begins a new word."""

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
    """Print the script of a shell; or, when that script asks, the candidates for a line."""
    if args.answer:
        print(answer(os.environ.get(LINE, ""), os.environ.get(BREAKS, ""), Path.cwd()), end="")
    elif args.shell is None:
        raise UserError("which shell?", cure=f"Write one of: {', '.join(SCRIPTS)}.")
    else:
        sys.stdout.write(SCRIPTS[args.shell])
    return 0


def answer(line: str, breaks: str, cwd: Path) -> str:
    """A line for each candidate: what is to stand from the last break on, a tab, and what it is."""
    from trainer_cli.cli.candidates import candidates, split

    words, kept = split(line, breaks)
    found = candidates(words, cwd)
    return "".join(f"{one.word[kept:]}\t{' '.join(one.about.split())}\n" for one in found if one.word.isprintable())
