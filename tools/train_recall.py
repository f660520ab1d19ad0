"""Make the recall micro-model: an ordinary Hugging Face folder of about 2 MB, in about five CPU minutes on one thread.

python -m tools.train_recall models/recall-micro
python -m tools.train_recall models/recall-micro --evaluate-only
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3ForCausalLM

from tools.recall.evaluate import exams, grade
from tools.recall.model import MAX_LEN, make_model
from tools.recall.tokenizer import build_tokenizer
from tools.recall.train import Recipe, train


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the checkpoint goes, or is")
    parser.add_argument(
        "--evaluate-only", action="store_true", help="grade the checkpoint in the folder; write nothing"
    )
    parser.add_argument("--seed", type=int, default=Recipe().seed, help="of the weights and the training documents")
    parser.add_argument("--num-steps", type=int, default=Recipe().num_steps, help="optimizer steps")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if args.evaluate_only:
        evaluate(Qwen3ForCausalLM.from_pretrained(args.folder, dtype=torch.float32))
    else:
        make(Recipe(seed=args.seed, num_steps=args.num_steps), args.folder)


def make(recipe: Recipe, folder: Path) -> None:
    """Train, grade and save."""
    torch.manual_seed(recipe.seed)
    model = make_model()
    cpu_s = train(model, recipe)
    scores = evaluate(model)
    model.save_pretrained(folder)
    build_tokenizer(MAX_LEN).save_pretrained(folder)
    report = {
        "made_by": "python -m tools.train_recall",
        "recipe": asdict(recipe),
        "torch": torch.__version__,
        "cpu_seconds": round(cpu_s),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "scores": scores,
    }
    (folder / "recall.json").write_text(json.dumps(report, indent=1) + "\n")
    for file in folder.iterdir():
        file.chmod(0o644)


def evaluate(model: Any) -> dict[str, dict[str, int]]:
    """Sit every exam; prints each score. {exam: {tokens_right, tokens, answers_right, answers}}."""
    model.eval()
    scores = {}
    for exam in exams():
        scores[str(exam)] = asdict(grade(model, exam, seed=1))
        print(f"{exam}: {scores[str(exam)]}", flush=True)
    return scores


if __name__ == "__main__":
    main()
