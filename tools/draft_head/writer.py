"""A process that writes files of chats: for a number on a line of its input the tokens of that file's answers go out.

python -m tools.draft_head.writer FOLDER MODEL
"""

import sys
from pathlib import Path

import torch

from tools.draft_head.chats import Chatter
from tools.draft_head.store import read_recipe, write_file


def main(folder: Path, model: Path) -> None:
    torch.set_num_threads(1)
    recipe = read_recipe(folder)
    chatter = Chatter(model, recipe.num_rows, recipe.limits, recipe.sampled_share)
    for line in sys.stdin:
        print(write_file(folder, int(line), chatter, recipe), flush=True)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
