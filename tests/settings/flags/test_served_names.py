"""`--served-model-name` takes several names, as vLLM's does: after spaces, after commas (llama.cpp), or as a list."""

from pathlib import Path

import pytest

from deltaserve.core.errors import ConfigError
from deltaserve.settings.flags.merge import load

_ENV = {"DELTASERVE_MODEL_PATH": "m"}
_LINES: tuple[tuple[list[str], dict[str, str]], ...] = (
    (["m", "--served-model-name", "a", "b"], {}),
    (["m", "--served-model-name", "a", "b", "--port", "8000"], {}),
    (["m", "--served_model_name=a,b"], {}),
    (["m", "-a", "a,b"], {}),
    (["m", "--alias", "a", "b"], {}),
    (["--model-path", "m", "--served-model-name", "a", "b"], {}),
    (["--served-model-name", "a", "b", "m"], {}),  # vLLM's parser takes m for a name, and then misses the model
    (["--served-model-name", "a,b", "m"], {}),
    (["--served-model-name", "a", "b"], _ENV),
    (["m"], {"DELTASERVE_SERVED_MODEL_NAME": "a,b"}),
)


@pytest.mark.parametrize(("argv", "environ"), _LINES, ids=lambda value: " ".join(value))
def test_several_names_beside_a_model(argv: list[str], environ: dict[str, str]) -> None:
    model = load("serve", "x", argv, environ).settings.model
    assert (model.model_path, model.served_model_name) == ("m", "a,b")


@pytest.mark.parametrize("text", ["served-model-name: [a, b]", "served-model-name: a,b", "alias: [a, b]"])
def test_several_names_in_a_file(text: str, tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(text)
    settings = load("serve", "x", ["m", "--config", str(tmp_path / "s.yaml")], {}).settings
    assert settings.model.served_model_name == "a,b"


def test_one_name_before_the_model_is_the_models() -> None:
    model = load("serve", "x", ["--served-model-name", "a", "m", "--port", "8000"], {}).settings.model
    assert (model.model_path, model.served_model_name) == ("m", "a")


@pytest.mark.parametrize("value", ["[]", "[a, 1]", "[a b]", "{a: b}", "',a'", "[[a]]"])
def test_what_is_no_list_of_names_is_refused(value: str, tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(f"served-model-name: {value}")
    with pytest.raises(ConfigError, match=r"served-model-name in .*: must be names of letters, digits"):
        load("serve", "x", ["m", "--config", str(tmp_path / "s.yaml")], {})
