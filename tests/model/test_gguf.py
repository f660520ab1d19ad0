"""GGUF files as checkpoints: what is read of the header, and the one line that a bad file gets."""

import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest

from deltaserve.core.errors import ConfigError
from deltaserve.core.layout.dtype import DType
from deltaserve.launch.compose import Checkpoint
from deltaserve.model.checkpoint_config import load_spec
from deltaserve.model.fingerprint import model_fingerprint
from deltaserve.model.formats.gguf_header import QUANTISATIONS, REFUSED, read_header
from deltaserve.model.layers.layer_spec import RopeKind
from tests.fixtures.tiny_gguf import GEMMA3, Kind, Write, write_gguf
from tests.fixtures.tiny_models import VARIANTS, Variant

_ONE_LAYER = Variant(VARIANTS["llama"].build, {"num_hidden_layers": 1})


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of one layer."""
    return write_gguf(_ONE_LAYER, tmp_path_factory.mktemp("gguf"), Kind.Q8_0)[0]


@pytest.fixture
def file(good: Path, tmp_path: Path) -> Path:
    """To damage."""
    return Path(shutil.copy(good, tmp_path / "m.gguf"))


def refused(path: Path, *texts: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Checkpoint.open(str(path))
    message = str(caught.value)
    for text in texts:
        assert text in message
    assert "\n" not in message
    assert len(message) < 600


# ---------------------------------------------------------------- what is read


def test_the_tables_are_those_of_the_package() -> None:
    for number, kind in QUANTISATIONS.items():
        known = Kind(number)
        assert (kind.name, kind.block_len, kind.block_bytes) == (known.name, *gguf.GGML_QUANT_SIZES[known])
    assert {number: Kind(number).name for number in REFUSED} == REFUSED
    assert {kind.value for kind in Kind} == QUANTISATIONS.keys() | REFUSED.keys()


def test_the_header_is_what_the_package_reads(good: Path) -> None:
    header, reader = read_header(good), gguf.GGUFReader(good)
    known = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert header.metadata == known
    ours = [(t.name, t.shape, t.quantisation.name, t.start, t.num_bytes) for t in header.tensors]
    theirs = [
        (t.name, tuple(reversed(t.shape.tolist())), t.tensor_type.name, t.data_offset, t.n_bytes)
        for t in reader.tensors
    ]
    assert ours == theirs


@pytest.mark.parametrize("name", ["llama", "llama_linear_rope", "llama_bias_mha", "qwen3", "qwen3_yarn_rope"])
def test_the_spec_is_that_of_the_folder(tmp_path: Path, name: str) -> None:
    file, folder = write_gguf(VARIANTS[name], tmp_path, Kind.F32)
    ours, theirs = load_spec(file), load_spec(folder)
    assert ours.norm_eps == pytest.approx(theirs.norm_eps)
    assert {**_fields(ours), "norm_eps": 0} == {**_fields(theirs), "norm_eps": 0}


def test_the_spec_of_gemma3_is_that_of_the_folder(tmp_path: Path) -> None:
    """But that the file's norms have 1 added."""
    file, folder = write_gguf(GEMMA3, tmp_path, Kind.F32)
    ours, theirs = load_spec(file), load_spec(folder)
    assert (ours.zero_centred_norms, theirs.zero_centred_norms) == (False, True)
    assert ours.norm_eps == pytest.approx(theirs.norm_eps)
    changed = {"norm_eps": 0, "zero_centred_norms": True}
    assert _fields(ours) | changed == _fields(theirs) | changed


def _fields(spec: Any) -> dict[str, Any]:
    return {name: getattr(spec, name) for name in spec.__slots__}


@pytest.mark.parametrize(
    ("kind", "dtype"), [(Kind.F16, DType.FLOAT16), (Kind.BF16, DType.BFLOAT16), (Kind.Q4_0, DType.FLOAT32)]
)
def test_the_type_is_that_of_the_matrices(tmp_path: Path, kind: Kind, dtype: DType) -> None:
    assert load_spec(write_gguf(_ONE_LAYER, tmp_path, kind)[0]).dtype is dtype


