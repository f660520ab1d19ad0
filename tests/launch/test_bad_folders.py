"""Damaged model folders, one row each: `serve` names what is wrong on one line before it starts anything."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from deltaserve.core.errors import ConfigError
from deltaserve.launch.compose import Checkpoint
from deltaserve.launch.serve import compose
from deltaserve.settings.config import Settings
from tests.launch.test_bad_settings import BAD_FILES, BAD_FLAGS, BAD_VARIABLES
from tests.patience import PATIENCE_S
from tests.ports import free_port

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
Damage = Callable[[Path], object]


@pytest.fixture(scope="session")
def small_model(tiny_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`llama` with one layer: quick to copy."""
    folder = tmp_path_factory.mktemp("folders") / "small"
    shutil.copytree(tiny_models / "llama", folder)
    _config(num_hidden_layers=1)(folder)
    _tensors(lambda t: [t.pop(name) for name in list(t) if ".layers." in name and ".layers.0." not in name])(folder)
    return folder


def _json(name: str, **changes: object) -> Damage:
    def damage(folder: Path) -> None:
        path = folder / name
        values = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({key: value for key, value in {**values, **changes}.items() if value != "-"}))

    return damage


def _config(**changes: object) -> Damage:
    """Keys of config.json; "-" takes one away."""
    return _json("config.json", **changes)


def _tensors(change: Callable[[dict[str, Any]], object]) -> Damage:
    def damage(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file(tensors, folder / WEIGHTS)

    return damage


def _header(change: Callable[[dict[str, Any]], object]) -> Damage:
    def damage(folder: Path) -> None:
        data = (folder / WEIGHTS).read_bytes()
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        change(header)
        text = json.dumps(header).encode()
        (folder / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])

    return damage


def _write(name: str, content: str | bytes) -> Damage:
    data = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / name).write_bytes(data)


def _remove(name: str) -> Damage:
    return lambda folder: (folder / name).unlink()


def _rename(name: str, new: str) -> Damage:
    return lambda folder: (folder / name).rename(folder / new)


def _index(mapping: object) -> Damage:
    return _write(INDEX, json.dumps({"weight_map": mapping}))


def _shard_missing(folder: Path) -> None:
    """And no whole file beside the index, which would be taken."""
    _index({_HEAD: "m-2.safetensors"})(folder)
    (folder / WEIGHTS).unlink()


def _link_out(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder.parent / "elsewhere.safetensors")
    (folder / WEIGHTS).symlink_to(folder.parent / "elsewhere.safetensors")


def _cut(num_bytes: int) -> Damage:
    return lambda folder: os.truncate(folder / WEIGHTS, (folder / WEIGHTS).stat().st_size - num_bytes)


