"""The options that a config may choose, the keys that it may set, and suggestions for commands that name neither.

Everything is read from the files and the schema, without Hydra and torch: `train list` and completion must be quick.
"""

from __future__ import annotations

import shlex
import types
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Union, get_args, get_origin

from trainer_cli.config import SearchPath
from trainer_cli.elsewhere import normalise, translate_setting
from trainer_cli.errors import Code, ConfigError, ConfigErrors, UserError
from trainer_cli.keys import ConfigKey, list_keys, sections, whole_values
from trainer_cli.layout import CONFIG_FILE, MANIFEST_FILE, in_runs
from trainer_cli.parts import explain_missing
from trainer_cli.patterns import did_you_mean, find_nearest

EXPERIMENT = "experiment"


def search_configs(config_dir: Path | None = None) -> SearchPath:
    """The folders of configs: `--config-dir`, `./configs`, and those that ship.

    Raises:
        ConfigError: `config_dir` is not a folder.
    """
    return SearchPath.without_own(config_dir)


def options_of(search: SearchPath, group: str) -> dict[str, Path]:
    """Option -> file of a group, sorted; the user's own come first."""
    return dict(sorted(search.options(group).items(), key=lambda item: (not search.is_own(item[1]), item[0])))


def read_settings(search: SearchPath, primary: str, words: Sequence[str]) -> dict[str, Any]:
    """Dotted key -> value in the components that the words choose, replaced by values of the experiment.

    An approximation for completion, without composing: interpolations and nested defaults are left out.
    """
    chosen = {key.lstrip("+"): value for word in words for key, _, value in [word.partition("=")]}
    chosen.update((EXPERIMENT, word) for word in words if word in search.options(EXPERIMENT))
    experiment = _read_config(search, f"{EXPERIMENT}/{chosen[EXPERIMENT]}") if EXPERIMENT in chosen else {}
    options = {**_defaults(_read_config(search, primary)), **_defaults(experiment), **chosen}
    groups = [group for group in search.groups() if group != EXPERIMENT and group in options]
    components = {group: _read_config(search, f"{group}/{options[group]}") for group in groups}
    trees = (components, experiment)
    return {".".join(path): value for tree in trees for path, value in whole_values(tree)}


def _read_config(search: SearchPath, name: str) -> dict[Any, Any]:
    import yaml

    file = search.find(name)
    try:
        content = yaml.safe_load(file.read_text("utf-8")) if file is not None else None
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        # Composing reports the mistake.
        return {}
    return content if isinstance(content, dict) else {}


def keys() -> dict[str, ConfigKey]:
    """Dotted key -> description of every value in the schema."""
    return {entry.key: entry for entry in list_keys() if not entry.is_section}


def values_of(kind: Any) -> Iterator[str]:
    """The values of a type that has few: booleans, enums, null."""
    if get_origin(kind) in (Union, types.UnionType):
        for member in get_args(kind):
            yield from ("null",) if member is type(None) else values_of(member)
    elif kind is bool:
        yield from ("true", "false")
    elif isinstance(kind, type) and issubclass(kind, Enum):
        # Without `cuda:3` and the like: which of them a machine has is unknown here.
        yield from (member.name for member in kind if ":" not in member.name)


def _defaults(content: Mapping[Any, Any]) -> dict[str, str]:
    """Group -> option, as a file's defaults list chooses them."""
    entries = content.get("defaults")
    options: dict[str, str] = {}
    for entry in entries if isinstance(entries, Sequence) else ():
        for key, value in entry.items() if isinstance(entry, Mapping) else ():
            options[str(key).split()[-1].partition("@")[0].lstrip("/")] = str(value)
    return options


