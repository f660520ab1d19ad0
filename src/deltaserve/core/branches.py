"""The options of each kind, in the order in which an automatic choice prefers them: a line for each.

Nothing outside a branch's own folder but its line here knows its name: who deletes the folder and the line has a server
without it, and who adds both has one with it. tests/test_branches.py does so with each.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class Branch(NamedTuple):
    """What is known of a branch before its code is imported."""

    module: str
    """Its entry, imported by the registry of its kind when it is asked for."""
    help: Mapping[str, str] = MappingProxyType({})
    """Setting |-> words of --help about this branch's part in it."""
    automatic: str | None = None
    """When an automatic choice takes it, for --help: empty: always. None: only where nothing before it is left."""
    known_as: tuple[str, ...] = ()
    """Values of other servers' flag that mean it."""
    halves: Mapping[str, str] = MappingProxyType({})
    """Purpose |-> its module for that, in another package."""


def words_on(branches: Mapping[str, Branch], setting: str) -> list[str]:
    """Each branch's words on a setting."""
    return [branch.help[setting] for branch in branches.values() if setting in branch.help]


def helped(branches: Mapping[str, Branch], setting: str) -> str:
    """The words on a setting one after the other: `a, b and c`."""
    *most, last = words_on(branches, setting) or ["none"]
    return f"{', '.join(most)} and {last}" if most else last


TRANSPORTS: Mapping[str, Branch] = MappingProxyType(
    {
        "local": Branch(
            "deltaserve.transports.local.kind",
            {"disaggregation_transfer_backend": "decode copies from prefill's memory, between workers of one serve"},
            "where that can be and --transfer-tls is not given",
        ),
        "nixl": Branch("deltaserve.transports.nixl.kind", automatic=""),
        "mooncake": Branch(
            "deltaserve.transports.mooncake.kind",
            {
                "disaggregation_transfer_backend": "CPU memory, always with checksums",
                "transfer_tls": "tcp (auto) or rdma",
            },
        ),
    }
)
"""Transports: what moves pages between workers."""

FAMILIES: Mapping[str, Branch] = MappingProxyType(
    {
        "llama": Branch("deltaserve.model.families.llama"),
        "qwen3": Branch("deltaserve.model.families.qwen3"),
        "qwen3_moe": Branch("deltaserve.model.families.qwen3_moe"),
        "minimax_m2": Branch("deltaserve.model.families.minimax_m2"),
        "deepseek_v3": Branch("deltaserve.model.families.deepseek_v3", {"speculative_algorithm": "DeepSeek V3"}),
        "gemma3": Branch("deltaserve.model.families.gemma3"),
        "gpt_oss": Branch("deltaserve.model.families.gpt_oss"),
        "qwen3_next": Branch("deltaserve.model.families.qwen3_next", {"speculative_algorithm": "Qwen3-Next"}),
        "qwen3_5": Branch("deltaserve.model.families.qwen3_5", {"speculative_algorithm": "Qwen3.5"}),
    }
)
"""Families of models, or groups of related ones, in the order in which messages name them."""

LAYERS: Mapping[str, Branch] = MappingProxyType(
    {
        "gqa": Branch("deltaserve.compute.layers.gqa"),
        "mla": Branch("deltaserve.compute.layers.mla"),
        "delta_net": Branch("deltaserve.compute.layers.delta_net"),
        "dense": Branch("deltaserve.compute.layers.dense"),
        "moe": Branch("deltaserve.compute.layers.moe"),
    }
)
"""Kinds of layers: parts of families. What is known of one without torch has a file of its name in model/layers."""

FORMATS: Mapping[str, Branch] = MappingProxyType(
    {
        "gguf": Branch(
            "deltaserve.model.formats.gguf_model",
            {"weights": "GGUF", "suffix": ".gguf"},
            halves={
                "weights": "deltaserve.compute.weights.gguf_arrays",
                "text": "deltaserve.server.text.gguf_text",
                "reference": "deltaserve.commands.verify.gguf_reference",
            },
        ),
        "quantised": Branch(
            "deltaserve.model.formats.quantised_folder",
            halves={"weights": "deltaserve.compute.weights.quantised_arrays"},
        ),
        "safetensors": Branch(
            "deltaserve.model.formats.safetensors_folder",
            halves={
                "weights": "deltaserve.compute.weights.safetensors_arrays",
                "reference": "deltaserve.commands.verify.safetensors_reference",
            },
        ),
    }
)
"""Formats of checkpoints, in the order in which a path is tried: the first that it is in reads it."""

