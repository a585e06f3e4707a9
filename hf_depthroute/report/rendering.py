"""Templates as HTML pages of one file, which loads nothing."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent


def render(template: str, **values: Any) -> str:
    """The page that `template`, a file in this folder, makes of `values`; text is escaped."""
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {
        "fixed": "{:.{}f}".format,
        "percent": "{:.{}%}".format,
        "signed": "{:+.{}f}".format,
        "or_dash": lambda value, digits=2: "-" if value is None else f"{value:.{digits}f}",
    }
    # Sorted keys would move layers; and JSON has no NaN, which nothing here may hold.
    environment.policies["json.dumps_kwargs"] = {"sort_keys": False, "allow_nan": False, "separators": (",", ":")}
    style, script = ((_HERE / name).read_text(encoding="utf-8") for name in ("style.css", "page.js"))
    hashes = [base64.b64encode(hashlib.sha256(part.encode()).digest()).decode() for part in (style, script)]
    policy = (  # nothing is loaded, and no other script or style runs, not even from text that was not escaped
        f"default-src 'none'; style-src 'sha256-{hashes[0]}'; script-src 'sha256-{hashes[1]}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    return environment.get_template(template).render(
        style=Markup(style), script=Markup(script), policy=policy, **values
    )