_MAX_SUGGESTIONS = 8
"""Experiments that a suggestion names."""
_NAMES_OF_WEIGHTS = (
    "model", "weights", "checkpoint", "checkpoint_path", "ckpt_path", "load_checkpoint", "load_from", "pretrained",
    "resume", "resume_from", "resume_from_checkpoint", "model_name_or_path",
)  # fmt: skip
"""Keys and flags of other tools that name the checkpoint to evaluate or to export."""
_CONFIG_FLAGS = ("--config", "-c", "--cfg", "--config-file", "--config_file")
_PATH_SIGNS = ("/", "*", "@")
_FILES = (".yaml", ".yml", ".py")
_EXPORT = "export"
ONNX = "ONNX is not written: torch.onnx.export does it in Python, from the model with these weights."
_VERBS_ELSEWHERE = {
    word: (command.format(word), *arguments)
    for words, command, *arguments in (
        ("train run start launch", "train fit", "", ""),
        ("resume continue restart", "train fit", "resume=", "RUN"),
        ("fork branch finetune", "train fit NAME name=OTHER", "ckpt=", "RUN@latest"),
        ("eval evaluate test val", "train validate", "ckpt=", "'runs/NAME/checkpoints/step*'"),
        ("log logs follow", "train tail", "", "RUN"),
        ("tensorboard tb", "tensorboard --logdir", "", "runs"),
        ("status ps runs", "train top", "", ""),
        ("sweep multirun tune", "train fit -m", "", ""),
        ("init create scaffold", "train new", "", "DIR"),
        ("diff", "train diverge", "", "RUN OTHER"),
        (
            "vs versus",
            "train report: draws their curves|train diverge: finds the first step that differs"
            "|train config --diff: compares their configs",
            "",
            "RUN OTHER",
        ),
        ("plot curves dashboard", "train report", "", "RUN"),
        ("checkpoint checkpoints", "train ckpt ls", "", "RUN"),
        ("info doctor versions", "train env", "", ""),
        ("schema keys fields", "train config --fields", "", ""),
        ("experiments models options", "train list", "", ""),
        ("completion completions", "train complete", "", "bash"),
        (_EXPORT, "train ckpt export", "", "runs/NAME@best --format safetensors -o FILE"),
        ("ls show verify pin unpin rm prune", "train ckpt {}", "", "RUN"),
    )
    for word in words.split()
}
"""Verb of other tools, or action without its verb -> command here, or several joined by `|`, each with what it does,
the key that its argument needs, and the argument if it is missing."""

_ACTIONS_ELSEWHERE = {"compare": "diff", "remove": "rm", "delete": "rm", "inspect": "show", "check": "verify"}
"""Action by another word -> action of `train ckpt`."""


def no_verb(word: str, arguments: Sequence[str], verbs: Iterable[str]) -> UserError:
    """The error for a first word that is not a verb: an override, an experiment, a flag, or a misspelling."""
    command = shlex.join(arguments)
    if "=" in word and not word.startswith("-"):
        return _refuse_verb(f"{word!r} is not a verb", "train fit", _translate_arguments(arguments, ""))
    names = list(verbs)
    if (error := explain_missing(f"train {word}", "verbs", word)) is not None:
        return error
    name, _, file = word.partition("=")
    if name in _CONFIG_FLAGS and (words := [*filter(None, [file]), *arguments[1:]]):
        return no_verb(words[0], words, names)
    if word.startswith("-"):
        verb = next((argument for argument in arguments if argument in names), "fit")
        other_arguments = [argument for argument in arguments if argument != verb]
        cure = f"Write train VERB first, as in 'train {shlex.join([verb, *other_arguments])}'; see train --help."
        return UserError(f"{word!r} is not a verb", cure=cure)
    if Path(word).suffix in _FILES:
        cure = _suggest_override(arguments, 0, search_configs(), "fit", has_config_name=True) or ""
        cure = cure.replace("Did you mean '", "Did you mean 'train fit ", 1)
        cure = cure.replace("key=value, or", "'train fit NAME' with", 1)
        a_file = ", but a file" if Path(word).is_file() else ""
        return UserError(f"{word!r} is not a verb{a_file}", cure=cure)
    if (error := _translate_verb(word, arguments[1:])) is not None:
        return error
    cure = did_you_mean(word, names).strip() or _suggest_help(word)
    if not cure and word in options_of(search_configs(), EXPERIMENT):
        return UserError(f"{word!r} is an experiment, not a verb", cure=f"Did you mean 'train fit {command}'?")
    return UserError(f"there is no verb {word!r}", cure=cure or f"Available: {', '.join(names)}.")