def test_rope_factors_are_read(tmp_path: Path) -> None:
    rope = load_spec(write_gguf(VARIANTS["llama_llama3_rope"], tmp_path, Kind.F32)[0]).attention.rope
    assert rope.kind is RopeKind.FACTORS
    assert min(rope.factors) == pytest.approx(1.0)
    assert max(rope.factors) == pytest.approx(8.0)


def test_overrides_replace_fields(good: Path) -> None:
    assert load_spec(good, '{"max_position_embeddings": 77}').max_position == 77


@pytest.mark.filterwarnings("ignore:Duplicated key")
def test_a_number_per_layer_is_that_number(tmp_path: Path) -> None:
    def per_layer(*counts: int) -> Any:
        return lambda writer: writer.add_head_count_kv(list(counts))

    file, folder = write_gguf(_ONE_LAYER, tmp_path / "same", Kind.F32, per_layer(4))
    assert load_spec(file).num_kv_heads == load_spec(folder).num_kv_heads == 4
    file, _ = write_gguf(_ONE_LAYER, tmp_path / "other", Kind.F32, per_layer(4, 2))
    with pytest.raises(ConfigError, match=r"llama.attention.head_count_kv is \[4, 2\], expected a whole number"):
        load_spec(file)


def test_tokens_that_end_an_answer(tmp_path: Path) -> None:
    """Those named by key, and control tokens whose name says so."""
    file, _ = write_gguf(_ONE_LAYER, tmp_path, Kind.F32, lambda writer: writer.add_eot_token_id(263))
    assert load_spec(file).eos_token_ids == (258, 263)


def test_a_folder_with_one_file_is_that_file(file: Path) -> None:
    (file.parent / "config.json").write_text("{}")
    of_folder, of_file = Checkpoint.open(str(file.parent)), Checkpoint.open(str(file))
    assert of_folder.spec == of_file.spec
    assert of_folder.fingerprint == of_file.fingerprint
    assert of_file.name == "m"


def test_safetensors_win_over_gguf(tiny_models: Path, file: Path) -> None:
    folder = shutil.copytree(tiny_models / "qwen3", file.parent / "qwen3")
    shutil.copy(file, folder)
    assert Checkpoint.open(str(folder)).spec.family == "qwen3"


def test_several_files_in_a_folder_are_refused(file: Path) -> None:
    shutil.copy(file, file.parent / "n.gguf")
    refused(file.parent, "2 GGUF files in the model folder (m.gguf, n.gguf): name one of them")


def test_a_file_without_suffix_is_read(file: Path) -> None:
    assert Checkpoint.open(str(file.rename(file.parent / "sha256-0123"))).name == "sha256-0123"


def test_other_metadata_is_another_model(good: Path, tmp_path: Path) -> None:
    other, _ = write_gguf(_ONE_LAYER, tmp_path, Kind.Q8_0, lambda writer: writer.add_name("other"))
    assert model_fingerprint(other) != model_fingerprint(good)


# ---------------------------------------------------------------- damaged files

STAND_INS = [
    (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n",
        "a Git LFS pointer, not the file: `g",
    ),
    (b"<!DOCTYPE html>\n<html><body>Not found</body></html>", "an HTML page, not the file: download it again"),
    (b"\n<HTML>Sign in</HTML>", "an HTML page, not the file"),
]


@pytest.mark.parametrize("keep", [0, 3, 4, 8, 20, 23, 24, 31, 60, 400, 3000, -1, -5000])
def test_a_cut_file(file: Path, keep: int) -> None:
    file.write_bytes(file.read_bytes()[:keep])
    refused(file, "m.gguf: ", "not a GGUF file" if 0 <= keep < 4 else "cut off, or damaged")


def _put(at: int, letters: str, *values: int) -> Callable[[bytearray], None]:
    def damage(data: bytearray) -> None:
        struct.pack_into("<" + letters, data, at, *values)

    return damage


_KEY = struct.pack("<Q", 20) + b"general.architecture"


