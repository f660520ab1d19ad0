"""Wrong settings, one row each: the error names what is wrong, its value and what is allowed, on one line."""

import os
from pathlib import Path

import pytest

from deltaserve.core.errors import ConfigError
from deltaserve.launch.lacking import lacking
from deltaserve.process.front.secrets import NO_CLUSTER_KEY
from deltaserve.settings.flags.known_flags import OF_ANY_COMMAND
from deltaserve.settings.flags.merge import load

M = "models/tiny"

BAD_FLAGS: list[tuple[str, list[str], tuple[str, ...]]] = [
    # unknown, misspelt, doubled, incomplete
    ("serve", [M, "--page-sise", "16"], ("--page-sise", "unknown flag", "did you mean --page-size?")),
    ("serve", [M, "--prot", "1"], ("--prot: unknown flag; did you mean --port?",)),
    ("serve", [M, "--hots", "x"], ("did you mean --host?",)),
    ("serve", [M, "--tensor-paralel-size", "2"], ("did you mean --tensor-parallel-size?",)),
    ("serve", [M, "--max-modellen", "9"], ("did you mean --max-model-len?",)),
    ("serve", [M, "--enable-metrics=true"], ("--enable-metrics: takes no value, leave out 'true'",)),
    ("serve", [M, "--dtype", "bf8"], ("--dtype", "float32")),
    ("serve", [M, "--pagesize=16"], ("--pagesize", "did you mean --page-size?")),
    ("serve", [M, "--max-runing-requests", "4"], ("did you mean --max-running-requests?",)),
    ("serve", [M, "--frobnicate"], ("--frobnicate", "unknown flag")),
    ("serve", [M, "--page", "16"], ("--page", "unknown flag")),
    ("serve", [M, "-p", "16"], ("-p", "unknown flag")),
    ("serve", [M, "--page-size", "16", "--page-size", "32"], ("--page-size", "given twice")),
    ("serve", [M, "--insecure-network", "--insecure-network"], ("--insecure-network", "given twice")),
    ("serve", [M, "--config", "a", "--config", "b"], ("--config", "given twice")),
    ("serve", [M, "--page-size"], ("--page-size", "expected one argument")),
    ("serve", [M, "--page-size", "--port", "1"], ("--page-size", "expected one argument")),
    ("serve", [M, "other/model"], ("other/model", "one MODEL")),
    ("serve", [M, "--model-path", M], ("MODEL and --model-path", "one of them")),
    ("serve", [], ("no model", "--model-path")),
    ("serve", [M, "--disable-radix-cache=yes"], ("--disable-radix-cache: takes no value",)),
    ("serve", [""], ("--model-path ''", "1 to 4096 characters")),
    ("serve", ["x" * 5000], ("--model-path 'xxx", "1 to 4096 characters")),
    # types and ranges
    ("serve", [M, "--page-size", "48"], ("--page-size 48", "power of two from 1 to 128")),
    ("serve", [M, "--page-size", "0"], ("--page-size 0", "power of two from 1 to 128")),
    ("serve", [M, "--page-size", "256"], ("--page-size 256", "power of two from 1 to 128")),
    ("serve", [M, "--page-size", "-16"], ("--page-size -16", "power of two from 1 to 128")),
    ("serve", [M, "--page-size", "16.0"], ("--page-size '16.0'", "power of two from 1 to 128 or auto")),
    ("serve", [M, "--page-size", "sixteen"], ("--page-size 'sixteen'", "or auto")),
    ("serve", [M, "--page-size", ""], ("--page-size ''", "or auto")),
    ("serve", [M, "--page-size", "AUTO"], ("--page-size 'AUTO'", "or auto")),
    ("serve", [M, "--num-pages", "0"], ("--num-pages 0", "an integer >= 1 or auto")),
    ("serve", [M, "--num-pages", str(2**31)], ("--num-pages 2147483648", "an integer >= 1")),
    ("serve", [M, "--num-pages", "9" * 30], ("--num-pages '999", "an integer >= 1")),
    ("serve", [M, "--num-pages", "1e3"], ("--num-pages '1e3'", "an integer >= 1")),
    ("serve", [M, "--num-pages", "1_000"], ("--num-pages '1_000'", "an integer >= 1")),
    ("serve", [M, "--num-pages", "٣"], ("--num-pages '٣'", "an integer >= 1")),
    ("serve", [M, "--mem-fraction-static", "0"], ("--mem-fraction-static 0.0", "between 0 and 1")),
    ("serve", [M, "--mem-fraction-static", "1"], ("--mem-fraction-static 1.0", "between 0 and 1")),
    ("serve", [M, "--mem-fraction-static", "nan"], ("--mem-fraction-static nan", "between 0 and 1")),
    ("serve", [M, "--mem-fraction-static", "80%"], ("--mem-fraction-static '80%'", "between 0 and 1")),
    ("serve", [M, "--mem-fraction-static", "0.8_5"], ("--mem-fraction-static '0.8_5'", "between 0 and 1")),
    ("serve", [M, "--max-running-requests", "0"], ("--max-running-requests 0", "an integer from 1 to 65536")),
    ("serve", [M, "--max-running-requests", "2147483647"], ("--max-running-requests 2147483647", "to 65536")),
    ("serve", [M, "--max-queued-requests", "auto"], ("--max-queued-requests 'auto'", "an integer >= 1")),
    ("serve", [M, "--chunked-prefill-size", "-2"], ("--chunked-prefill-size -2", "an integer >= 1 or auto")),
    ("serve", [M, "--num-reserved-decode-tokens", "-1"], ("--num-reserved-decode-tokens -1", "an integer >= 0")),
    ("serve", [M, "--decode-extend-tokens", "x"], ("--decode-extend-tokens 'x'", "an integer >= 0")),
    ("serve", [M, "--stream-interval", "0"], ("--stream-interval 0", "an integer >= 1")),
    ("serve", [M, "--num-threads", "0"], ("--num-threads 0", "an integer from 1 to 1024")),
    ("serve", [M, "--num-threads", "100000"], ("--num-threads 100000", "to 1024")),
    ("serve", [M, "--context-length", "1.5"], ("--context-length '1.5'", "an integer >= 1 or auto")),
    ("serve", [M, "--request-timeout-s", "0"], ("--request-timeout-s 0.0", "above 0")),
    ("serve", [M, "--slow-reader-timeout-s", "0"], ("--slow-reader-timeout-s 0.0", "above 0")),
    ("serve", [M, "--request-timeout-s", "inf"], ("--request-timeout-s inf", "at most 86400")),
    ("serve", [M, "--start-timeout-s", "0"], ("--start-timeout-s 0.0", "above 0")),
    ("decode", [M, "--shutdown-grace-s", "never"], ("--shutdown-grace-s 'never'", "seconds")),
    ("decode", [M, "--uds", "/x"], ("--uds", "only `deltaserve serve` or `deltaserve router`")),
    ("serve", [M, "--drain-timeout-s", "1s"], ("--drain-timeout-s '1s'", "seconds")),
    ("serve", [M, "--port", "0"], ("--port 0", "a port from 1 to 65534")),
    ("serve", [M, "--port", "65535"], ("--port 65535", "a port from 1 to 65534")),
    ("serve", [M, "--port", "http"], ("--port 'http'", "a port")),
    ("serve", [M, "--prefill", "0"], ("--prefill 0", "from 1 to 64")),
    ("serve", [M, "--decode", "65"], ("--decode 65", "from 1 to 64")),
    ("serve", [M, "--dtype", "fp8"], ("--dtype 'fp8'", "auto, float32, bfloat16, float16")),
    ("serve", [M, "--kv-cache-dtype", "int4"], ("--kv-cache-dtype 'int4'", "fp8_e4m3")),
    ("serve", [M, "--device", "tpu"], ("--device 'tpu'", "auto, cpu, cuda")),
    ("serve", [M, "--schedule-policy", "random"], ("--schedule-policy 'random'", "fcfs, lpm")),
    (
        "serve",
        [M, "--attention-backend", "fa2"],
        ("--attention-backend 'fa2'", "auto, native, triton, torch, flashinfer"),
    ),
    ("serve", [M, "--cuda-graph-max-bs", "0"], ("--cuda-graph-max-bs 0", "from 1 to 65536")),
    ("serve", [M, "--verify", "md5"], ("--verify 'md5'", "off, crc")),
    ("serve", [M, "--log-level", "loud"], ("--log-level 'loud'", "debug, info, warning, error")),
    ("serve", [M, "--disaggregation-transfer-backend", "rdma"], ("'rdma'", "nixl")),
    ("serve", [M, "--served-model-name", "a b"], ("--served-model-name 'a b'", "letters, digits")),
    ("prefill", [M, "--host", "::1"], ("--host ::1", "IPv4 address")),
    ("serve", [M, "--host", "::1%lo"], ("--host '::1%lo'", "IPv4 or IPv6 address")),
    ("serve", [M, "--host", "1:2"], ("--host '1:2'", "IPv4 or IPv6 address")),
    ("serve", [M, "--host", "http://x"], ("--host 'http://x'", "a host name, IPv4 or IPv6 address")),
    ("serve", [M, "--host", "::"], ("--host ::", "--api-key-file")),
    (
        "serve",
        [M, "--allowed-origins", "chat.example"],
        ("--allowed-origins 'chat.example'", "https://chat.example.com"),
    ),
    ("serve", [M, "--allowed-origins", "http://a/b"], ("--allowed-origins 'http://a/b'", "list of origins")),
    ("serve", [M, "--uds", "llm.sock"], ("--uds 'llm.sock'", "absolute path")),
    ("serve", [M, "--uds", "/" + "x" * 100], ("--uds", "2 to 100 characters")),
    ("serve", [M, "--uds", "/s", "--host", "10.0.0.1", "--insecure-network"], ("--host 10.0.0.1", "--uds /s")),
    ("serve", [M, "--uds", "/s", "--fronts", "2"], ("--fronts 2", "--uds /s")),
    ("serve", [M, "--uds", "/s", "--ssl-certfile", "c"], ("--ssl-certfile c", "--uds")),
    ("serve", [M, "--ssl-keyfile", "k"], ("--ssl-keyfile k", "--ssl-certfile")),
    ("serve", [M, "--json-model-override-args", "{"], ("--json-model-override-args '{'", "JSON object")),
    ("serve", [M, "--json-model-override-args", "[1]"], ("--json-model-override-args '[1]'", "JSON object")),
    ("router", [M, "--trusted-data-network", "10.0.0.0/24"], ("only `deltaserve prefill` or `deltaserve decode` or",)),
    ("serve", [M, "--cluster", "slurm"], ("--cluster 'slurm'", "none, ray")),
    ("serve", [M, "--address", "10.0.0.1:6379"], ("--address 10.0.0.1:6379", "--cluster")),
    (
        "serve",
        [M, "--cluster", "ray", "--disaggregation-mode", "null"],
        ("--cluster ray", "--disaggregation-mode null"),
    ),
    ("router", [M, "--num-pages", "9"], ("--num-pages", "only `deltaserve serve` or")),
    ("prefill", [M, "--trusted-data-network", "10.0.0.1"], ("'10.0.0.1'", "10.0.0.0/24")),
    ("prefill", [M, "--trusted-data-network", "10.0.0.0/40"], ("'10.0.0.0/40'", "10.0.0.0/24")),
    ("prefill", [M, "--trusted-data-network", "0.0.0.0/0"], ("'0.0.0.0/0'", "no wider than /8")),
    # what may not stand together
    ("serve", [M, "--page-size", "16", "--chunked-prefill-size", "100"], ("100", "multiple of --page-size 16")),
    ("serve", [M, "--page-size", "64", "--attention-split-tokens", "32"], ("32", "multiple of --page-size 64")),
    (
        "serve",
        [M, "--chunked-prefill-size", "512", "--max-prefill-tokens", "256"],
        ("--max-prefill-tokens 256", "at least --chunked-prefill-size 512"),
    ),
    (
        "serve",
        [M, "--drain-timeout-s", "30", "--request-timeout-s", "20"],
        ("--drain-timeout-s 30", "below --request-timeout-s 20"),
    ),
    ("serve", [M, "--disaggregation-mode", "prefill"], ("--disaggregation-mode prefill", "`deltaserve prefill`")),
    ("decode", [M, "--disaggregation-mode", "prefill"], ("--disaggregation-mode prefill", "`deltaserve decode`")),
    ("serve", [M, "--disaggregation-mode", "null", "--prefill", "2"], ("--prefill 2", "null")),
    (
        "serve",
        [M, "--disaggregation-mode", "null", "--disable-decode-radix-cache"],
        ("one cache", "--disable-radix-cache"),
    ),
    ("decode", [M, "--disable-decode-radix-cache"], ("--disable-decode-radix-cache", "only `deltaserve serve`")),
    ("decode", [M, "--prefill", "2"], ("--prefill", "only `deltaserve serve`")),
    ("serve", [M, "--workers", "decode@h:1"], ("--workers", "only `deltaserve router`")),
    ("router", [M], ("--workers", "prefill@10.0.0.1:8998")),
    ("router", [M, "--workers", "10.0.0.1:8998"], ("--workers '10.0.0.1:8998'", "prefill@")),
    ("router", [M, "--workers", "prefill@h:1"], ("--workers prefill@h:1", "at least one decode")),
    ("router", [M, "--workers", "decode@h:99999"], ("--workers h:99999", "1 to 65535")),
    ("router", [M, "--workers", "decode@127.0.0.1:30000"], ("127.0.0.1:30000", "own address")),
    ("router", [M, "--workers", "decode@127.0.0.1:1,prefill@127.0.0.1:1"], ("127.0.0.1:1", "listed twice")),
    # listeners
    ("serve", [M, "--host", "0.0.0.0"], ("--host 0.0.0.0", "--api-key-file", "--insecure-network")),
    ("serve", [M, "--host", "127.evil.example"], ("--host 127.evil.example", "--api-key-file")),
    ("serve", [M, "--log-to", "stdout", "--log-dir", "logs"], ("--log-dir logs", "--log-to stdout")),
    ("serve", [M, "--log-format", "xml"], ("--log-format 'xml'", "text, json")),
    ("decode", [M, "--log-to", "stdout"], ("--log-to", "only `deltaserve serve`")),
    ("serve", [M, "--transfer-tls", "RDMA"], ("--transfer-tls 'RDMA'", "rc,tcp,self")),
    ("prefill", [M, "--transfer-devices", "mlx5_0:1"], ("mlx5_0:1", "--trusted-data-network")),
    ("prefill", [M, "--transfer-devices", "a b"], ("--transfer-devices 'a b'", "UCX devices")),
    ("serve", [M, "--admin-host", "0.0.0.0"], ("--admin-host 0.0.0.0", "--api-key-file")),
    ("serve", [M, "--admin-port", "30000"], ("--admin-port 30000", "that of the API")),
    ("decode", [M, "--fronts", "2"], ("--fronts", "only `deltaserve serve` or `deltaserve router`")),
    ("serve", [M, "--http", "9100"], ("--http", "only `deltaserve prefill` or `deltaserve decode`")),
    ("decode", [M, "--http", "0"], ("--http 0", "a port from 1 to 65534")),
    ("decode", [M, "--http", "8998"], ("--http 8998", "--disaggregation-bootstrap-port")),
    (
        "decode",
        [M, "--http", "8997", "--admin-host", "127.0.0.1"],
        ("--disaggregation-bootstrap-port 8998", "admin routes", "--http 8997"),
    ),
    ("prefill", [M, "--http", "9100", "--admin-host", "10.0.0.1"], ("--admin-host 10.0.0.1", "--api-key-file")),
    ("decode", [M, "--http", "9100", "--admin-port", "8998"], ("--disaggregation-bootstrap-port 8998", "admin routes")),
    ("decode", [M, "--http", "9100", "--admin-port", "9100"], ("--admin-port 9100", "that of the API (--http)")),
    ("prefill", [M, "--http", "9100", "--worker-name", "p0"], ("--worker-name p0", "--http", "leave it out")),
    (
        "prefill",
        [M, "--http", "9100", "--host", "10.0.0.1", "--trusted-data-network", "10.0.0.0/24"],
        ("--host 10.0.0.1", "--http 9100", "--api-key-file"),
    ),
    ("prefill", [M, "--host", "10.0.0.1"], ("--host 10.0.0.1", "--trusted-data-network")),
    ("decode", [M, "--host", "10.0.0.1", "--insecure-network"], ("--host 10.0.0.1", "--trusted-data-network")),
    ("decode", [M, "--host", "0"], ("--host 0", "nobody can dial", "--advertise")),
    ("decode", [M, "--host", "0.0.0.0"], ("--host 0.0.0.0", "nobody can dial", "--advertise")),
    ("prefill", [M, "--advertise", "10.0.0.1:0"], ("--advertise '10.0.0.1:0'", "and :PORT")),
    ("prefill", [M, "--advertise", "tcp://10.0.0.1"], ("--advertise 'tcp://10.0.0.1'", "a host name or IPv4 address")),
    ("serve", [M, "--advertise", "10.0.0.1"], ("--advertise", "only `deltaserve prefill` or `deltaserve decode`")),
    # flags of other servers
    ("serve", [M, "--tp-size", "0"], ("--tp-size 0", "an integer from 1 to 64")),
    ("serve", [M, "--tp", "many"], ("--tp 'many'", "an integer from 1 to 64")),
    ("serve", [M, "--tp", "2", "--tp-size", "2"], ("--tp-size", "given twice")),
    ("serve", [M, "--disaggregation-mode", "null", "--decode-tp-size", "2"], ("--decode-tp-size 2", "use --tp-size")),
    ("serve", [M, "--disaggregation-mode", "null", "--prefill-tp-size", "2"], ("--prefill-tp-size 2", "--tp-size")),
    (
        "serve",
        [M, "--disaggregation-mode", "null", "--decode-page-size", "16"],
        ("--decode-page-size 16", "--page-size"),
    ),
    (
        "serve",
        [M, "--disaggregation-mode", "null", "--prefill-kv-cache-dtype", "fp8_e4m3"],
        ("--prefill-kv-cache-dtype fp8_e4m3", "use --kv-cache-dtype"),
    ),
    ("serve", [M, "--prefill-page-size", "48"], ("--prefill-page-size 48", "a power of two")),
    ("serve", [M, "--decode-kv-cache-dtype", "auto"], ("--decode-kv-cache-dtype 'auto'", "float32, bfloat16")),
    ("decode", [M, "--decode-page-size", "16"], ("--decode-page-size", "only `deltaserve serve` has it")),
    ("decode", [M, "--decode-tp-size", "2"], ("--decode-tp-size", "only `deltaserve serve` has it")),
    ("router", [M, "--tp-size", "2"], ("--tp-size", "has it")),
    ("serve", [M, "--staging", "maybe"], ("--staging 'maybe'", "off, auto, on")),
    ("serve", [M, "--staging-memory-mib", "513"], ("--staging-memory-mib 513", "an integer from 1 to 512")),
    ("router", [M, "--staging", "on"], ("--staging", "has it")),
    ("serve", [M, "--cache-dir", ""], ("--cache-dir", "a text of 1 to 4096")),
    ("serve", [M, "--cache-dir-mib", "0"], ("--cache-dir-mib 0", "an integer >= 1")),
    ("serve", [M, "--cache-dir-mib", "64"], ("--cache-dir-mib 64", "needs --cache-dir")),
    ("serve", [M, "--cache-dir", "x", "--disable-radix-cache"], ("--cache-dir", "leave out --disable-radix-cache")),
    ("router", [M, "--cache-dir", "x"], ("--cache-dir", "has it")),
    ("serve", [M, "--ep-size", "4"], ("--ep-size 4", "add --tp-size")),
    (
        "serve",
        [M, "--overlap-schedule", "0"],
        ("--overlap-schedule 0", "only 1 is possible", "--disable-overlap-schedule"),
    ),
    ("serve", [M, "-tp", "x"], ("-tp 'x'", "an integer from 1 to 64")),
    ("serve", ["--model", M, M], ("MODEL and --model-path", "one of them")),
    ("serve", [M, "--max-model-len", "32q"], ("--max-model-len '32q'", "an integer >= 1")),
    (
        "serve",
        [M, "--kv-transfer-config.kv_role", "kv_both"],
        ("--kv-transfer-config.kv_role: write", "transfer-backend"),
    ),
    ("serve", [M, "--trust-remote-code=true"], ("--trust-remote-code: takes no value",)),
    ("serve", [M, "--watchdog-timeout"], ("--watchdog-timeout: expected one argument",)),
    *(
        ("serve", [M, flag, parser], (f"{flag} '{parser}'", "auto, none, harmony, deepseek_v3"))
        for flag in ("--tool-call-parser", "--reasoning-parser")
        for parser in ("internlm", "x", "")
    ),
    ("serve", [M, "--tool-call-parser", "think"], ("--tool-call-parser 'think'", "auto, none, harmony")),
    ("serve", [M, "--reasoning-parser", "pythonic"], ("--reasoning-parser 'pythonic'", "auto, none, harmony")),
    ("serve", [M, "--reasoning-format", "deepseek"], ("--reasoning-format: write --reasoning-parser",)),
    ("serve", [M, "--revision", "main"], ("--revision", "never downloaded", "hf download")),
    ("serve", [M, "--api-key", "secret-of-mine"], ("--api-key", "--api-key-file")),
    ("serve", [M, "--max-total-tokens", "4096"], ("--max-total-tokens", "--num-pages")),
    ("serve", [M, "--gpu-memory-utilization", "9"], ("--gpu-memory-utilization 9.0", "between 0 and 1")),
    ("serve", [M, "--quantization=fp8"], ("--quantization", "checkpoint")),
]


