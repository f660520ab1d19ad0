"""Model folders as they are published, layout x family: ids and the greedy token are those of transformers."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from deltaserve.core.errors import ConfigError
from deltaserve.model.checkpoint_config import load_spec
from deltaserve.server.text.text_codec import SamplingDefaults, TextCodec
from tests.compute.executor.world import Driver, drawn, extend
from tests.fixtures.families import FAMILIES
from tests.fixtures.tiny_models import VARIANTS, write_shards
from tests.fixtures.tiny_tokenizer import CHAT_TEMPLATE, SPECIALS

WEIGHTS = "model.safetensors"
MULTIMODAL = ("qwen3_5", "qwen3_5_moe")
TEXT = "The sky is<|im_end|>\nblue <tool_call>"
CHAT = [
    {"role": "user", "content": "Go on."},
    {"role": "assistant", "content": "Yes"},
    {"role": "user", "content": "?"},
]
Layout = Callable[[Path], object]


def edit(name: str, **fields: object) -> Layout:
    """`...` takes a field away."""

    def change(folder: Path) -> None:
        path = folder / name
        values = {**(json.loads(path.read_text()) if path.exists() else {}), **fields}
        path.write_text(json.dumps({key: value for key, value in values.items() if value is not ...}))

    return change


def edit_text(**fields: object) -> Layout:
    """A layout with changed fields of config.json, where the language model's fields are."""

    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        if "text_config" in config:
            fields_there = {**config["text_config"], **fields}
            config["text_config"] = {key: value for key, value in fields_there.items() if value is not ...}
        else:
            config = {key: value for key, value in {**config, **fields}.items() if value is not ...}
        (folder / "config.json").write_text(json.dumps(config))

    return change


def both(*layouts: Layout) -> Layout:
    def change(folder: Path) -> None:
        for layout in layouts:
            layout(folder)

    return change


def tensors(change: Callable[[dict[str, Tensor]], object]) -> Layout:
    def apply(folder: Path) -> None:
        values = load_file(folder / WEIGHTS)
        change(values)
        save_file(values, folder / WEIGHTS, metadata={"format": "pt"})

    return apply


def sharded_with_others(folder: Path) -> None:
    """As Meta's and Mistral's: the maker's own files beside those that the index names."""
    write_shards(folder, load_file(folder / WEIGHTS), 3)
    (folder / WEIGHTS).unlink()
    save_file({"tok_embeddings.weight": torch.zeros(2, 2)}, folder / "consolidated.safetensors")
    (folder / "original").mkdir()
    (folder / "original" / "consolidated.00.pth").write_bytes(b"not read")
    (folder / "original" / "params.json").write_text("{")
    for name in ("README.md", ".gitattributes", "LICENSE", "USE_POLICY.md"):
        (folder / name).write_text("x")
    (folder / "preprocessor_config.json").write_text("{}")


def hub_cache(folder: Path) -> None:
    """In place: the folder becomes a link-only snapshot beside blobs."""
    blobs = folder.parent / "blobs"
    blobs.mkdir()
    for index, path in enumerate(sorted(folder.iterdir())):
        blob = blobs / f"{index:040x}"
        path.rename(blob)
        path.symlink_to(blob)
    snapshots = folder.parent / "snapshots"
    snapshots.mkdir()
    folder.rename(snapshots / "abc")
    folder.symlink_to(snapshots / "abc")


def older_rope(folder: Path) -> None:
    """As transformers before 5 wrote it: theta beside the scaling, the type of weights as `torch_dtype`."""
    config = json.loads((folder / "config.json").read_text())
    holder = config.get("text_config", config)
    rope = holder.pop("rope_parameters")
    if "full_attention" in rope:
        holder["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    for name in ("rope_theta", "partial_rotary_factor"):
        if name in rope:
            holder[name] = rope.pop(name)
    holder["rope_scaling"] = None if rope["rope_type"] == "default" and len(rope) == 1 else rope
    config["torch_dtype"] = config.pop("dtype", None) or holder.pop("dtype", "float32")
    (folder / "config.json").write_text(json.dumps(config))


def rotary_buffers(values: dict[str, Tensor]) -> None:
    values |= {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.ones(8) for layer in range(2)}


def head_though_tied(folder: Path) -> None:
    """A file with a copy of the embedding, of a model that ties them."""
    values = load_file(folder / WEIGHTS)
    table = next(value for name, value in values.items() if name.endswith("embed_tokens.weight"))
    if "lm_head.weight" not in values:
        save_file(values | {"lm_head.weight": table.clone()}, folder / WEIGHTS, metadata={"format": "pt"})


def without_prefix(values: dict[str, Tensor]) -> None:
    """As a base model is saved."""
    for name in [name for name in values if name.startswith("model.")]:
        values[name.removeprefix("model.")] = values.pop(name)


def added(*tokens: dict[str, Any]) -> Layout:
    """Further added tokens of tokenizer.json."""

    def change(folder: Path) -> None:
        path = folder / "tokenizer.json"
        values = json.loads(path.read_text())
        values["added_tokens"] += [token_entry(**token) for token in tokens]
        path.write_text(json.dumps(values))

    return change


def token_entry(content: str, **fields: Any) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"content": content, **flags, **fields}


