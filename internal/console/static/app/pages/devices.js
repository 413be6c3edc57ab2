// Which devices are there, and how are they? The server pages, filters and counts; the stream patches rows on screen.
import { html, useRef, useState } from "../html.js";
import { download, get, query as encode } from "../api.js";
import { COUNTED, useData, useEvents, useTick } from "../data.js";
import { age, count, term } from "../format.js";
import { go, Link, setQuery, to } from "../route.js";
import { s, word } from "../strings.js";
import { Command, Empty, flag, LabelLink, Loaded, Page, Pager, State } from "../ui.js";
import { line, Said } from "../untrusted.js";

const FILTERS = ["state", "reason", "board", "firmware", "transport", "node", "label", "q", "select"];
const FACETS = [["state", "state"], ["reason", "offline_reason"], ["transport", "transport"], ["board", "board"], ["firmware", "firmware"]];
const SAVED = "fleetd.filters";
const CHIPS = 8; // values of a facet that are shown, the most frequent first

// selection writes the filters of a URL, without some of them, as one selector.
export function selection(query, without = []) {
  const terms = FILTERS.filter((name) => !["label", "q", "select"].includes(name) && !without.includes(name) && query.get(name)).map((name) => term(name, query.get(name)));
  const label = query.get("label");
  if (label) terms.push(label.includes("=") ? term(label.slice(0, label.indexOf("=")), label.slice(label.indexOf("=") + 1)) : label);
  if (query.get("select")) terms.push(query.get("select"));
  return terms.join(",");
}

export function Devices({ query, can }) {
  const select = selection(query);
  const cursor = query.get("cursor") || "", sort = query.get("sort") || "id", q = query.get("q") || "";
  const list = useData((signal) => get("/v1/devices" + encode({ select, q, sort, cursor, limit: 100 }), signal), [select, q, sort, cursor]);
  const counted = selection(query, ["state"]);
  const fleet = useData((signal) => get("/v1/fleet" + encode({ select: counted }), signal), [counted], { settle: counted ? COUNTED : undefined });
  const changed = useRef(new Set());
  const [changes, setChanges] = useState(0);
  useTick();

  // Rows on screen are patched where they are. What may change which rows belong here is counted, not applied.
  useEvents((message) => {
    if (message.status) return;
    if (message.gap || message.omitted) list.soon();
    if (message.gap || message.omitted || message.events.some((e) => e.type in PATCHES)) fleet.soon();
    const news = new Map();
    for (const event of message.events || []) if (event.type in PATCHES && event.data.device) news.set(event.data.device, event);
    if (!news.size || !list.data) return;
    const shown = new Set(list.data.items.map((d) => d.id));
    for (const id of news.keys()) if (!shown.has(id) || FILTERS.some((name) => query.get(name))) changed.current.add(id);
    setChanges(changed.current.size);
    if ([...news.keys()].some((id) => shown.has(id))) {
      list.patch((data) => ({ ...data, items: data.items.map((d) => (news.has(d.id) ? PATCHES[news.get(d.id).type](d, news.get(d.id).data) : d)) }));
    }
  });
  const refresh = () => {
    changed.current.clear();
    setChanges(0);
    list.reload();
    fleet.reload();
  };

  // The counts are without the search: of its results only a single page is counted.
  const found = list.data && !cursor && !list.data.next_cursor ? list.data.items.length : null;
  const total = q ? found : fleet.data && (query.get("state") ? fleet.data.state[query.get("state")] ?? 0 : fleet.data.total);
  return html`<${Page} title=${s.devices.title} lead=${total != null && html`<span class="faint" data-test="total">${s.devices.counted(total)}</span>`} />
    <${Filters} query=${query} fleet=${fleet.data} />
    ${changes > 0 && html`<p class="changed"><button type="button" class="primary" onClick=${refresh}>${s.devices.changed(changes)}</button></p>`}
    <${Loaded} from=${list}>${({ items, next_cursor: next }) => (items.length || next
      ? html`${!items.length && html`<p class="notice">${s.devices.partial}</p>`}<${Table} items=${items} />`
      : html`<${Nothing} q=${q} filtered=${FILTERS.some((name) => query.get(name))} />`)}<//>
    <${Pager} next=${list.data?.next_cursor} cursor=${cursor} onCursor=${(c) => setQuery({ cursor: c })} />
    ${!q && html`<div class="actions">${can("jobs") && html`<${Link} class="button" href=${to(["jobs", "new"], { select })}>${s.devices.job}<//>`}<${Export} select=${select} /></div>`}
    <${Command} cli=${["devices", ...(select ? [select] : []), ...flag("--search", q), ...flag("--sort", sort)]} url=${"/v1/devices" + encode({ select, q, sort })} />`;
}

// PATCHES apply an event to the row of its device.
const PATCHES = {
  online: (d, { node, transport, time }) => ({ ...d, state: "online", node, transport, connected_at: time, last_seen: time, offline_reason: "", offline_since: null }),
  offline: (d, { reason, time }) => (reason === "superseded" ? d : { ...d, state: "offline", offline_reason: reason, offline_since: time, last_seen: time }),
  pending: (d) => ({ ...d, state: "pending" }),
  contested: (d) => ({ ...d, state: "contested" }),
};