DIALECTS: Mapping[str, Branch] = MappingProxyType(
    {
        "completions": Branch("deltaserve.server.dialects.completions"),
        "chat": Branch("deltaserve.server.dialects.chat"),
        "generate": Branch("deltaserve.server.dialects.generate"),
        "responses": Branch("deltaserve.server.dialects.responses"),
        "anthropic": Branch("deltaserve.server.dialects.anthropic"),
    }
)
"""Dialects of HTTP in which text is asked for, in the order of the API's description."""

ANSWERS: Mapping[str, Branch] = MappingProxyType(
    {
        "harmony": Branch(
            "deltaserve.server.text.answers.harmony",
            {"tool_call_parser": "gpt-oss", "reasoning_parser": "gpt-oss"},
            known_as=("openai", "gpt-oss", "gpt_oss", "openai_gptoss"),
        ),
        "deepseek_v3": Branch(
            "deltaserve.server.text.answers.deepseek_v3",
            {"tool_call_parser": "DeepSeek V3, V3.1 and R1", "reasoning_parser": "DeepSeek V3.1"},
            known_as=("deepseekv3", "deepseekv31", "deepseek_v31", "deepseek-v3", "deepseek-v31"),
        ),
        "minimax_m2": Branch(
            "deltaserve.server.text.answers.minimax_m2",
            {"tool_call_parser": "MiniMax-M2", "reasoning_parser": "MiniMax-M2"},
            known_as=("minimax-m2", "minimax", "minimax_m2_append_think", "minimax-append-think"),
        ),
        "qwen3_xml": Branch(
            "deltaserve.server.text.answers.qwen3_xml",
            {"tool_call_parser": "Qwen3-Coder, Qwen3.5", "reasoning_parser": "Qwen3.5"},
            known_as=("qwen3_coder",),
        ),
        "hermes": Branch(
            "deltaserve.server.text.answers.hermes",
            {"tool_call_parser": "Qwen3, Qwen 2.5, Hermes", "reasoning_parser": "Qwen3"},
            known_as=("qwen", "qwen25", "qwen3"),
        ),
        "gemma": Branch(
            "deltaserve.server.text.answers.gemma",
            {"tool_call_parser": "FunctionGemma, Gemma 4", "reasoning_parser": "Gemma 4"},
            known_as=("gemma4", "functiongemma"),
        ),
        "deepseek_v32": Branch(
            "deltaserve.server.text.answers.deepseek_v32",
            {"tool_call_parser": "DeepSeek V3.2", "reasoning_parser": "DeepSeek V3.2"},
            known_as=("deepseekv32", "deepseek-v32"),
        ),
        "deepseek_v4": Branch(
            "deltaserve.server.text.answers.deepseek_v4",
            {"tool_call_parser": "DeepSeek V4", "reasoning_parser": "DeepSeek V4"},
            known_as=("deepseekv4", "deepseek-v4"),
        ),
        "seed_oss": Branch(
            "deltaserve.server.text.answers.seed_oss",
            {"tool_call_parser": "Seed-OSS", "reasoning_parser": "Seed-OSS"},
            known_as=("seed-oss",),
        ),
        "mistral": Branch(
            "deltaserve.server.text.answers.mistral",
            {"tool_call_parser": "Mistral", "reasoning_parser": "Magistral, Ministral"},
            known_as=("magistral",),
        ),
        "glm45": Branch(
            "deltaserve.server.text.answers.glm45",
            {"tool_call_parser": "GLM 4.5 to 4.7", "reasoning_parser": "GLM 4.5 to 4.7"},
            known_as=("glm", "glm47"),
        ),
        "kimi_k2": Branch(
            "deltaserve.server.text.answers.kimi_k2",
            {"tool_call_parser": "Kimi K2", "reasoning_parser": "Kimi K2"},
            known_as=("kimi-k2",),
        ),
        "cohere": Branch(
            "deltaserve.server.text.answers.cohere",
            {"tool_call_parser": "Command R7B, Command A", "reasoning_parser": "Command A"},
            known_as=("cohere_command3", "cohere2"),
        ),
        "granite": Branch(
            "deltaserve.server.text.answers.granite",
            {"tool_call_parser": "Granite 3, Phi-4-mini"},
            known_as=("phi4_mini_json",),
        ),
        "llama3_json": Branch(
            "deltaserve.server.text.answers.llama3_json",
            {"tool_call_parser": "Llama 3"},
            known_as=("llama3", "llama4_json"),
        ),
        "pythonic": Branch(
            "deltaserve.server.text.answers.pythonic",
            {"tool_call_parser": "Llama 4"},
            known_as=("llama4", "llama4_pythonic"),
        ),
        "think": Branch(
            "deltaserve.server.text.answers.think",
            {"reasoning_parser": "DeepSeek R1 and others with <think>"},
            known_as=("deepseek_r1", "deepseek-r1", "qwen3-thinking", "step3"),
        ),
    }
)
"""Formats of answers: how models write reasoning and calls of tools. An automatic choice takes the first that reads
what the chat template writes."""