def wants_help_on(words: Sequence[str]) -> UserError | None:
    """The error for `--help` followed by a key or a group, which the help of a verb does not explain; else None."""
    flag = next(index for index, word in enumerate(words) if word in ("-h", "--help"))
    word = next((word for word in words[flag + 1 :] if _suggest_help(word)), None)
    return None if word is None else UserError(f"--help explains a verb, not {word!r}", cure=_suggest_help(word))


def _suggest_help(word: str) -> str:
    """The commands that explain a key or a group; empty if the word is neither."""
    shown = [f"`train list {word}` lists its options"] if word in search_configs().groups() else []
    if any(entry.key == word for entry in list_keys()):
        shown.append(f"`train config --fields {word}` explains it")
    if not shown:
        return ""
    experiment = next(iter(options_of(search_configs(), EXPERIMENT)), "NAME")
    return f"{', '.join(shown)}, and `train config {experiment}` shows its values."


def _translate_verb(word: str, arguments: Sequence[str]) -> UserError | None:
    """The error for a verb of other tools, or an action without its verb, with the command here; None for others."""
    if word.lower() not in _VERBS_ELSEWHERE:
        return None
    command, key, missing = _VERBS_ELSEWHERE[word.lower()]
    message = f"there is no verb {word!r}"
    words, notes = _translate_arguments(arguments, "ckpt=" if word.lower() == _EXPORT else key)
    if word.lower() == _EXPORT:
        words = [argument.removeprefix("ckpt=") for argument in words]
        if words and not any(argument.startswith("-") for argument in words):
            # A second word is the file; keys set nothing here.
            places = [argument for argument in words if "=" not in argument]
            words = [*(places[:1] or ["CKPT"]), "--format", "safetensors", "-o", *(places[1:2] or ["FILE"])]
            if any("onnx" in argument.lower() for argument in arguments):
                notes = [ONNX]
    words = words or [f"{key}{missing}"]
    if command == "train fit" and arguments:
        return _refuse_verb(message, command, (words, notes))
    # The arguments are quoted for a shell; a placeholder for what is missing is not.
    text = shlex.join(words) if arguments else " ".join(words)
    alternatives = [alternative.partition(": ") for alternative in command.split("|")]
    lines = [f"{alternative} {text}".rstrip() for alternative, _, _ in alternatives]
    if lines[1:]:
        purposes = [f"`{line}` {purpose}" for line, (_, _, purpose) in zip(lines, alternatives, strict=True)]
        return UserError(message, cure=f"{', '.join(purposes)}.")
    return UserError(message, cure=" ".join([_ask_if_meant(lines[0]), *notes]))


def _refuse_verb(message: str, command: str, translated: tuple[list[str], list[str]]) -> UserError:
    """The error for a command without its verb: `command` with the words, if they compose, else with their mistakes."""
    from trainer_cli.config import compose

    words, notes = translated
    # The reader replaces N by a number.
    complete_words = [word for word in words if not word.startswith("-") and not word.endswith("=N")]
    overrides = experiment_by_name(complete_words, None)
    try:
        compose(overrides, missing_ok=True)
    except ConfigError as error:
        mistakes = getattr(error, "mistakes", [error])
        return ConfigErrors([ConfigError(message, hint=_ask_if_meant(command)), *mistakes])
    return UserError(message, cure=" ".join([_ask_if_meant(shlex.join([*command.split(), *words])), *notes]))


def _ask_if_meant(command: str) -> str:
    """The question whether a command is meant."""
    mark = "`" if "'" in command else "'"
    return f"Did you mean {mark}{command}{mark}?"


