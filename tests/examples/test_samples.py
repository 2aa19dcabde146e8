"""README shows what programs print."""

from __future__ import annotations

import pytest

from docs.samples import PAGE, SAMPLES, fill, masked, samples_in


def test_every_sample_is_on_the_page() -> None:
    """And filling it with what it shows changes nothing."""
    page = PAGE.read_text()
    assert samples_in(page).keys() == SAMPLES.keys()
    assert fill(page, samples_in(page)) == page


@pytest.mark.parametrize("name", ["train", "mismatch"])
def test_sample_is_what_is_printed(name: str) -> None:
    """Run `python -m docs.samples` after a change of what is printed."""
    assert masked(SAMPLES[name]()) == masked(samples_in(PAGE.read_text())[name])