def _after(found: bytes, letters: str, *values: int) -> Callable[[bytearray], None]:
    def damage(data: bytearray) -> None:
        _put(data.index(found) + len(found), letters, *values)(data)

    return damage


_TOKENS = struct.pack("<Q", 21) + b"tokenizer.ggml.tokens"
_TENSOR = struct.pack("<Q", 17) + b"token_embd.weight"


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (_put(0, "I", 0x46554746), "not a GGUF file"),
        (_put(4, "I", 1), "version 1 of the format is not read"),
        (_put(4, "I", 0x03000000), "a big-endian file of the format is not read"),
        (_put(8, "Q", 1 << 60), "1152921504606846976 tensors, at most 65536 are read"),
        (_put(16, "Q", 1 << 60), "1152921504606846976 metadata keys, at most"),
        (_put(24, "Q", 1 << 62), "a metadata key has 4611686018427387904 bytes"),
        (_after(_KEY, "I", 99), "metadata 'general.architecture' has type 99"),
        (_after(_KEY, "IQ", 8, 1 << 63), "general.architecture has 9223372036854775808 bytes"),
        (_after(_KEY, "IQI", 8, 4, 0xFFFFFFFF), "general.architecture is no UTF-8"),
        (_after(_TOKENS, "IIQ", 9, 8, 1 << 62), "ends within tokenizer.ggml.tokens"),
        (_after(_TOKENS, "IIQ", 9, 0, 1 << 62), "ends within tokenizer.ggml.tokens"),
        (_after(_TOKENS, "IIQ", 9, 9, 1), "metadata 'tokenizer.ggml.tokens' has type 9"),
        (_after(_TENSOR, "I", 0), "tensor 'token_embd.weight' has 0 dimensions"),
        (_after(_TENSOR, "I", 1 << 31), "tensor 'token_embd.weight' has 2147483648 dimensions"),
        (_after(_TENSOR, "IQ", 2, 1 << 62), "tensor 'token_embd.weight' of shape [272, 4611686018427387904] ends at"),
        (_after(_TENSOR, "IQ", 2, 33), "Q8_0 stores rows in blocks of 32"),
        (_after(_TENSOR, "IQ", 2, 0), "tensor 'token_embd.weight' has shape [272, 0]"),
        (_after(_TENSOR, "IQQI", 2, 64, 272, 16), "type IQ2_XXS, which is not read; read are F32, F16, Q4_0"),
        (_after(_TENSOR, "IQQI", 2, 64, 272, 4), "type number 4, which is not read"),
        (_after(_TENSOR, "IQQIQ", 2, 64, 272, 8, 1 << 63), "cut off, or damaged"),
    ],
)
def test_a_damaged_header(file: Path, damage: Callable[[bytearray], None], text: str) -> None:
    data = bytearray(file.read_bytes())
    damage(data)
    file.write_bytes(data)
    refused(file, "m.gguf: ", text)


@pytest.mark.parametrize(
    "offset",
    [
        pytest.param(lambda offsets: 0, id="within the first tensor's bytes: overlaps"),
        pytest.param(lambda offsets: offsets[3] + 3, id="unaligned"),
        pytest.param(lambda offsets: offsets[3] + 1, id="unaligned by one"),
        pytest.param(lambda offsets: offsets[3] - 32, id="the end of the one before"),
        pytest.param(lambda offsets: offsets[4], id="the next tensor's"),
        pytest.param(lambda offsets: offsets[3] + 32, id="a gap, and the beginning of the next"),
    ],
)
def test_an_offset_that_would_bring_other_values(file: Path, offset: Callable[[list[int]], int]) -> None:
    """Each of these lies within the file."""
    tensors = read_header(file).tensors
    offsets = [tensor.start - tensors[0].start for tensor in tensors]
    data = bytearray(file.read_bytes())
    name = tensors[3].name.encode()
    found = data.index(struct.pack("<Q", len(name)) + name) + 8 + len(name)
    (num_dimensions,) = struct.unpack_from("<I", data, found)
    _put(found + 4 + 8 * num_dimensions + 4, "Q", offset(offsets))(data)
    file.write_bytes(data)
    refused(file, f"m.gguf: tensor '{tensors[3].name}' of shape", f"but {offsets[3]} follows in steps of 32: damaged")


