import pytest
from support.rehearsing import workload

from legato.core import files


@pytest.fixture
def chain(tmp_path):
    files.write(tmp_path / "chain.json", workload())
    return tmp_path / "chain.json"
