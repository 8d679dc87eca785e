"""A picture drawn once is what altair would have drawn each time."""

import altair as alt
import numpy as np
import pandas as pd
import pytest
from altair.utils.mimebundle import spec_to_mimebundle

from lib.picture import Picture


def chart(rows):
    frame = pd.DataFrame({"x": np.arange(rows), "y": np.sin(np.arange(rows)), "arm": "äß"})
    return alt.Chart(frame, width=171, height=93, title="a title").mark_point().encode(x="x", y="y", color="arm")


@pytest.mark.parametrize("scale", [1, 1.5])
def test_a_file_is_altairs_own(tmp_path, scale):
    chart(40).save(tmp_path / "own.png", scale_factor=scale)
    assert Picture(chart(40)).png(scale) == (tmp_path / "own.png").read_bytes()


def test_a_cell_shows_what_it_would_show_of_the_chart():
    assert Picture(chart(40))._repr_mimebundle_() == spec_to_mimebundle(chart(40).to_dict(), format="png", mode="vega-lite")
    assert repr(Picture(chart(40))) == repr(chart(40)) == "alt.Chart(...)"


def test_a_chart_of_many_rows_is_drawn():
    assert Picture(chart(6000)).png(1)[:4] == b"\x89PNG"