@pytest.mark.parametrize(("command", "argv", "parts"), BAD_FLAGS, ids=[" ".join(row[1])[-50:] for row in BAD_FLAGS])
def test_bad_flags(command: str, argv: list[str], parts: tuple[str, ...]) -> None:
    expect_line(command, argv, {}, parts)


BAD_VARIABLES: list[tuple[dict[str, str], tuple[str, ...]]] = [
    (
        {"DELTASERVE_PAGE_SISE": "16"},
        ("DELTASERVE_PAGE_SISE", "unknown variable", "did you mean DELTASERVE_PAGE_SIZE?"),
    ),
    ({"DELTASERVE_": "16"}, ("DELTASERVE_", "unknown variable")),
    ({"DELTASERVE_PAGE_SIZE": "17"}, ("DELTASERVE_PAGE_SIZE: 17", "power of two")),
    ({"DELTASERVE_INSECURE_NETWORK": "maybe"}, ("DELTASERVE_INSECURE_NETWORK: 'maybe'", "true or false")),
    ({"DELTASERVE_DISABLE_RADIX_CACHE": ""}, ("DELTASERVE_DISABLE_RADIX_CACHE: ''", "true or false")),
    ({"DELTASERVE_PORT": "30000 "}, ("DELTASERVE_PORT: '30000 '", "a port")),
    ({"DELTASERVE_CONFIG": "no/such/file.yaml"}, ("no/such/file.yaml", "No such file")),
    ({"DELTASERVE_DUMP_CONFIG": "1"}, ("DELTASERVE_DUMP_CONFIG: unknown variable; only a command line has it",)),
    ({"DELTASERVE_HELP": "1"}, ("DELTASERVE_HELP: unknown variable; only a command line has it; write --help",)),
    ({"DELTASERVE_M": "x"}, ("DELTASERVE_M: unknown variable; a letter is", "its key is model-path")),
    ({"DELTASERVE_API_KEY": "secret-of-mine"}, ("DELTASERVE_API_KEY", "write --api-key-file FILE")),
]


