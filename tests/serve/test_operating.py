"""The service as examples/service sets it up: behind nginx and Caddy, and under systemd."""

from __future__ import annotations

import logging
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import urllib3

from bench.serve_process import free_port, started
from tests.checkpoint.checkpoints import save_arrays
from tests.serve.answers import TOKEN
from tests.serve.conftest import Serve
from tests.serve.sample import RUN_ID, JournalWriter, arrays_of
from tests.serve.test_connections import make_certificate
from tests.waiting import until
from zstore.remote.upload import upload_checkpoint

EXAMPLES = Path(__file__).parents[2] / "examples" / "service"
NAME = "runs.example.org"


def nginx(folder: Path, port: int, target: int) -> list[str]:
    text = (EXAMPLES / "nginx.conf").read_text()
    text = text.replace("443", f"127.0.0.1:{port}").replace("8700", str(target))
    text = text.replace(f"/etc/ssl/{NAME}.pem", str(folder / "certificate.pem"))
    text = text.replace(f"/etc/ssl/{NAME}.key", str(folder / "key.pem"))
    paths = " ".join(
        f"{kind}_temp_path {folder}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    config = folder / "nginx.conf"
    config.write_text(
        f"daemon off; pid {folder}/nginx.pid; error_log {folder}/error.log;\n"
        f"events {{}}\nhttp {{ access_log off; {paths}\n{text}\n}}\n"
    )
    return [shutil.which("nginx", path="/usr/sbin:/usr/bin") or "nginx", "-c", str(config), "-p", str(folder)]


def caddy(folder: Path, port: int, target: int) -> list[str]:
    text = (EXAMPLES / "Caddyfile").read_text().replace("8700", str(target))
    files = f"tls {folder}/certificate.pem {folder}/key.pem"
    text = text.replace(f"{NAME} {{", f"https://127.0.0.1:{port}, https://{NAME}:{port} {{\n\t{files}")
    config = folder / "Caddyfile"
    config.write_text("{\n\tadmin off\n\tauto_https disable_redirects\n}\n" + text)
    return ["caddy", "run", "--config", str(config), "--adapter", "caddyfile"]


@pytest.mark.parametrize("proxy", [nginx, caddy])
def test_behind_a_proxy(
    proxy: object, tmp_path: Path, serve: Serve, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = proxy.__name__  # type: ignore[attr-defined]
    if shutil.which(name, path="/usr/sbin:/usr/bin") is None:
        pytest.skip(f"needs {name}: apt-get install --yes {name}")
    runs, folder = tmp_path / "runs", tmp_path / "proxy"
    folder.mkdir()
    path = save_arrays(runs / "one", arrays_of(), run_id="run")
    journal = JournalWriter(runs / "one" / f"journal-{RUN_ID}.jsonl", 1000.0)
    journal.start(RUN_ID)
    journal.steps(3)
    service = serve(runs, token=TOKEN, allow_actions=True, hosts=(NAME,), trusted_proxies=("127.0.0.1",))
    certificate, _ = make_certificate(folder)
    port = free_port()
    monkeypatch.setenv("XDG_DATA_HOME", str(folder))  # of Caddy
    with (
        started(proxy(folder, port, int(service.rpartition(":")[2])), port),  # type: ignore[operator]
        urllib3.PoolManager(ca_certs=str(certificate), retries=False, timeout=60) as http,
    ):
        base, bearer = f"https://127.0.0.1:{port}", {"Authorization": f"Bearer {TOKEN}"}
        assert http.request("GET", f"{base}/healthz").data == b"ok\n"
        assert http.request("GET", f"{base}/api/runs").status == 401
        assert http.request("GET", f"{base}/api/runs", headers=bearer).json()["runs"][0]["name"] == "one"
        if name == "nginx":  # Caddy chooses the site by the name in TLS, which an address has not
            assert http.request("GET", f"{base}/api/runs", headers={**bearer, "Host": NAME}).status == 200
        # Who asks is who the proxy says, and not who the client says.
        with caplog.at_level(logging.INFO, "zstore.serve.access"):
            http.request("GET", f"{base}/healthz?who", headers={"X-Forwarded-For": "9.9.9.9"})
            until(lambda: "/healthz" in caplog.text)
        assert " 127.0.0.1 " in caplog.text
        assert "9.9.9.9" not in caplog.text
        # A part of a file.
        file = next(each for each in path.rglob("c.*") if each.stat().st_size > 200)
        url = f"{base}/zarr/one/{file.relative_to(runs / 'one')}"
        part = http.request("GET", url, headers={**bearer, "Range": "bytes=100-199"})
        assert (part.status, part.data) == (206, file.read_bytes()[100:200])
        # Live steps, at once.
        events = http.request("GET", f"{base}/api/runs/one/events", headers=bearer, preload_content=False)
        lines = iter(events)
        assert next(lines).startswith(b"retry:")
        journal.steps(1)
        assert any(b'"last_step":4' in line for line in lines)
        events.close()
        # And a checkpoint that comes in.
        upload_checkpoint(path, f"{base}/two", {"token": TOKEN, "ca_certs": str(certificate)})
        assert {each.name for each in (runs / "two").iterdir()} >= {path.name}


def test_the_unit_is_sound(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd-analyze")
    text = (EXAMPLES / "zstore.service").read_text()
    unit = tmp_path / "zstore.service"
    unit.write_text(text.replace("/opt/zstore/bin/zstore", "/bin/true"))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", unit],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_options_of_the_examples_are_those_of_the_command() -> None:
    command = [sys.executable, "-m", "zstore", "serve", "--help"]
    told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    for file in ("zstore.service", "Dockerfile"):
        (start,) = re.findall(r"^(?:ExecStart|ENTRYPOINT).*", (EXAMPLES / file).read_text(), re.MULTILINE)
        used = re.findall(r"--[a-z-]+", start)
        assert used
        assert set(used) <= set(re.findall(r"--[a-z-]+", told))
