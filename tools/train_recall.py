"""Make a recall micro-model: an ordinary Hugging Face folder of at most 2 MB, in about five CPU minutes on one thread.

python -m tools.train_recall models/recall-micro
python -m tools.train_recall models/recall-state --memory state
python -m tools.train_recall models/recall-micro --evaluate-only
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from tools.recall.evaluate import Exam, grade, kv_exams, state_exams
from tools.recall.model import MAX_LEN, make_kv_model, make_state_model
from tools.recall.rows import Variety
from tools.recall.tokenizer import build_tokenizer
from tools.recall.train import STATE_STAGES, Recipe, save, train


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of micro-model: what it looks answers up in."""

    make_model: Callable[[], Any]
    recipe: Recipe
    exams: Callable[[], list[Exam]]


KINDS = {
    "kv": Kind(make_kv_model, Recipe(), kv_exams),
    "state": Kind(
        make_state_model,
        Recipe(num_steps=1100, peak_lr=3e-3, stages=STATE_STAGES, variety=Variety(round_trip=0.2)),
        state_exams,
    ),
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the checkpoint goes, or is")
    parser.add_argument(
        "--evaluate-only", action="store_true", help="grade the checkpoint in the folder; write nothing"
    )
    parser.add_argument("--memory", choices=KINDS, default="kv", help="what it looks answers up in")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the training documents")
    parser.add_argument("--num-steps", type=int, help="optimizer steps")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    kind = KINDS[args.memory]
    if args.evaluate_only:
        evaluate(AutoModelForCausalLM.from_pretrained(args.folder, dtype=torch.float32), kind)
    else:
        recipe = replace(kind.recipe, seed=args.seed, num_steps=args.num_steps or kind.recipe.num_steps)
        make(replace(kind, recipe=recipe), args.folder)


def make(kind: Kind, folder: Path) -> None:
    """Train, grade and save."""
    torch.manual_seed(kind.recipe.seed)
    model = kind.make_model()
    cpu_s = train(model, kind.recipe)
    scores = evaluate(model, kind)
    save(folder, model, build_tokenizer(MAX_LEN), "python -m tools.train_recall", kind.recipe, cpu_s, scores)


def evaluate(model: Any, kind: Kind) -> dict[str, dict[str, int]]:
    """Sit every exam; prints each score. {exam: {tokens_right, tokens, answers_right, answers}}."""
    model.eval()
    scores = {}
    for exam in kind.exams():
        scores[str(exam)] = asdict(grade(model, exam, seed=1))
        print(f"{exam}: {scores[str(exam)]}", flush=True)
    return scores


if __name__ == "__main__":
    main()