@pytest.mark.parametrize(("environ", "parts"), BAD_VARIABLES, ids=[next(iter(row[0])) for row in BAD_VARIABLES])
def test_bad_variables(environ: dict[str, str], parts: tuple[str, ...]) -> None:
    expect_line("serve", [M], environ, parts)


def _bomb(brackets: str, item: str) -> bytes:
    """A value of a few hundred bytes that stands for a thousand million."""
    levels = [f"&a0 {brackets % (item % ((0, 'x') if '%d' in item else 'x'))}"]
    for level in range(1, 9):
        items = (item % ((i, f"*a{level - 1}") if "%d" in item else f"*a{level - 1}") for i in range(10))
        levels.append(f"&a{level} {brackets % ', '.join(items)}")
    return f"host: [{', '.join(levels)}]".encode()


BAD_FILES: list[tuple[bytes, tuple[str, ...]]] = [
    (b"page-sise: 16", ("page-sise in", "unknown key", "did you mean page-size?")),
    (b"page-size: 16\npage-size: 32", (":2:", "page-size occurs twice")),
    (b"page-size: 16\npage_size: 16", (":2:", "page-size occurs twice")),
    (b"page-size: '16'", ("page-size in", "'16'", "power of two")),
    (b"page-size: 16.0", ("page-size in", "16.0", "power of two")),
    (b"page-size: 0x10", ("page-size in", "'0x10'", "power of two")),
    (b"page-size: 020", ("page-size in", "'020'", "power of two")),
    (b"page-size: 1_6", ("page-size in", "'1_6'", "power of two")),
    (b"page-size: 0b1", ("page-size in", "'0b1'", "power of two")),
    (b"port: 8:20", ("port in", "'8:20'", "a port")),
    (b"mem-fraction-static: 0.8_5", ("mem-fraction-static in", "'0.8_5'", "between 0 and 1")),
    (b"request-timeout-s: 1e3", ("request-timeout-s in", "'1e3'")),
    (b"page-size: true", ("page-size in", "True", "power of two")),
    (b"page-size: [16]", ("page-size in", "[16]", "power of two")),
    (b"page-size:", ("page-size in", "''", "power of two")),
    (b"port: 99999", ("port in", "99999", "65534")),
    (b"insecure-network: 1", ("insecure-network in", "1", "true or false")),
    (b"insecure-network: yes", ("insecure-network in", "'yes'", "true or false")),
    (b"mem-fraction-static: .nan", ("mem-fraction-static in", "nan", "between 0 and 1")),
    (b"memory:\n  page-size: 16", ("memory in", "unknown key")),
    (b"- page-size", ("must be a mapping",)),
    (b"hello", ("must be a mapping",)),
    (b"page-size: [16", (":1:", "expected")),
    (b"page-size: 16\n\tport: 1", (":2:", "cannot start any token")),
    (b"a: !!python/object/apply:os.system [id]", (":1:", "could not determine a constructor")),
    (b"\xff\xfe\x00page", ("not UTF-8",)),
    (b"page-size: \x0116", ("characters that YAML does not allow",)),
    (b"---\npage-size: 16\n---\nport: 1", (":3:", "expected a single document")),
    (b"config: other.yaml", ("config in", "unknown key; one file holds all settings and names no other; --config")),
    (b"dump-config: true", ("dump-config in", "unknown key; only a command line has it; write --dump-config")),
    (b"dump_config: false", ("dump-config in", "unknown key; only a command line has it")),
    (b"help-all: true", ("help-all in", "unknown key; only a command line has it; write --help or --help-all")),
    (b"help: true", ("help in", "unknown key; only a command line has it")),
    (b"h: true", ("h in", "unknown key; only a command line has it")),
    (b"m: x", ("m in", "unknown key; a letter is a flag of a command line only; its key is model-path")),
    (b"trusted-data-networks: 10.0.0.0/24", ("did you mean trusted-data-network?",)),
    (b"prot: 1", ("prot in", "unknown key; did you mean port?")),
    (b"tool-parser-plugin: x.py", ("tool-parser-plugin in", "no code is loaded")),
    (b"max-model-len: 0.5", ("max-model-len in", "0.5", "an integer >= 1")),
    (b"enable-prefix-caching: false", ("only true is possible", "always on", "--disable-radix-cache")),
    (b"tp-size: two", ("tp-size in", "'two'", "an integer from 1 to 64")),
    (b"tp-size: 2\ntp: 2", ("tp in", "given twice, as tp-size too")),
    (b"? [a, b]\n: 1", (":1:", "unhashable key")),
    (b"#" * (1 << 20) + b"#", ("more than 1048576 bytes",)),
    (b"a: " + b"[" * 5000, ("nested too deeply",)),
    (b"page-size: !!int abc", (":1:", "no value of the type int")),
    (b"page-size: !!float abc", (":1:", "no value of the type float")),
    (b"page-size: !!bool abc", (":1:", "no value of the type bool")),
    (b"page-size: !!timestamp abc", (":1:", "no value of the type timestamp")),
    (b"page-size: !!timestamp 2020-99-99", (":1:", "no value of the type timestamp")),
    (b"port: 1\npage-size: !!int ''", (":2:", "no value of the type int")),
    (b"page-size: !!int 0x" + b"f" * 5000, (":1:", "no value of the type int")),
    (b"page-size: " + b"9" * 5000, (":1:", "no value of the type int")),
    (b"page-size: " + b"9" * 60, ("page-size in", "999", "power of two")),
    (b"page-size: &a 16\nport: *a", (":1:", "anchors and aliases")),
    (b"page-size: *nope", (":1:", "anchors and aliases")),
    (b"<<: {page-size: 16}\npage-size: 32", (":1:", "<< has no use")),
    (_bomb("[%s]", "%s"), (":1:", "anchors and aliases")),
    (_bomb("{%s}", "k%d: %s"), (":1:", "anchors and aliases")),
]


