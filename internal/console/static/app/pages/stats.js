// How did it go? Figures of all nodes over time.
import { html } from "../html.js";
import { get, now, query as encode } from "../api.js";
import { useData } from "../data.js";
import { Plot } from "../plot.js";
import { setQuery } from "../route.js";
import { s, word } from "../strings.js";
import { Command, Loaded, Page } from "../ui.js";
import { line } from "../untrusted.js";

const RANGES = { "1h": 3600, "6h": 21600, "24h": 86400, "7d": 604800 };
const REFRESH = 30_000;

// PLOTS are the series of each plot.
const PLOTS = [["online"], ["connects"], ["closes"], ["calls"], ["call_p50", "call_p99"], ["hello_p99", "handshake_p99"], ["ota_checks"], ["events_dropped", "slow_readers"], ["memory"], ["goroutines"], ["gc_cycles"]];

// WORDS are the kinds of codes that tell the series of a plot apart.
const WORDS = { online: "transport", closes: "reason", calls: "auditOutcome" };

// times are the instants of the points, in seconds.
export const times = ({ since, step, series }) => (series[0]?.points || []).map((_, i) => Date.parse(since) / 1000 + i * step);

export function Stats({ query, can }) {
  const range = query.get("range") in RANGES ? query.get("range") : "1h";
  const node = can("admin") ? query.get("node") || "" : "";
  const stats = useData((signal) => get("/v1/stats" + encode({ since: new Date(now() - RANGES[range] * 1000).toISOString(), node }), signal), [range, node], { every: REFRESH });
  const nodes = useData((signal) => (can("admin") ? get("/v1/nodes", signal) : Promise.resolve({ items: [] })), []);
  return html`<${Page} title=${s.stats.title} /><div class="row">
      <label>${s.stats.range}<select value=${range} onChange=${(e) => setQuery({ range: e.target.value })}>${Object.entries(s.stats.ranges).map(([value, text]) => html`<option key=${value} value=${value}>${text}</option>`)}</select></label>
      ${can("admin") && html`<label>${s.stats.node}<select value=${node} onChange=${(e) => setQuery({ node: e.target.value })}><option value="">${s.stats.all}</option>${(nodes.data?.items || []).map((n) => html`<option key=${n.name} value=${n.name}>${line(n.name, 40)}</option>`)}</select></label>`}</div>
    <${Loaded} from=${stats}>${(found) => html`
      ${found.nodes_missing.length > 0 && html`<p class="notice warn">${s.stats.missing(line(found.nodes_missing.join(", ")))}</p>`}
      <${Plots} found=${found} />`}<//>
    <${Command} cli=${["fleet", "--since", range]} url=${"/v1/stats" + encode({ node })} />`;
}

function Plots({ found }) {
  const at = times(found);
  const marks = found.starts.map((start) => Date.parse(start.at) / 1000);
  return html`<div class="plots">${PLOTS.map((names) => {
    const series = found.series.filter((x) => names.includes(x.name) && (x.points.some((v) => v) || !x.value));
    if (!series.length) return null;
    const title = s.stats.names[names[0]] || names.join(", ");
    return html`<${Plot} key=${names[0]} title=${title} times=${at} unit=${series[0].unit} marks=${marks} about=${/_p\d/.test(names[0])}
      series=${series.map((x) => ({ name: (x.value && (WORDS[x.name] ? word(WORDS[x.name], x.value, 1) : x.value)) || s.stats.names[x.name + "!"] || x.name, points: x.points }))} />`;
  })}</div>`;
}
