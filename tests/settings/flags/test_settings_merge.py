"""Right settings: precedence, the three forms of each option, and that a printed file gives the same settings again."""

import re
from pathlib import Path
from typing import Any

import pytest

from deltaserve.core.errors import ConfigError
from deltaserve.settings.config import USEFUL_POOL_FACTOR, Settings
from deltaserve.settings.flags.foreign import FOREIGN, Alias, Denied, Idle, Takes
from deltaserve.settings.flags.merge import load
from deltaserve.settings.flags.options import Option, read_options
from deltaserve.settings.flags.yaml_file import write_yaml

M = "models/tiny"
COMMANDS = ("serve", "prefill", "decode", "router")

EXAMPLES: dict[str, str] = {
    "model-path": "models/other",
    "served-model-name": "org/model-7b",
    "sampling-defaults": "openai",
    "dtype": "float32",
    "quantization": "a8",
    "context-length": "4096",
    "json-model-override-args": '{"rope_theta": 10000.0}',
    "device": "cpu",
    "page-size": "16",
    "num-pages": "1000",
    "mem-fraction-static": "0.5",
    "kv-cache-dtype": "fp8_e4m3",
    "prefill-page-size": "64",
    "decode-page-size": "8",
    "prefill-kv-cache-dtype": "bfloat16",
    "decode-kv-cache-dtype": "fp8_e4m3",
    "max-mamba-cache-size": "100",
    "mamba-ssm-dtype": "bfloat16",
    "mamba-track-interval": "256",
    "radix-eviction-policy": "slru",
    "state-eviction": "cost",
    "cache-dir": "/var/cache/pages",
    "cache-dir-mib": "512",
    "disable-radix-cache": "true",
    "disable-decode-radix-cache": "true",
    "max-running-requests": "8",
    "chunked-prefill-size": "256",
    "max-prefill-tokens": "1024",
    "schedule-policy": "lpm",
    "num-reserved-decode-tokens": "0",
    "decode-extend-tokens": "64",
    "attention-split-tokens": "128",
    "attention-backend": "torch",
    "disable-cuda-graph": "true",
    "cuda-graph-max-bs": "64",
    "num-threads": "2",
    "prefill-num-threads": "3",
    "decode-num-threads": "1",
    "itl-target-ms": "25.5",
    "disable-overlap-schedule": "true",
    "steps-ahead": "3",
    "enable-deterministic-inference": "true",
    "max-queued-requests": "12",
    "default-max-tokens": "2048",
    "stream-interval": "4",
    "request-timeout-s": "60.5",
    "slow-reader-timeout-s": "5.5",
    "speculative-algorithm": "NGRAM",
    "speculative-draft-model-path": "models/head",
    "speculative-policy": "always",
    "speculative-num-steps": "2",
    "speculative-num-draft-tokens": "4",
    "speculative-eagle-topk": "1",
    "tp-size": "2",
    "prefill-tp-size": "4",
    "staging": "auto",
    "staging-memory-mib": "128",
    "decode-tp-size": "2",
    "ep-size": "1",
    "dp-size": "2",
    "prefill-dp-size": "2",
    "enable-dp-attention": "true",
    "prefill": "3",
    "decode": "2",
    "disaggregation-mode": "null",
    "disaggregation-transfer-backend": "nixl",
    "disaggregation-bootstrap-port": "9000",
    "drain-timeout-s": "2",
    "conditional-prefill": "off",
    "write-back": "off",
    "verify": "crc",
    "host": "localhost",
    "port": "8080",
    "max-connections-per-address": "64",
    "cluster": "ray",
    "address": "10.0.0.1:6379",
    "worker-name": "prefill.one",
    "otlp-traces-endpoint": "http://127.0.0.1:4318/v1/traces",
    "workers-file": "/etc/deltaserve/workers",
    "workers-dns": "prefill@prefill.default.svc:8998",
    "workers": "prefill@127.0.0.1:8998,decode@localhost:8999",
    "api-key-file": "keys/api",
    "cluster-key-file": "keys/cluster",
    "insecure-network": "true",
    "trusted-data-network": "10.0.0.0/24",
    "log-level": "debug",
    "transfer-tls": "rc,tcp,self",
    "transfer-devices": "lo",
    "transfer-fenced": "rc",
    "log-format": "json",
    "log-to": "stdout",
    "log-dir": "logs",
    "admin-host": "localhost",
    "admin-port": "9100",
    "fronts": "2",
    "metrics-names": "vllm,sglang",
    "metrics-on-api-port": "true",
    "kv-events-config": '{"endpoint": "tcp://127.0.0.1:5557"}',
    "allowed-hosts": "llm.example",
    "allowed-origins": "https://chat.example,http://[::1]:3000",
    "uds": "/run/llm.sock",
    "ssl-certfile": "server.pem",
    "ssl-keyfile": "server.key",
    "chat-template": "chat.jinja",
    "tool-call-parser": "none",
    "reasoning-parser": "none",
    "advertise": "worker-0.example:9000",
    "nnodes": "2",
    "node-rank": "1",
    "dist-init-addr": "127.0.0.1:5000",
    "http": "9100",
    "start-timeout-s": "900",
    "shutdown-grace-s": "20",
    "state-dir": "state",
}
COMPANIONS = {
    "cache-dir-mib": ["--cache-dir", "pages"],
    "speculative-draft-model-path": ["--speculative-algorithm", "EAGLE3"],
    "address": ["--cluster", "ray"],
    "dp-size": ["--enable-dp-attention"],
    "prefill-dp-size": ["--enable-dp-attention"],
    "nnodes": ["--tp-size", "2", "--dist-init-addr", "127.0.0.1:5000"],
    "node-rank": ["--nnodes", "2", "--tp-size", "2", "--dist-init-addr", "127.0.0.1:5000"],
    "enable-dp-attention": ["--dp-size", "2"],
    "ssl-keyfile": ["--ssl-certfile", "server.pem"],
}
"""What an option cannot be without."""
OPTIONS = {option.key: option for option in read_options()}


