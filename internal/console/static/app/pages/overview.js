// Is the fleet well, and what changed?
import { html } from "../html.js";
import { get, now, query as encode } from "../api.js";
import { useData, useEvents, useFeed, useTick } from "../data.js";
import { count, plural, term } from "../format.js";
import { Spark } from "../plot.js";
import { Link, to } from "../route.js";
import { s, word } from "../strings.js";
import { Command, Copyable, Loaded, Page, State } from "../ui.js";
import { line } from "../untrusted.js";
import { recent, row, Row } from "./events.js";

const HOUR = 3_600_000;
const KEEP = 1000, LAST = 20;
const NOTABLE = new Set(["online", "offline", "catalog", "photo", "pending", "contested"]);
const notable = (event) => NOTABLE.has(event.type);

export function Overview({ can, self }) {
  useTick();
  const fleet = useData((signal) => get("/v1/fleet", signal), []);
  const whole = Object.keys(self.devices || {}).length === 0; // the figures over time are of the whole fleet
  const stats = useData((signal) => (whole ? get("/v1/stats" + encode({ since: new Date(now() - HOUR).toISOString(), step: "1m" }), signal) : Promise.resolve(null)), [], { every: 60_000 });
  const doctor = useData((signal) => (can("admin") ? get("/v1/diagnosis", signal) : Promise.resolve(null)), []);
  const nodes = useData((signal) => (can("admin") ? get("/v1/nodes", signal) : Promise.resolve(null)), [], { every: 15_000 });
  const events = useData(async (signal) => (can("events:read") ? (await recent({ since: new Date(now() - HOUR / 4).toISOString() }, KEEP, signal)).filter(notable).slice(-LAST).map(row).reverse() : []), []);
  const feed = useFeed(events, LAST);
  useEvents((message) => {
    if (message.status) return;
    const found = (message.events || []).filter(notable);
    if (message.gap || message.omitted || found.length) fleet.soon();
    feed.add(found.map(row).reverse());
  });
  return html`<${Page} title=${s.overview.title} />
    <${Loaded} from=${fleet}>${(f) => html`
      ${f.total === 0 && !(f.state.pending > 0) && html`<${Zero} ota=${doctor.data?.ota_url} />`}
      ${f.state.pending > 0 && html`<p class="notice warn"><${Link} href=${can("devices:write") ? to(["admissions"]) : to(["devices"], { state: "pending" })}>${s.overview.waiting(f.state.pending)}<//></p>`}
      ${f.state.contested > 0 && html`<p class="notice warn"><${Link} href=${to(["devices"], { state: "contested" })}>${s.overview.contested(f.state.contested)}<//></p>`}
      <div class="cards">
        <section class="card"><h2>${s.overview.fleet}</h2><p class="number-big">${count(f.total)}</p><ul class="bars">${["online", "offline", "pending", "contested"].filter((state) => f.state[state]).map((state) => html`<li key=${state}>
          <${Link} href=${to(["devices"], { state })}><${State} state=${state} /> <b>${count(f.state[state])}</b><meter aria-label=${word("state", state)} min="0" max=${f.total || 1} value=${f.state[state]}></meter><//></li>`)}</ul></section>
        <${Bars} title=${s.overview.offline} counts=${f.offline_reason} facet="reason" extra=${{ state: "offline" }} none=${s.overview.allWell} />
        ${stats.data && html`<${Hour} stats=${stats.data} />`}
        ${doctor.data && html`<section class="card"><h2>${s.overview.findings}</h2>${doctor.data.findings.filter((x) => x.severity !== "info").length ? html`<ul class="plain">${doctor.data.findings.filter((x) => x.severity !== "info").map((x, i) => html`<li key=${i}><strong>${word("severity", x.severity)}</strong> <code>${x.setting}</code> ${line(x.message, 240)}</li>`)}</ul>
          <${Link} href=${to(["doctor"])}>${s.pages.doctor}<//>` : html`<p class="faint">${s.overview.noFindings}</p>`}</section>`}
        ${nodes.data && html`<section class="card"><h2>${s.overview.nodes}</h2><ul class="bars">${nodes.data.items.map((n) => html`<li key=${n.name}><${Link} href=${to(["devices"], { node: n.name })}><bdi>${line(n.name, 40)}</bdi> <b>${plural(n.devices, "device")}</b><//></li>`)}</ul></section>`}
        <${Bars} title=${s.overview.boards} counts=${f.board} facet="board" />
        <${Bars} title=${s.overview.firmwares} counts=${f.firmware} facet="firmware" />
      </div>`}<//>
    ${can("events:read") && html`<section><h2>${s.overview.happened}</h2><${Loaded} from=${events}>${(rows) => (rows.length ? html`<ol class="log">${rows.map((e) => html`<${Row} key=${e.key} event=${e} />`)}</ol>` : html`<p class="faint">${s.overview.nothing}</p>`)}<//></section>`}
    <${Command} cli=${["fleet"]} url="/v1/fleet" />`;
}

const MOST = 6; // values of a facet that a card shows

function Bars({ title, counts, facet, extra, none }) {
  const values = Object.entries(counts || {}).filter(([, n]) => n).sort((a, b) => b[1] - a[1]);
  if (!values.length && !none) return null;
  const top = values[0]?.[1] || 1;
  return html`<section class="card"><h2>${title}</h2>${values.length ? html`<ul class="bars">${values.slice(0, MOST).map(([value, n]) => html`<li key=${value}>
    <${Link} href=${to(["devices"], value ? { ...extra, [facet]: value } : { ...extra, select: term(facet, "") })}><bdi>${line(value || s.overview.unseen, 40)}</bdi> <b>${count(n)}</b><meter aria-label=${line(value || s.overview.unseen, 40)} min="0" max=${top} value=${n}></meter><//></li>`)}</ul>` : html`<p class="faint">${none}</p>`}</section>`;
}

function Hour({ stats }) {
  const sum = (name, values) => {
    const found = stats.series.filter((x) => x.name === name && (!values || values.includes(x.value)));
    return (found[0]?.points || []).map((_, i) => found.reduce((n, x) => (x.points[i] == null ? n : (n ?? 0) + x.points[i]), null));
  };
  const card = (title, name, unit, values) => {
    const points = sum(name, values);
    return points.some((v) => v != null) && html`<${Spark} title=${title} points=${points} unit=${unit} />`;
  };
  const n = s.stats.names;
  return html`<section class="card"><h2>${s.overview.hour}</h2>${card(n.online, "online", "")}${card(n.connects, "connects", "1/s")}${card(n.calls_ok, "calls", "1/s", ["ok"])}${card(n.calls_bad, "calls", "1/s", ["tool_error", "timeout", "refused"])}
    <p><${Link} href=${to(["stats"])}>${s.pages.stats}<//></p></section>`;
}

const Zero = ({ ota }) => html`<section class="card"><h2>${s.overview.zero}</h2><ol>${s.overview.zeroSteps.map((text, i) => html`<li key=${text}>${text}${i === 1 && ota && html`<${Copyable} text=${ota} />`}</li>`)}</ol></section>`;
