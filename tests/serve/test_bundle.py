"""The page as one file: what is put into it, and what is refused."""

from __future__ import annotations

import base64
import hashlib
import json
import re

import pytest

from zstore.serve.report.bundle import Inside, bundle, one_file, read_assets

PAGE = """<!doctype html>
<html><head>
<title>zstore</title>
<link rel="icon" href="/assets/icon.svg">
<link rel="stylesheet" href="/assets/style.css">
<script src="/assets/theme.js"></script>
<script type="module" src="/assets/main.js"></script>
</head><body>
<main id="main"></main>
</body></html>
"""
ASSETS = {
    "icon.svg": b"<svg/>",
    "style.css": b"p { margin: 0 }",
    "report.css": b"p { padding: 0 }",
    "theme.js": b"document.title;",
    "main.js": b'import { f as g } from "./parts/f.js";\ng();\n',
    "parts/f.js": b'import * as all from "../all.js";\nexport function f() {\n  return all.one;\n}\n',
    "all.js": b"export const one = 1;\nconst two = 2;\n/*\nexport const three = 3;\n*/\nexport { two as zwei };\n",
}
HOSTILE = "</script><script>alert(1)</script><!-- \u2028"


def test_the_file_holds_everything_and_its_policy_allows_nothing_else() -> None:
    data = {"/api/runs": json.dumps({"name": HOSTILE}, ensure_ascii=False)}
    text = one_file(PAGE, ASSETS, Inside(data=data, title="<b>", note=HOSTILE))
    assert "/assets/" not in text
    assert "<title>&lt;b&gt;</title>" in text
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]+)"', text)
    assert policy is not None
    assert policy[1].startswith("default-src 'none'; ")
    allowed = set(re.findall(r"'sha256-([^']+)'", policy[1]))
    inside = re.findall(r"<(?:script|style)>(.*?)</(?:script|style)>", text, re.DOTALL)
    assert {base64.b64encode(hashlib.sha256(each.encode()).digest()).decode() for each in inside} == allowed
    assert len(inside) == 4
    kept = re.search(r'<script type="application/json" id="report-data">(.*?)</script>', text, re.DOTALL)
    assert kept is not None
    assert json.loads(kept[1]) == {"/api/runs": {"name": HOSTILE}}
    assert text.index('id="report-data"') < text.index("$main_js")


def test_modules_come_after_those_that_they_import() -> None:
    text = bundle(ASSETS, "main.js")
    places = [text.index(f"const {name} = ") for name in ("$all_js", "$parts_f_js", "$main_js")]
    assert places == sorted(places)
    assert "return { one, zwei: two };" in text
    assert "const { f: g } = $parts_f_js;" in text
    assert not re.search(r"^(import|export)\b", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("code", "what"),
    [
        ('import { f } from "./parts/f.js";\nexport let x = 1;\n', "export let"),
        ("export default 1;\n", "export default"),
        ("// a\nexport const { a } = { a: 1 };\n", "export const {"),
        ('import f from "./parts/f.js";\n', "expected `import"),
        ('const f = await import("./parts/f.js");\n', "import"),
        ("console.log(import.meta.url);\n", "import.meta"),
        ('import { main } from "./main.js";\n', "circle"),
        ('import { x } from "./missing.js";\n', "missing.js"),
        ('import { x } from "zarr";\n', "begins with"),
        ('const x = "</script>";\n', "ends its element"),
    ],
)
def test_what_one_script_cannot_do_is_refused(code: str, what: str) -> None:
    with pytest.raises(ValueError, match=re.escape(what)):
        one_file(PAGE, ASSETS | {"main.js": code.encode()}, Inside(data={}, title="", note=""))


def test_the_page_of_the_service_can_be_one_file() -> None:
    assets = read_assets()
    text = one_file(assets["index.html"].decode(), assets, Inside(data={}, title="zstore", note="nothing"))
    missing = [name for name in assets if name.endswith(".js") and f"// {name}\n" not in text and name != "theme.js"]
    assert not missing
