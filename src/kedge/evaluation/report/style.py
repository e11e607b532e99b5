"""The look of the report: one style sheet, light and dark, wide and narrow, on screen and on paper."""

SERIES = 6  # colours for curves, --s1 to --s6: told apart by people who see few colours, in light and in dark

CSS = """
:root {
  color-scheme: light dark;
  --bg: #fdfcfa; --fg: #1f262d; --muted: #59636e; --line: #dedad2; --panel: #f4f1eb; --mark: #dcebf5; --link: #0b5c8a;
  --id: #0072b2; --ood: #d55e00;
  --s1: #0072b2; --s2: #d55e00; --s3: #007a5a; --s4: #b0568b; --s5: #8a6d00; --s6: #5f6670;
}
@media screen and (prefers-color-scheme: dark) {
  :root {
    --bg: #14181c; --fg: #e7e4dd; --muted: #a0aab3; --line: #343c44; --panel: #1c2228; --mark: #1f3d52; --link: #85c8f2;
    --id: #56b4e9; --ood: #ff9155;
    --s1: #56b4e9; --s2: #ff9155; --s3: #2fc796; --s4: #e79cc6; --s5: #e8cb55; --s6: #b4bac0;
  }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body {
  margin: 0; background: var(--bg); color: var(--fg);
  font: 1.0625rem/1.6 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "Noto Sans", Arial, sans-serif;
}
header, main, footer { max-width: 70rem; margin: 0 auto; padding: 0 1.5rem; }
header { padding-top: 4rem; }
h1, h2 { font-family: "Iowan Old Style", "Palatino Linotype", Palatino, Georgia, serif; font-weight: 600; }
h1, h2, h3 { line-height: 1.2; text-wrap: balance; overflow-wrap: anywhere; }
h1 { font-size: clamp(2rem, 5vw, 2.9rem); margin: 0 0 1.25rem; letter-spacing: -0.01em; }
h2 { font-size: 1.65rem; margin: 0 0 0.75rem; }
h3 { font-size: 1.1rem; margin: 2rem 0 0.5rem; }
p, dl { max-width: 44rem; margin: 0 0 1rem; overflow-wrap: anywhere; }
a { color: var(--link); text-underline-offset: 0.15em; }
section { margin: 4rem 0 0; scroll-margin-top: 1rem; }
.finding { font-size: 1.3rem; line-height: 1.5; }
.note, figcaption, caption, .small { color: var(--muted); font-size: 0.9rem; line-height: 1.5; }
nav ul { display: flex; flex-wrap: wrap; gap: 0.35rem 1.25rem; margin: 2rem 0 0; padding: 0.9rem 0; list-style: none;
  border: solid var(--line); border-width: 1px 0; font-size: 0.95rem; }
footer { padding-top: 4rem; padding-bottom: 4rem; }

.scroll { overflow-x: auto; position: relative; margin: 1.25rem 0; }
table { border-collapse: separate; border-spacing: 0; min-width: 100%; font-size: 0.95rem;
  font-variant-numeric: tabular-nums; }
caption { text-align: left; padding: 0 0 0.6rem; }
caption span { position: sticky; left: 0; display: inline-block; max-width: min(44rem, calc(100vw - 2.2rem)); }
th, td { padding: 0.5rem 0.5rem; text-align: right; vertical-align: baseline; white-space: nowrap; }
thead th { border-bottom: 1px solid var(--fg); font-weight: 600; line-height: 1.3; vertical-align: bottom; }
tbody th, tbody td { border-bottom: 1px solid var(--line); }
th:first-child, .left { text-align: left; }
tr > th:first-child { position: sticky; left: 0; background: var(--bg); padding-left: 0; font-weight: 600;
  white-space: normal; overflow-wrap: anywhere; min-width: 11.5rem; max-width: 16rem; }
th small, td small { display: block; color: var(--muted); font-weight: 400; font-size: 0.8rem; }
thead th { max-width: 11rem; white-space: normal; overflow-wrap: break-word; }
.best { background: var(--mark); border-radius: 0.3rem; padding: 0.1rem 0.4rem; font-weight: 700; }
td .best { margin: 0 -0.4rem; }
.differs { color: var(--ood); font-weight: 600; }
.hidden { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); white-space: nowrap; }

figure { margin: 0; min-width: 0; }
figcaption { margin-top: 0.4rem; overflow-wrap: anywhere; }
figcaption strong { color: var(--fg); font-weight: 600; }
svg { max-width: 100%; height: auto; display: block; color: var(--fg); }
svg * { stroke-linejoin: round; }
svg text { font-family: inherit; }
.panels { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 18rem), 1fr)); gap: 2rem 1.75rem;
  margin: 1.5rem 0; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); gap: 2rem 2.5rem;
  margin: 1.5rem 0; }
.panels figure > svg, .pair figure > svg { width: 100%; }
.pair > figure { max-width: 34rem; }
.legend { display: flex; flex-wrap: wrap; gap: 0.3rem 1.2rem; margin: 0.75rem 0; padding: 0; list-style: none;
  font-size: 0.9rem; }
.legend li { display: flex; align-items: center; gap: 0.45rem; overflow-wrap: anywhere; }
.legend svg { flex: none; }

.gallery { display: grid; grid-template-columns: repeat(auto-fill, minmax(9.5rem, 1fr)); gap: 1.5rem 1rem;
  margin: 1rem 0 2rem; }
.gallery figcaption { font-size: 0.8rem; line-height: 1.4; }
img { width: 96px; height: 96px; object-fit: contain; image-rendering: pixelated; background: var(--panel);
  border-radius: 0.25rem; outline: 1px solid var(--line); outline-offset: -1px; display: block; }
table img { width: 56px; height: 56px; display: inline-block; margin-bottom: 0.2rem; }
tbody tr:has(img) > * { vertical-align: middle; }
.anchors { display: flex; flex-wrap: wrap; gap: 0.75rem; margin: 1rem 0; padding: 0; list-style: none; }

.terms { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 20rem), 1fr)); gap: 1.1rem 2.5rem;
  max-width: none; font-size: 0.95rem; }
dt { font-weight: 600; }
dd { margin: 0.1rem 0 0; }
.record { display: grid; grid-template-columns: minmax(7rem, max-content) 1fr; gap: 0.4rem 1.5rem; max-width: none;
  font-size: 0.95rem; }
.record dd { margin: 0; min-width: 0; overflow-wrap: anywhere; }
code, pre { font: 0.85rem/1.5 ui-monospace, "SF Mono", Menlo, Consolas, monospace; overflow-wrap: anywhere; }
pre { background: var(--panel); padding: 1rem; border-radius: 0.4rem; white-space: pre-wrap; margin: 0.5rem 0; }
details { margin: 1rem 0; }
.record details { margin: 0; }
summary { cursor: pointer; color: var(--link); }

@media (max-width: 40rem) {
  body { font-size: 1rem; }
  header, main, footer { padding-left: 1.1rem; padding-right: 1.1rem; }
  header { padding-top: 2.25rem; }
  section { margin-top: 3rem; }
  .finding { font-size: 1.15rem; }
  .record { grid-template-columns: 1fr; gap: 0; }
  .record dt { margin-top: 0.8rem; }
  .gallery { grid-template-columns: repeat(auto-fill, minmax(7.5rem, 1fr)); }
  tr > th:first-child { min-width: 6.5rem; max-width: 7.5rem; padding-right: 0.5rem; }
}
@media print {
  @page { margin: 15mm 14mm; }
  html { font-size: 11.5px; }
  body { font-size: 1rem; background: none; }
  header, main, footer { max-width: none; padding: 0; }
  nav { display: none; }
  section { margin-top: 2rem; }
  footer { margin-top: 2rem; }
  h1, h2, h3, h2 + p, h3 + p, section > .legend { break-after: avoid; }
  p, figure, tr, .scroll, .terms > div { break-inside: avoid; }
  .scroll { overflow: visible; }
  th, td { padding: 0.3rem 0.4rem; }
  tr > th:first-child { position: static; min-width: 7rem; background: none; }
  td code { white-space: normal; font-size: 0.75rem; }
  .panels { grid-template-columns: repeat(3, 1fr); gap: 1.25rem; }
  .pair { grid-template-columns: 1fr 1fr; }
  .gallery { grid-template-columns: repeat(6, 1fr); gap: 1rem; }
  .best, img { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
}
"""
