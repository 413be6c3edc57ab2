// Plots over time with uPlot, which draws on a canvas and needs neither markup nor inline styles. A plot has a caption
// with its figures, and a table for people who do not see it.
import { html, useEffect, useRef, useState } from "./html.js";
import { now } from "./api.js";
import { bytes, clock, count, milliseconds, utc } from "./format.js";
import { s } from "./strings.js";
import { line } from "./untrusted.js";

const COLOURS = [["#1d5bd6", "#86b4ff"], ["#7a2aa8", "#d3a3f5"], ["#0b6f7f", "#6fd3e3"], ["#a3246b", "#f59ac6"], ["#555e69", "#b4bfca"]]; // none that means a state
const HEIGHT = 180;

export function figure(value, unit) {
  if (value == null) return "–";
  if (unit === "bytes") return bytes(value);
  if (unit === "s") return milliseconds(value * 1000);
  const digits = unit && value !== 0 && Math.abs(value) < 10 ? 2 : 0; // devices are whole
  return (digits ? Number(value.toFixed(digits)).toString() : count(Math.round(value))) + (unit === "1/s" ? "/s" : "");
}

const scheme = matchMedia("(prefers-color-scheme: dark)");

// useDark is whether the scheme of colours is the dark one; it draws again when that changes.
function useDark() {
  const [dark, set] = useState(scheme.matches);
  useEffect(() => {
    const look = () => set(scheme.matches);
    scheme.addEventListener("change", look);
    return () => scheme.removeEventListener("change", look);
  }, []);
  return dark;
}

// Plot shows series of one unit: [{name, points}], over times in seconds. marks are times of restarts.
export function Plot({ title, times, series, unit, marks = [], sync = "fleetd", about }) {
  const box = useRef(null);
  const dark = useDark();
  useEffect(() => {
    let plot, sized, left = false;
    import("../vendor/uplot.js").then(({ default: uPlot }) => { // with the first plot: no other page needs it
      if (left) return;
      const ink = dark ? "#9dabba" : "#566271", grid = dark ? "#2f3843" : "#d5dae1";
      const axis = { stroke: ink, grid: { stroke: grid, width: 1 }, ticks: { stroke: grid } };
      plot = new uPlot({
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
      sized = new ResizeObserver(() => plot.setSize({ width: box.current.clientWidth, height: HEIGHT }));
      sized.observe(box.current);
    });
    return () => { left = true; sized?.disconnect(); plot?.destroy(); };
  }, [times, series, dark]);
  return html`<figure class="plot card"><figcaption><h2>${title}</h2><ul class="legend">${series.map((line_, i) => html`<li key=${i}><svg width="14" height="4" aria-hidden="true"><line x1="0" y1="2" x2="14" y2="2" stroke=${COLOURS[i % COLOURS.length][dark ? 1 : 0]} stroke-width="4" /></svg>
      ${line(line_.name, 40)} <small>${s.stats.now} ${about && last(line_.points) != null ? `${s.stats.about} ` : ""}${figure(last(line_.points), unit)}, ${s.stats.max} ${figure(most(line_.points), unit)}</small></li>`)}</ul></figcaption>
    <div ref=${box} role="img" aria-label=${title}></div>
    <details><summary>${s.stats.table}</summary><${Figures} times=${times} series=${series} unit=${unit} /></details></figure>`;
}

// last is the newest point; that of the step which is not over may be missing.
export const last = (points) => points.at(-1) ?? points.at(-2);

export const most = (points) => points.reduce((m, v) => (v != null && (m == null || v > m) ? v : m), null);

const ROWS = 60; // of the table, the newest first

const Figures = ({ times, series, unit }) => html`<div class="scroll" tabindex="0" role="region" aria-label=${s.table}><table><thead><tr><th scope="col">${s.stats.time}</th>${series.map((x) => html`<th scope="col" class="right" key=${x.name}>${line(x.name, 40)}</th>`)}</tr></thead>
  <tbody>${times.map((_, i) => times.length - 1 - i).slice(0, ROWS).map((i) => html`<tr key=${i}><td>${clock(times[i] * 1000)}</td>${series.map((x) => html`<td class="right" key=${x.name}>${figure(x.points[i], unit)}</td>`)}</tr>`)}</tbody></table></div>`;

// total adds up the points of a rate. The last step may not be over, and before a start there is nothing to count.
export const total = ({ since, step, starts }, points) => points.reduce((sum, rate, i) => {
  const begin = Date.parse(since) / 1000 + i * step, end = Math.min(begin + step, now() / 1000);
  const started = points[i - 1] == null ? starts.map((x) => Date.parse(x.at) / 1000).find((at) => at > begin && at < end) : 0;
  return sum + (rate ?? 0) * (end - (started || begin));
}, 0);

// Spark is a small plot in a tile, without axes: the tile has the figures. It begins with the first figure, and gaps are drawn over.
export function Spark({ points: all, tone = "" }) {
  const points = all.slice(Math.max(0, all.findIndex((v) => v != null))), top = most(points) || 1;
  const at = points.map((v, i) => (v == null ? null : `${((i / Math.max(1, points.length - 1)) * 100).toFixed(2)} ${(35 - (v / top) * 32).toFixed(2)}`)).filter(Boolean);
  return at.length > 1 && html`<svg class=${`spark ${tone}`} viewBox="0 0 100 36" preserveAspectRatio="none" aria-hidden="true"><path class="under" d=${`M${at[0].split(" ")[0]} 36 L${at.join(" ")} ${at.at(-1).split(" ")[0]} 36Z`} />
    <path d=${`M${at.join(" ")}`} fill="none" stroke="currentColor" stroke-width="1.5" vector-effect="non-scaling-stroke" /></svg>`;
}
