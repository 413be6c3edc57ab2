// Plots over time with uPlot, which draws on a canvas and needs neither markup nor inline styles. A plot has a caption
// with its figures, and a table for people who do not see it.
import { html, useEffect, useRef } from "./html.js";
import uPlot from "../vendor/uplot.js";
import { bytes, clock, count, milliseconds, utc } from "./format.js";
import { s } from "./strings.js";
import { line } from "./untrusted.js";

const COLOURS = [["#1d5bd6", "#86b4ff"], ["#b3231b", "#ff938a"], ["#12703a", "#5fd08c"], ["#7d5200", "#edbd5c"], ["#7a2aa8", "#d3a3f5"], ["#0b6f7f", "#6fd3e3"], ["#555e69", "#b4bfca"]];
const HEIGHT = 180;

export function figure(value, unit) {
  if (value == null) return "–";
  if (unit === "bytes") return bytes(value);
  if (unit === "s") return milliseconds(value * 1000);
  const digits = unit && value !== 0 && Math.abs(value) < 10 ? 2 : 0; // devices are whole
  return (digits ? Number(value.toFixed(digits)).toString() : count(Math.round(value))) + (unit === "1/s" ? "/s" : "");
}

// Plot shows series of one unit: [{name, points}], over times in seconds. marks are times of restarts.
export function Plot({ title, times, series, unit, marks = [], sync = "fleetd", about }) {
  const box = useRef(null);
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  useEffect(() => {
    const ink = dark ? "#9dabba" : "#566271", grid = dark ? "#2f3843" : "#d5dae1";
    const axis = { stroke: ink, grid: { stroke: grid, width: 1 }, ticks: { stroke: grid } };
    const plot = new uPlot({
      width: box.current.clientWidth, height: HEIGHT, cursor: { sync: { key: sync }, drag: { x: false, y: false } }, legend: { show: false },
      tzDate: (t) => (utc.get() ? uPlot.tzDate(new Date(t * 1000), "UTC") : new Date(t * 1000)),
      scales: { y: { range: (_, low, high) => [Math.min(0, low ?? 0), (high || 1) * 1.08] } },
      axes: [{ ...axis, values: (_, ticks) => ticks.map((at) => clock(at * 1000).slice(...(times.at(-1) - times[0] > 86_400 ? [5, 10] : [11, 16]))) }, { ...axis, size: 64, values: (_, ticks) => ticks.map((v) => (unit || v % 1 === 0 ? figure(v, unit) : "")) }],
      series: [{}, ...series.map((line_, i) => ({ label: line_.name, stroke: COLOURS[i % COLOURS.length][dark ? 1 : 0], width: 1.5, spanGaps: false, dash: i >= COLOURS.length ? [4, 3] : undefined }))],
      hooks: { draw: [(u) => {
        u.ctx.save();
        u.ctx.strokeStyle = ink;
        u.ctx.setLineDash([3, 3]);
        for (const at of marks.filter((m) => m >= times[0] && m <= times.at(-1))) {
          const x = u.valToPos(at, "x", true);
          u.ctx.beginPath();
          u.ctx.moveTo(x, u.bbox.top);
          u.ctx.lineTo(x, u.bbox.top + u.bbox.height);
          u.ctx.stroke();
        }
        u.ctx.restore();
      }] },
    }, [times, ...series.map((line_) => line_.points)], box.current);
    const sized = new ResizeObserver(() => plot.setSize({ width: box.current.clientWidth, height: HEIGHT }));
    sized.observe(box.current);
    return () => { sized.disconnect(); plot.destroy(); };
  }, [times, series, dark]);
  return html`<figure class="plot card"><figcaption><h2>${title}</h2><ul class="legend">${series.map((line_, i) => html`<li key=${i}><svg width="14" height="4" aria-hidden="true"><line x1="0" y1="2" x2="14" y2="2" stroke=${COLOURS[i % COLOURS.length][dark ? 1 : 0]} stroke-width="4" /></svg>
      ${line(line_.name, 40)} <small>${s.stats.now} ${about ? `${s.stats.about} ` : ""}${figure(last(line_.points), unit)}, ${s.stats.max} ${figure(most(line_.points), unit)}</small></li>`)}</ul></figcaption>
    <div ref=${box} role="img" aria-label=${title}></div>
    <details><summary>${s.stats.table}</summary><${Figures} times=${times} series=${series} unit=${unit} /></details></figure>`;
}

// last is the newest point; that of the step which is not over may be missing.
const last = (points) => points.at(-1) ?? points.at(-2);

const most = (points) => points.reduce((m, v) => (v != null && (m == null || v > m) ? v : m), null);

const ROWS = 60; // of the table, the newest first

const Figures = ({ times, series, unit }) => html`<div class="scroll" tabindex="0" role="region" aria-label=${s.table}><table><thead><tr><th scope="col">${s.stats.time}</th>${series.map((x) => html`<th scope="col" class="right" key=${x.name}>${line(x.name, 40)}</th>`)}</tr></thead>
  <tbody>${times.map((_, i) => times.length - 1 - i).slice(0, ROWS).map((i) => html`<tr key=${i}><td>${clock(times[i] * 1000)}</td>${series.map((x) => html`<td class="right" key=${x.name}>${figure(x.points[i], unit)}</td>`)}</tr>`)}</tbody></table></div>`;

// Spark is a small plot in a card, without axes.
export function Spark({ points, title, unit }) {
  const top = most(points) || 1;
  const at = points.map((v, i) => (v == null ? null : `${(i / Math.max(1, points.length - 1)) * 200},${38 - (v / top) * 36}`)).filter(Boolean);
  return html`<div><small>${title} <b>${figure(last(points), unit)}</b></small><svg class="spark" viewBox="0 0 200 40" preserveAspectRatio="none" role="img" aria-label=${`${title}: ${s.stats.max} ${figure(top, unit)}`}>
    <polyline points=${at.join(" ")} fill="none" stroke="currentColor" stroke-width="1.5" vector-effect="non-scaling-stroke" /></svg></div>`;
}
