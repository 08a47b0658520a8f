"""The report as one page: self-contained HTML with its pictures drawn as SVG. Pure: rows in, text out.

Nothing is fetched when it is opened, and every name that comes from a cluster is escaped.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from html import escape
from typing import Any

_COLOURS = ("#3b6fb6", "#d9822b", "#4c9a5a", "#b0485a", "#7a5fa8", "#3a9ba5", "#a08a3c", "#77808c")
_OTHERS = "others"
_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 720, 220, 72, 26
_LABELS, _LETTER = 5, 10.0  # below an axis; how wide a letter is on a narrow page, where they are largest

_STYLE = """
:root { color-scheme: light dark; --ink: #1d2530; --soft: #66707d; --line: #d9dee5; --back: #ffffff; --card: #f6f8fa }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ee; --soft: #9aa4b1; --line: #39424e; --back: #14181e; --card: #1c222a }
}
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 1180px; padding: 24px 16px 48px; background: var(--back); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif }
h1 { font-size: 22px; margin: 0 } h2 { font-size: 15px; margin: 0 0 8px }
p.sub { color: var(--soft); margin: 2px 0 20px }
.tiles, .cards { display: grid; gap: 14px; grid-template-columns: repeat(auto-fit, minmax(min(100%, 170px), 1fr)) }
.cards { grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); margin-top: 14px }
.tile, .card { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 12px 14px;
  min-width: 0 }
