// Which devices are there, and how are they? The server pages, filters and counts; the stream patches rows on screen.
import { html, useEffect, useMemo, useRef, useState } from "../html.js";
import { download, get, query as encode, request } from "../api.js";
import { COUNTED, useData, useEvents, useTick } from "../data.js";
import { count } from "../format.js";
import { go, Link, setQuery, to } from "../route.js";
import { FILTERS, readSearch, searched, selection } from "../search.js";
import { codes, s, word } from "../strings.js";
import { Act, Command, Dialog, flag, JobLinks, LabelLink, Loaded, Page, Pager, Problem, readLabels, Rows, standing, State } from "../ui.js";
import { line, Said } from "../untrusted.js";

const FACETS = [["reason", "offline_reason"], ["board", "board"], ["firmware", "firmware"], ["transport", "transport"], ["node", "node"]];
const STATES = ["online", "offline", "pending", "contested"];
const SAVED = "fleetd.filters";
const FEW = 50; // values of a facet that are offered, the most frequent first
const LIMIT = 100; // rows of a page
const NONE = new Set();

export function Devices({ query, can, needs }) {
  const select = selection(query);
  const cursor = query.get("cursor") || "", order = query.get("sort") || "id", q = readSearch(query.get("q") || "").words;
  const sort = order in s.devices.sorts ? order : "id"; // others are orders of this page
  const list = useData((signal) => get("/v1/devices" + encode({ select, q, sort, cursor, limit: LIMIT }), signal), [select, q, sort, cursor]);
  const counted = selection(query, ["state"]);
  const own = useData((signal) => (counted ? get("/v1/fleet" + encode({ select: counted }), signal) : null), [counted], { settle: COUNTED });
  const fleet = counted ? own : needs.fleet;
  const changed = useRef(new Set());
  const [changes, setChanges] = useState(0);
  const [chosen, setChosen] = useState(NONE);
  useEffect(() => setChosen(NONE), [select, q, cursor]);
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

  // The API counts selections, and no search: its results are counted where all of them are on this page.
  const items = list.data?.items || [];
  const whole = list.data && !cursor && !list.data.next_cursor;
  const filtered = FILTERS.some((name) => query.get(name));
  const state = query.get("state");
  const counts = !q ? fleet.data : whole && !state ? { total: items.length, state: Object.fromEntries(STATES.map((name) => [name, items.filter((d) => d.state === name).length])) } : null;
  const loading = list.stale || !list.data || (!q && (fleet.stale || !fleet.data));
  const total = loading ? null : !q ? (state ? counts.state[state] ?? 0 : counts.total) : whole ? items.length : cursor ? null : s.search.over(LIMIT);
  const all = needs.fleet.data;
  const lead = all && !loading && html`<span class="faint" data-test="total">${filtered ? line(s.search.found(total, all.total, searched(q, select)), 300) : s.devices.counted(all.total, all.state.online)}</span>`;
  return html`<${Page} title=${s.devices.title} lead=${html`${lead}<div class="right">${changes > 0 && html`<button type="button" class="primary" onClick=${refresh}>${s.devices.changed(changes)}</button>`}
        ${!q && !chosen.size && html`${can("jobs") && html`<${Link} class="button" href=${to(["jobs", "new"], { select })}>${s.devices.job}<//>`}<${Export} select=${select} />`}</div>`} />
    <section class="panel">${chosen.size ? html`<${Chosen} ids=${[...chosen]} can=${can} onNone=${() => setChosen(NONE)} onDone=${refresh} />`
      : html`<${Filters} query=${query} counts=${counts} order=${order} />`}
    <${Loaded} from=${list}>${({ next_cursor: next }) => (items.length || next
      ? html`${!items.length && html`<p class="notice">${s.devices.partial}</p>`}<${Table} items=${items} at=${list.at} order=${order} whole=${whole} chosen=${chosen} onChoose=${setChosen} />`
      : html`<${Nothing} q=${q} filtered=${filtered} />`)}<//></section>
    <${Pager} next=${list.data?.next_cursor} cursor=${cursor} onCursor=${(c) => setQuery({ cursor: c })} />
    <${Command} cli=${["devices", ...(select ? [select] : []), ...flag("--search", q), ...flag("--sort", sort)]} url=${"/v1/devices" + encode({ select, q, sort })} />`;
}

// PATCHES apply an event to the row of its device.
const PATCHES = {
  online: (d, { node, transport, time }) => ({ ...d, state: "online", node, transport, connected_at: time, last_seen: time, offline_reason: "", offline_since: null }),
  offline: (d, { reason, time }) => (reason === "superseded" ? d : { ...d, state: "offline", offline_reason: reason, offline_since: time, last_seen: time }),
  pending: (d) => ({ ...d, state: "pending" }),
  contested: (d) => ({ ...d, state: "contested" }),
};

// VALUES are what the columns sort by. Those of COLUMNS are shown if the rows differ in them.
const VALUES = new Map([["name", (d) => d.name || d.id], ["state", (d) => word("state", d.state)], ["labels", (d) => JSON.stringify(d.labels)], ["board", (d) => d.board], ["firmware", (d) => d.firmware],
  ["transport", (d) => d.transport], ["node", (d) => (d.state === "online" ? d.node : "")], ["tools", (d) => d.mcp.tools || ""]]);
const COLUMNS = ["labels", "board", "firmware", "transport", "node", "tools"];

// CELLS are what a column shows of a device, where that is not its value as text.
const CELLS = {
  labels: (d) => Object.entries(d.labels).slice(0, 4).map(([k, v]) => html`<${LabelLink} key=${k} name=${k} value=${v} max=${32} />`),
  transport: (d) => d.transport && word("transport", d.transport),
  node: (d) => d.state === "online" && d.node,
  tools: (d) => d.mcp.tools > 0 && count(d.mcp.tools),
};

// Table keeps to 25 elements a row: 100 rows stay under 3,000. Its order and its columns change when the list is loaded, not
// with a row.
function Table({ items, at, order, whole, chosen, onChoose }) {
  const falling = order[0] === "-", by = falling ? order.slice(1) : order;
  const columns = useMemo(() => COLUMNS.filter((name) => new Set(items.map(VALUES.get(name)).filter(Boolean)).size > (items.length > 1 ? 1 : 0)), [at]);
  const places = useMemo(() => {
    if (!whole || !VALUES.has(by) || order === "name") return null; // the order of the API
    const [value, way] = [VALUES.get(by), falling ? -1 : 1];
    return new Map([...items].sort((a, b) => way * String(value(a)).localeCompare(String(value(b)), "en", { numeric: true })).map((d, i) => [d.id, i]));
  }, [at, order, whole]);
  const rows = places ? [...items].sort((a, b) => places.get(a.id) - places.get(b.id)) : items;
  const head = (name) => {
    const next = by !== name ? name : falling || !whole ? "" : `-${name}`;
    return html`<th key=${name} scope="col" class=${name === "tools" ? "right" : ""} aria-sort=${by === name ? (falling ? "descending" : "ascending") : null}>${whole || name === "name"
      ? html`<button type="button" class="sort" onClick=${() => setQuery({ sort: next })}>${s.devices.columns[name]}${by === name && html`<span aria-hidden="true"> ${falling ? "↓" : "↑"}</span>`}</button>` : s.devices.columns[name]}</th>`;
  };
  const choose = (id, on) => onChoose((before) => {
    const next = new Set(before);
    on ? next.add(id) : next.delete(id);
    return next;
  });
  const every = html`<th class="check"><input type="checkbox" aria-label=${s.devices.chooseAll} checked=${chosen.size === rows.length} onChange=${(e) => onChoose(new Set(e.target.checked ? rows.map((d) => d.id) : []))} /></th>`;
  return html`<${Rows} kind="devices" columns=${[every, ...["name", "state", ...columns].map(head)]}>${rows.map((d) => html`<tr key=${d.id} data-device=${d.id}>
    <td class="check"><label><input type="checkbox" aria-label=${s.devices.choose(line(d.name || d.id, 48))} checked=${chosen.has(d.id)} onChange=${(e) => choose(d.id, e.target.checked)} /></label></td>
    <td class="first"><${Link} href=${to(["devices", d.id])}><${Said} text=${d.name || d.id} max=${48} /><//>${d.name && html`<small class="mono">${d.id}</small>`}</td>
    <td><${State} state=${d.state} /> <small>${line(standing(d), 100)}</small></td>
    ${columns.map((name) => html`<td key=${name} class=${name === "labels" ? "" : name === "tools" ? "right wide" : "wide"}>${CELLS[name] ? CELLS[name](d) : d[name] && html`<${Said} text=${d[name]} max=${40} />`}</td>`)}</tr>`)}<//>`;
}

const ID = /^([0-9a-f]{2}[:-]?){5}[0-9a-f]{2}$/i;

// Nothing leads on: a device that was searched by its id has a page, which says why it is not here.
function Nothing({ q, filtered }) {
  return html`<p class="blank">${ID.test(q) && html`<${Link} href=${to(["devices", q])}>${q}<//> ${s.devices.absent} `}${s.devices.empty} ${!filtered && s.devices.emptyOTA} ${filtered && html`<${Link} href=${to(["devices"])}>${s.devices.clear}<//>`}</p>`;
}

// Filters are the states with their counts, and a choice for each of the other facets.
function Filters({ query, counts, order }) {
  const state = query.get("state") || "", n = (name) => counts && (counts.state[name] ?? 0);
  const chip = (value, text, number) => html`<button key=${value} type="button" class="chip" aria-pressed=${value === state} onClick=${() => setQuery({ state: value === state ? "" : value })}>${text}${number != null && html` <b>${count(number)}</b>`}</button>`;
  return html`<div class="filters"><div class="chips" role="group" aria-label=${s.devices.columns.state}>${chip("", s.all, counts?.total)}
      ${STATES.filter((name, i) => i < 2 || n(name) || state === name).map((name) => chip(name, word("state", name), n(name)))}</div>
    ${FACETS.map(([name, member]) => html`<${Facet} key=${name} name=${name} counts=${counts?.[member]} chosen=${query.get(name) || ""} />`)}
    <select class="chip" aria-label=${s.devices.sort} value=${order in s.devices.sorts ? order : "id"} onChange=${(e) => setQuery({ sort: e.target.value === "id" ? "" : e.target.value })}>
      ${Object.entries(s.devices.sorts).map(([value, text]) => html`<option key=${value} value=${value}>${text}</option>`)}</select>
    <${Saved} query=${query} /></div>`;
}

// Facet offers the most frequent values with their counts, where there is something to choose.
function Facet({ name, counts, chosen }) {
  const values = new Map(Object.entries(counts || {}).filter(([value, n]) => n && value && value !== "other").sort((a, b) => b[1] - a[1]).slice(0, FEW));
  if (chosen && !values.has(chosen)) values.set(chosen, null);
  if (values.size < 2 && !chosen) return null;
  return html`<select class="chip" aria-label=${s.devices.columns[name]} value=${chosen} onChange=${(e) => setQuery({ [name]: e.target.value })}><option value="">${s.devices.any(s.devices.columns[name])}</option>
    ${[...values].map(([value, n]) => html`<option key=${value} value=${value}>${s.devices.value(line(name in codes ? word(name, value) : value, 32), n)}</option>`)}</select>`;
}

// Saved filters are kept in this browser, as queries.
function Saved({ query }) {
  const [saved, setSaved] = useState(() => JSON.parse(localStorage.getItem(SAVED) || "[]"));
  const filters = new URLSearchParams(query);
  filters.delete("cursor");
  const search = filters.toString(), known = saved.some((f) => f.search === search);
  const write = (list) => { localStorage.setItem(SAVED, JSON.stringify(list)); setSaved(list); };
  return html`${saved.length > 0 && html`<select class="chip" aria-label=${s.devices.saved} value=${known ? search : ""} onChange=${(e) => go(`${to(["devices"])}?${e.target.value}`)}><option value="">${s.devices.saved}</option>
      ${saved.map((f) => html`<option key=${f.search} value=${f.search}>${line([...new URLSearchParams(f.search)].map((pair) => pair.join("=")).join(" "), 40)}</option>`)}</select>`}
    ${search && html`<button type="button" class="link" onClick=${() => write(known ? saved.filter((f) => f.search !== search) : [...saved, { search }].slice(-12))}>${known ? s.devices.unsave : s.devices.save}</button>
      <button type="button" class="link" onClick=${() => go(to(["devices"]))}>${s.devices.clear}</button>`}`;
}

// Chosen is in place of the filters while devices are chosen: what can be done with them. A job is first shown with what it
// would do.
function Chosen({ ids, can, onNone, onDone }) {
  const [editing, setEditing] = useState(false);
  const [told, setTold] = useState("");
  const select = `device in (${ids.join()})`;
  const edited = ({ changed }) => { setEditing(false); setTold(s.devices.edited(changed)); onDone(); };
  return html`<div class="filters"><b role="status">${s.devices.chosen(ids.length)}</b><button type="button" class="link" onClick=${onNone}>${s.devices.chooseNone}</button>
    ${can("jobs") && html`<${JobLinks} ids=${ids} />`}
    ${can("devices:write") && html`<button type="button" onClick=${() => setEditing(true)}>${s.devices.editLabels}</button>`}<${Export} select=${select} />
    <span role="status">${told}</span>${editing && html`<${EditLabels} select=${select} onClose=${() => setEditing(false)} onDone=${edited} />`}</div>`;
}

function EditLabels({ select, onClose, onDone }) {
  const [error, setError] = useState(null);
  const submit = async (event) => {
    event.preventDefault();
    try {
      onDone(await request("PATCH", "/v1/devices" + encode({ select }), { body: { labels: readLabels(new FormData(event.target).get("labels")) } }));
    } catch (problem) {
      setError(problem);
    }
  };
  return html`<${Dialog} title=${s.devices.editLabels} onClose=${onClose}><form onSubmit=${submit}>
    <div class="field"><label for="edit-labels">${s.devices.labels}</label><textarea id="edit-labels" name="labels" rows="3" spellcheck=${false} autofocus></textarea></div>
    <${Problem} error=${error} /><div class="actions"><button class="primary">${s.save}</button><button type="button" onClick=${onClose}>${s.cancel}</button></div></form><//>`;
}

// Export downloads through fetch, because a link cannot carry the key.
const Export = ({ select }) => html`<details class="menu"><summary class="button">${s.devices.export}</summary><div>${["csv", "ndjson"].map((format) => html`<${Act} key=${format} label=${format.toUpperCase()} act=${() => download("/v1/devices/export" + encode({ select, format }), `devices.${format}`)} />`)}</div></details>`;
