"""What the plots of a record show: every point, told apart, and nothing covered."""

import pytest
from conftest import needed

from mla_index.bench.record import Row

needed("matplotlib")

from mla_index.bench import plot  # noqa: E402

UNIFORM = "uniform"
DECODE, PREFILL = "trace decode", "trace prefill"


def record(*rows):
    return {
        "date": "2026-01-02T03:04:05+00:00",
        "source_hash": "0123456789abcdef" * 4,
        "device": {"type": "cuda", "name": "a card", "host": "a host"},
        "rows": [row.as_dict() for row in rows],
    }


def timed(workload, counts, providers=("triton", "cupy")):
    """Times of `remap` and of the copy, at so many rows."""
    who = [("copy", "torch"), *(("remap", provider) for provider in providers)]
    return [
        Row("gpu_us", 1.0 + place + count, operation, provider, workload, count, 2048, 1)
        for place, (operation, provider) in enumerate(who)
        for count in counts
    ]


def lines(figure):
    """The lines of the first panel that have points, by T."""
    found = figure.axes[0].lines
    return {(line.get_label(), *line.get_xdata()): line for line in found if len(line.get_xdata())}


def look(line):
    return line.get_color(), line.get_linestyle(), line.get_marker(), line.get_markerfacecolor()


def legend(axis):
    return [text.get_text() for text in axis.get_legend().get_texts()]


@pytest.mark.parametrize(
    "rows", [timed(UNIFORM, [8]), [*timed(DECODE, [2, 4]), *timed(PREFILL, [8192])]]
)
def test_a_single_point_has_a_marker(rows):
    found = lines(plot.draw(record(*rows)))
    single = [line for (_, *counts), line in found.items() if len(counts) == 1]
    assert len(single) == 3  # the copy among them
    assert all(line.get_marker() not in ("", "None", None) for line in single)


def test_the_copy_is_a_bare_line_where_it_can_be():
    found = lines(plot.draw(record(*timed(UNIFORM, [1, 2]))))
    assert found["copy", 1, 2].get_marker() == ""
    assert found["copy", 1, 2].get_linestyle() == "--"


def test_decode_and_prefill_are_told_apart():
    figure = plot.draw(record(*timed(DECODE, [2, 256]), *timed(PREFILL, [8192])))
    found = lines(figure)
    for who in ("triton", "cupy"):
        decode, prefill = look(found[who, 2, 256]), look(found[who, 8192])
        assert decode[0] == prefill[0]
        assert all(one != other for one, other in zip(decode[1:], prefill[1:], strict=True))
    shown = legend(figure.axes[0])
    assert sorted(shown) == sorted({"triton", "cupy", "copy", DECODE, PREFILL})
    assert legend(plot.draw(record(*timed(UNIFORM, [1, 2]))).axes[0]) == ["triton", "cupy", "copy"]


def test_no_legend_covers_anything():
    """Bars to the very end of their axis, and lines in every corner."""
    operations = ("remap", "remap_counts", "dcp_filter", "everything")
    providers = ("triton", "cupy", "numba", "torch", "composition")
    hosts = [
        Row("host_us", 10.0, operation, provider, UNIFORM, 32, 2048, 1)
        for operation in operations
        for provider in (*providers[:3], "auto")
    ]
    times = [*timed(DECODE, [2, 256], providers), *timed(PREFILL, [8192], providers)]
    figure = plot.draw(record(*times, *hosts))
    figure.canvas.draw()
    drawn = [axis for axis in figure.axes if axis.get_legend()]
    assert len(drawn) == 2
    for axis in drawn:
        box = axis.get_legend().get_window_extent()
        assert not box.overlaps(axis.get_window_extent())
        assert not box.overlaps(axis.xaxis.label.get_window_extent())
        assert box.x0 >= 0
        assert box.x1 <= figure.bbox.x1
        assert box.y0 >= 0