def value_of(settings: Settings, option: Option) -> Any:
    return settings.model_dump()[option.group][option.field]


def settings_of(command: str, *argv: str, environ: dict[str, str] | None = None) -> Settings:
    return load(command, "", argv, environ or {}).settings


def test_defaults() -> None:
    settings = settings_of("serve", M)
    assert settings.model.model_path == M
    assert settings.network.host == "127.0.0.1"
    assert settings.network.port == 30000
    assert settings.memory.page_size == "auto"
    assert not settings.memory.disable_radix_cache
    assert settings == Settings.model_validate({"model": {"model_path": M}})


def test_every_option_has_an_example_here() -> None:
    assert set(EXAMPLES) == set(OPTIONS)


@pytest.mark.parametrize("key", EXAMPLES)
def test_flag_variable_and_file_mean_the_same(key: str, tmp_path: Path) -> None:
    option, text = OPTIONS[key], EXAMPLES[key]
    command = option.commands[0] if option.commands else "serve"
    base = [] if key == "model-path" else [M]
    if command == "router" and key != "workers":
        base += ["--workers", "decode@localhost:1"]
    base += COMPANIONS.get(key, [])
    by_flag = settings_of(command, *base, *([option.flag] if option.is_switch else [option.flag, text]))
    by_variable = settings_of(command, *base, environ={option.env: text})
    path = tmp_path / "config.yaml"
    path.write_text(f"{key}: {text}" if "{" not in text else f"{key}: '{text}'")
    by_file = settings_of(command, *base, "--config", str(path))
    assert by_flag == by_variable == by_file
    assert str(value_of(by_flag, option)).lower() in (text.lower(), f"{text}.0")