def _translate_arguments(arguments: Sequence[str], key: str) -> tuple[list[str], list[str]]:
    """The arguments of a verb of other tools as they are written here, and sentences on those with no such form.

    Args:
        key: how the argument of the verb is given here: as the value of this key; empty for a word alone.
    """
    search = search_configs()
    experiments, models = options_of(search, EXPERIMENT), search.options("model")
    words: list[str] = []
    notes: list[str] = []
    words_left = [argument for argument in arguments if argument]
    while words_left:
        word = words_left.pop(0)
        name, equals, _ = word.lstrip("-").partition("=")
        if not equals and not word.startswith("--"):
            words.append(word if word[0] in "-+~" else f"{key}{word}")
            continue
        given_value = _find_flag_value(word, [word, *words_left])
        translated = translate_setting(name, given_value, below=word.startswith("--"))
        if key == "ckpt=" and given_value and normalise(name) in _NAMES_OF_WEIGHTS:
            translated = f"ckpt={in_runs(given_value) or given_value}"
        elif name == "model" and given_value in experiments and given_value not in models:
            translated = given_value
        if translated is None:
            words.append(word)
            continue
        if given_value is not None and not equals:
            words_left.pop(0)
        if translated.endswith("."):
            notes.append(translated)
        else:
            # Of alternatives the first is taken.
            words += translated.partition(" | ")[0].split(" ")
    if key == "ckpt=":
        selector = "latest" if "ckpt=last" in words else "best"
        named = {f"ckpt={name}": f"ckpt=runs/{name}@{selector}" for name in experiments}
        if not named.keys().isdisjoint(words):
            words = [word for word in words if word not in ("ckpt=best", "ckpt=last")]
        # The name of an experiment beside a checkpoint, which holds its config.
        if any(word.startswith("ckpt=") and word not in named for word in words):
            words = [word for word in words if word not in named]
        words = [named.get(word, word) for word in words]
    return words, notes


def no_action(verb: str, arguments: Sequence[str], actions: Iterable[str]) -> UserError:
    """The error for a verb with actions whose first argument is not one of them."""
    names = list(actions)
    cure = f"Available: {', '.join(names)}."
    if not arguments:
        return UserError(f"train {verb} needs an action", cure=cure)
    word = arguments[0]
    if word.startswith("-"):
        action = next((argument for argument in arguments if argument in names), None)
        suggestion = cure if action is None else f"Did you mean 'train {verb} {action} {word}'?"
        return UserError(f"{word!r} is not an action of train {verb}", cure=suggestion)
    if (error := explain_missing(f"train {verb} {word}", "verbs", f"{verb} {word}")) is not None:
        return error
    suggestion = did_you_mean(_ACTIONS_ELSEWHERE.get(word, word), names).strip()
    return UserError(f"train {verb} has no action {word!r}", cure=suggestion or cure)


def several_runs(verb: str, runs: Sequence[str]) -> UserError:
    """The error for a verb that shows one folder or run, and got several, with the commands that compare them."""
    error = _translate_verb("vs", runs)
    assert error is not None
    return UserError(f"train {verb} takes one path, and got {' '.join(runs)}", cure=error.cure)


def wrong_flags(
    unknown: Sequence[str],
    words: Sequence[str],
    flags: Iterable[str],
    *,
    verb: str,
    owners: Mapping[str, Sequence[str]],
    parsed: Namespace,
) -> list[ConfigError]:
    """The errors for unknown flags, mostly keys that are written as flags (`--experiment digits`), and for the wrong
    overrides beside them.

    Args:
        unknown: the unknown flags, as they were given, and words that argparse has left with them.
        words: the arguments of the verb.
        flags: the flags of the verb.
        owners: other actions of the verb that have a flag.
        parsed: the arguments that are known; its `overrides`, if the verb takes them, hold the values of the flags.
    """
    takes_overrides = hasattr(parsed, "overrides")
    words_left = [word for word in unknown if not word.startswith("-")]
    words_without_flag = [*parsed.overrides, *words_left] if takes_overrides else words_left
    mistakes = []
    config_name = getattr(parsed, "config_name", "config")
    for flag in (word for word in unknown if word.startswith("-")):
        value = _find_flag_value(flag, words)
        if value is not None and "=" not in flag and value in words_without_flag:
            words_without_flag.remove(value)
        name = flag.partition("=")[0]
        if name == "--config-path" and (hint := search_configs()._replace(primary=config_name).hint_on_experiment()):
            cure = hint
        elif named := owners.get(name):
            cure = f"It is one of {', '.join(named)}; see train {verb} --help."
        else:
            cure = _suggest_for_flag(name, value, words, list(flags), verb, overrides=takes_overrides)
        mistakes.append(ConfigError(f"train {verb} has no flag {name}", code=Code.override, hint=cure))
    if takes_overrides and not getattr(parsed, "multirun", False):
        from trainer_cli.config import find_mistakes

        overrides = [word for word in experiment_by_name(words_without_flag, parsed.config_dir) if "=" in word]
        search = SearchPath.of(parsed.config_dir, config_name, None)
        mistakes += find_mistakes(overrides, search)
    return mistakes


