"""What the queries of Grafana's board ask for, and what a server tells."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

BOARD = Path(__file__).resolve().parents[2] / "deploy" / "grafana" / "deltaserve.json"
ADDED = {"job", "instance"}
"""Labels that Prometheus adds to what it scrapes, where the series has none of that name."""
_SELECTOR = re.compile(r"\b((?:deltaserve|process)_\w+)(\{[^}]*\})?")
_MATCHER = re.compile(r'(\w+)(=~|=)"([^"]*)"')
_BY = re.compile(r"\bby \(([^)]*)\)")
_SHOWN = re.compile(r"\{\{(\w+)\}\}")
Series = Mapping[str, list[Mapping[str, str]]]
"""Name of a sample |-> labels of each that there is."""


def series_of(text: str) -> Series:
    found: dict[str, list[Mapping[str, str]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample.labels)
    return found


@dataclass(frozen=True, slots=True)
class Expression:
    """A query of a panel."""

    panel: str
    text: str
    legend: str

    def problems(self, told: Series) -> Iterator[str]:
        """What it asks for that the server does not tell."""
        grouped = {label.strip() for group in _BY.findall(self.text) for label in group.split(",")}
        for label in _SHOWN.findall(self.legend):
            if label not in grouped | ADDED:
                yield f"{self.panel}: the legend shows {label}, by which nothing is grouped"
        asked = _SELECTOR.findall(self.text)
        if not asked:
            yield f"{self.panel}: asks for no metric"
        for name, matchers in asked:
            yield from self._lacking(name, _MATCHER.findall(matchers), grouped, told.get(name, []))

    def _lacking(
        self, name: str, matchers: list[tuple[str, str, str]], grouped: set[str], there: list[Mapping[str, str]]
    ) -> Iterator[str]:
        if not there:
            yield f"{self.panel}: no {name}"
        for labels in there[:1]:
            for label in (grouped | {label for label, _, _ in matchers}) - labels.keys() - ADDED:
                yield f"{self.panel}: {name} has no label {label}"
        for label, operator, value in matchers:
            if operator == "=" and not any(labels.get(label) == value for labels in there):
                yield f'{self.panel}: no {name} with {label}="{value}"'


def expressions() -> list[Expression]:
    """Every query of the board, in the order of its panels."""
    panels = json.loads(BOARD.read_text())["panels"]
    return [
        Expression(panel["title"], target["expr"], target["legendFormat"])
        for panel in panels
        for target in panel.get("targets", [])
    ]