def not_special(*names: str) -> Layout:
    """In tokenizer.json."""

    def change(folder: Path) -> None:
        path = folder / "tokenizer.json"
        values = json.loads(path.read_text())
        for token in values["added_tokens"]:
            token["special"] = token["special"] and token["content"] not in names
        path.write_text(json.dumps(values))

    return change


def template_in(name: str, value: object) -> Layout:
    def change(folder: Path) -> None:
        (folder / "chat_template.jinja").unlink()
        edit(name, chat_template=value)(folder)

    return change


def further_templates(folder: Path) -> None:
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("never {{ tools[0] }}")


def remove(*names: str) -> Layout:
    def change(folder: Path) -> None:
        for name in names:
            (folder / name).unlink(missing_ok=True)

    return change


NAMED = [{"name": "tool_use", "template": "never {{ tools[0] }}"}, {"name": "default", "template": CHAT_TEMPLATE}]
NO_NAMES = dict.fromkeys(("bos_token", "eos_token", "pad_token", "added_tokens_decoder"), ...)
DECODER = {str(256 + index): token_entry(name) for index, name in enumerate(SPECIALS)}
LAYOUTS: dict[str, Layout] = {
    "as saved": lambda folder: None,
    "shards and the maker's own files": sharded_with_others,
    "hub cache": hub_cache,
    "older rope": older_rope,
    "rotary buffers": tensors(rotary_buffers),
    "lm_head though tied": head_though_tied,
    "auto_map and the like": edit(
        "config.json", auto_map={"AutoModel": "modeling.X"}, _name_or_path="x/y", pretraining_tp=1, use_cache=True
    ),
    "names as objects": edit(
        "tokenizer_config.json",
        bos_token=token_entry("<|bos|>", __type="AddedToken"),
        eos_token=token_entry("<|im_end|>", __type="AddedToken"),
        unk_token=None,
    ),
    "added_tokens_decoder": edit("tokenizer_config.json", added_tokens_decoder=DECODER),
    "a token of added_tokens_decoder alone": edit(
        "tokenizer_config.json", added_tokens_decoder={**DECODER, "264": token_entry("blue")}
    ),
    "special tokens that tokenizer.json does not call so": not_special("<|bos|>", "<|im_end|>"),
    "additional_special_tokens": both(
        not_special("<tool_call>"), edit("tokenizer_config.json", additional_special_tokens=["<tool_call>"])
    ),
    "extra_special_tokens": both(
        not_special("<tool_call>"), edit("tokenizer_config.json", extra_special_tokens=["<tool_call>"])
    ),
    "listed tokens that tokenizer.json lacks": edit("tokenizer_config.json", additional_special_tokens=["blue", "sky"]),
    "special in added_tokens_decoder alone": both(
        not_special("<tool_call>"), edit("tokenizer_config.json", added_tokens_decoder=DECODER)
    ),
    "an end that tokenizer.json lacks": edit("tokenizer_config.json", eos_token="blue"),
    "special_tokens_map of strings": both(
        edit("tokenizer_config.json", **NO_NAMES),
        edit("special_tokens_map.json", bos_token="<|bos|>", eos_token="<|im_end|>"),
    ),
    "special_tokens_map of objects": both(
        edit("tokenizer_config.json", **NO_NAMES),
        edit("special_tokens_map.json", bos_token=token_entry("<|bos|>"), eos_token=token_entry("<|im_end|>")),
    ),
    "special_tokens_map that says otherwise": edit("special_tokens_map.json", eos_token="<|pad|>"),
    "added_tokens.json": edit("added_tokens.json", blue=264),
    "no tokenizer_config": remove("tokenizer_config.json"),
    "template in tokenizer_config": template_in("tokenizer_config.json", CHAT_TEMPLATE),
    "named templates": template_in("tokenizer_config.json", NAMED),
    "template in chat_template.json": template_in("chat_template.json", CHAT_TEMPLATE),
    "further templates": further_templates,
    "tokens beyond the embedding": added(*({"content": f"<extra_{i}>", "id": i} for i in range(264, 275))),
    "no generation_config": remove("generation_config.json"),
    "a list of ends": edit("generation_config.json", eos_token_id=[258, 263]),
    "neutral sampling": edit("generation_config.json", temperature=1.0, top_p=1.0, top_k=-1, repetition_penalty=1.0),
    "sampling out of range": edit("generation_config.json", temperature=2.5, top_p=0.0, do_sample=True),
}
OF_SOME = {
    "lm_head though tied": ("qwen3", "gemma3_text"),
    "rotary buffers": tuple(family for family in FAMILIES if family not in MULTIMODAL),
}
"""Families that a layout is of, where it is not of all."""
QUICK_FAMILIES = ("llama",)
CASES = [
    pytest.param(
        family,
        layout,
        marks=() if family in QUICK_FAMILIES or layout == "older rope" else pytest.mark.slow,
        id=f"{family}-{layout}".replace(" ", "-"),
    )
    for layout in LAYOUTS
    for family in FAMILIES
    if family in OF_SOME.get(layout, FAMILIES)
]


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_a_folder_as_published(tiny_models: Path, tmp_path: Path, family: str, layout: str) -> None:
    folder = shutil.copytree(tiny_models / family, tmp_path / "models--x--y" / "model")
    LAYOUTS[layout](folder)
    check_served(folder)


