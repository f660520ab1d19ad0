"""Translation of GBNF: as the library does it, in time that grows with the text."""

from random import Random

from llguidance.gbnf_to_lark import gbnf_to_lark

from deltaserve.server.gbnf import lark_of

PARTS = ('"a"', "[a-z]", ".", '"x"*', "[0-9]{2,3}", '"q"?')


def drawn(rng: Random) -> str:
    names = ["root", *(rng.choice(["a", "fooBar", "x-y", "r"]) + str(number) for number in range(rng.randint(1, 12)))]
    rules = [f"{name} ::= {_sequence(rng, names, 0)}" for name in names]
    rng.shuffle(rules)
    return "\n".join(rules) + "\n"


def _sequence(rng: Random, names: list[str], depth: int) -> str:
    parts = []
    for _ in range(rng.randint(1, 4)):
        kind = rng.choice(["plain", "name", "group"])
        if kind == "group" and depth < 2:
            parts.append(f"({_sequence(rng, names, depth + 1)})")
        else:
            parts.append(rng.choice(names if kind == "name" else PARTS))
    other = f" | {_sequence(rng, names, depth + 1)}" if depth < 2 and rng.random() < 0.3 else ""
    return " ".join(parts) + other


def test_grammars_are_those_of_the_library() -> None:
    for seed in range(500):
        grammar = drawn(Random(seed))
        lines = [[line for line in text.split("\n") if line] for text in (lark_of(grammar), gbnf_to_lark(grammar))]
        assert lines[0] == lines[1], grammar


def test_a_long_chain_of_rules_is_translated_at_once() -> None:
    """In rounds of which each looks at all of them, it would take hours."""
    grammar = "root ::= r0\n" + "".join(f'r{n} ::= "a" r{n + 1}\n' for n in range(6000)) + 'r6000 ::= "b"\n'
    assert 'R5999: "a" R6000' in lark_of(grammar)