def _pipe(name: str) -> Damage:
    def damage(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return damage


def _link(name: str, target: str) -> Damage:
    def damage(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)

    return damage


def _optional(name: str) -> dict[str, tuple[Damage, tuple[str, ...]]]:
    """A file that need not be there, but is not what it should be."""
    return {
        f"{name} a link to nothing": (_link(name, "nothing"), (f"{name}: a link to nothing",)),
        f"{name} a link to itself": (_link(name, name), (f"{name}: Too many levels of symbolic links",)),
        f"{name} a device": (_link(name, "/dev/zero"), (f"{name}: a link that leads out of the model folder",)),
        f"{name} a pipe": (_pipe(name), (f"{name}: not a regular file",)),
        f"{name} a folder": (_new_folder(name), (f"{name}: Is a directory",)),
    }


def _new_folder(name: str) -> Damage:
    def damage(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).mkdir()

    return damage


def _template(source: str) -> Damage:
    return _write("chat_template.jinja", source)


_HEAD, _NORM, _Q = "lm_head.weight", "model.norm.weight", "model.layers.0.self_attn.q_proj.weight"
_ONES = np.ones(64, np.float32)

BAD_FOLDERS: Mapping[str, tuple[Damage, tuple[str, ...]]] = {
    # config.json
    "config missing": (_remove("config.json"), ("config.json: not found",)),
    "config a folder": (_new_folder("config.json"), ("config.json: Is a directory",)),
    "config empty": (_write("config.json", ""), ("config.json: not readable as JSON",)),
    "config cut": (_write("config.json", '{"a": '), ("config.json: not readable as JSON",)),
    "config not UTF-8": (_write("config.json", b"\xff\xfe{}"), ("config.json: not readable as JSON",)),
    "config a list": (_write("config.json", "[]"), ("config.json: expected a JSON object",)),
    "config deep": (_write("config.json", "[" * 100_000), ("config.json: not readable as JSON",)),
    "config long integer": (_write("config.json", '{"a": ' + "9" * 5000 + "}"), ("config.json: not readable",)),
    "architecture missing": (_config(architectures="-"), ("config.json: architectures",)),
    "architecture unknown": (_config(architectures=["GPT2LMHeadModel"]), ("'GPT2LMHeadModel'", "Llama, Qwen3")),
    "architecture number": (_config(architectures=[7]), ("config.json: architectures is [7]",)),
    "architecture text": (_config(architectures="LlamaForCausalLM"), ("config.json: architectures",)),
    "layers 513": (_config(num_hidden_layers=513), ("num_hidden_layers is 513", "1 .. 512")),
    "layers 0": (_config(num_hidden_layers=0), ("num_hidden_layers is 0",)),
    "layers text": (_config(num_hidden_layers="3"), ("num_hidden_layers is '3'", "whole number")),
    "layers true": (_config(num_hidden_layers=True), ("num_hidden_layers is True", "whole number")),
    "layers float": (_config(num_hidden_layers=1.0), ("num_hidden_layers is 1.0", "whole number")),
    "layers missing": (_config(num_hidden_layers="-"), ("num_hidden_layers is missing",)),
    "vocabulary absurd": (_config(vocab_size=2**22 + 1), ("vocab_size is 4194305", "4194304")),
    "vocabulary negative": (_config(vocab_size=-1), ("vocab_size is -1",)),
    "hidden absurd": (_config(hidden_size=2**17 + 1), ("hidden_size is 131073", "131072")),
    "heads absurd": (_config(num_attention_heads=10**9), ("num_attention_heads",)),
    "heads uneven": (_config(num_key_value_heads=3), ("num_key_value_heads is 3", "divisor of num_attention_heads 8")),
    "head size odd": (_config(head_dim=15), ("head_dim is 15", "even")),
    "positions 0": (_config(max_position_embeddings=0), ("max_position_embeddings is 0",)),
    "activation": (_config(hidden_act="gelu"), ("hidden_act is 'gelu'", "silu")),
    "type": (_config(dtype="float64"), ("dtype is 'float64'", "bfloat16")),
    "epsilon": (_config(rms_norm_eps=-1), ("rms_norm_eps is -1", "positive")),
    "epsilon not a number": (_config(rms_norm_eps=float("nan")), ("rms_norm_eps is nan", "positive")),
    "epsilon endless": (_config(rms_norm_eps=10**400), ("rms_norm_eps is 1000", "positive")),
    "rope endless": (_config(rope_parameters={"rope_theta": 10**400}), ("rope_theta is 1000", "positive")),
    "end id endless": (_config(eos_token_id=10**400), ("eos_token_id 1000", "is outside")),
    "config a pipe": (_pipe("config.json"), ("config.json: not a regular file",)),
    "config a device": (_link("config.json", "/dev/zero"), ("config.json: a link that leads out",)),
    "quantised": (_config(quantization_config={"quant_method": "awq"}), ("'awq'", "not supported")),
    "rope unknown": (_config(rope_parameters={"rope_type": "su"}), ("config.json", "'su'")),
    "end id outside": (_config(eos_token_id=272), ("eos_token_id 272 is outside",)),
    "end id text": (_config(eos_token_id="2"), ("eos_token_id is '2'", "expected ids of tokens such as 2")),
    # weights against the configuration
    "hidden differs": (_config(hidden_size=32, head_dim=16), (WEIGHTS, "has shape", "expected")),
    "more layers": (_config(num_hidden_layers=2), ("tensors are missing, first layers.1.",)),
    "other vocabulary": (_config(vocab_size=300), (WEIGHTS, "lm_head.weight has shape [272, 64], expected [300, 64]")),
    "other heads": (_config(num_key_value_heads=2), (WEIGHTS, "k_proj.weight has shape [64, 64], expected [32, 64]")),
    "bias expected": (_config(attention_bias=True), ("4 tensors are missing", "bias")),
    "tensor missing": (_tensors(lambda t: t.pop(_NORM)), ("1 tensors are missing, first norm.weight",)),
    "tensor unknown": (_tensors(lambda t: t.update({"model.extra": _ONES})), ("model.extra is not a tensor",)),
    "tensor twice": (_tensors(lambda t: t.update({"norm.weight": _ONES})), ("norm.weight is given twice",)),
    "shape": (_tensors(lambda t: t.update({_HEAD: _ONES})), (_HEAD, "has shape [64], expected [272, 64]")),
    "transposed": (
        _tensors(lambda t: t.update({_Q: np.ones((64, 128), np.float32)})),
        ("q_proj.weight has shape [64, 128], expected [128, 64]",),
    ),
    "scalar": (_tensors(lambda t: t.update({_NORM: np.ones((), np.float32)})), ("has shape [], expected [64]",)),
    "integers": (_tensors(lambda t: t.update({_NORM: np.ones(64, np.int8)})), ("has dtype I8, expected one of F32",)),
    "doubles": (_tensors(lambda t: t.update({_NORM: np.ones(64, np.float64)})), ("has dtype F64",)),
    "no values": (_tensors(lambda t: t.update({_NORM: np.ones(0, np.float32)})), ("shape [0], expected [64]",)),
    "no values in an unknown one": (
        _tensors(lambda t: t.update({"model.extra": np.ones((0, 64), np.float32)})),
        ("model.extra is not a tensor",),
    ),
    "integers by their tag": (_header(lambda h: h[_NORM].update(dtype="I32")), ("has dtype I32, expected one of F32",)),
    "halves by their tag": (_header(lambda h: h[_NORM].update(dtype="BF16")), (WEIGHTS, "not a valid")),
    "a shape by its tag": (_header(lambda h: h[_NORM].update(shape=[32, 2])), ("has shape [32, 2], expected [64]",)),
    "a shape of another size": (_header(lambda h: h[_NORM].update(shape=[65])), (WEIGHTS, "not a valid")),
    # weight files
    "no weights": (_remove(WEIGHTS), ("model.safetensors: not found",)),
    "only .bin": (_rename(WEIGHTS, "pytorch_model.bin"), ("pytorch_model.bin", "only safetensors")),
    "only .gguf": (_rename(WEIGHTS, "model.gguf"), ("model.gguf", "not a GGUF file")),
    "only .pkl": (_rename(WEIGHTS, "model.pkl"), ("model.pkl", "only safetensors")),
    "only .pth": (_rename(WEIGHTS, "consolidated.00.pth"), ("consolidated.00.pth", "only safetensors")),
    "weights a folder": (_new_folder(WEIGHTS), ("model.safetensors: not found",)),
    "weights empty": (_write(WEIGHTS, b""), (WEIGHTS, "header")),
    "weights text": (_write(WEIGHTS, "a text, longer than eight bytes\n"), (WEIGHTS, "header")),
    "weights a pointer": (
        _write(WEIGHTS, "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"),
        (f"{WEIGHTS}: a Git LFS pointer, not the file: `git lfs pull` gets it",),
    ),
    "weights a page": (_write(WEIGHTS, "<!DOCTYPE html>\n<html>"), (f"{WEIGHTS}: an HTML page, not the file",)),
    "header huge": (_write(WEIGHTS, (1 << 40).to_bytes(8, "little")), (WEIGHTS, "header of 1099511627776 bytes")),
    "header cut": (_write(WEIGHTS, (1000).to_bytes(8, "little") + b"{}"), (WEIGHTS, "ends within its header")),
    "header not JSON": (_write(WEIGHTS, (4).to_bytes(8, "little") + b"{{{{"), (WEIGHTS, "not a valid")),
    "one byte short": (_cut(1), (WEIGHTS, "not a valid safetensors file")),
    "one page short": (_cut(4096), (WEIGHTS, "not a valid safetensors file")),
    "offsets past the end": (_header(lambda h: h[_NORM].update(data_offsets=[0, 1 << 60])), (WEIGHTS, "not a valid")),
    "offsets negative": (_header(lambda h: h[_NORM].update(data_offsets=[-4, 252])), (WEIGHTS, "not a valid")),
    "offsets overlap": (_header(lambda h: h.update(copy=h[_NORM])), (WEIGHTS, "not a valid")),
    "offsets gap": (_header(lambda h: h.pop(_NORM)), (WEIGHTS, "not a valid")),
    "type unknown": (_header(lambda h: h[_NORM].update(dtype="F13")), (WEIGHTS, "not a valid")),
    "link out": (_link_out, (WEIGHTS, "leads out of the model folder")),
    # index
    "index empty": (_write(INDEX, "{}"), (INDEX, "weight_map is missing")),
    "index not JSON": (_write(INDEX, "{"), (INDEX, "not readable as JSON")),
    "index upwards": (_index({_HEAD: "../x.safetensors"}), (INDEX, "not a plain .safetensors file name")),
    "index absolute": (_index({_HEAD: "/etc/x.safetensors"}), (INDEX, "not a plain .safetensors file name")),
    "index to a pickle": (_index({_HEAD: "model.bin"}), (INDEX, "not a plain .safetensors file name")),
    "index number": (_index({_HEAD: 1}), (INDEX, "not a plain .safetensors file name")),
    "shard missing": (_shard_missing, ("m-2.safetensors: not found",)),
    "index incomplete": (_index({_HEAD: WEIGHTS}), ("but the index says nothing",)),
    "index of another file": (_index({"model.other": WEIGHTS}), (f"{WEIGHTS}: ", "but the index says nothing")),
    # tokenizer
    "tokenizer missing": (_remove("tokenizer.json"), ("tokenizer.json is missing",)),
    "tokenizer empty": (_write("tokenizer.json", ""), ("tokenizer.json: not a tokenizer",)),
    "tokenizer an object": (_write("tokenizer.json", "{}"), ("tokenizer.json: not a tokenizer",)),
    "tokenizer not UTF-8": (_write("tokenizer.json", b"\xff"), ("tokenizer.json: not a tokenizer",)),
    "tokenizer deep": (_write("tokenizer.json", "[" * 100_000), ("tokenizer.json: not a tokenizer",)),
    "tokenizer model unknown": (_json("tokenizer.json", model={"type": "X"}), ("tokenizer.json: not a tokenizer",)),
    "tokenizer config a list": (_write("tokenizer_config.json", "[]"), ("tokenizer_config.json", "object")),
    "tokenizer config cut": (_write("tokenizer_config.json", "{"), ("tokenizer_config.json", "not readable as JSON")),
    "tokenizer config deep": (_write("tokenizer_config.json", "[" * 100_000), ("tokenizer_config.json", "JSON")),
    "end token a number": (_json("tokenizer_config.json", eos_token=5), ("eos_token is 5", "a string")),
    "end token half a pair": (_json("tokenizer_config.json", eos_token="\ud800"), ("eos_token holds half a",)),
    "first token half a pair": (_json("tokenizer_config.json", bos_token="\ud800"), ("bos_token holds half a",)),
    "template half a pair": (_json("tokenizer_config.json", chat_template="\ud800"), ("chat_template holds half a",)),
    # files that may be left out
    **_optional(INDEX),
    **_optional("generation_config.json"),
    **_optional("tokenizer_config.json"),
    **_optional("chat_template.jinja"),
    **_optional("chat_template.json"),
    # generation_config.json
    "generation a list": (_write("generation_config.json", "[]"), ("generation_config.json", "object")),
    "generation cut": (_write("generation_config.json", "{"), ("generation_config.json", "not readable as JSON")),
    "generation end id": (_json("generation_config.json", eos_token_id=[1, 999]), ("eos_token_id 999",)),
    "generation end nulls": (_json("generation_config.json", eos_token_id=[1, None]), ("eos_token_id is [1, None]",)),
    "generation end true": (_json("generation_config.json", eos_token_id=True), ("eos_token_id is True",)),
    "generation end part": (_json("generation_config.json", eos_token_id=1.0), ("eos_token_id is 1.0",)),
    "generation end text": (_json("generation_config.json", eos_token_id="x"), ("eos_token_id is 'x'",)),
    # chat template
    "template broken": (_template("{{ messages"), ("chat template does not compile",)),
    "template long": (_template("x" * 65_537), ("65537 bytes", "65536")),
    "template not UTF-8": (_write("chat_template.jinja", b"\xff"), ("chat_template.jinja",)),
    "template fails": (_template("{{ messages[7].content.x }}"), ("chat template fails",)),
    "template refuses": (
        _template("{{ raise_exception('no') }}"),
        (
            "chat_template.jinja: ",
            "refuses one plain message: no",
        ),
    ),
    "template escapes": (_template("{{ ''.__class__.__mro__[1].__subclasses__() }}"), ("chat template fails",)),
    "template includes": (_template("{% include '/etc/passwd' %}"), ("chat template fails",)),
    "template power": (_template("{% for i in range(10**9) %}{% endfor %}"), ("chat template fails",)),
    "template endless call": (_template("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"), ("chat template fails",)),
    "template renders half a pair": (
        _template('{{ "\\ud800" }}{{ messages[0].content }}'),
        ("chat_template.jinja: ", "makes half a surrogate pair"),
    ),
    "template deep": (_template("{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}"), ("not compile (RecursionError)",)),
    "template deep loops": (
        _template("{% for i in [1] %}" * 1500 + "{% endfor %}" * 1500),
        ("chat template does not compile",),
    ),
    "template long chain": (_template("{{ a" + ".b" * 30_000 + " }}"), ("chat template does not compile",)),
    "template long number": (_template("{{ " + "9" * 60_000 + " }}"), ("chat template does not compile",)),
    "template of another type": (_json("tokenizer_config.json", chat_template=5), ("chat_template is neither",)),
    "template list": (_json("tokenizer_config.json", chat_template=[{"name": []}]), ("chat_template is neither",)),
    "template file": (_json("chat_template.json", chat_template=5), ("chat_template.json: chat_template is neither",)),
}


@pytest.mark.parametrize(("damage", "parts"), BAD_FOLDERS.values(), ids=BAD_FOLDERS.keys())
def test_a_damaged_folder_is_named_before_anything_starts(
    small_model: Path, tmp_path: Path, damage: Damage, parts: tuple[str, ...]
) -> None:
    folder = Path(shutil.copytree(small_model, tmp_path / "model"))
    damage(folder)
    with pytest.raises(ConfigError) as caught:
        _compose(folder, tmp_path)
    message = " ".join(str(caught.value).split())
    assert len(message) < 400
    said = re.sub(r"\(.*\)|'[^']*'", "", message)
    assert said.count(": ") <= 2, "place: what is wrong; reasons of libraries are in parentheses"
    for part in parts:
        assert part in message


def test_the_folder_undamaged_is_served(small_model: Path, tmp_path: Path) -> None:
    (tmp_path / "specs").mkdir()
    assert len(_compose(small_model, tmp_path / "specs").children) == 3


@pytest.mark.parametrize("folder", ["a" * 300, "a" * 200 + "/" + "b" * 256, "a\0b", "/dev/null", "/proc/self/mem/x"])
def test_a_name_of_no_folder_is_refused(folder: str) -> None:
    with pytest.raises(ConfigError, match="not a folder"):
        Checkpoint.open(folder)


def test_code_in_a_folder_is_not_run(small_model: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(small_model, tmp_path / "model"))
    (folder / "modeling_x.py").write_text("raise SystemExit('this was run')")
    _config(auto_map={"AutoModelForCausalLM": "modeling_x.X"})(folder)
    _compose(folder, tmp_path)


def _compose(folder: Path, private: Path) -> Any:
    settings = Settings.model_validate({"model": {"model_path": str(folder)}, "network": {"port": free_port()}})
    return compose(settings, private)


COMMANDS: Mapping[str, tuple[list[str], Damage, str]] = {
    "flag": (["--page-sise", "16"], lambda folder: None, "--page-sise"),
    "value": (["--page-size", "48"], lambda folder: None, "--page-size 48"),
    "override": (
        ["--json-model-override-args", '{"rms_norm_eps": 1' + "0" * 400 + "}"],
        lambda folder: None,
        "rms_norm_eps is 1000",
    ),
    "door": (["--host", "0.0.0.0"], lambda folder: None, "--host 0.0.0.0"),
    "weights": ([], _tensors(lambda t: t.pop(_NORM)), "norm.weight"),
    "tokenizer": ([], _write("tokenizer.json", "{}"), "tokenizer.json"),
    "template": ([], _template("{{ messages"), "chat template"),
    "generation": ([], _json("generation_config.json", eos_token_id=999), "eos_token_id 999"),
}


@pytest.mark.parametrize(("argv", "damage", "named"), COMMANDS.values(), ids=COMMANDS.keys())
def test_the_command_says_one_line_and_exits_with_2(
    small_model: Path, tmp_path: Path, argv: list[str], damage: Damage, named: str
) -> None:
    folder = Path(shutil.copytree(small_model, tmp_path / "model"))
    damage(folder)
    command = [sys.executable, "-m", "deltaserve.cli.main", "serve", str(folder), "--port", str(free_port()), *argv]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("deltaserve: ") and named in line


def test_the_corpus_is_large() -> None:
    assert len(BAD_FOLDERS) >= 80
    assert len(BAD_FOLDERS) + len(BAD_FLAGS) + len(BAD_VARIABLES) + len(BAD_FILES) >= 200
