"""Flags, environment and YAML merged into one Settings: flag > environment > YAML > default.

Every value is checked where it stands, also one that is overridden: nothing wrong is ever ignored. All that is wrong
is found before anything is told.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from deltaserve.core.errors import ConfigError
from deltaserve.settings.config import Settings
from deltaserve.settings.flags.flag_help import About, print_help
from deltaserve.settings.flags.foreign import FOREIGN, Alias, Denied, Idle, Takes, key_of
from deltaserve.settings.flags.foreign_values import advise_workers, told_elsewhere, told_value
from deltaserve.settings.flags.given import CONFIG_ENV, Given, Source, of_environment, of_yaml
from deltaserve.settings.flags.known_flags import (
    CONFIG,
    DUMP,
    HELP,
    HELP_ALL,
    OF_ANY_COMMAND,
    KnownFlags,
    advise_of_a_line,
    is_key,
    known_flags,
)
from deltaserve.settings.flags.line_words import Word, take_apart
from deltaserve.settings.flags.options import nearest
from deltaserve.settings.flags.problems import problems_of, raise_problems
from deltaserve.settings.rules import breaches, idle

_MODEL, _NAMES = "model-path", "served-model-name"


@dataclass(frozen=True, slots=True)
class CommandLine:
    """What the words of one command mean, and what is wrong with them."""

    settings: Settings
    """The settings from all that is right."""
    dump_config: bool = False
    """Print the settings and end."""
    notes: tuple[str, ...] = ()
    """Lines for the user about what was accepted and changes nothing."""
    problems: tuple[str, ...] = ()
    """What is wrong, and what to write instead."""


def load(command: str, summary: str, argv: Sequence[str], environ: Mapping[str, str]) -> CommandLine:
    """Settings of `deltaserve COMMAND argv`. Raises ConfigError; ends the process after --help."""
    line = read_line(command, About(summary), argv, environ)
    raise_problems(line.problems)
    return line


def read_line(command: str, about: About, argv: Sequence[str], environ: Mapping[str, str]) -> CommandLine:
    """What `load` returns, with what is wrong beside what is right."""
    words = list(take_apart(argv, known_flags(command).takes))
    _help_if_asked(command, about, words)
    merged = _Merged(known_flags(command))
    line = merged.sort(words)
    config = line.config or environ.get(CONFIG_ENV)
    if config is not None:
        merged.take_file(Path(config))
    merged.take_all(of_environment(environ))
    merged.take_all(merged.with_model(line.given))
    return merged.result(line.dump_config)


def command_of(command: str, argv: Sequence[str]) -> str:
    """`prefill` or `decode` of a line of SGLang's server, which names its role by a flag; else the command itself."""
    for word in take_apart(argv, known_flags(command).takes):
        if command == "serve" and word.name == "disaggregation-mode" and word.values[:1] in (("prefill",), ("decode",)):
            return word.values[0]
    return command


def _help_if_asked(command: str, about: About, words: Iterable[Word]) -> None:
    asked = {word.name for word in words if word.flag}
    if asked.isdisjoint((*HELP, HELP_ALL)):
        return
    known = known_flags(command)
    own = [option for option in known.options.values() if known.has(option)]
    print_help(command, about, own, ("common", "rare") if HELP_ALL in asked else ("common",))
    raise SystemExit(0)


@dataclass(frozen=True, slots=True)
class _Sorted:
    """A line: what was given for settings, and the rest."""

    given: Sequence[Given]
    config: str | None
    dump_config: bool