def test_two_tensors_whose_offsets_changed_places(file: Path) -> None:
    """Neither overlaps; both are of one size, and each would have the values of the other."""
    data = file.read_bytes()
    (first, second) = (struct.pack("<Q", 19) + f"blk.0.{name}.weight".encode() for name in ("attn_q", "attn_k"))
    assert data.count(first) == data.count(second) == 1
    at = [data.index(each) + len(each) + 4 + 16 + 4 for each in (first, second)]
    offsets = [struct.unpack_from("<Q", data, each)[0] for each in at]
    changed = bytearray(data)
    for place, value in zip(at, reversed(offsets), strict=True):
        _put(place, "Q", value)(changed)
    file.write_bytes(changed)
    refused(file, "has offset", "follows in steps of 32: damaged")


@pytest.mark.parametrize(("head", "text"), STAND_INS)
def test_a_file_that_was_never_downloaded(file: Path, head: bytes, text: str) -> None:
    file.write_bytes(head)
    refused(file, f"m.gguf: {text}")


def test_a_tensor_given_twice(file: Path) -> None:
    file.write_bytes(file.read_bytes().replace(b"blk.0.attn_k.weight", b"blk.0.attn_q.weight"))
    refused(file, "tensor 'blk.0.attn_q.weight' is given twice")


def test_a_key_given_twice(file: Path) -> None:
    same_length = b"tokenizer.ggml.bos_token_id", b"tokenizer.ggml.eos_token_id"
    file.write_bytes(file.read_bytes().replace(*same_length))
    refused(file, "metadata key 'tokenizer.ggml.eos_token_id' is given twice")


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"not a folder, nor a GGUF file"):
        Checkpoint.open(str(tmp_path / "m.gguf"))


# ---------------------------------------------------------------- models that are not served


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda w: w.add_uint32("llama.expert_count", 8), "llama.expert_count is 8, expected 0"),
        (lambda w: w.add_sliding_window(4096), "llama.attention.sliding_window is 4096"),
        (lambda w: w.add_causal_attention(False), "llama.attention.causal is False"),
        (lambda w: w.add_logit_scale(2.0), "llama.logit_scale is 2.0: what it asks for is not supported"),
        (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE), "rope.scaling.type is 'longrope'"),
        (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LINEAR), "llama.rope.scale_linear is missing"),
        (lambda w: w.add_uint16("split.count", 3), "split.count is 3, expected 1"),
        (lambda w: w.add_type("adapter"), "general.type is 'adapter', expected model"),
        (lambda w: w.add_eot_token_id(272), "tokenizer.ggml.eot_token_id is 272, expected 0 .. 271"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(tmp_path: Path, change: Write, text: str) -> None:
    refused(write_gguf(_ONE_LAYER, tmp_path, Kind.F32, change)[0], text)


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        (
            b"\x05\0\0\0\0\0\0\0llama",
            b"\x05\0\0\0\0\0\0\0gemma",
            "general.architecture is 'gemma', expected one of llama, qwen3",
        ),
        (b"llama.block_count", b"llama.block_coumt", "llama.block_coumt is 1: what it asks for"),
        (b"blk.0.ffn_up.weight", b"blk.0.ffn_gp.weight", "tensor 'blk.0.ffn_gp.weight' is of no supported model"),
        (b"blk.0.ffn_up.weight", b"blk.1.ffn_up.weight", "model.layers.1.mlp.up_proj.weight is not a tensor of this"),
        (b"token_embd.weight", b"token_embd.weighs", "tensor 'token_embd.weight' is missing or no matrix"),
    ],
)
def test_other_names(file: Path, old: bytes, new: bytes, text: str) -> None:
    data = file.read_bytes()
    assert old in data
    file.write_bytes(data.replace(old, new))
    refused(file, text)