def check_served(folder: Path) -> None:
    """Ids of a text and of a conversation, and the token that follows, as transformers has them. Of tokenizers its
    general class: those of families bring special tokens that a folder does not name."""
    codec, theirs = TextCodec.load(folder), transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    theirs.chat_template = theirs.chat_template or CHAT_TEMPLATE  # in chat_template.json processors alone find it
    ids = codec.encode(TEXT)
    assert list(ids) == theirs(TEXT).input_ids
    chat = theirs.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    assert list(codec.encode_chat(CHAT, {"add_generation_prompt": True})) == chat
    shown = theirs.decode(list(ids), skip_special_tokens=True)
    assert codec.decode(ids, skip_special_tokens=True) == shown
    assert theirs.eos_token_id is None or theirs.eos_token_id in codec.eos_ids
    driver = Driver(folder)
    driver.open(0, ids)
    (result,) = driver.step([extend(0, ids, 0, len(ids))]).items
    assert drawn(result) == greedy(folder, ids)


@torch.inference_mode()
def greedy(folder: Path, ids: tuple[int, ...]) -> int:
    transformers.logging.set_verbosity_error()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return int(model(torch.tensor([ids])).logits[0, -1].argmax())


def test_sampling_of_the_layouts(tiny_models: Path, tmp_path: Path) -> None:
    for layout, expected in (
        ("neutral sampling", SamplingDefaults()),
        ("sampling out of range", SamplingDefaults(temperature=2.0, top_p=1e-9)),
        ("no generation_config", SamplingDefaults()),
    ):
        folder = shutil.copytree(tiny_models / "llama", tmp_path / layout)
        LAYOUTS[layout](folder)
        assert TextCodec.load(folder).defaults == expected


def test_a_base_models_names(tiny_models: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_models / "qwen3", tmp_path / "model")
    tensors(without_prefix)(folder)
    check_served(folder)