def _find_flag_value(flag: str, words: Sequence[str]) -> str | None:
    """The value of an unknown flag: after its `=`, or the next word, if that may be one."""
    _, equals, value = flag.partition("=")
    if equals:
        return value
    following = words[words.index(flag) + 1 :] if flag in words else ()
    return following[0] if following and not following[0].startswith("-") and "=" not in following[0] else None


def _suggest_for_flag(
    name: str, given_value: str | None, words: Sequence[str], flags: Sequence[str], verb: str, *, overrides: bool
) -> str:
    """What is meant by an unknown flag. `overrides`: whether the verb takes overrides, of which it may be one."""
    key = name.lstrip("-").replace("-", "_")
    if overrides and key:
        from trainer_cli.config import hint_on_setting

        value = "VALUE" if given_value is None else given_value
        search = search_configs()
        if verb in ("validate", "predict") and key in _NAMES_OF_WEIGHTS and value not in search.options("model"):
            return f"Did you mean 'ckpt={in_runs(value) or value}'?"
        if hint := hint_on_setting(key, given_value, below=False):
            return hint
        settings = [*read_settings(search, "config", words), *keys()]
        if key in settings or key in search.groups():
            return f"Did you mean '{spell(key, value)}'?"
        if name in _CONFIG_FLAGS and (
            suggestion := _suggest_file(Path(value), search, has_config_name="--config-name" in flags)
        ):
            return suggestion.replace("Did you mean '", f"Did you mean 'train {verb} ", 1)
        if hint := hint_on_setting(key, given_value):
            return hint
        # A key without its section, such as --lr.
        owners = [setting for setting in settings if setting.rpartition(".")[2] == key]
        if owners:
            listed = " or ".join(f"'{owner}={value}'" for owner in owners[:3])
            return f"Did you mean {listed}?"
    cure = did_you_mean(name, flags).strip()
    if not cure and overrides:
        cure = f"Values are given as key=value, without dashes. See train {verb} --help."
    return cure or f"See train {verb} --help."


def experiment_by_name(words: Sequence[str], config_dir: Path | None) -> list[str]:
    """The overrides, with the name of an experiment, or several for a sweep, written as `experiment=NAME`."""
    index = next((index for index, word in enumerate(words) if "=" not in word and word.strip("~") == word), None)
    # With an experiment chosen already, the word would be a second one by mistake.
    chosen = any(word.lstrip("+").startswith("experiment=") for word in words)
    if index is None or chosen or _join_override(words, index) is not None:
        return list(words)
    if not set(words[index].split(",")) <= search_configs(config_dir).options(EXPERIMENT).keys():
        return list(words)
    return [*words[:index], f"experiment={words[index]}", *words[index + 1 :]]


def stray_word(words: Sequence[str], *, verb: str, config_dir: Path | None, has_config_name: bool) -> UserError | None:
    """The error for the first word among overrides that sets nothing; None if there is nothing to suggest.

    Args:
        has_config_name: whether the verb has the flag `--config-name`.
    """
    index = next((index for index, word in enumerate(words) if "=" not in word and word.strip("~") == word), None)
    if index is None:
        return None
    word = words[index]
    if (joined := _join_override(words, index)) is not None:
        return UserError(
            f"{word!r} is separated from its key or value",
            where="command line",
            cure=f"Write '{joined}', without spaces.",
        )
    if (error := explain_missing(word, "configs", f"{EXPERIMENT}/{word}")) is not None:
        return error
    suggestion = _suggest_override(words, index, search_configs(config_dir), verb, has_config_name=has_config_name)
    if suggestion is None:
        return None
    return UserError(f"{word!r} is not of the form key=value", where="command line", cure=suggestion)


def spell(key: str, value: str) -> str:
    """The override as it is shown to users: an experiment by its name alone."""
    return value if key == EXPERIMENT else f"{key}={value}"


