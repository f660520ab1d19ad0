"""A GGUF file as a Hugging Face folder, for servers that read no GGUF: the same values, multiplied out."""

from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast

from deltaserve.commands.verify.gguf_reference import load
from deltaserve.model.formats.gguf_model import GgufModel
from deltaserve.server.text.gguf_text import read_text


def write_folder(gguf: Path, folder: Path, dtype: torch.dtype) -> None:
    """`folder` is there only once it is whole."""
    partial = folder.with_name(folder.name + ".partial")
    model = GgufModel.open(gguf)
    load(model, dtype).save_pretrained(partial)
    text = read_text(model)
    template = None if text.template is None else text.template.text
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=text.tokenizer, chat_template=template, **text.special_names)
    tokenizer.save_pretrained(partial)
    partial.rename(folder)
