from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: no test asks the hub for anything

import hypothesis
import pytest
import torch

# A busy machine must not fail a property.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

# With more threads a float32 product is split differently, and its bits differ from those of one thread: what holds
# two runs against each other bit for bit computes with one.
torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _own_folders(tmp_path_factory: pytest.TempPathFactory):
    """No test converts weights into the cache of whoever runs it, or plans by what was measured there."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("OVERSPILL_CACHE_DIR", str(tmp_path_factory.mktemp("converted")))
        environment.delenv("OVERSPILL_CACHE_LIMIT", raising=False)
        environment.setenv("OVERSPILL_MACHINE_DIR", str(tmp_path_factory.mktemp("machines")))
        yield


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory):
    """A function from a name in tiny_models.TINY to the folder of that checkpoint, written once a session."""
    from tiny_models import maker

    return maker(tmp_path_factory.mktemp("tiny"))