def _join_override(words: Sequence[str], index: int) -> str | None:
    """Join an override that spaces around its `=` split into words; `index` is that of a word without `=`."""
    before, word, *after = ["", *words, "", ""][index : index + 4]
    if after[0] == "=":
        return f"{word}={after[1]}"
    if after[0].startswith("="):
        return f"{word}{after[0]}"
    return f"{before}{word}" if before.endswith("=") and before.count("=") == 1 else None


def _groups_with(search: SearchPath, option: str) -> list[str]:
    """The groups that have an option of this name."""
    return [group for group in search.groups() if option in search.options(group)]


def _suggest_file(path: Path, search: SearchPath, *, has_config_name: bool) -> str | None:
    """The override or flags for the path of a config file; None if it is not one.

    Args:
        has_config_name: whether the verb has the flag `--config-name`.
    """
    if path.suffix != ".yaml":
        return None
    if groups := _groups_with(search, path.stem):
        group = path.parent.name if path.parent.name in groups else groups[0]
        return f"Did you mean '{spell(group, path.stem)}'?"
    if not has_config_name or not path.is_file():
        return None
    named = f"--config-name {shlex.quote(path.stem)}"
    if path.resolve().parent == Path.cwd():
        # A project's modules are beside its folder of configs, so the file cannot be beside them.
        return f"Move it into the folder configs, and write {named}."
    return f"Did you mean '--config-dir {shlex.quote(str(path.parent))} {named}'?"


def _suggest_override(
    words: Sequence[str], index: int, search: SearchPath, verb: str, *, has_config_name: bool
) -> str | None:
    """A suggestion for a word among overrides, by what it names; None if it names nothing."""
    word = words[index]
    # The next word, if it may be a value.
    following = words[index + 1] if index + 1 < len(words) and "=" not in words[index + 1] else None
    name = word.lstrip("+-")
    is_key = name in (*search.groups(), *keys(), *read_settings(search, "config", words))
    # A space was typed for the equals sign.
    if following is not None and is_key and (name,) not in sections():
        return f"Did you mean '{spell(name, following)}'?"
    if groups := _groups_with(search, name):
        return f"Did you mean {' or '.join(repr(spell(group, name)) for group in groups)}?"
    path = Path(word)
    if suggestion := _suggest_file(path, search, has_config_name=has_config_name):
        return suggestion
    if path.suffix == ".py":
        experiment = next(iter(options_of(search, EXPERIMENT)), "NAME")
        return (
            "No script is run: an experiment names the classes of its model and data. "
            f"'train new DIR' writes one, and 'train fit {experiment}' trains one."
        )
    # Without `@` the first part is empty, which would be the current folder.
    runs = (word, word.rpartition("@")[0] or word)
    is_run = any((Path(run) / CONFIG_FILE).is_file() for run in runs)
    if verb in ("config", "diff") and is_run:
        # With `--diff` alone it is the other run.
        return (
            None
            if verb == "diff" and not words[1:]
            else f"The config of a run is {word}/{CONFIG_FILE}; `train config --diff {word} OTHER` compares two."
        )
    if verb in ("fit", "plan") and is_run:
        # A checkpoint holds the config too.
        return f"Did you mean '{'ckpt' if (path / MANIFEST_FILE).is_file() else 'resume'}={word}'?"
    path_in_runs = in_runs(word)
    if verb in ("validate", "predict") and (path_in_runs or any(sign in word for sign in _PATH_SIGNS)):
        if following and not path_in_runs:
            return "Write ckpt='GLOB', in quotes, so that the shell leaves the glob alone."
        return f"Did you mean 'ckpt={path_in_runs or word}'?"
    if is_key:
        return f"Write {name}=VALUE."
    experiments = list(options_of(search, EXPERIMENT))
    if near := find_nearest(name, experiments):
        return f"Did you mean '{near}'?"
    if name.isidentifier() or path.suffix == ".yaml":
        listed = ", ".join(experiments[:_MAX_SUGGESTIONS]) + (", …" if len(experiments) > _MAX_SUGGESTIONS else "")
        above = search.advise_project_above()
        return f"{above}Write key=value, or the name of an experiment: {listed}."
    return None
