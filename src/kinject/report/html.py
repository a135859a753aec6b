"""The frame of every HTML page: a template that escapes what it is given, under a policy that lets nothing run or be fetched."""

from __future__ import annotations

import base64
import hashlib
import re
from typing import Any

_STYLE = re.compile(r"<style>(.*?)</style>", re.DOTALL)
_POLICY = "@POLICY@"


def render_template(name: str, **values: Any) -> str:
    """Return a template of this folder as one page.

    Its policy allows the page's one style sheet, by its hash, and style attributes (figures have them), nothing else: no
    script, image, font, frame, form or address. Browsers that know no ``style-src-elem`` go by ``style-src``.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("kinject.report", "templates"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    page = str(environment.get_template(name).render(**values, policy=_POLICY)).lstrip()
    sheet = _STYLE.search(page)
    assert sheet is not None, "every page has its style sheet"
    digest = base64.b64encode(hashlib.sha256(sheet[1].encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; style-src-elem 'sha256-{digest}'; style-src-attr 'unsafe-inline'; "
        "base-uri 'none'; form-action 'none'"
    )
    return page.replace(_POLICY, policy, 1)
