"""Tables of a report as HTML; wide ones scroll inside their frame, the first column stays in sight."""

from collections.abc import Sequence
from html import escape
from itertools import groupby

from .compare import Cell, Column, Comparison


def comparison_table(comparison: Comparison, focus: str, columns: Sequence[Column], label: str) -> str:
    """Some columns of a comparison: best in `<strong>`, second best in `<u>`, the method in focus shaded."""
    groups = [(group, len(list(members))) for group, members in groupby(columns, key=lambda column: column.group)]
    positions = [comparison.columns.index(column) for column in columns]
    body = "".join(
        f'<tr{_focus(row.name == focus)}><th scope="row">{escape(row.name)}</th>'
        + "".join(f"<td>{_marked(row.cells[position])}</td>" for position in positions)
        + "</tr>"
        for row in comparison.rows
    )
    return _table(label, groups, [column.heading for column in columns], body)


def plain_table(
    label: str,
    groups: Sequence[tuple[str, int]],
    headings: Sequence[str],
    rows: Sequence[tuple[str, Sequence[str]]],
    corner: str,
) -> str:
    """A table of text: group headings with their widths, headings, and named rows under a heading of their own."""
    body = "".join(
        f'<tr><th scope="row">{escape(name)}</th>' + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"
        for name, cells in rows
    )
    return _table(label, groups, headings, body, corner)


def _table(
    label: str, groups: Sequence[tuple[str, int]], headings: Sequence[str], body: str, corner: str = "Method"
) -> str:
    upper = ""
    if any(group for group, _ in groups):
        cells = "".join(
            f'<th colspan="{width}" scope="colgroup"{_span(group)}>{escape(group)}</th>' for group, width in groups
        )
        upper = f'<tr class="groups"><th></th>{cells}</tr>'
    lower = "".join(f'<th scope="col">{escape(heading)}</th>' for heading in headings)
    return (
        f'<div class="scroll" role="region" aria-label="{escape(label)}" tabindex="0"><table><thead>{upper}'
        f'<tr><th scope="col">{escape(corner)}</th>{lower}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def _marked(cell: Cell) -> str:
    words = escape(cell.text)
    return {"best": f"<strong>{words}</strong>", "second": f"<u>{words}</u>", "": words}[cell.rank]


def _span(group: str) -> str:
    return ' class="span"' if group else ""


def _focus(here: bool) -> str:
    return ' class="focus"' if here else ""