@dataclass(slots=True)
class _Merged:
    """Values by key, as the sources are taken one after the other, and all that is to be told."""

    known: KnownFlags
    values: dict[str, object] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    wrong: set[str] = field(default_factory=set)
    """Keys of which a problem tells: what may follow from them is not told."""

    # ------------------------------------------------------------ the line

    def sort(self, words: Iterable[Word]) -> _Sorted:
        """MODEL becomes one of the flags."""
        given: list[Given] = []
        models: list[str] = []
        workers: list[tuple[str, Sequence[str]]] = []
        single: dict[str, str] = {}
        for word in words:
            if not word.flag:
                models += word.values
            elif self.known.is_of_pair(word.name):
                workers.append((word.name, word.values))
            elif word.name in OF_ANY_COMMAND:
                self._take_single(word, single)
            else:
                given.append(Given(Source.FLAG, word.name, word.flag, word.values))
        if workers:
            self._refuse("workers", advise_workers(workers))
        return _Sorted([*given, *self._model(models, given)], single.get(CONFIG), DUMP in single)

    def _take_single(self, word: Word, single: dict[str, str]) -> None:
        try:
            if word.name in single:
                raise ConfigError(f"{word.flag}: given twice")
            Given(Source.FLAG, word.name, word.flag, word.values).require(OF_ANY_COMMAND[word.name])
            single[word.name] = "".join(word.values)
        except ConfigError as error:
            self._refuse(word.name, str(error))

    def _model(self, models: Sequence[str], given: Iterable[Given]) -> Iterable[Given]:
        """The positional MODEL as --model-path."""
        has_unknown = any(self.known.takes(one.name) is None for one in given)
        if len(models) > 1 and not has_unknown:
            self._refuse(_MODEL, f"{models[1]!r}: one MODEL is expected, and every other value after its flag")
        if models and any(key_of(one.name) == _MODEL for one in given):
            self._refuse(_MODEL, "MODEL and --model-path: give one of them")
            return ()
        return [Given(Source.FLAG, _MODEL, "--model-path", (models[0],))] if models else ()

    def with_model(self, given: Sequence[Given]) -> Iterator[Given]:
        """MODEL may stand behind several names of it: where nothing else says it, the last of them is MODEL."""
        lacks = _MODEL not in self.values and all(key_of(one.name) != _MODEL for one in given)
        for one in given:
            if lacks and key_of(one.name) == _NAMES and len(one.values) > 1:
                yield replace(one, values=one.values[:-1])
                yield Given(Source.FLAG, _MODEL, "--model-path", one.values[-1:])
            else:
                yield one

    # ------------------------------------------------------------ all sources

    def take_file(self, path: Path) -> None:
        """Take what a file gave, as `take_all` does; a file that cannot be read is a problem itself."""
        try:
            self.take_all(of_yaml(path))
        except ConfigError as error:
            self._refuse(CONFIG, str(error))

    def take_all(self, given: Iterable[Given]) -> None:
        """Take what one source gave, over what earlier sources gave. What is wrong becomes a problem, the rest is
        taken."""
        seen: set[str] = set()
        for one in given:
            key = key_of(one.name)
            try:
                if key in seen and one.is_part:
                    continue  # what is told of one part is told of all
                if key in seen:
                    raise ConfigError(f"{one.place}: given twice{f', as {key} too' if one.name != key else ''}")
                seen.add(key)
                self._take(one, key)
            except ConfigError as error:
                self._refuse(key, *problems_of(error))

    def _take(self, given: Given, key: str) -> None:
        """Take one value as ours, or note or refuse it. Raises ConfigError."""
        is_letter = not is_key(given.name) and given.source is not Source.FLAG
        row, option = FOREIGN.get(given.name), self.known.options.get(key)
        if is_letter or (row is None and option is None):
            self._raise_unknown(given)
        elif row is not None and not isinstance(row.meaning, Alias):
            self._let(given, row.meaning, row.takes)
        elif given.is_part:
            raise ConfigError(f"{given.place}: its parts are no flags; write --{key} with the whole value")
        elif option is not None and given.source is Source.FLAG and not self.known.has(option):
            self._let(given, told_elsewhere(self.known.command, key, option.commands), Takes.ONE)
        elif option is not None:
            match told_value(self.known.command, given.name, key, given.text):
                case str(ours):
                    self.values[key] = option.parse(ours, given.where)
                case None:
                    self.values[key] = given.value_of(option)
                case Idle(why):
                    self.notes.append(f"{given.where} {given.text} changes nothing: {why}")
                case Denied(remedy):
                    raise ConfigError(f"{given.where} {given.text}: {remedy}")

    def _let(self, given: Given, meaning: Idle | Denied, takes: Takes) -> None:
        """Note that it changes nothing. Raises ConfigError if it would have to change something."""
        if isinstance(meaning, Denied):
            raise ConfigError(f"{given.place}: {meaning.remedy}")
        given.require(takes)
        allowed, text = meaning.values, given.text
        if allowed and text.lower() not in allowed:
            raise ConfigError(f"{given.place} {text[:80]}: only {' or '.join(allowed)} is possible; {meaning.why}")
        if takes is Takes.NOTHING and text == "false":
            return
        if takes is Takes.NOTHING or not allowed:
            self.notes.append(f"{given.place} changes nothing: {meaning.why}")

    def _raise_unknown(self, given: Given) -> None:
        advice = advise_of_a_line(given.name)
        match given.source:
            case Source.VARIABLE:
                near = nearest(given.place, [option.env for option in self.known.options.values()])
            case Source.FILE:
                near = self.known.nearest_key(given.name)
            case Source.FLAG:
                self.wrong.add(_MODEL)  # which may have been taken for its value
                near = self.known.nearest(given.name)
                near = near or f"; `deltaserve {self.known.command} --help-all` lists those there are"
        raise ConfigError(f"{given.place}: unknown {given.source.value}{near if advice is None else f'; {advice}'}")

    def _refuse(self, key: str, *problems: str) -> None:
        self.wrong.add(key)
        self.problems += problems

    def result(self, dump_config: bool) -> CommandLine:
        """What it came to, and which values may not stand together."""
        tree: dict[str, dict[str, object]] = {}
        for option in self.known.options.values():
            group = tree.setdefault(option.group, {})
            if option.key in self.values:
                group[option.field] = self.values[option.key]
        settings = Settings.model_validate(tree)
        named = [f"--{key}" for key in self.wrong]
        told = [text for text in breaches(settings, self.known.command) if not any(flag in text for flag in named)]
        notes = (*self.notes, *idle(settings, self.known.command))
        return CommandLine(settings, dump_config, notes, (*self.problems, *told))
