"""Counts of requests, in the text format of Prometheus, and the access log.

[Note: labels]
`part` is the first part of a path if the service has it, else `page`, so that nobody who asks for many paths makes many series.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping

from starlette.types import Scope

from .._version import __version__

_log = logging.getLogger("zstore.serve.access")

_PARTS = frozenset({"api", "assets", "healthz", "metrics", "weights", "xarray", "zarr"})
_METHODS = frozenset({"DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"})
_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, float("inf"))


class Metrics:
    """Counts requests. Used on the event loop alone."""

    def __init__(self) -> None:
        self._requests = Counter[tuple[str, str, int]]()
        self._within = Counter[tuple[str, float]]()
        self._seconds = defaultdict[str, float](float)
        self._sent = Counter[str]()
        self.under_way = 0

    def ended(self, scope: Scope, status: int, sent_bytes: int, seconds: float) -> None:
        """Count a request that was answered, and log it."""
        first = scope["path"].lstrip("/").partition("/")[0]
        part, method = first if first in _PARTS else "page", scope["method"] if scope["method"] in _METHODS else "other"
        self._requests[part, method, status] += 1
        self._seconds[part] += seconds
        self._sent[part] += sent_bytes
        for most in _BUCKETS_S:
            self._within[part, most] += seconds <= most
        if _log.isEnabledFor(logging.INFO):
            client, at = scope.get("client") or ("-",), time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            path = scope["raw_path"].decode("ascii", "backslashreplace").replace('"', "%22")
            _log.info('%s %s "%s %s" %d %d %.3f', at, client[0], method, path, status, sent_bytes, seconds)

    def lines(self, gauges: Mapping[str, float]) -> Iterator[str]:
        """Yield all counts, with `gauges` of the service by their names."""
        yield "# TYPE zstore_requests_total counter"
        for (part, method, status), count in self._requests.items():
            yield f'zstore_requests_total{{part="{part}",method="{method}",status="{status}"}} {count}'
        yield "# TYPE zstore_sent_bytes_total counter"
        for part, count in self._sent.items():
            yield f'zstore_sent_bytes_total{{part="{part}"}} {count}'
        yield "# TYPE zstore_request_seconds histogram"
        for (part, most), count in self._within.items():
            yield f'zstore_request_seconds_bucket{{part="{part}",le="{most if most < 1e9 else "+Inf"}"}} {count}'
        for part, seconds in self._seconds.items():
            yield f'zstore_request_seconds_sum{{part="{part}"}} {seconds}'
            yield f'zstore_request_seconds_count{{part="{part}"}} {self._within[part, _BUCKETS_S[-1]]}'
        version = f'zstore_info{{version="{__version__}"}}'
        for name, value in {version: 1, "zstore_requests_under_way": self.under_way, **gauges}.items():
            yield f"# TYPE {name.partition('{')[0]} gauge"
            yield f"{name} {value}"
