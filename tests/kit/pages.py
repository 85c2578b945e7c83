"""What a value shows in a notebook, taken apart."""

from __future__ import annotations

import base64
import re
from xml.etree import ElementTree

from dataflow.display import Displayed


def page_of(value: Displayed) -> str:
    """The HTML that a notebook shows; its plain text is the `repr`."""
    bundle = value._repr_mimebundle_()
    assert bundle["text/plain"] == repr(value)
    return bundle["text/html"]


def pictures_of(page: str) -> list[str]:
    """The words of each picture on a page; each has to be an SVG that can be parsed."""
    found = re.findall(r"data:image/svg\+xml;base64,([^\"]*)", page)
    roots = [ElementTree.fromstring(base64.b64decode(each)) for each in found]
    return [" ".join(filter(None, map(str.strip, root.itertext()))) for root in roots]
