"""Parts of the steps of a run, as a zoomed chart asks for them."""

from __future__ import annotations

from zstore.serve.views.columns import row_of
from zstore.serve.views.steptable import StepTable


def test_a_range_of_steps_is_its_rows_or_fewer_points() -> None:
    table = StepTable()
    for step in range(1, 101):
        table.add(row_of({"step": step, "loss": float(step)}))
    assert table.columns(points=50, after_step=9, until_step=20)["step"] == [float(step) for step in range(10, 21)]
    few = table.columns(points=2, after_step=10, until_step=20)
    assert (few["step"], few["loss"], few["loss_min"], few["loss_max"]) == ([15, 20], [13, 18], [11, 16], [15, 20])
    assert table.columns(points=9, after_step=50, until_step=50)["step"] == []
    assert table.columns(points=9, after_step=50, until_step=20)["step"] == []
    assert table.columns(points=9, after_step=98)["step"] == [99, 100]