.tile b { display: block; font-size: 22px; font-variant-numeric: tabular-nums }
.tile span { color: var(--soft) }
svg { width: 100%; height: auto; display: block } svg text { fill: var(--soft); font-size: 12px }
.scroll { overflow-x: auto }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th, td { text-align: left; padding: 3px 10px 3px 0; white-space: nowrap } th { color: var(--soft); font-weight: 500 }
td.n, th.n { text-align: right } .legend { color: var(--soft); margin: 6px 0 0 }
.legend span { display: inline-block; margin-right: 12px }
.legend i { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 5px }
.meter { background: var(--line); border-radius: 4px; height: 8px; min-width: 90px }
.meter i { display: block; height: 8px; border-radius: 4px; background: #3b6fb6 } .meter i.full { background: #b0485a }
@media (max-width: 560px) {
  svg text { font-size: 18px } table { font-size: 13px } .meter { min-width: 34px }
  th, td { padding-right: 6px } td:first-child { white-space: normal; overflow-wrap: anywhere; min-width: 64px }
  td.n, th.n { white-space: normal; overflow-wrap: normal }
}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All that the page shows. Amounts in dollars; ``by_*`` rows are (bucket, name, dollars)."""

    title: str
    about: str
    total: Decimal
    burn_usd_per_hour: Decimal
    forecast: Decimal
    saved: Decimal
    wasted: Decimal
    unpriced: int
    by_hour: Sequence[tuple[str, str, Decimal]]
    by_team: Sequence[tuple[str, str, Decimal]]
    by_provider: Sequence[tuple[str, str, Decimal]]
    waste: Sequence[tuple[str, Decimal]]
    forecasts: Sequence[Mapping[str, Any]]
    budgets: Sequence[Mapping[str, Any]]
    workloads: Sequence[tuple[str, Decimal, Decimal]]


def page(report: Report) -> str:
    """The page."""
    tiles = (
        ("spent", money(report.total)),
        ("an hour now", money(report.burn_usd_per_hour)),
        ("by the month's end, as it runs", money(report.forecast)),
        ("saved by Spot", money(report.saved)),
        ("paid while nothing ran", money(report.wasted)),
        ("rows without a price", str(report.unpriced)),
    )
    cards = (
        _card("Burn over time, dollars an hour", _bars(report.by_hour)),
        _card("Cost by team", _bars(report.by_team)),
        _card("Cost by provider", _bars(report.by_provider)),
        _card("Waste, by reason", _rows(("reason", "$"), [(name, money(usd)) for name, usd in report.waste])),
        _card(
            "Dearest workloads",
            _rows(
                ("workload", "GPU hours", "$"),
                [(name, f"{hours:.2f}", money(usd)) for name, hours, usd in report.workloads],
            ),
        ),
        _card(
            "To the end of the month",
            _rows(
                ("namespace", "spent", "as it runs", "as last week"),
                [
                    (
                        str(row["namespace"]),
                        *(money(row[name]) for name in ("spent", "run_rate_forecast", "trend_forecast")),
                    )
                    for row in report.forecasts
                ],
            ),
        ),
        _card("Budgets", _budgets(report.budgets)),
    )
    shown = "".join(
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>' for name, value in tiles
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(report.title)}</title><style>{_STYLE}</style></head><body>"
        f'<h1>{escape(report.title)}</h1><p class="sub">{escape(report.about)}</p>'
        f'<div class="tiles">{shown}</div><div class="cards">{"".join(cards)}</div></body></html>\n'
    )


def money(amount: Decimal | None) -> str:
    """Dollars for people: cents, and more digits where cents would say nothing."""
    if amount is None:
        return "unknown"
    digits = 2 if abs(amount) >= 1 or not amount else 4
    return f"${amount:,.{digits}f}"


def _axis(amount: Decimal) -> str:
    """Dollars beside an axis, where there is room for six characters."""
    for least, letter in ((1_000_000, "M"), (1_000, "k")):
        if amount >= least:
            scaled = amount / least
            return f"${scaled:.0f}{letter}" if scaled >= 100 else f"${scaled:.1f}{letter}"
    return f"${amount:.0f}" if amount >= 100 else money(amount)[:6]


def _card(title: str, body: str) -> str:
    return f'<section class="card"><h2>{escape(title)}</h2>{body}</section>'


def _rows(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return '<p class="legend">nothing yet</p>'
    head = "".join(
        f'<th class="{"n" if index else ""}">{escape(text)}</th>' for index, text in enumerate(titles)
    )
    body = "".join(
        "<tr>"
        + "".join(
            f'<td class="{"n" if index else ""}">{escape(cell or "none")}</td>'
            for index, cell in enumerate(row)
        )
        + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'


def _budgets(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return '<p class="legend">there are none</p>'
    body = ""
    for row in rows:
        ratio = row["used_ratio"]
        full = ' class="full"' if ratio >= 1 else ""
        width = f"{float(min(ratio, Decimal(1))) * 100:.1f}%"
        body += (
            f"<tr><td>{escape(row['name'])}</td><td class='n'>{money(row['spent'])} of {money(row['amount'])}</td>"
            f"<td>{escape(row['period'])}</td>"
            f"<td><div class='meter'><i{full} style='width:{width}'></i></div></td>"
            f"<td>{escape(row['label_action'] or row['action'])}</td></tr>"
        )
    return f'<div class="scroll"><table>{body}</table></div>'


def _bars(rows: Sequence[tuple[str, str, Decimal]]) -> str:
    """Stacked bars, one a bucket, with the dearest names apart and the rest together."""
    if not rows:
        return '<p class="legend">nothing yet</p>'
    sums: dict[str, Decimal] = {}
    for _, name, usd in rows:
        sums[name] = sums.get(name, Decimal(0)) + usd
    kept = sorted(sums, key=lambda name: -sums[name])[: len(_COLOURS) - 1]
    names = kept + ([_OTHERS] if len(sums) > len(kept) else [])
    buckets: dict[str, dict[str, Decimal]] = {}
    for bucket, name, usd in rows:
        stack = buckets.setdefault(bucket, {})
        key = name if name in kept else _OTHERS
        stack[key] = stack.get(key, Decimal(0)) + max(usd, Decimal(0))
    most = max(sum(stack.values(), Decimal(0)) for stack in buckets.values()) or Decimal(1)
    step = (_WIDTH - _LEFT) / len(buckets)
    drawn = []
    for index, (bucket, stack) in enumerate(buckets.items()):
        top = float(_HEIGHT - _BOTTOM)
        left = _LEFT + index * step
        for name in names:
            usd = stack.get(name, Decimal(0))
            height = float(usd / most) * (_HEIGHT - _BOTTOM - 12)
            top -= height
            if height > 0:
                drawn.append(
                    f'<rect x="{left + step * 0.1:.1f}" y="{top:.1f}" width="{step * 0.8:.1f}" height="{height:.1f}"'
                    f' fill="{_COLOURS[names.index(name)]}"><title>{escape(bucket)} {escape(name or "none")}'
                    f" {money(usd)}</title></rect>"
                )
    every = -(-len(buckets) // _LABELS)
    shown = {
        _LEFT + index * step + step / 2: bucket[5:] if len(bucket) > len("2026-03") else bucket
        for index, bucket in enumerate(buckets)
        if index % every == 0
    }
    labels = "".join(
        f'<text x="{x:.1f}" y="{_HEIGHT - 8}" text-anchor="middle">{escape(text)}</text>'
        for x, text in shown.items()
        if x + len(text) * _LETTER / 2 <= _WIDTH  # one that goes over the edge is cut off, and is left out
    )
    scale = "".join(
        f'<text x="{_LEFT - 8}" y="{y:.0f}" text-anchor="end">{_axis(most * part / 2)}</text>'
        for part, y in ((2, 16), (1, (_HEIGHT - _BOTTOM + 12) / 2 + 4), (0, _HEIGHT - _BOTTOM))
    )
    legend = "".join(
        f'<span><i style="background:{_COLOURS[index]}"></i>{escape(name or "none")}</span> '
        for index, name in enumerate(names)
    )
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">{scale}'
        f'<line x1="{_LEFT}" x2="{_WIDTH}" y1="{_HEIGHT - _BOTTOM}" y2="{_HEIGHT - _BOTTOM}" stroke="var(--line)"/>'
        f'{"".join(drawn)}{labels}</svg><p class="legend">{legend}</p>'
    )
