"""A chart drawn once: altair's way draws it anew for the cell and for the file, which takes most of a figure's time."""

import struct

import altair as alt
import vl_convert


class Picture:
    """The drawing of an Altair chart. A cell that ends with it shows a PNG, as it would with the chart and `plots.setup`."""

    def __init__(self, chart: alt.TopLevelMixin):
        self.chart = chart
        version = "_".join(alt.SCHEMA_VERSION.split(".")[:2])  # as vl-convert writes it: v6_1
        with alt.data_transformers.disable_max_rows():
            spec = chart.to_dict()
        self.svg = vl_convert.vegalite_to_svg(spec, vl_version=version)

    def png(self, scale: float) -> bytes:
        """The drawing as a PNG file of `scale` pixels a point."""
        return vl_convert.svg_to_png(self.svg, scale=scale)

    def __repr__(self) -> str:
        return repr(self.chart)

    def _repr_mimebundle_(self, include=None, exclude=None) -> tuple[dict, dict]:
        png = self.png(1)
        width, height = struct.unpack(">2I", png[16:24])  # of a PNG's first chunk
        return {"image/png": png}, {"image/png": {"width": float(width), "height": float(height)}}
