"""Drawings without what nobody sees: digits below a tenth of a pixel, empty groups, and what siblings say alike."""

import re
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

SVG = "http://www.w3.org/2000/svg"
NUMBER = re.compile(r"-?\d*\.\d{2,}(?:e-?\d+)?")
NUMBERS = ("transform", "d", "x", "y", "x2", "y2", "width", "height")
INHERITED = (
    "fill", "fill-opacity", "font-family", "font-size", "font-weight", "stroke", "stroke-opacity", "stroke-width",
    "text-anchor",
)  # fmt: skip
DEFAULTS = {"opacity": "1", "pointer-events": "none", "font-weight": "normal", "x2": "0", "y2": "0"}
"""Of a drawing that answers nothing."""

ElementTree.register_namespace("", SVG)


def slim(svg: str) -> str:
    """The same drawing in fewer bytes; the words and what they are called stay."""
    root = ElementTree.fromstring(svg)
    _clean(root)
    _lift(root)
    return ElementTree.tostring(root, encoding="unicode")


def _clean(element: Element) -> None:
    """Drop what has no effect, and round."""
    for name, value in [*element.attrib.items()]:
        if name == "class" or DEFAULTS.get(name) == value:
            del element.attrib[name]
        elif name in NUMBERS:
            element.set(name, NUMBER.sub(lambda number: f"{float(number[0]):.1f}".removesuffix(".0"), value))
    if element.get("transform") == "translate(0,0)":
        del element.attrib["transform"]
    for child in [*element]:
        _clean(child)
        if _is_unseen(child):
            element.remove(child)


def _is_unseen(element: Element) -> bool:
    kind = element.tag.removeprefix(f"{{{SVG}}}")
    if kind == "path":
        return element.get("display") == "none" or not ({"fill", "stroke"} & element.attrib.keys())
    return kind == "g" and not len(element) and "aria-label" not in element.attrib


def _lift(element: Element) -> None:
    """Give a group what all its children say alike of their looks."""
    for child in element:
        _lift(child)
    for name in INHERITED:
        values = {child.get(name) for child in element}
        if len(element) > 1 and len(values) == 1 and None not in values and element.tag == f"{{{SVG}}}g":
            for child in element:
                element.set(name, child.attrib.pop(name))
