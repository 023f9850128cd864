"""Models and references, made once a session."""

from __future__ import annotations

import logging
from functools import cache
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from equivalence.alone import AloneOutputs
    from equivalence.references import References
    from equivalence.test_number_formats import Format


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folder of the tiny model of that family."""
    from equivalence.tiny_models import save_tiny_model

    return cache(lambda family: save_tiny_model(family, tmp_path_factory.mktemp(family)))


@pytest.fixture(scope="session")
def tiny_references(tiny_folder: Callable[[str], Path]) -> Callable[[str, int], References]:
    """Return the references of the tiny model of that family, for so many outputs."""
    from equivalence.references import References

    return cache(lambda family, num_outputs: References(tiny_folder(family), num_outputs))


@pytest.fixture(scope="session")
def alone_in(tiny_folder: Callable[[str], Path]) -> Callable[[str, Format, int], AloneOutputs]:
    """Return what the fused decoder gives each prompt alone: of a family, in a format, for so many outputs."""
    from equivalence.alone import AloneOutputs

    def make(family: str, form: Format, num_outputs: int) -> AloneOutputs:
        return AloneOutputs(tiny_folder(family), num_outputs, model_impl="pagefold", threads=1, **form.settings)

    return cache(make)


@pytest.fixture(autouse=True)
def _quiet_injected_failures() -> Iterator[None]:
    """A step that fails because the suite wants it is no news: keep its traceback out of the log."""
    from equivalence.harsh_runner import InjectedError

    def is_news(record: logging.LogRecord) -> bool:
        return not (record.exc_info and isinstance(record.exc_info[1], InjectedError))

    log = logging.getLogger("pagefold.engine.engine")
    log.addFilter(is_news)
    yield
    log.removeFilter(is_news)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tiny tensors gain nothing from a second thread, and lose much when its core is busy.

    An engine that is built here asks torch for a thread a core: that is not heard. Kernels have their teams as ever.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "set_num_threads", lambda num_threads: None)
        yield
    torch.set_num_threads(before)