def test_precedence(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("page-size: 1\nnum_pages: 10\nport: 1111\n")
    environ = {"DELTASERVE_PAGE_SIZE": "2", "DELTASERVE_PORT": "2222"}
    settings = settings_of("serve", M, "--config", str(path), "--page-size=4", environ=environ)
    assert (settings.memory.page_size, settings.network.port, settings.memory.num_pages) == (4, 2222, 10)


def test_the_file_may_be_named_by_a_variable(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("page-size: 8")
    assert settings_of("serve", M, environ={"DELTASERVE_CONFIG": str(path)}).memory.page_size == 8


def test_a_switch_can_be_taken_back_by_a_variable_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("disable-radix-cache: true")
    environ = {"DELTASERVE_DISABLE_RADIX_CACHE": "false"}
    assert not settings_of("serve", M, "--config", str(path), environ=environ).memory.disable_radix_cache


@pytest.mark.parametrize("command", COMMANDS)
def test_a_printed_file_gives_the_same_settings(command: str, tmp_path: Path) -> None:
    argv = [M, "--kv-cache-dtype", "bfloat16", "--page-size", "16", "--max-queued-requests", "9"]
    argv += ["--workers", "decode@localhost:1"] if command == "router" else ["--verify", "off"]
    settings = settings_of(command, *argv)
    path = tmp_path / "config.yaml"
    path.write_text(write_yaml(settings))
    assert load(command, "", ["--config", str(path)], {}).settings == settings


def test_words_that_yaml_might_take_for_values_survive(tmp_path: Path) -> None:
    settings = settings_of(
        "serve", "null", "--served-model-name", "123", "--verify", "off", "--disaggregation-mode=null"
    )
    path = tmp_path / "config.yaml"
    path.write_text(write_yaml(settings))
    assert settings_of("serve", "--config", str(path)) == settings
    path.write_text("model-path: no\nverify: off\ndisaggregation-mode: null\n")
    assert settings_of("serve", "--config", str(path)).model.model_path == "no"
    assert settings_of("serve", "--config", str(path)).disaggregation.disaggregation_mode == "null"


def test_one_file_serves_all_commands(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"model-path: {M}\nprefill: 2\ndisaggregation-bootstrap-port: 9000\nworkers: decode@localhost:1")
    assert {settings_of(command, "--config", str(path)) for command in COMMANDS} == {
        settings_of("serve", "--config", str(path))
    }


def test_settings_are_frozen() -> None:
    settings = settings_of("serve", M)
    with pytest.raises(ValueError, match="frozen"):
        settings.memory.page_size = 1


ALIASES = {name: row.meaning.key for name, row in FOREIGN.items() if isinstance(row.meaning, Alias)}
IDLE = {name: row.meaning for name, row in FOREIGN.items() if isinstance(row.meaning, Idle)}
REFUSED = {name: row.meaning.remedy for name, row in FOREIGN.items() if isinstance(row.meaning, Denied)}


def given(name: str, value: str) -> list[str]:
    takes = Takes.NOTHING if name in ALIASES and OPTIONS[ALIASES[name]].is_switch else FOREIGN[name].takes
    return [f"--{name}"] if takes is Takes.NOTHING else [f"--{name}", value]


@pytest.mark.parametrize("name", IDLE)
def test_foreign_flags_that_change_nothing_are_accepted(name: str) -> None:
    for value in IDLE[name].values or ("1",):
        line = load("serve", "", [M, *given(name, value)], {})
        assert line.settings == settings_of("serve", M)
        is_told = FOREIGN[name].takes is Takes.NOTHING or not IDLE[name].values
        assert line.notes == ((f"--{name} changes nothing: {IDLE[name].why}",) if is_told else ())


@pytest.mark.parametrize("name", [name for name in IDLE if IDLE[name].values])
def test_a_value_that_would_change_something_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(f"{name}: 7")
    with pytest.raises(ConfigError, match="is possible; "):
        settings_of("serve", M, "--config", str(path))


def test_several_values_of_a_foreign_flag_end_at_the_next_flag() -> None:
    line = load("decode", "", [M, "--cuda-graph-bs", "8", "16", "24", "--page-size", "16"], {})
    assert line.settings == settings_of("decode", M, "--page-size", "16")
    assert len(line.notes) == 1


def test_foreign_flags_are_nobody_elses() -> None:
    assert not set(FOREIGN) & set(OPTIONS)
    assert set(ALIASES.values()) <= set(OPTIONS)


@pytest.mark.parametrize("alias", ALIASES)
def test_other_words_for_a_flag_are_accepted_in_all_forms(alias: str, tmp_path: Path) -> None:
    option = OPTIONS[ALIASES[alias]]
    command, text = option.commands[0] if option.commands else "serve", EXAMPLES[option.key]
    base = [] if option.key == "model-path" else [M]
    base += COMPANIONS.get(option.key, [])
    expected = settings_of(command, *base, *([option.flag] if option.is_switch else [option.flag, text]))
    forms: list[tuple[list[str], dict[str, str]]]
    forms = [([*base, *given(alias, text)], {}), ([*base, f"-{alias}", *given(alias, text)[1:]], {})]
    if len(alias) > 1:
        path = tmp_path / "settings.yaml"
        path.write_text(f"{alias}: {text}" if "{" not in text else f"{alias}: '{text}'")
        forms.append(([*base, "--config", str(path)], {}))
        forms.append((base, {f"DELTASERVE_{alias.upper().replace('-', '_')}": text}))
        forms.append(([*base, f"--{alias.replace('-', '_')}", *given(alias, text)[1:]], {}))
    for argv, environ in forms:
        assert settings_of(command, *argv, environ=environ) == expected


def test_an_alias_and_its_option_are_given_once() -> None:
    with pytest.raises(ConfigError, match="--tp-size: given twice"):
        settings_of("serve", M, "--tp", "2", "--tp-size", "2")
    environ = {"DELTASERVE_MAX_MODEL_LEN": "1024", "DELTASERVE_CONTEXT_LENGTH": "2048"}
    with pytest.raises(ConfigError, match="DELTASERVE_MAX_MODEL_LEN: given twice, as context-length too"):
        settings_of("serve", M, environ=environ)


def test_a_letter_is_a_flag_and_no_key(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("c: 4096")
    with pytest.raises(ConfigError, match=r"c in .*: unknown key"):
        settings_of("serve", M, "--config", str(path))
    assert settings_of("serve", "-m", M, "-c", "4096").model.context_length == 4096


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("values", [(), ("1",)], ids=["alone", "with a value"])
def test_foreign_flags_without_a_meaning_are_refused_with_the_reason(name: str, values: tuple[str, ...]) -> None:
    is_switch = FOREIGN[name].takes is Takes.NOTHING
    with pytest.raises(ConfigError) as refused:
        settings_of("decode", M, f"--{name}", *(() if is_switch else values))
    assert str(refused.value) == f"--{name}: {REFUSED[name]}"


def test_foreign_flags_name_existing_replacements() -> None:
    texts = {name: row.why for name, row in IDLE.items()} | REFUSED
    found = {
        name: word
        for name, text in texts.items()
        for word in re.findall(r"--[a-z][a-z-]*", text.replace("--local-dir", ""))
        if word[2:] not in {*OPTIONS, "dump-config"}
    }
    assert found == {}


def test_a_refusal_says_what_to_write() -> None:
    """Or that the flag is to be left out, or where what it asks for is to be had."""
    advice = ("write ", "leave it out", "hf download", "let a proxy", "need a proxy", "merge it into")
    assert [name for name, text in REFUSED.items() if not any(words in text for words in advice)] == []


def test_help_says_that_an_automatic_pool_may_leave_memory_free(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load("serve", "", ["--help"], {})
    text = " ".join(capsys.readouterr().out.split()).replace("- ", "-")  # lines may end within a flag
    assert f"up to {USEFUL_POOL_FACTOR} times what --max-running-requests" in text


def test_help_calls_a_count_n_and_a_port_port() -> None:
    parts = {option.key: option for option in read_options()}
    counts = {key for key, option in parts.items() if option.is_count}
    assert {"max-connections-per-address", "num-pages", "prefill", "page-size"} <= counts
    assert not counts & {"port", "admin-port", "request-timeout-s", "host"}