REFUSED: dict[str, tuple[Layout, str]] = {
    "an added token with another id": (
        edit("tokenizer_config.json", added_tokens_decoder={**DECODER, "270": token_entry("blue")}),
        "tokenizer_config.json: 'blue' has id 270, but 264 follows in tokenizer.json",
    ),
    "an added token that is no object": (
        edit("tokenizer_config.json", added_tokens_decoder={"264": "blue"}),
        "tokenizer_config.json: added_tokens_decoder has '264': 'blue'",
    ),
    "an added token without text": (
        edit("tokenizer_config.json", added_tokens_decoder={"264": {"special": True}}),
        "tokenizer_config.json: added_tokens_decoder has token 264 without content",
    ),
    "an id that is no number": (edit("added_tokens.json", blue="264"), "added_tokens.json: 'blue' is '264'"),
    "a template of tokens beyond the embedding": (
        both(
            added({"content": "<far>", "id": 264}, {"content": "<turn>", "id": 265}),
            edit_text(vocab_size=265),
            lambda folder: (folder / "chat_template.jinja").write_text("<turn>{{ messages[0].content }}"),
        ),
        "chat template writes '<turn>', of which the model has no embedding",
    ),
    "ordinary tokens beyond the embedding": (
        edit_text(vocab_size=200, eos_token_id=1, bos_token_id=0, pad_token_id=0),
        "is outside the model's vocabulary of 200",
    ),
    "named templates without a default": (template_in("tokenizer_config.json", NAMED[:1]), "a list with a default"),
    "a sentencepiece model alone": (remove("tokenizer.json"), "only tokenizer.json is read; transformers writes it"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_is_one_line(tiny_models: Path, tmp_path: Path, name: str) -> None:
    folder = shutil.copytree(tiny_models / "llama", tmp_path / "model")
    layout, message = REFUSED[name]
    layout(folder)
    with pytest.raises(ConfigError) as caught:
        (folder / "generation_config.json").unlink()
        TextCodec.load(folder)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_text_that_spells_a_token_beyond_the_embedding_is_text(
    tiny_models: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = shutil.copytree(tiny_models / "llama", tmp_path / "model")
    LAYOUTS["tokens beyond the embedding"](folder)
    codec = TextCodec.load(folder)
    assert "3 added tokens are text, for the model has no embedding: <extra_272>" in caplog.text
    assert codec.encode("<extra_271>") == (271,)
    assert codec.encode("<extra_272>") == tuple(b"<extra_272>")


# ---------------------------------------------------------------- Gemma 3 with images

SPARSE = ("hidden_size", "intermediate_size", "model_type", "num_hidden_layers", "rope_scaling", "sliding_window")
"""All that the text part of the published 4B, 12B and 27B names."""


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory, tiny_models: Path) -> Path:
    """With the hub's names of tensors, its sparse text part and the smallest image part."""
    folder = tmp_path_factory.mktemp("gemma") / "gemma"
    text: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6, "sliding_window": 24}
    text |= {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "model_type": "gemma3_text"}
    vision: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    vision |= {"image_size": 28, "patch_size": 14, "model_type": "siglip_vision_model"}
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    torch.manual_seed(0)
    with torch.no_grad():
        model = transformers.Gemma3ForConditionalGeneration(config)
        for name, value in model.state_dict().items():
            if "norm" in name:
                value.copy_(0.2 * torch.randn_like(value))
            elif "language_model" in name:
                value.copy_(torch.randn_like(value) * (0.2 if "embed" in name else value.shape[-1] ** -0.5))
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tiny_models / "gemma3_text" / name, folder)
    published: dict[str, Any] = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "torch_dtype": "float32",
    }
    published |= {"eos_token_id": [1, 106], "image_token_index": 262144, "mm_tokens_per_image": 4}
    published |= {"text_config": {name: text[name] for name in SPARSE}, "vision_config": vision}
    (folder / "config.json").write_text(json.dumps(published))
    return folder


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_gemma3_from_the_official_folder(gemma: Path, tmp_path: Path, prefix: str) -> None:
    """The vocabulary is that of the family, for both sides; the image part is skipped."""
    folder = shutil.copytree(gemma, tmp_path / "gemma")
    tensors(lambda values: rename(values, prefix))(folder)
    names = load_file(folder / WEIGHTS)
    assert any(name.startswith(prefix) for name in names)
    assert any("vision_tower" in name for name in names)
    codec = TextCodec.load(folder)
    assert codec.vocab_size == load_spec(folder).vocab_size == 262_208
    assert codec.eos_ids == (1, 106, 258)
    check_served(folder)


def rename(values: dict[str, Tensor], prefix: str) -> None:
    for name in list(values):
        bare = name.removeprefix("model.").removeprefix("language_model.").removeprefix("model.")
        is_image = bare.startswith(("vision_tower", "multi_modal"))
        values[bare if is_image else prefix + bare] = values.pop(name)


def test_an_override_reaches_the_text_side(gemma: Path) -> None:
    assert TextCodec.load(gemma, overrides='{"vocab_size": 1000}').vocab_size == 1000
    with pytest.raises(ConfigError, match="vocab_size is 0"):
        TextCodec.load(gemma, overrides='{"vocab_size": 0}')


assert set(FAMILIES) <= set(VARIANTS)
