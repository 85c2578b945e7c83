"""How pictures look: one style sheet with the colours of light and dark pages.

Owns: CSS and its custom properties. Does not own: which words and shapes there are (svg.py).

All rules are below `.dataflow`, so that a picture changes nothing else on its page. A page that has
a switch of its own sets `data-theme` of its root to `light` or `dark`.
"""

from __future__ import annotations

from collections.abc import Mapping

from dataflow.draw.colours import DARK, LIGHT

SANS = "Inter, 'Helvetica Neue', Helvetica, Arial, 'Liberation Sans', sans-serif"
MONO = "'SF Mono', Menlo, Consolas, 'DejaVu Sans Mono', 'Liberation Mono', monospace"

_RULES = """
.dataflow{color-scheme:light dark;font-family:var(--df-font,SANS)}
.dataflow text{fill:var(--df-ink);font-size:11px}
.dataflow .paper{fill:var(--df-paper)}
.dataflow .title{font-size:19px;font-weight:600}
.dataflow .panel{fill:var(--df-panel);stroke:var(--df-rule)}
.dataflow .region,.dataflow .begins,.dataflow .soft{fill:var(--df-soft)}
.dataflow .name{font-size:13px;font-weight:600}
.dataflow .call,.dataflow .facts,.dataflow .note{font-family:var(--df-mono,MONO)}
.dataflow .facts{fill:var(--df-soft)}
.dataflow .note{fill:var(--df-note)}
.dataflow .box{fill:var(--df-host-fill);stroke:var(--df-host-line);stroke-width:1.2}
.dataflow .folded .box{stroke-dasharray:none}
.dataflow .under{fill:var(--df-host-fill);stroke:var(--df-host-line)}
.dataflow .state .drum{fill:var(--df-state-fill);stroke:var(--df-state-line);stroke-width:1.2}
.dataflow .wire{fill:none;stroke:var(--df-wire);stroke-width:1.5}
.dataflow .head{fill:var(--df-wire);stroke:none}
.dataflow .hit{fill:none;stroke:transparent;stroke-width:12}
.dataflow .weight .wire{stroke:var(--df-state-line);stroke-dasharray:5 4}
.dataflow .weight .head{fill:var(--df-state-line)}
.dataflow .ports{fill:var(--df-soft)}
.dataflow .weight .ports{fill:var(--df-state-text)}
.dataflow .ports,.dataflow .region,.dataflow .cut text,.dataflow .halo{paint-order:stroke;
stroke:var(--df-panel);stroke-width:3px;stroke-linejoin:round}
.dataflow .cut line{stroke:var(--df-cut);stroke-dasharray:7 5}
.dataflow .cut text{fill:var(--df-cut-text)}
.dataflow .worker .frame{fill:var(--df-worker);stroke:var(--df-worker-line)}
.dataflow .worker text{font-weight:600}
.dataflow .worker .soft{font-weight:400}
.dataflow .edge{outline:none}
.dataflow .node:focus-visible{outline:none}
.dataflow .node:focus-visible .box{stroke:var(--df-focus);stroke-width:3}
.dataflow .edge:focus-visible .wire{stroke:var(--df-focus);stroke-width:3}
.dataflow .axis{stroke:var(--df-rule)}
.dataflow .chart{fill:none;stroke-width:1.6}
"""


def sheet() -> str:
    """The style element of a picture."""
    light, dark = _properties(LIGHT), _properties(DARK)
    rules = [
        f".dataflow{{{light}}}",
        f"@media (prefers-color-scheme:dark){{.dataflow{{{dark}}}}}",
        # After the media rule: a page's own switch wins over the system's.
        f':root[data-theme="light"] .dataflow{{{light}}}',
        f':root[data-theme="dark"] .dataflow{{{dark}}}',
        _RULES.replace("SANS", SANS).replace("MONO", MONO).strip(),
    ]
    # Boxes of host work have the colours of `.box`.
    for kind in ("source", "decode", "forward", "train", "evaluate"):
        rules.append(_rule_of_work(kind))
    return "<style>\n" + "\n".join(rules) + "\n</style>"


def _properties(colours: Mapping[str, str]) -> str:
    properties = [f"--df-{name}:{colour}" for name, colour in colours.items()]
    return ";".join(properties)


def _rule_of_work(kind: str) -> str:
    fill, line = f"fill:var(--df-{kind}-fill)", f"stroke:var(--df-{kind}-line)"
    return f".dataflow .kind-{kind} .box{{{fill};{line}}}"
