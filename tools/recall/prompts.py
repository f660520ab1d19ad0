"""Questions about documents, as a file of prompts for a draft head to learn from.

python -m tools.recall.prompts OUT.jsonl NUM_PROMPTS [SEED]
"""

import json
import sys
from pathlib import Path
from random import Random

from deltaserve.commands.load.recall import ASK, DocumentShape, make_document

_FEWEST, _MOST = 4, 120
"""Facts of a document."""


def question_prompts(num_prompts: int, seed: int) -> list[tuple[int, ...]]:
    """One question about each of so many documents, of all sizes, with and without noise."""
    rng = Random(f"prompts {seed}")
    prompts = []
    for _ in range(num_prompts):
        num_facts = round(_FEWEST * (_MOST / _FEWEST) ** rng.random())  # many small ones: lookup is learnt there first
        document = make_document(rng, DocumentShape(num_facts, int(num_facts * rng.choice((0.0, 0.5, 1.0)))))
        prompts.append((*document.tokens, ASK, rng.choice(list(document.successor))))
    return prompts


def main(out: Path, num_prompts: int, seed: int = 0) -> None:
    lines = [json.dumps({"prompt": prompt}) for prompt in question_prompts(num_prompts, seed)]
    out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
