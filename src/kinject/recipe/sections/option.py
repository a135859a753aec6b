"""One field of a section. `kinject.recipe.check` reads its metadata and `schema` publishes them.

The metadata of a field: `help`; the bounds of a number (of each number in a list or mapping): `min`
or `above` (excluded), `max` or `below` (excluded), and `or`, one value outside of them; `nonempty`;
`words`, a mapping whose keys are the allowed texts of a list; `path`, an input that must exist when
a verb runs ("file"; "files", which may be a folder; "documents" and "model", which may be folders
or names on the hub), or an "output"; `holds`, a text into which a secret is easily put ("url", or
"variable" for the name of one): a secret there is refused.
"""

from __future__ import annotations

from dataclasses import field
from typing import Any


def option(default: Any = ..., **metadata: Any) -> Any:
    """Return a dataclass field with the metadata that `kinject.recipe.check` reads."""
    return field(metadata=metadata) if default is ... else field(default=default, metadata=metadata)
