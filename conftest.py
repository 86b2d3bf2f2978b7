"""Set-up shared by the unit tests and by nbval, which runs every notebook in a kernel of its own.

Everything here is set through the environment, so that the notebooks' kernels inherit it.
"""

import os
import tempfile

import pytest


def pytest_configure(config):
    config.addinivalue_line("markers", "smollm2: needs the real chat model (fetched once, 98 MB)")
    # A test run must not touch the learner's own guesses and progress.
    folder = tempfile.TemporaryDirectory(prefix="kvcourse-results-", ignore_cleanup_errors=True)
    config.add_cleanup(folder.cleanup)
    os.environ["KVCOURSE_RESULTS"] = folder.name
    os.environ.setdefault("TQDM_MININTERVAL", "5")
    if "PYTEST_XDIST_WORKER_COUNT" in os.environ:  # in a worker; what the controller sets, the workers would inherit
        share_cores(int(os.environ["PYTEST_XDIST_WORKER_COUNT"]))


def share_cores(workers: int) -> None:
    """Give each worker its share of the cores: two workers with two threads each on two cores only get in each
    other's way."""
    threads = max(1, (os.cpu_count() or 1) // workers)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))


def pytest_collection_finish(session):
    """Fetch the real model once, before anything that needs it; a second worker waits for the first."""
    if session.config.option.collectonly or not any(map(needs_model, session.items)):
        return
    from kvcourse.weights.fetch import fetch

    try:
        fetch("smollm2-135m")
    except (OSError, RuntimeError) as error:
        pytest.exit(str(error), returncode=1)


def needs_model(item) -> bool:
    """Notebook cells do, and tests that say so."""
    return type(item).__name__ == "IPyNbCell" or item.get_closest_marker("smollm2") is not None


@pytest.fixture(scope="session")
def smollm2():
    """The real chat model, loaded in float32 on the CPU."""
    import kvcourse as kv

    return kv.load_model("smollm2-135m", dtype="float32", device="cpu")