// Table keeps to 25 elements a row: 100 rows stay under 3,000.
const Table = ({ items }) => html`<div class="scroll" tabindex="0" role="region" aria-label=${s.table}><table class="rows"><thead><tr>${s.devices.columns.map((name) => html`<th scope="col" key=${name}>${name}</th>`)}</tr></thead>
  <tbody>${items.map((d) => html`<tr key=${d.id} data-device=${d.id}>
    <td><${State} state=${d.state} /> <small>${stateDetail(d)}</small></td>
    <td class="first"><${Link} href=${to(["devices", d.id])}><${Said} text=${d.name || d.id} max=${48} /><//>${d.name && html` <small class="mono">${d.id}</small>`}</td>
    <td>${d.board && html`<${Said} text=${d.board} max=${40} />`}</td><td>${d.firmware && html`<${Said} text=${d.firmware} max=${24} />`}</td><td>${d.transport}</td>
    <td>${d.mcp.tools ? s.devices.tools(d.mcp.tools) : ""}${d.state === "online" && d.mcp.state !== "ready" && html` <small>${word("mcp", d.mcp.state)}</small>`}</td>
    <td>${d.state === "online" && d.node}</td>
    <td>${Object.entries(d.labels).slice(0, 4).map(([k, v]) => html`<${LabelLink} key=${k} name=${k} value=${v} max=${32} />`)}</td></tr>`)}</tbody></table></div>`;

function stateDetail(d) {
  if (d.state === "online") return d.connected_at && age(d.connected_at);
  if (d.state === "offline") return [d.offline_reason, d.offline_since && age(d.offline_since)].filter(Boolean).join(", ");
  return "";
}

const ID = /^([0-9a-f]{2}[:-]?){5}[0-9a-f]{2}$/i;

// Nothing leads on: a device that was searched by its id has a page, which says why it is not here.
function Nothing({ q, filtered }) {
  return html`<${Empty}>${ID.test(q) && html`<${Link} href=${to(["devices", q])}>${q}<//> ${s.devices.absent} `}${s.devices.empty} ${!filtered && s.devices.emptyOTA} ${filtered && html`<${Link} href=${to(["devices"])}>${s.devices.clear}<//>`}<//>`;
}

function Filters({ query, fleet }) {
  const submit = (event) => {
    event.preventDefault();
    const form = new FormData(event.target);
    setQuery({ q: form.get("q").trim(), select: form.get("select").trim() });
  };
  const narrow = matchMedia("(max-width: 699px)").matches;
  return html`<details class="filters" open=${!narrow}><summary>${s.devices.filters}</summary>
    ${fleet && FACETS.map(([name, member]) => html`<${Chips} key=${name} name=${name} counts=${fleet[member]} chosen=${query.get(name) || ""} />`)}
    <form class="row" onSubmit=${submit} key=${query.toString()}>
      <label>${s.devices.search}<input type="search" name="q" value=${query.get("q") || ""} /></label>
      <label>${s.devices.select}<input name="select" value=${query.get("select") || ""} spellcheck=${false} autocapitalize="off" /></label>
      <label>${s.devices.sort}<select value=${query.get("sort") || "id"} onChange=${(e) => setQuery({ sort: e.target.value === "id" ? "" : e.target.value })}>
        ${Object.entries(s.devices.sorts).map(([value, text]) => html`<option key=${value} value=${value}>${text}</option>`)}</select></label>
      <button>${s.devices.apply}</button>
    </form><${Saved} query=${query} /></details>`;
}

// Chips are the most frequent values of a facet with their counts; one of them can be chosen.
function Chips({ name, counts, chosen }) {
  const values = new Map(Object.entries(counts || {}).filter(([value, n]) => n && value));
  if (chosen && !values.has(chosen)) values.set(chosen, 0);
  if (values.size < (name === "state" ? 1 : 2) && !chosen) return null;
  const shown = [...values].sort((a, b) => b[1] - a[1]).slice(0, CHIPS);
  return html`<div class="chips" role="group" aria-label=${s.devices.facets[name]}><small>${s.devices.facets[name]}</small>${shown.map(([value, n]) => html`<button key=${value} type="button"
    class="chip" aria-pressed=${value === chosen} onClick=${() => setQuery({ [name]: value === chosen ? "" : value })}><bdi>${line(name === "state" ? word("state", value) : value, 32)}</bdi> <b>${count(n)}</b></button>`)}</div>`;
}

// Saved filters are kept in this browser, by the text of the query.
function Saved({ query }) {
  const read = () => {
    try {
      return JSON.parse(localStorage.getItem(SAVED)) || [];
    } catch {
      return [];
    }
  };
  const [saved, setSaved] = useState(read);
  const text = [...query].filter(([name]) => name !== "cursor").map(([name, value]) => `${name}=${value}`).join(" ");
  const search = new URLSearchParams([...query].filter(([name]) => name !== "cursor")).toString();
  const write = (list) => { localStorage.setItem(SAVED, JSON.stringify(list)); setSaved(list); };
  if (!text && !saved.length) return null;
  return html`<div class="chips"><small>${s.devices.saved}</small>${saved.map((f) => html`<${Link} class="chip" key=${f.search} href=${to(["devices"]) + "?" + f.search}>${line(f.text, 60)}<//>`)}
    ${text && (saved.some((f) => f.search === search)
      ? html`<button type="button" class="link" onClick=${() => write(saved.filter((f) => f.search !== search))}>${s.devices.unsave}</button>`
      : html`<button type="button" class="link" onClick=${() => write([...saved, { text, search }].slice(-12))}>${s.devices.save}</button>`)}
    ${text && html`<button type="button" class="link" onClick=${() => go(to(["devices"]))}>${s.devices.clear}</button>`}</div>`;
}

// Export downloads through fetch, because a link cannot carry the key.
function Export({ select }) {
  const save = async (format) => download("/v1/devices/export" + encode({ select, format }), `devices.${format}`);
  return ["csv", "ndjson"].map((format) => html`<button type="button" key=${format} onClick=${() => save(format)}>${format.toUpperCase()}</button>`);
}
