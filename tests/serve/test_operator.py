"""What whoever runs the service sees of it: health, metrics as Prometheus reads them, and the access log."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
import urllib3
from prometheus_client import parser

from tests.serve.conftest import Serve
from tests.serve.sample import RUN, make_sample
from tests.waiting import until

TOKEN = "correct-horse-battery-staple"
BEARER = {"Authorization": f"Bearer {TOKEN}"}
# The grammar of the text format: docs of Prometheus, "Exposition formats".
LINE = re.compile(r'# TYPE \w+ (counter|gauge|histogram)|\w+(\{(\w+="[^"\\\n]*",?)+\})? [0-9.e+-]+')


def scrape(base: str, http: urllib3.PoolManager) -> dict[str, float]:
    text = http.request("GET", f"{base}/metrics", headers=BEARER).data.decode()
    assert all(LINE.fullmatch(line) for line in text.splitlines()), text
    return {
        name: float(value) for name, _, value in (line.rpartition(" ") for line in text.splitlines() if line[0] != "#")
    }


def test_requests_are_counted(tmp_path: Path, serve: Serve, http: urllib3.PoolManager) -> None:
    make_sample(tmp_path)
    base = serve(tmp_path, token=TOKEN)
    statuses = []
    sent = 0
    for path in ("/api/runs", f"/api/runs/{RUN}", "/api/runs/nobody"):
        answer = http.request("GET", base + path, headers=BEARER)
        statuses.append(answer.status)
        sent += len(answer.data)
    assert statuses == [200, 200, 404]
    assert http.request("GET", f"{base}/api/runs").status == 401
    found = scrape(base, http)
    assert found['zstore_requests_total{part="api",method="GET",status="200"}'] == 2
    assert found['zstore_requests_total{part="api",method="GET",status="404"}'] == 1
    assert found['zstore_requests_total{part="api",method="GET",status="401"}'] == 1
    assert found['zstore_sent_bytes_total{part="api"}'] >= sent
    buckets = [value for name, value in found.items() if name.startswith('zstore_request_seconds_bucket{part="api"')]
    assert buckets == sorted(buckets)
    assert buckets[-1] == found['zstore_request_seconds_count{part="api"}'] == 4
    assert (found["zstore_runs"], found["zstore_uploads"], found["zstore_requests_under_way"]) == (2, 0, 1)
    assert found["process_resident_memory_bytes"] > 10**7


def test_the_parser_of_prometheus_reads_them(tmp_path: Path, serve: Serve, http: urllib3.PoolManager) -> None:
    base = serve(tmp_path)
    for path in ("/", "/api", "/a%22b%0a", "/zarr/x/y"):
        http.request("GET", base + path)
    text = http.request("GET", f"{base}/metrics").data.decode()
    families = {family.name: family for family in parser.text_string_to_metric_families(text)}
    assert {name: families[name].type for name in ("zstore_requests", "zstore_request_seconds", "zstore_info")} == {
        "zstore_requests": "counter",
        "zstore_request_seconds": "histogram",
        "zstore_info": "gauge",
    }
    assert {sample.labels["part"] for sample in families["zstore_requests"].samples} == {"page", "api", "zarr"}
    assert sum(sample.value for sample in families["zstore_requests"].samples) == 4


def test_health_is_for_anybody_and_metrics_are_not(tmp_path: Path, serve: Serve, http: urllib3.PoolManager) -> None:
    base = serve(tmp_path, token=TOKEN)
    assert (http.request("GET", f"{base}/healthz").status, http.request("GET", f"{base}/healthz").data) == (
        200,
        b"ok\n",
    )
    assert http.request("GET", f"{base}/metrics").status == 401


def test_the_access_log(
    tmp_path: Path, serve: Serve, http: urllib3.PoolManager, caplog: pytest.LogCaptureFixture
) -> None:
    def logged() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.name == "zstore.serve.access"]

    base = serve(tmp_path, token=TOKEN)
    with caplog.at_level(logging.INFO, "zstore.serve.access"):
        http.request("GET", f"{base}/api/runs?x=1", headers=BEARER)
        http.request("GET", f"{base}/%22%20200", headers=BEARER)
        http.request("GET", f"{base}/healthz")
        until(lambda: len(logged()) == 3)  # the last is logged once its client has the answer
    lines = logged()
    pattern = r'\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ 127\.0\.0\.1 "GET (\S+)" (\d+) \d+ \d+\.\d{3}'
    found = [re.fullmatch(pattern, line) for line in lines]
    expected = [("/api/runs", "400"), ("/%22%20200", "404"), ("/healthz", "200")]
    assert [one.groups() if one else None for one in found] == expected
    assert TOKEN not in "".join(lines)
