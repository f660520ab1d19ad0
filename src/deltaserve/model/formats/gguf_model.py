"""A GGUF file as the Hugging Face folder it was made from: the same config fields, tensor names and order of rows."""

import os
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from deltaserve.core.errors import ConfigError
from deltaserve.model.family import MAX_HEADS, GgufForm
from deltaserve.model.fields import Fields
from deltaserve.model.files import INDEX_NAME, SINGLE_NAME
from deltaserve.model.folder_files import in_folder
from deltaserve.model.formats.gguf_config import config_values, generation_values, gguf_family
from deltaserve.model.formats.gguf_header import GgufHeader, GgufTensor, read_header
from deltaserve.model.source import TensorHeader
from deltaserve.model.weight_sample import Extent, weight_sample

ROPE_FACTORS = "rope_freqs.weight"
"""Tensor of divisors of the rotary embedding's frequencies: part of the configuration, not of the weights."""

_LAYER_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TABLES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAME = re.compile(r"blk\.(0|[1-9][0-9]{0,4})\.(\w+)\.(weight|bias)")


def find_gguf(path: Path) -> Path | None:
    """The GGUF file that `path` names or that is a folder's only weights; None for a folder of safetensors.

    Raises ConfigError for a folder with several.
    """
    if not path.is_dir():
        return path
    if any(os.path.lexists(path / name) for name in (INDEX_NAME, SINGLE_NAME)):
        return None
    found = sorted(p for p in path.glob("*.gguf"))
    if len(found) > 1:
        names = ", ".join(p.name for p in found[:3])
        raise ConfigError(f"{len(found)} GGUF files in the model folder ({names}): name one of them")
    return in_folder(found[0]) if found else None


def open_path(path: Path) -> "GgufModel | None":
    """None for a folder that is not of this format."""
    found = find_gguf(path)
    return None if found is None else GgufModel.open(found)


@dataclass(frozen=True, slots=True)
class GgufModel:
    """A GGUF file as a TensorSource."""

    format: ClassVar[str] = "gguf"

    path: Path
    header: GgufHeader

    @classmethod
    def open(cls, path: Path) -> "GgufModel":
        return cls(path, read_header(path))

    def identity(self) -> Iterator[tuple[str, bytes]]:
        """Everything before the first tensor, and a little of every tensor."""
        yield "gguf", self.header.raw
        yield "values", weight_sample(self.path, [Extent(each.start, each.num_bytes) for each in self.header.tensors])

    def text_identity(self) -> Iterator[tuple[str, bytes]]:
        for key, value in sorted(self.header.metadata.items()):
            if key.startswith("tokenizer."):
                yield key, repr(value).encode()

    @property
    def num_bytes(self) -> int:
        return self.path.stat().st_size

    @property
    def index(self) -> Mapping[str, str]:
        return {}

    @property
    def kinds(self) -> Mapping[str, str]:
        return {name: tensor.quantisation.name for name, tensor in self.named() if tensor.quantisation.block_len > 1}

    def config(self) -> Fields:
        factors = next((tensor for tensor in self.header.tensors if tensor.name == ROPE_FACTORS), None)
        values = config_values(self.header, None if factors is None else self._floats(factors))
        return Fields(values, self.header.file)

    def generation(self) -> Fields:
        return Fields(generation_values(self.header.metadata), self.header.file)

    def headers(self) -> Iterator[TensorHeader]:
        for name, tensor in self.named():
            dtype = tensor.quantisation.name if tensor.quantisation.block_len == 1 else "F32"
            yield TensorHeader(self.header.file, name, dtype, tensor.shape)

    def named(self) -> Iterator[tuple[str, GgufTensor]]:
        """(name in a Hugging Face folder, tensor). Raises ConfigError for a tensor that no supported model has."""
        parts = {**_LAYER_PARTS, **self._form.parts}
        for tensor in self.header.tensors:
            if tensor.name != ROPE_FACTORS:
                yield self._folder_name(tensor.name, parts), tensor

    def interleaved_heads(self) -> Mapping[str, int]:
        """Tensor of this file |-> heads in it, where the two channels that RoPE turns together lie side by side.

        Some architectures' files have queries and keys so; a Hugging Face folder has them D/2 apart.
        """
        if not self._form.pairs_rows:
            return {}
        fields = self.config()
        num_heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
        heads = {part: fields.integer(name, 1, MAX_HEADS) for part, name in num_heads.items()}
        matches = (_LAYER_NAME.fullmatch(tensor.name) for tensor in self.header.tensors)
        return {found[0]: heads[found[2]] for found in matches if found and found[2] in heads}

    @property
    def _form(self) -> GgufForm:
        return gguf_family(Fields(dict(self.header.metadata), self.header.file))[1]

    def _folder_name(self, name: str, parts: Mapping[str, str]) -> str:
        if name in _TABLES:
            return _TABLES[name]
        found = _LAYER_NAME.fullmatch(name)
        if found is None or found[2] not in parts:
            raise ConfigError(f"{self.header.file}: tensor {name[:80]!r} is of no supported model")
        return f"model.layers.{found[1]}.{parts[found[2]]}.{found[3]}"

    def _floats(self, tensor: GgufTensor) -> tuple[float, ...]:
        """Values of a small tensor."""
        if tensor.quantisation.name != "F32" or len(tensor.shape) != 1 or tensor.num_bytes > 1 << 16:
            raise ConfigError(f"{self.header.file}: tensor {tensor.name!r} is not a short list of F32")
        with self.path.open("rb") as file:
            file.seek(tensor.start)
            return struct.unpack(f"<{tensor.shape[0]}f", file.read(tensor.num_bytes))