DRAFTS: Mapping[str, Branch] = MappingProxyType(
    {
        "NGRAM": Branch(
            "deltaserve.model.drafts.ngram",
            {"speculative_algorithm": "guess that text goes on as it did before in prompt and answer"},
        ),
        "NEXTN": Branch(
            "deltaserve.model.drafts.nextn",
            {"speculative_algorithm": f"by the head that {helped(FAMILIES, 'speculative_algorithm')} bring (MTP)"},
        ),
        "EAGLE": Branch(
            "deltaserve.model.drafts.eagle",
            {"speculative_algorithm": "by the head in a folder of its own, or else by the one that the model brings"},
        ),
        "EAGLE3": Branch(
            "deltaserve.model.drafts.eagle3",
            {
                "speculative_algorithm": "by a head in a folder of its own",
                "speculative_draft_model_path": "folder of the head",
            },
        ),
    }
)
"""Draft algorithms: who guesses at the tokens that come next."""


ATTENTION: Mapping[str, Branch] = MappingProxyType(
    {
        "native": Branch("deltaserve.compute.attention.native.kind", automatic="on a CPU"),
        "triton": Branch(
            "deltaserve.compute.attention.triton.kind",
            {"disable_cuda_graph": "its decode steps are recorded"},
            "on a GPU",
            ("TRITON_ATTN",),
        ),
        "torch": Branch(
            "deltaserve.compute.attention.reference.kind", automatic="", known_as=("torch_native", "TORCH_SDPA")
        ),
        "flashinfer": Branch(
            "deltaserve.compute.attention.flashinfer.kind",
            {"attention_backend": "on GPUs, promises no equal bits where requests share a prefix"},
            known_as=("FLASHINFER",),
        ),
    }
)
"""Attention backends. The one that an automatic choice takes always is compared with the others at their start."""

CLUSTERS: Mapping[str, Branch] = MappingProxyType(
    {
        "ray": Branch(
            "deltaserve.launch.clusters.ray.kind",
            {
                "cluster": "nodes of a Ray cluster, an actor for each worker; needs the extra ray",
                "address": "HOST:PORT of Ray's head; by default RAY_ADDRESS, or the cluster that this machine is in",
            },
            halves={"serve": "deltaserve.launch.clusters.ray.driver"},
        ),
    }
)
"""Launchers: what starts the workers of `serve` on other machines, and replaces them."""


def with_words(branches: Mapping[str, Branch], setting: str) -> tuple[str, ...]:
    """Branches that a setting may name, where not all may be: those that have words on it."""
    return tuple(name for name, branch in branches.items() if setting in branch.help)


def branch_help(branches: Mapping[str, Branch], setting: str) -> tuple[str, ...]:
    """`name: words` of each branch that has words on a setting, for --help."""
    return tuple(f"{name}: {branch.help[setting]}" for name, branch in branches.items() if setting in branch.help)


def automatic(branches: Mapping[str, Branch]) -> dict[str, str]:
    """Branches that an automatic choice may take |-> when, in words for --help."""
    return {name: branch.automatic for name, branch in branches.items() if branch.automatic is not None}


def automatic_help(branches: Mapping[str, Branch]) -> str:
    """Which branch an automatic choice takes, for --help."""
    return ", else ".join(f"{name} {when}".strip() for name, when in automatic(branches).items())
