"""What the options that a line names refuse, before anything is read or opened."""

from pathlib import Path

import pytest

from deltaserve.core.branches import DRAFTS
from deltaserve.launch.lacking import lacking, model_problem
from deltaserve.model.drafts.draft_algorithm import HeadFolder, draft_algorithm
from deltaserve.settings.flags.merge import load

NEEDS = "--speculative-algorithm {}: needs the head's folder, --speculative-draft-model-path"
READS_NONE = "--speculative-draft-model-path draft: --speculative-algorithm {} reads none"
REFUSED = {
    (HeadFolder.NONE, True): READS_NONE,
    (HeadFolder.REQUIRED, False): NEEDS,
}


@pytest.mark.parametrize("has_folder", [False, True])
@pytest.mark.parametrize("name", ["off", *DRAFTS])
def test_a_draft_algorithm_reads_a_folder_or_none(tmp_path: Path, name: str, has_folder: bool) -> None:
    flags = ["--speculative-algorithm", name, *(["--speculative-draft-model-path", "draft"] if has_folder else [])]
    settings = load("serve", "", [str(tmp_path), *flags], {}).settings
    wanted = REFUSED.get((draft_algorithm(name).folder, has_folder))
    assert list(lacking("serve", settings)) == ([] if wanted is None else [wanted.format(name)])


@pytest.mark.parametrize(
    ("path", "is_of_the_hub"), [("nofolder/model", True), ("nofolder/x.gguf", False), ("nofolder/x.GGUF", False)]
)
def test_a_name_of_the_hub_comes_with_the_line_that_gets_it(path: str, is_of_the_hub: bool) -> None:
    problem = model_problem(path)
    assert problem is not None
    assert ("hf download" in problem) is is_of_the_hub
