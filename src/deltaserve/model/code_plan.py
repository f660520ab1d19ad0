"""Which of a rank's matrices are kept as codes (block_forms.py): by what was asked for, and how files store them.

| `--quantization` | matrices that files have in codes | the others | inputs of products |
|---|---|---|---|
| none | their values | their values | as they are |
| auto | codes | their values | as they are |
| int8 | codes | rounded to codes of 8 bits | as they are |
| a8 | codes | rounded to codes of 8 bits | rounded to 8 bits |

A draft head in a folder of its own is loaded as by a8, unless codes are not kept at all.

No torch: the launcher counts bytes with it.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from deltaserve.core.layout.shard import Shard
from deltaserve.core.quantization import Quantization
from deltaserve.model.family import Family
from deltaserve.model.formats.block_forms import INT8, STORED_FORMS, WHOLE_LEN, BlockForm
from deltaserve.model.shard_rules import TensorPiece
from deltaserve.model.source import TensorSource
from deltaserve.model.tensor_part import TensorPart
from deltaserve.model.tensors import HEAD


class CodeRules(NamedTuple):
    """What one row of the table above says."""

    keeps_codes: bool = False
    rounds_weights: bool = False
    rounds_inputs: bool = False


CODE_RULES: Mapping[Quantization, CodeRules] = {
    "none": CodeRules(),
    "auto": CodeRules(keeps_codes=True),
    "int8": CodeRules(keeps_codes=True, rounds_weights=True),
    "a8": CodeRules(keeps_codes=True, rounds_weights=True, rounds_inputs=True),
}
_HEAD_RULES = CODE_RULES["a8"]
_MULTIPLIED = re.compile(r"(.*\.)?((?!kv_b_)\w+_proj(_with_mqa|_\w+)?|out_proj|fc|eh_proj)\.weight|lm_head\.weight")
"""Matrices that `StepOps.product` multiplies with, experts in one tensor apart."""
_ONE_EXPERT = re.compile(r".*\.experts\.\d+\..*")
"""Names of one expert's matrices: parts of tensors of all experts, which are rounded, not kept."""
_ALL_EXPERTS = re.compile(r".*\.experts\.(gate_up_proj|down_proj)")


@dataclass(frozen=True, slots=True)
class CodePlan:
    """How one rank keeps its matrices of codes."""

    forms: Mapping[str, BlockForm]
    """Canonical name |-> how its codes are kept, where files have codes. A tied embedding counts as output matrix."""
    uncut: tuple[str, ...]
    """Names whose values are taken, because what the rank holds of them does not begin and end between runs."""


def draft_rules(rules: CodeRules) -> CodeRules:
    """Rules for a draft head in a folder of its own, where its model is loaded by `rules`: its guesses are verified, so
    they need not be exact, and a pass of it takes as long as its matrices take to read."""
    return _HEAD_RULES if rules.keeps_codes else rules


def stored_kinds(source: TensorSource, family: Family) -> dict[str, str]:
    """Canonical name |-> how files store it, of what they have in codes (a key of STORED_FORMS)."""
    names = ((family.canonical(name), kind) for name, kind in source.kinds.items())
    return {name: kind for name, kind in names if name is not None}


def plan_codes(
    parts: Mapping[str, TensorPart], kinds: Mapping[str, str], shard: Shard, tied: str | None = None
) -> CodePlan:
    """`parts`: of the whole model. `tied`: the embedding, where it is the output matrix, too."""
    forms: dict[str, BlockForm] = {}
    uncut = []
    for name, kind in kinds.items():
        part = parts.get(name)
        if part is None or kind not in STORED_FORMS or not (is_multiplied(name) or name == tied) or part.added:
            continue
        if _ONE_EXPERT.fullmatch(name):
            continue
        if len(part.shape) != 2 or not all(map(_is_between_runs, part.pieces(shard))):
            uncut.append(name)
        else:
            forms[name] = STORED_FORMS[kind]
    return CodePlan(forms, tuple(uncut))


def is_multiplied(name: str) -> bool:
    """Whether a canonical name is that of a matrix of its own that products take."""
    return _MULTIPLIED.fullmatch(name) is not None or name == HEAD


def code_bytes(name: str, shape: tuple[int, ...], form: BlockForm | None, rules: CodeRules) -> int | None:
    """Bytes of a matrix kept as codes; `shape`: on the rank, `form`: as planned. None: its values are kept."""
    if form is not None and rules.keeps_codes:
        return form.num_bytes(*shape[-2:])
    if not rules.rounds_weights:
        return None
    if _ALL_EXPERTS.fullmatch(name) and len(shape) == 3:  # [in, out] of each
        return None if shape[1] % WHOLE_LEN else shape[0] * INT8.num_bytes(shape[2], shape[1])
    if len(shape) != 2 or shape[1] % WHOLE_LEN or not is_multiplied(name):
        return None
    return INT8.num_bytes(*shape)


def _is_between_runs(piece: TensorPiece) -> bool:
    """All rows may be cut anywhere; of columns a rank holds one range."""
    if len(piece.source) < 2:
        return True
    columns, target = piece.source[1], piece.target[1]
    return all((edge or 0) % WHOLE_LEN == 0 for edge in (columns.start, columns.stop)) and not target.start


def shown_names(names: Iterable[str], most: int = 8) -> str:
    """The first names, and how many more there are, for a line of the log."""
    all_names = list(names)
    more = f" and {len(all_names) - most} more" if len(all_names) > most else ""
    return ", ".join(name[:80] for name in all_names[:most]) + more
