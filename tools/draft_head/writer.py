"""A process that writes files of chats: for a number on a line of its input the tokens of that file's answers go out.

python -m tools.draft_head.writer FOLDER MODEL
"""

import sys
from pathlib import Path

import torch

from tools.draft_head.store import file_writer


def main(folder: Path, model: Path) -> None:
    torch.set_num_threads(1)
    write = file_writer(folder, model)
    for line in sys.stdin:
        print(write(int(line)), flush=True)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