@pytest.mark.parametrize(("content", "parts"), BAD_FILES, ids=[row[0][:40].decode("latin-1") for row in BAD_FILES])
def test_bad_files(content: bytes, parts: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes(content)
    expect_line("serve", [M, "--config", str(path)], {}, parts)


@pytest.mark.parametrize("name", [*OF_ANY_COMMAND, "dump-confi", "config-file", "m", "hel"])
def test_no_key_is_advised_that_a_file_cannot_have(name: str, tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(f"{name}: 1")
    with pytest.raises(ConfigError, match=r": unknown key") as caught:
        load("serve", "", [M, "--config", str(path)], {})
    assert "did you mean" not in str(caught.value)


def test_only_a_regular_file_is_read(tmp_path: Path) -> None:
    pipe, loop, nowhere = tmp_path / "pipe", tmp_path / "loop", tmp_path / "nowhere"
    os.mkfifo(pipe)
    loop.symlink_to(loop)
    nowhere.symlink_to(tmp_path / "missing")
    expect_line("serve", [M, "--config", "/dev/zero"], {}, ("/dev/zero", "not a regular file"))
    expect_line("serve", [M, "--config", str(pipe)], {}, ("pipe", "not a regular file"))
    expect_line("serve", [M, "--config", str(tmp_path)], {}, ("Is a directory",))
    expect_line("serve", [M, "--config", str(loop)], {}, ("Too many levels of symbolic links",))
    expect_line("serve", [M, "--config", str(nowhere)], {}, ("a link to nothing",))
    expect_line("serve", [M, "--config", "a" * 300], {}, ("File name too long",))


def test_an_overridden_value_is_checked_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("page-size: 17")
    expect_line("serve", [M, "--config", str(path), "--page-size", "16"], {}, ("page-size in", "17"))
    expect_line("serve", [M, "--page-size", "16"], {"DELTASERVE_PAGE_SIZE": "18"}, ("DELTASERVE_PAGE_SIZE: 18",))


def test_a_secret_given_by_mistake_is_not_repeated() -> None:
    with pytest.raises(ConfigError) as caught:
        load("serve", "", [M, "--api-key", "secret-of-mine"], {})
    assert "secret-of-mine" not in str(caught.value)


@pytest.mark.parametrize("flag", ["--bogus", "--no-such-thing", "--x"])
def test_nothing_is_suggested_where_nothing_is_near(flag: str) -> None:
    with pytest.raises(ConfigError, match=r"unknown flag; `deltaserve serve --help-all` lists those there are$"):
        load("serve", "", [M, flag], {})


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (
            ["--transfer-tls", "tcp,self"],
            "--transfer-tls tcp,self: with --disaggregation-transfer-backend mooncake it is",
        ),
        (
            ["--transfer-devices", "a,b"],
            "--transfer-devices a,b: mooncake listens on one interface, or add --transfer-tls",
        ),
        (["--transfer-devices", "a,b", "--transfer-tls", "rdma"], None),
    ],
)
def test_what_a_transport_refuses_is_told_beside_what_is_missing(argv: list[str], line: str | None) -> None:
    flags = [M, "--disaggregation-transfer-backend", "mooncake", "--trusted-data-network=10.0.0.0/8", *argv]
    told = list(lacking("decode", load("decode", "", flags, {}).settings))
    assert NO_CLUSTER_KEY in told
    assert sum("mooncake" in one for one in told) == (line is not None)
    assert line is None or any(one.startswith(line) for one in told)


def test_the_corpus_is_large() -> None:
    assert len(BAD_FLAGS) + len(BAD_VARIABLES) + len(BAD_FILES) >= 120


def expect_line(command: str, argv: list[str], environ: dict[str, str], parts: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        load(command, "", argv, environ)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 400
    for part in parts:
        assert part in message
