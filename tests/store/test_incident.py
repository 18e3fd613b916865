"""What ranks make of each other's reports, and which connections lie between them."""

from __future__ import annotations

import socket

import pytest

from zstore.ranks.connections import Connections
from zstore.ranks.incident import ABSENT_S, SAME_S, Outcome, RankReport, explain, judge

LATER_S = SAME_S + 1


def at(entered: int, **more: object) -> RankReport:
    return RankReport(at="forward", entered=entered, **more)  # type: ignore[arg-type]


FAILED = {"cause": "ValueError: x", "details": "a traceback"}


@pytest.mark.parametrize(
    ("reports", "waited_s", "outcome"),
    [
        ({0: at(3, **FAILED), 1: at(3, **FAILED)}, 0.0, Outcome.SOUND),
        # The same error, but after another number of collectives: the next ones would not fit together.
        ({0: at(3, **FAILED), 1: at(4, **FAILED)}, 0.0, Outcome.BROKEN),
        # Rank 1 waits where rank 0 will never come.
        ({0: at(3, **FAILED), 1: at(4)}, 0.0, Outcome.BROKEN),
        # Rank 1 computes, and may come to the same error yet.
        ({0: at(3, **FAILED), 1: at(3)}, 0.0, None),
        ({0: at(3, **FAILED), 1: at(3)}, LATER_S, Outcome.BROKEN),
        ({0: at(3, **FAILED)}, 0.0, None),
        ({0: at(3, **FAILED)}, ABSENT_S, Outcome.BROKEN),
        ({0: at(3, lost="closed"), 1: at(2)}, 0.0, Outcome.BROKEN),
        ({0: at(3, final=True, **FAILED), 1: at(3, **FAILED)}, 0.0, Outcome.BROKEN),
        # Who has left needs nobody.
        ({0: at(3, **FAILED), 1: at(3, left=True)}, 0.0, Outcome.SOUND),
        ({0: at(3, lost="closed"), 1: at(3, left=True)}, 0.0, Outcome.BROKEN),
    ],
)
def test_the_outcome_follows_from_the_reports_of_all_ranks(
    reports: dict[int, RankReport], waited_s: float, outcome: Outcome | None
) -> None:
    assert judge(reports, 2, waited_s) is outcome


@pytest.mark.parametrize(
    ("reports", "said"),
    [
        ({0: at(3), 1: at(2, **FAILED)}, r"rank 1 of 2 failed \(rank 1 in forward: ValueError: x\)"),
        ({0: at(3, lost="closed")}, r"rank 1 of 2 failed \(rank 1 is gone\)"),
        ({0: at(3, lost="closed"), 1: at(3, left=True)}, r"rank 1 closed its engine"),
        # As after a timeout of the process group.
        (
            {0: at(3, lost="timed out"), 1: at(2, details="its stack")},
            r"(?s)rank 1 did not come to .*forward.*its stack",
        ),
        ({0: at(3, lost="a cable fell out"), 1: at(3)}, r"rank 0 in forward: a cable fell out"),
    ],
)
def test_the_error_names_the_rank_that_failed_and_why(reports: dict[int, RankReport], said: str) -> None:
    error = explain(reports, 2, 0, "step, unit 'blocks.1', collective all_gather", "no answer")
    assert "rank 0 stops with it, in step, unit 'blocks.1', collective all_gather" in str(error)
    with pytest.raises(type(error), match=said):
        raise error


def test_only_connections_between_ranks_are_cut() -> None:
    server = socket.create_server(("127.0.0.1", 0))
    with (
        server,
        socket.create_connection(server.getsockname()) as ours,
        server.accept()[0] as theirs,
        socket.create_connection(server.getsockname()) as other,
        server.accept()[0] as its_end,
    ):
        mine = (*ours.getsockname(), *ours.getpeername())
        connections = Connections()
        assert mine in connections.listed()
        assert mine not in Connections(server.getsockname()[1]).listed()
        connections.learn([connections.listed(), [[*mine[2:], *mine[:2]]]], 0)
        assert len(connections) == 1
        connections.cut()
        assert theirs.recv(1) == b""
        other.sendall(b"x")
        assert its_end.recv(1) == b"x"
