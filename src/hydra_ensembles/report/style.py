"""The style sheet of the report: one for light and dark, phone and desk."""

CSS = """
:root { color-scheme: light dark;
  --paper:#fbfaf7; --card:#ffffff; --ink:#1c2330; --soft:#475467; --muted:#6b7482; --rule:#e3e0d8; --empty:#eceae4;
  --shade:#1c23302b; --accent:#2563c9; --good:#14765f; --bad:#b3401a; --over:#e08a9c; --under:#a9d5c6;
  --id:#2563c9; --ood:#d1571b; --on-strong:#ffffff;
  --c0:#2563c9; --c1:#d1571b; --c2:#14866d; --c3:#9a3fb5; --c4:#a67c00; --c5:#c62f6b; --c6:#4f7a1a; --c7:#5c6773; }
@media (prefers-color-scheme: dark) { :root {
  --paper:#13161b; --card:#1a1e25; --ink:#e8eaef; --soft:#b6bfcc; --muted:#8f99a8; --rule:#2a303a; --empty:#262c35;
  --shade:#00000090; --accent:#7fb0ff; --good:#4fd1b0; --bad:#ff9d73; --over:#b8495f; --under:#2f6d5d;
  --id:#6ea8ff; --ood:#ff9a5c; --on-strong:#10141a;
  --c0:#6ea8ff; --c1:#ff9a5c; --c2:#3ecfaf; --c3:#d18bf0; --c4:#e6c04a; --c5:#ff7fae; --c6:#a5cf5f; --c7:#aab4c0; } }
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0; background: var(--paper); color: var(--ink); line-height: 1.55;
  font: 1rem/1.55 ui-sans-serif, system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "DejaVu Sans",
  sans-serif; }
main, header, footer { max-width: 70rem; margin: 0 auto; padding: 0 clamp(1rem, 4vw, 2.5rem); }
header { padding-top: clamp(2rem, 6vw, 4rem); }
h1, h2 { font-family: "Iowan Old Style", "Palatino Linotype", Palatino, Georgia, "DejaVu Serif", serif;
  font-weight: 600; letter-spacing: -.012em; line-height: 1.15; text-wrap: balance; overflow-wrap: anywhere; }
h1 { font-size: clamp(1.9rem, 5.5vw, 3rem); margin: .2rem 0 .6rem; }
h2 { font-size: clamp(1.35rem, 3.4vw, 1.8rem); margin: 0 0 .35rem; }
h3 { font-size: 1rem; margin: 1.4rem 0 .5rem; overflow-wrap: anywhere; }
section { margin: clamp(2.2rem, 6vw, 3.6rem) 0; }
.eyebrow { color: var(--accent); font-size: .8rem; font-weight: 600; letter-spacing: .08em; text-transform:
  uppercase; margin: 0; }
.meta { color: var(--muted); margin: 0; font-size: .92rem; font-weight: 400; }
.lead { font-size: clamp(1.06rem, 2.4vw, 1.28rem); line-height: 1.6; max-width: 46rem; margin: 1.6rem 0 0;
  overflow-wrap: anywhere; }
.lead { font-weight: 600; }
.lead span { font-weight: 400; font-size: .86em; color: var(--soft); display: block; margin-top: .5em; }
.how { color: var(--soft); max-width: 46rem; margin: 0 0 1.2rem; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.2rem, 1fr)); gap: .8rem; margin: 1.8rem 0
  0; padding: 0; list-style: none; }
.tiles li { background: var(--card); border: 1px solid var(--rule); border-radius: .8rem; padding: .85rem 1rem; }
.tiles .what { color: var(--muted); font-size: .8rem; display: block; }
.tiles .number { font-size: 1.65rem; font-weight: 620; letter-spacing: -.02em; font-variant-numeric: tabular-nums;
  line-height: 1.25; }
.tiles .delta { font-size: .84rem; font-variant-numeric: tabular-nums; display: block; color: var(--muted); }
.delta.better { color: var(--good); } .delta.worse { color: var(--bad); }
.stack { display: grid; gap: 1rem; }
.scroll { overflow-x: auto; background: linear-gradient(90deg, var(--card) 40%, transparent) 0 0 / 3rem 100% local,
  linear-gradient(270deg, var(--card) 40%, transparent) 100% 0 / 3rem 100% local,
  linear-gradient(90deg, var(--shade), transparent) 0 0 / .8rem 100% scroll,
  linear-gradient(270deg, var(--shade), transparent) 100% 0 / .8rem 100% scroll, var(--card);
  background-repeat: no-repeat; border: 1px solid var(--rule); border-radius: .8rem; }
.scroll:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; }
table { border-collapse: collapse; width: 100%; font-size: .84rem; font-variant-numeric: tabular-nums; }
th, td { padding: .5rem .55rem; text-align: right; white-space: nowrap; }
thead th { color: var(--muted); font-weight: 550; font-size: .76rem; }
thead tr.groups th { text-align: center; padding-bottom: 0; color: var(--soft); }
thead tr.groups th.span { border-bottom: 1px solid var(--rule); }
tbody tr { border-top: 1px solid var(--rule); }
tbody th { text-align: left; font-weight: 550; }
th:first-child { position: sticky; left: 0; background: var(--card); text-align: left; padding-left: 1rem; }
td:last-child, thead th:last-child { padding-right: 1rem; }
tr.focus th, tr.focus td { background: color-mix(in srgb, var(--accent) 9%, var(--card)); }
td strong { font-weight: 750; } td u { text-underline-offset: .2em; text-decoration-thickness: 1.5px; }
.note { color: var(--muted); font-size: .82rem; margin: .6rem 0 0; overflow-wrap: anywhere; }
.grid { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fill, minmax(min(100%, 19.5rem), 1fr)); }
.two { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fill, minmax(min(100%, 24rem), 1fr)); }
.row { display: flex; flex-wrap: wrap; gap: 1rem; } .row > .grow { flex: 1 1 18rem; }
figure { margin: 0; background: var(--card); border: 1px solid var(--rule); border-radius: .8rem; padding: .9rem
  .9rem .75rem; min-width: 0; }
figure svg { display: block; width: 100%; height: auto; overflow: visible; }
figure.agreement { flex: 1 1 14rem; }
.grid > .scroll th, .grid > .scroll td { padding: .42rem .38rem; font-size: .78rem; }
.grid > .scroll th:first-child { padding-left: .8rem; } .grid > .scroll th { white-space: normal; }
figcaption { color: var(--soft); font-size: .84rem; margin-top: .55rem; font-variant-numeric: tabular-nums;
  overflow-wrap: anywhere; }
svg text { font-family: inherit; fill: var(--muted); font-size: 10.5px; font-variant-numeric: tabular-nums; }
svg .axis-title { font-size: 11px; fill: var(--soft); } svg .bar-name, svg .bar-value { font-size: 11.5px; fill:
  var(--ink); }
svg .bar-value { fill: var(--soft); } svg .cell { font-size: 12px; fill: var(--ink); } svg .cell.strong { fill:
  var(--on-strong); }
svg line.grid { stroke: var(--rule); stroke-width: 1; } svg line.axis { stroke: var(--muted); stroke-width: 1; }
.key { display: inline-block; width: .7em; height: .7em; border-radius: .2em; margin: 0 .35em 0 0; vertical-align:
  baseline; }
figcaption .key:not(:first-child) { margin-left: .9em; }
.chips { display: flex; flex-wrap: wrap; gap: .3rem 1.1rem; margin: 0 0 1rem; padding: 0; list-style: none; color:
  var(--soft); font-size: .88rem; }
.chip { white-space: nowrap; margin-right: .7rem; } .chips b { color: var(--ink); }
.shelf { display: grid; gap: .8rem; grid-template-columns: repeat(auto-fill, minmax(6.2rem, 1fr)); margin: 0;
  padding: 0; list-style: none; }
.shelf.texts { grid-template-columns: repeat(auto-fill, minmax(min(100%, 16rem), 1fr)); }
.shelf li { background: var(--card); border: 1px solid var(--rule); border-radius: .8rem; overflow: hidden;
  font-size: .8rem; }
.shelf img { display: block; width: 100%; aspect-ratio: 1; object-fit: cover; background: var(--empty); }
.shelf p { margin: 0; padding: .45rem .6rem .55rem; overflow-wrap: anywhere; line-height: 1.35; }
.shelf p.text { font-size: .88rem; padding-bottom: 0; } .shelf .said { color: var(--soft); }
.shelf b { font-weight: 600; } .right { color: var(--good); } .wrong { color: var(--bad); }
details { margin-top: 1rem; } summary { cursor: pointer; color: var(--accent); font-weight: 550; padding: .3rem 0; }
details > .scroll { margin-top: .6rem; }
dl { display: grid; grid-template-columns: minmax(7rem, max-content) 1fr; gap: .35rem 1.2rem; margin: 1rem 0 0;
  font-size: .88rem; }
dt { color: var(--muted); } dd { margin: 0; overflow-wrap: anywhere; }
footer { color: var(--muted); font-size: .82rem; padding-top: 1.2rem; padding-bottom: 3rem; border-top: 1px solid
  var(--rule); }
@media (max-width: 30rem) { dl { grid-template-columns: 1fr; gap: 0; } dd { margin-bottom: .5rem; } }
@media print { body { background: #fff; } section, figure { break-inside: avoid; } .scroll { overflow: visible; } }
"""
