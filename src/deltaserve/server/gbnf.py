"""Grammars in GBNF, llama.cpp's notation, as Lark, which llguidance compiles."""

from collections.abc import Iterator, Mapping

from llguidance.gbnf_to_lark import ASTNode, GrammarParser, RuleNode, RuleRefNode, resolve

_ROOTS = frozenset({"root", "start"})


def lark_of(gbnf: str) -> str:
    """The same grammar in Lark. Raises whatever the library does.

    The library finds out which rules are lexemes in rounds over all of them, of which there may be as many as rules: a
    small text would take seconds. They are told to it before, so that one round is enough.
    """
    rules = GrammarParser().parse(gbnf)
    for name in _lexemes(rules):
        rules[name].rule_is_terminal = True
    resolve(rules)
    in_order = sorted(rules.values(), key=lambda rule: rule.order)
    return "\n\n".join(["%llguidance {}", *map(str, in_order), ""])


def _lexemes(rules: Mapping[str, RuleNode]) -> Iterator[str]:
    """Names of rules that lead to no rule but such ones, each behind those that it names. The first rule of a grammar
    is none."""
    missing = {name: set(_named(rule)) for name, rule in rules.items() if name not in _ROOTS}
    users: dict[str, list[str]] = {}
    for name, named in missing.items():
        for each in named:
            users.setdefault(each, []).append(name)
    ready = [name for name, named in missing.items() if not named]
    while ready:
        name = ready.pop()
        yield name
        for user in users.get(name, ()):
            missing[user].discard(name)
            if not missing[user]:
                ready.append(user)


def _named(rule: RuleNode) -> Iterator[str]:
    """Rules that a rule names."""
    waiting: list[ASTNode] = [rule]
    while waiting:
        node = waiting.pop()
        if isinstance(node, RuleRefNode):
            yield node.name
        waiting += node.children()
