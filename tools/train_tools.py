"""Make the micro-model of tools: an ordinary Hugging Face folder, in about a CPU minute on one thread.

python -m tools.train_tools models/tools-micro
python -m tools.train_tools models/tools-micro --evaluate-only
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from tools.calling.conversations import Shape
from tools.calling.evaluate import drawn, grade
from tools.calling.model import make_tools_model
from tools.calling.rows import Rows, Stage
from tools.calling.tokenizer import build_tokenizer
from tools.recall.model import MAX_LEN
from tools.recall.rows import Batch
from tools.recall.train import Pace, learn, save

STAGES = (
    Stage(Shape(num_tools=3, num_facts=4, num_turns=6), num_rows=3),
    Stage(Shape(num_tools=5, num_facts=12, num_turns=8), num_rows=3),
)
RECALL = Path(__file__).resolve().parents[1] / "models" / "recall-micro"
"""Where its weights begin."""
NUM_CONVERSATIONS = 400
"""Those that it is graded with."""


@dataclass(frozen=True, slots=True)
class ToolsRecipe(Pace):
    """Everything the weights depend on. Equal recipes on equal machines give equal weights."""

    num_steps: int = 800
    peak_lr: float = 1e-3
    warmup_steps: int = 30
    stages: tuple[Stage, ...] = STAGES


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the checkpoint goes, or is")
    parser.add_argument(
        "--evaluate-only", action="store_true", help="grade the checkpoint in the folder; write nothing"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the conversations")
    parser.add_argument("--num-steps", type=int, help="optimizer steps")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = Rows(build_tokenizer(MAX_LEN))
    if args.evaluate_only:
        evaluate(AutoModelForCausalLM.from_pretrained(args.folder, dtype=torch.float32), rows)
    else:
        recipe = ToolsRecipe(seed=args.seed)
        make(replace(recipe, num_steps=args.num_steps or recipe.num_steps), rows, args.folder)


def make(recipe: ToolsRecipe, rows: Rows, folder: Path) -> None:
    """Train, grade and save."""

    def draw(rng: Random, level: int, reached: int) -> Batch:
        return rows.batch(rng, recipe.stages[level])

    torch.manual_seed(recipe.seed)
    model = make_tools_model(RECALL, build_tokenizer(MAX_LEN))
    cpu_s = learn(model, recipe, len(recipe.stages), draw)
    scores = evaluate(model, rows)
    save(folder, model, build_tokenizer(MAX_LEN), "python -m tools.train_tools", recipe, cpu_s, scores)


def evaluate(model: Any, rows: Rows) -> dict[str, dict[str, int]]:
    """Prints and returns {kind of answer: {right, answers}}."""
    model.eval()
    scores = grade(model, rows, drawn(1, NUM_CONVERSATIONS))
    for kind, score in scores.items():
        print(f"{kind}: {score.right} of {score.answers}", flush=True)
    return {kind.value: asdict(score) for kind, score in scores.items()}


if __name__ == "__main__":
    main()
