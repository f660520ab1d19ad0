"""Train an EAGLE-3 draft head for a model, with nothing but the model: it writes the chats that the head learns from.

    python -m tools.train_draft_head OUT [--model FILE_OR_FOLDER] [--num-tokens 300000] [--processes 2]
    python -m tools.train_draft_head OUT --prompts FILE [--model FILE_OR_FOLDER] ..
    deltaserve serve MODEL --speculative-algorithm EAGLE3 --speculative-draft-model-path OUT --speculative-num-steps 4

Three stages, each with lines of progress:
 1. chats: the model writes users' turns behind its chat template's header and answers them, greedily for the most part.
    They go into files in OUT/chats (or --chats): 6 KB a token, with what the head reads of the model. A run that was
    stopped goes on where it was; one with more --num-tokens adds files. With --prompts the model answers those, each
    once: a head learns most from prompts as they are served. A line of FILE is {"messages": [..]}, {"prompt": "text"}
    or {"prompt": [ids of tokens]}.
 2. training: each epoch ends with a line that says how often the head's first, second, third .. guess is right where
    those before it are, on chats that were kept apart, and how many of them would be accepted in a round.
 3. OUT/config.json and OUT/model.safetensors, with the names that published heads have.

For a model of 135M parameters on 2 cores with AVX512-BF16: chats came at 150 to 200 tokens a second beside other work;
an epoch of 300,000 tokens takes one minute in the first half of the training and two and a half in the second. A head
fits one model file alone: quantisation and fine-tuning change what it reads. The model must have at least 4 layers, all
of them attention, and a chat template where no prompts are given.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch

from benchmarks.bench_speculation import QUESTIONS
from deltaserve.commands.demo.model import PACKAGE, find_language_model
from deltaserve.core.errors import ConfigError
from deltaserve.model.drafts.eagle3 import eagle3_head
from tools.draft_head.folder import head_shape, new_head, target_tables, write_head
from tools.draft_head.lessons import guessable_tokens
from tools.draft_head.prompts import read_prompts
from tools.draft_head.store import ChatRecipe, read_chats, unrepeated, write_chats
from tools.draft_head.target import trainable_spec
from tools.draft_head.train import Exam, Trainer, TrainRecipe

_HELD_OUT = 32
"""One chat of so many is not learnt from."""
_RECIPE = TrainRecipe()
_DRAFT_VOCAB = 8192
Tell = Callable[[str], None]


def main(arguments: Sequence[str] | None = None) -> None:
    args = _parser().parse_args(arguments)
    model: Path | None = args.model or find_language_model()
    if model is None:
        raise SystemExit(f"--model: which one? Without it, the package {PACKAGE} must be installed")
    began = time.monotonic()

    def tell(line: str) -> None:
        print(f"{time.monotonic() - began:6.0f} s  {line}", flush=True)

    chats = ChatRecipe(args.seed, left_out=QUESTIONS)
    if args.answer_len is not None:
        chats = replace(chats, answer_len=args.answer_len)
    recipe = TrainRecipe(args.seed, args.epochs, num_passes=args.passes, peak_lr=args.peak_lr)
    if args.minutes is not None:
        recipe = replace(recipe, most_seconds=60 * args.minutes)
    try:
        prompts = read_prompts(args.prompts, model, trainable_spec(model).vocab_size) if args.prompts else ()
        folder = args.chats or args.out / "chats"
        files = write_chats(folder, model, chats, args.num_tokens, args.processes, tell, prompts)
        torch.set_num_threads(args.processes)
        draft_vocab = args.draft_vocab or min(_DRAFT_VOCAB, trainable_spec(model).vocab_size)
        make_head(args.out, model, files, recipe, draft_vocab, tell)
    except ConfigError as error:
        raise SystemExit(str(error)) from None


def make_head(
    out: Path, model: Path, files: Sequence[Path], recipe: TrainRecipe, draft_vocab: int, tell: Tell
) -> tuple[Exam, Exam]:
    """From files of chats to a folder: how good the head was before it learnt anything, and after.

    Raises ConfigError for a model or files that are none, or where there are too few chats.
    """
    spec = trainable_spec(model)
    if not 0 < draft_vocab <= spec.vocab_size:
        raise ConfigError(f"--draft-vocab {draft_vocab}: the model has {spec.vocab_size} tokens")
    chats = unrepeated(read_chats(files))
    learnt = [chat for index, chat in enumerate(chats) if index % _HELD_OUT]
    held_out = chats[::_HELD_OUT]
    if not learnt:
        raise ConfigError(f"{len(chats)} chats are too few to learn from")
    guessable = guessable_tokens(learnt, draft_vocab, spec.vocab_size)
    tables, norm = target_tables(model, spec, guessable)
    head = new_head(head_shape(spec, draft_vocab), tables, norm, learnt, recipe.seed)
    trainer = Trainer(head, tables, recipe)
    before = trainer.examine(held_out)
    tell(f"{len(learnt)} chats to learn from, {len(held_out)} kept apart; untrained: {before}")
    after = trainer.train(learnt, held_out, tell)
    tell(f"logits scaled by {trainer.calibrate(held_out):.2f}: as sure as it is right")
    write_head(out, head, spec, tables)
    eagle3_head(spec, model, out)
    report = {
        "made_by": "python -m tools.train_draft_head",
        "recipe": asdict(recipe),
        "torch": torch.__version__,
        "chats": len(learnt),
        "right": after.right,
        "accepted": after.accepted,
    }
    (out / "training.json").write_text(json.dumps(report, indent=1) + "\n")
    tell(f"{out}: written")
    return before, after


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder of the head, made where it is missing")
    parser.add_argument("--model", type=Path, help="GGUF file or folder; without it, that of the demo")
    parser.add_argument("--chats", type=Path, metavar="FOLDER", help="where chats are, or go; OUT/chats")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="that are to be answered: JSON lines, see above")
    parser.add_argument("--answer-len", type=_count, help="tokens of an answer at most (160)")
    parser.add_argument("--num-tokens", type=_count, default=300_000, help="of answers (300000)")
    parser.add_argument("--processes", type=_count, default=2, help="that write chats, and threads that train (2)")
    parser.add_argument("--epochs", type=_count, default=_RECIPE.num_epochs, help="times that each chat is read")
    parser.add_argument("--passes", type=_count, default=_RECIPE.num_passes, help="guesses in a row to learn")
    parser.add_argument("--minutes", type=float, help="of training at most; its schedule is cut to fit")
    parser.add_argument("--peak-lr", type=float, default=_RECIPE.peak_lr, help="highest learning rate of AdamW")
    parser.add_argument(
        "--draft-vocab", type=_count, help="tokens that it chooses among (8192, or all where the model has fewer)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of chats and weights")
    return parser


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return value


if __name__ == "__main__":
    main(sys.argv[1:])
